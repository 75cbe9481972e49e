"""Names and sizes of files in every format: lost markers and ranks, and bare files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import case as fixture

from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.verify import verify
from ckptool.errors import Unrecognized


def lose(folder: Path, name: str) -> None:
    next(folder.rglob(name)).unlink()


def empty(folder: Path, name: str) -> None:
    next(folder.rglob(name)).write_bytes(b"")


def cut(folder: Path, name: str) -> None:
    file = next(folder.rglob(name))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("case", "damage", "file", "code"),
    [
        ("accelerate_folders", lose, "optimizer_0/.metadata", "save-incomplete"),
        ("accelerate_folders", empty, "optimizer_0/.metadata", "file-empty"),
        ("bytecheckpoint_ddp", lose, "model/.metadata", "save-incomplete"),
        ("bytecheckpoint_ddp", empty, "model/.metadata", "file-empty"),
        ("megatron_torch_dist", lose, "metadata.json", "save-incomplete"),
        ("megatron_torch_dist", cut, "metadata.json", "metadata-unreadable"),
        ("megatron_torch_dist", empty, "metadata.json", "file-empty"),
        ("megatron_torch_dist", lose, ".metadata", "save-incomplete"),
        ("megatron_torch", lose, "mp_rank_00/model_optim_rng.pt", "rank-missing"),
        ("megatron_torch_distributed", lose, "mp_rank_00_001/distrib_optim.pt", "file-missing"),
        ("megatron_local", lose, "iter_*_0_local.pt", "rank-missing"),
        ("megatron_local", cut, "iter_*_0_local.pt", "rank-missing"),
        ("deepspeed_universal", lose, "exp_avg.pt", "optimizer-incomplete"),
        ("deepspeed_universal", lose, "optimizer_state.pt", "save-incomplete"),
        ("deepspeed_pipeline", lose, "layer_01-model_01-model_states.pt", "rank-missing"),
        ("deepspeed_zero_2", lose, "*pp_rank_1*optim_states.pt", "rank-missing"),
        ("vllm_sharded_state", lose, "model-rank-0-part-0.safetensors", "rank-missing"),
        ("llama_consolidated", lose, "consolidated.00.pth", "rank-missing"),
        ("llama_consolidated", lose, "consolidated.01.pth", "rank-missing"),
        ("accelerate_rank_files", lose, "random_states_1.pkl", "rank-missing"),
        ("snapshot", cut, ".snapshot_metadata", "metadata-unreadable"),
        ("torch_checkpointing_safetensors", lose, "metadata.pkl", "save-incomplete"),
        ("snapshot", lose, ".snapshot_metadata", "save-incomplete"),
        ("snapshot_batched", lose, ".snapshot_metadata", "save-incomplete"),
        ("bytecheckpoint_ddp", lose, "extra_state_rank_1.pt", "rank-missing"),
        ("bytecheckpoint_ddp", lose, "extra_state_rank_0.pt", "rank-missing"),
        ("megatron_torch", lose, "latest_checkpointed_iteration.txt", "latest-missing"),
        ("megatron_torch_dist", lose, "latest_checkpointed_iteration.txt", "latest-missing"),
        ("deepspeed_zero_2", lose, "latest", "latest-missing"),
        ("deepspeed_pipeline", lose, "latest", "latest-missing"),
    ],
)
def test_what_is_lost_has_a_code(
    case: str,
    damage: Callable[[Path, str], None],
    file: str,
    code: str,
    copy_of: Callable[[str], Path],
) -> None:
    folder = copy_of(case)
    before = verify(folder, VerifyOptions(quick=True))
    assert all(finding.severity.value == "info" for finding in before.findings)
    damage(folder, file)
    assert code in {finding.code for finding in verify(folder, VerifyOptions(quick=True)).findings}


@pytest.mark.parametrize("name", ["megatron_torch", "deepspeed_zero_2"])
def test_a_step_that_was_asked_for_by_itself_needs_no_tracker(
    name: str, copy_of: Callable[[str], Path]
) -> None:
    run = copy_of(name)
    lose(run, "latest*")
    (step,) = run.iterdir()
    codes = {finding.code for finding in verify(step, VerifyOptions(quick=True)).findings}
    assert codes <= {"note", "value-not-written"}


def test_a_step_of_one_file_that_was_asked_for_by_itself_needs_no_tracker(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = {"module": {"w": torch.ones(2)}, "ds_version": "0.19.8", "global_steps": 1}
    state |= {"dp_world_size": 1, "mp_world_size": 1}  # DeepSpeed without ZeRO
    torch.save(state, tmp_path / "mp_rank_00_model_states.pt")
    report = verify(tmp_path, VerifyOptions(quick=True))
    assert (report.format, report.findings) == ("deepspeed", ())


def test_numbered_folders_are_not_snapshot(tmp_path: Path) -> None:
    (tmp_path / "0" / "state").mkdir(parents=True)
    (tmp_path / "0" / "state" / "w").write_bytes(bytes(8))
    with pytest.raises(Unrecognized):
        verify(tmp_path, VerifyOptions(quick=True))


@pytest.mark.parametrize(
    ("at", "quick", "codes"),
    [(None, False, set()), (0.2, True, {"copy-damaged"}), (-0.5, False, {"copy-damaged"})],
)
def test_a_damaged_copy_that_is_not_read_is_a_warning(
    at: float | None, quick: bool, codes: set[str], copy_of: Callable[[str], Path]
) -> None:
    folder = copy_of("megatron_local")
    mine = next(folder.rglob("iter_*_0_local.pt"))
    copied = mine.parent.parent / "1" / mine.name
    shutil.copyfile(mine, copied)
    data = bytearray(copied.read_bytes())
    if at is not None and at < 0:
        data[int(len(data) * -at)] ^= 1
    elif at is not None:
        data = data[: int(len(data) * at)]
    copied.write_bytes(data)
    report = verify(folder, VerifyOptions(quick=quick))
    assert report.ok
    assert {one.code for one in report.findings if one.severity.value != "info"} == codes


# Bare files: elements that begin as some file does, or are called as one, are no such file

HEADS = {
    "zip": b"PK\x03\x04",
    "pickle of legacy torch.save": bytes.fromhex(
        "80028a0a6cfc9c46f920 6aa85019 2e".replace(" ", "")
    ),
    "safetensors": b"\x10\0\0\0\0\0\0\0{",
    "gzip": b"\x1f\x8b\x08\0",
}
FILES = {
    "snapshot": "replicated/state/model/w",
    "snapshot_batched": None,
    "bytecheckpoint_flat": "global_step_7/model/__0_0.distcp",
}


def wrong(folder: Path) -> set[str]:
    found = verify(folder, VerifyOptions()).findings
    return {f.code for f in found if f.severity.value != "info"} - {"not-finite"}


def bare_file(folder: Path, name: str | None) -> Path:
    if name is not None:
        return folder / name
    files = [f for f in folder.rglob("*") if f.suffix == ".distcp" or f.parent.name == "batched"]
    return max(files, key=lambda file: file.stat().st_size)


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("name", FILES)
def test_the_first_bytes_of_a_tensor_are_its_elements(
    name: str, head: bytes, copy_of: Callable[[str], Path]
) -> None:
    folder = copy_of(name)
    file = bare_file(folder, FILES[name])
    file.write_bytes(head + file.read_bytes()[len(head) :])
    assert wrong(folder) <= wrong(fixture(name).path)


@pytest.mark.parametrize(
    "ending", [".safetensors", ".index.json", ".pt", ".part", ".tmp", ".metadata", "/metadata.json"]
)
def test_a_file_called_after_its_tensor_is_what_the_manifest_says(
    ending: str, copy_of: Callable[[str], Path]
) -> None:
    folder = copy_of("snapshot")
    old = "replicated/state/model/w"
    (folder / old).rename(folder / "moved")
    (folder / (old + ending)).parent.mkdir(exist_ok=True)
    (folder / "moved").rename(folder / (old + ending))
    manifest = folder / ".snapshot_metadata"
    manifest.write_text(manifest.read_text().replace(f'"{old}"', f'"{old}{ending}"'))
    assert wrong(folder) == set()
