"""No file that may be part of a checkpoint, listed or not, is ignored without a note."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import case, convert_to
from safetensors.numpy import save_file
from typer.testing import CliRunner

from ckptool.cli.app import app
from ckptool.commands.detect import detect_checkpoint
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.verify import verify
from ckptool.errors import Changed, CkptoolError, NotFound, Problem
from ckptool.storage.file_status import DEPTH
from ckptool.storage.local import LocalSource

FORMATS = [
    *("accelerate_folders", "accelerate_rank_files", "accelerate_whole", "bin_shards"),
    *("bytecheckpoint_ddp", "dcp_base", "dcp_lightning", "dcp_no_collectives", "deepspeed_zero_2"),
    *("deepspeed_universal", "hf_consolidated", "hf_full", "hf_sharded", "hf_shards"),
    *("llama_consolidated", "megatron_local", "megatron_torch_dist", "rank_experimental"),
    *("snapshot", "torch_checkpointing", "vllm_sharded_state"),
]
STRAYS = [
    *("stray.npz", "ema.model.pt"),
    *("consolidated-of-another.safetensors", "stray_rank_3", "model.safetensors.gz"),
]


def notes_of(folder: Path) -> dict[str, str]:
    """Code and first file of the notes on files, with their words."""
    notes = open_checkpoint(folder).catalog.notes
    return {f"{n.code} {n.file}": str(n) for n in notes if isinstance(n, Problem) and n.file}


@pytest.mark.parametrize("name", FORMATS)
def test_a_stray_file_is_named(name: str, copy_of: Callable[[str], Path]) -> None:
    folder = copy_of(name)
    before, told = notes_of(folder), verify(folder, VerifyOptions(quick=True)).findings
    assert not any(key.startswith("file-unused") for key in before), before
    for stray in STRAYS:
        (folder / stray).parent.mkdir(exist_ok=True)
        (folder / stray).write_bytes(b"x" * 64)
    after = notes_of(folder)
    assert [stray for stray in STRAYS if f"file-unused {stray}" not in after] == []
    found = verify(folder, VerifyOptions(quick=True))
    new = {f.file for f in found.findings if f.code == "file-unused"}
    assert new == set(STRAYS)
    assert found.ok
    assert len(found.findings) == len(told) + len(STRAYS)
    assert not verify(folder, VerifyOptions(quick=True, strict=True)).ok


def test_a_part_that_was_never_finished_is_no_checkpoint_by_itself(
    copy_of: Callable[[str], Path],
) -> None:
    folder = copy_of("accelerate_folders")
    for metadata in folder.rglob(".metadata"):
        metadata.unlink()
    parts = ("optimizer_0", "pytorch_model_fsdp_0")
    said = [f"{part}: data files without .metadata, which is written last" for part in parts]
    assert sorted(notes_of(folder).values()) == [f"not read: {text}" for text in said]
    report = verify(folder, VerifyOptions())
    assert [finding.message for finding in report.fails(strict=False)] == said


def test_what_is_not_part_of_a_checkpoint_is_not_named(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("hf_shards")
    others = [
        *(".git/objects/model.pt", ".cache/huggingface/model.safetensors.metadata"),
        *("wandb/run.log", "events.out.tfevents.1", "train.py", "trainer_state.json", "notes.txt"),
        *("rank_0.log", "metrics_rank_1.json"),
    ]
    for name in others:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    (folder / "empty.pt").touch()
    assert notes_of(folder) == {}


def sentence_transformer(folder: Path) -> Path:
    """As sentence-transformers 5 saves a model with a dense layer behind the pooling."""
    folder.mkdir()
    (folder / "modules.json").write_text("[]")
    (folder / "config.json").write_text("{}")
    save_file({"embeddings.weight": np.ones((4, 2), np.float32)}, folder / "model.safetensors")
    for part in ("1_Pooling", "2_Dense"):
        (folder / part).mkdir()
        (folder / part / "config.json").write_text("{}")
    save_file(
        {"linear.weight": np.ones((2, 2), np.float32)}, folder / "2_Dense" / "model.safetensors"
    )
    return folder


def test_a_part_in_a_folder_of_its_own_is_named_with_what_reads_it(
    tmp_path: Path, out: Path
) -> None:
    folder = sentence_transformer(tmp_path / "st")
    (said,) = notes_of(folder).values()
    assert said.startswith("not read: 2_Dense/, a separate checkpoint (hf)")
    command = said.partition("; run `ckptool ")[2].removesuffix("`").split()
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0
    assert [one["name"] for one in json.loads(result.stdout)["tensors"]] == ["linear.weight"]
    assert said in convert_to("safetensors", folder, out / "m").notes
    result = CliRunner().invoke(app, ["verify", str(folder), "--json", "--strict"])
    assert result.exit_code == 0
    codes = {(f["code"], f["file"]) for f in json.loads(result.stdout)["findings"]}
    assert ("checkpoint-nested", "2_Dense") in codes


def test_the_parts_of_a_pipeline_are_all_named(tmp_path: Path) -> None:
    """Without its index, with a whole model beside them, and with an index that leaves out one."""
    for part in ("unet", "vae", "text_encoder"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text("{}")
        save_file({"w": np.ones(2, np.float32)}, tmp_path / part / f"{part}.safetensors")
    with pytest.raises(CkptoolError, match="3 checkpoints:"):
        open_checkpoint(tmp_path)
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    assert notes_of(tmp_path).keys() == {
        "checkpoint-nested unet",
        "checkpoint-nested vae",
        "checkpoint-nested text_encoder",
    }
    index = {"unet": ["diffusers", "UNet2DConditionModel"], "vae": ["diffusers", "AutoencoderKL"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert notes_of(tmp_path).keys() == {
        "checkpoint-nested text_encoder",
        "file-unused model.safetensors",
    }


def test_a_lora_beside_the_state_that_accelerate_goes_on_from(tmp_path: Path) -> None:
    """As diffusers' training scripts save one, which no hook of accelerate reads as its model."""
    folder = tmp_path / "checkpoint-500"
    folder.mkdir()
    save_file({"lora.down": np.ones(2, np.float32)}, folder / "pytorch_lora_weights.safetensors")
    weight = torch.nn.Parameter(torch.ones(2))
    torch.save(torch.optim.AdamW([weight]).state_dict(), folder / "optimizer.bin")
    torch.save({"last_epoch": 500}, folder / "scheduler.bin")
    torch.save({"step": 500}, folder / "random_states_0.pkl")
    assert notes_of(folder).keys() == {"checkpoint-nested pytorch_lora_weights.safetensors"}


def test_a_comparison_says_what_it_excluded(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("hf_shards")
    np.savez(folder / "optimizer.npz", m=np.ones(3))
    line = ["verify", str(case("hf_shards").path), "--against", str(folder), "--json"]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0
    assert [f["code"] for f in json.loads(result.stdout)["findings"]] == ["file-unused"]


def test_steps_below_a_model_are_other_checkpoints(tmp_path: Path) -> None:
    """The output folder of transformers' Trainer: the last model, and a folder for each step."""
    for folder in (tmp_path, tmp_path / "checkpoint-500", tmp_path / "checkpoint-1000"):
        folder.mkdir(exist_ok=True)
        save_file({"w": np.ones(2, np.float32)}, folder / "model.safetensors")
        torch.save({"lr": 0.1}, folder / "training_args.bin")
    notes = notes_of(tmp_path)
    assert notes.keys() == {"checkpoint-nested checkpoint-1000", "note training_args.bin"}
    assert "checkpoint-1000, checkpoint-500" in notes["checkpoint-nested checkpoint-1000"]
    assert verify(tmp_path, VerifyOptions(strict=True)).ok


def test_files_beside_the_only_checkpoint_of_a_folder(tmp_path: Path) -> None:
    shutil.copytree(case("dcp_base").path, tmp_path / "weights")
    np.savez(tmp_path / "optimizer.npz", m=np.ones(3))
    (tmp_path / "log.txt").write_text("x")
    assert notes_of(tmp_path).keys() == {"file-unused optimizer.npz"}
    shutil.rmtree(tmp_path / "weights")
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    torch.save({"v": torch.ones(1)}, tmp_path / "model.extra.pt")
    unused = {"file-unused optimizer.npz", "file-unused model.extra.pt"}
    assert notes_of(tmp_path).keys() == unused


def test_random_states_of_ranks_do_not_hide_the_model(copy_of: Callable[[str], Path]) -> None:
    """As transformers' Trainer saved several processes' states beside a model in shards."""
    folder = copy_of("bin_shards")
    before = open_checkpoint(folder).catalog.tensors.keys()
    for rank in range(2):
        torch.save({"cpu": torch.arange(4) + rank}, folder / f"rng_state_{rank}.pth")
    assert open_checkpoint(folder).catalog.tensors.keys() == before
    assert notes_of(folder).keys() == {"file-unused rng_state_0.pth"}


def test_what_the_trainer_goes_on_from_is_no_warning(tmp_path: Path) -> None:
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "trainer_state.json").write_text("{}")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth", "ema.pt"):
        torch.save({"state": {}}, tmp_path / name)
    known = {f"note {name}" for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth")}
    assert notes_of(tmp_path).keys() == {*known, "file-unused ema.pt"}


def test_what_accelerate_goes_on_from_beside_deepspeed_is_no_warning(
    copy_of: Callable[[str], Path],
) -> None:
    folder = copy_of("deepspeed_zero_2")
    for name in ("random_states_0.pkl", "random_states_1.pkl", "scheduler.bin", "ema.bin"):
        torch.save({"state": {}}, folder / name)
    known = {"note random_states_0.pkl", "note scheduler.bin"}
    assert known | {"file-unused ema.bin"} <= notes_of(folder).keys()
    assert "file-unused scheduler.bin" not in notes_of(folder)
    assert verify(folder, VerifyOptions(strict=True)).ok is False
    (folder / "ema.bin").unlink()
    assert verify(folder, VerifyOptions(strict=True)).ok


def test_a_file_that_was_never_finished(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("hf_shards")
    (folder / "model-00009-of-00009.safetensors.incomplete").write_bytes(b"x")
    key = "file-incomplete model-00009-of-00009.safetensors.incomplete"
    assert notes_of(folder).keys() == {key}
    found = verify(folder, VerifyOptions(quick=True)).findings
    assert [f.code for f in found if f.file and f.file.endswith("incomplete")] == [
        "file-incomplete"
    ]


def test_an_older_iteration_is_named(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("megatron_local")
    for rank in "01":
        name = f"iter_0000100_{rank}_local.pt"
        shutil.copy(folder / rank / name, folder / rank / name.replace("100", "090"))
    (said,) = notes_of(folder).values()
    assert said.startswith("not read: 0/iter_0000090_0_local.pt and 1 more")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two safetensors files of one model, which no index names."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in (1, 2):
        file = folder / f"model-0000{number}-of-00002.safetensors"
        save_file({f"w{number}": np.arange(4.0)}, file)
    return folder


class _Entry:
    """An entry of a folder whose ``stat`` fails, or that cannot even be told a folder or file."""

    def __init__(self, entry: os.DirEntry[str], number: int, method: str) -> None:
        self._entry, self._number, self._method = entry, number, method

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            return self._fail
        return getattr(self._entry, name)

    def _fail(self) -> None:
        raise OSError(self._number, os.strerror(self._number), self._entry.path)


def fail(monkeypatch: pytest.MonkeyPatch, name: str, number: int, method: str = "stat") -> None:
    """Let a call fail for each entry of a name, or listing the folder of that name."""
    real = os.scandir

    @contextmanager
    def scandir(path: Any) -> Iterator[Iterator[Any]]:
        if method == "scandir" and Path(path).name == name:
            raise OSError(number, os.strerror(number), str(path))
        with real(path) as entries:
            yield (
                _Entry(entry, number, method) if entry.name == name else entry for entry in entries
            )

    monkeypatch.setattr(os, "scandir", scandir)


LAST = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("method", ["stat", "is_dir", "is_file"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_file_that_cannot_be_looked_at_ends_the_command(
    number: int, method: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, LAST, number, method)
    command = ["convert", str(shards), str(tmp_path / "m.pt"), "--to", "torch-save"]
    error = CliRunner().invoke(app, command).exception
    assert isinstance(error, NotFound)
    assert f"{LAST}: cannot be read: {os.strerror(number)}" in str(error)
    assert not (tmp_path / "m.pt").exists()
    found = verify(shards, VerifyOptions())
    assert [(f.code, f.file) for f in found.findings if f.code == "file-unreadable"] == [
        ("file-unreadable", LAST)
    ]
    assert not found.ok


def test_a_file_that_vanishes_while_it_is_listed(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, LAST, errno.ENOENT)
    with pytest.raises(Changed, match=LAST) as raised:
        open_checkpoint(shards)
    assert raised.value.exit_code == 5
    assert "file-changed" in {f.code for f in verify(shards, VerifyOptions()).findings}


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_subfolder_that_cannot_be_listed(
    number: int, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shards / "more").mkdir()
    fail(monkeypatch, "more", number, "scandir")
    with pytest.raises(NotFound, match="more: cannot be read"):
        open_checkpoint(shards)
    assert not verify(shards, VerifyOptions()).ok


@pytest.mark.parametrize("name", [".git", ".cache", "lost+found"])
def test_what_cannot_belong_to_a_checkpoint_stops_nothing(
    name: str, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shards / name).mkdir()
    fail(monkeypatch, name, errno.EACCES, "scandir")
    assert set(open_checkpoint(shards).catalog.tensors) == {"w1", "w2"}
    assert verify(shards, VerifyOptions()).ok


@pytest.mark.parametrize("target", ["../blobs/1", LAST])
def test_data_behind_a_link_to_nothing(target: str, shards: Path) -> None:
    (shards / LAST).unlink()
    (shards / LAST).symlink_to(target)
    with pytest.raises(NotFound, match=f"{LAST}: a link to nothing"):
        open_checkpoint(shards)
    assert ("file-missing", LAST) in {
        (f.code, f.file) for f in verify(shards, VerifyOptions()).findings
    }
    (shards / "more.safetensors").symlink_to("nowhere")
    with pytest.raises(NotFound, match=r": a link to nothing \(and 1 more\)"):
        open_checkpoint(shards)


def test_another_link_to_nothing_is_named(shards: Path) -> None:
    (shards / "latest-run").symlink_to("nowhere")
    notes = open_checkpoint(shards).catalog.notes
    assert "latest-run" in [note.file for note in notes if isinstance(note, Problem)]
    assert verify(shards, VerifyOptions()).ok


def test_a_subfolder_has_what_could_not_be_listed_in_it(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, LAST, errno.EIO)
    source = LocalSource.folder(shards.parent)
    for inner in (source.narrowed("shards"), source.subfolders()["shards"]):
        assert list(inner.unlisted) == [LAST]


def test_a_folder_with_nothing_else_is_not_called_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "step-1").mkdir(parents=True)
    fail(monkeypatch, "step-1", errno.EACCES, "scandir")
    with pytest.raises(NotFound, match="step-1"):
        open_checkpoint(tmp_path / "run")


def test_data_many_folders_deep_is_read(shards: Path) -> None:
    below = shards.joinpath(*"abcdefghijkl")
    below.mkdir(parents=True)
    (shards / LAST).rename(below / LAST)
    name = str((below / LAST).relative_to(shards))
    assert name in LocalSource.folder(shards).files
    assert name in {finding.file for finding in verify(shards, VerifyOptions()).findings}


def test_a_folder_that_lies_too_deep_is_named(shards: Path) -> None:
    deepest = shards.joinpath(*["a"] * (DEPTH + 1))
    deepest.mkdir(parents=True)
    (deepest / "model.safetensors").touch()
    name = str(deepest.relative_to(shards))
    with pytest.raises(NotFound, match=f"{name}: not searched"):
        open_checkpoint(shards)
    report = verify(shards, VerifyOptions())
    assert ("file-unreadable", name) in {(f.code, f.file) for f in report.findings}
    assert not report.ok


def test_of_one_file_the_folders_far_below_are_not_listed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file may lie in a home folder, whose other million files say nothing about it."""
    save_file({"w": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    torch.save({"w": torch.zeros(2)}, tmp_path / "model.pt")
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    listed: list[str] = []
    real = os.scandir

    def scandir(path: Path) -> Iterator[Any]:
        listed.append(path.name)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    for name in ("model.safetensors", "model.pt"):
        assert verify(tmp_path / name, VerifyOptions()).ok
    assert "a" in listed
    assert "b" not in listed


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_a_file_in_a_folder_that_cannot_be_listed(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who may enter a folder may read its files, by their names."""
    save_file({"w": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    torch.save({"w": torch.zeros(2)}, tmp_path / "model.pt")

    def scandir(path: Path) -> Iterator[Any]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", scandir)
    assert verify(tmp_path / name, VerifyOptions()).ok


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("dcp_base", ".metadata"),
        ("snapshot", ".snapshot_metadata"),
        ("megatron_torch_dist", "iter_0000100/metadata.json"),
        ("deepspeed_universal", "latest_universal"),
        ("diffusers_pipeline", "model_index.json"),
    ],
)
def test_a_file_that_describes_a_checkpoint_stands_for_it(name: str, file: str) -> None:
    described = case(name).path / file
    whole = detect_checkpoint(described)
    assert whole.path == described.parent
    assert whole.source.files == LocalSource.folder(described.parent).files


def test_an_adapter_beside_the_model_that_it_was_merged_into(tmp_path: Path) -> None:
    """As torchtune 0.6 saves both, in PEFT's names and in its own."""
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    save_file({"a.lora_A": np.ones(2, np.float32)}, tmp_path / "adapter_model.safetensors")
    torch.save({"a.lora_a": torch.ones(2)}, tmp_path / "adapter_0.pt")
    assert notes_of(tmp_path).keys() == {
        "checkpoint-nested adapter_model.safetensors",
        "checkpoint-nested adapter_0.pt",
    }
