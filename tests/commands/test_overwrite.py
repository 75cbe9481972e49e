"""--overwrite replaces a checkpoint, and nothing beside its files."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import SUFFIX, case, convert_to, read_back
from typer.testing import CliRunner

from ckptool.cli.app import app
from ckptool.commands.convert import prepare
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.target import ConvertOptions, TransferOptions
from ckptool.engine.run_options import RunOptions
from ckptool.engine.write.commit import FileCommit
from ckptool.engine.write.stage import Stage
from ckptool.errors import Committed, TransferError, Unsupported, UsageError
from ckptool.storage import disk
from ckptool.storage.commit_note import NoteFile

FOREIGN = {
    "train.py": b"import torch",
    "src/model.py": b"class Model: ...",
    "src/deep/er/notes.txt": b"remember",
    ".git/HEAD": b"ref: refs/heads/main",
    "wandb/run-1/log.txt": b"loss 1.0",
    "tokenizer.json": b"{}",
    "events.out.tfevents.1": b"\x00\x01",
    "empty/.keep": b"",
}
SAMPLES = {
    "dcp": "dcp_fsdp2_tp",
    "hf": "hf_shards",
    "rank-local": "rank_experimental",
}


def put_foreign(folder: Path) -> None:
    for name, data in FOREIGN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "bare").mkdir()
    (folder / "link").symlink_to("train.py")


def foreign_of(folder: Path) -> dict[str, bytes]:
    assert (folder / "bare").is_dir()
    assert os.readlink(folder / "link") == "train.py"
    return {name: (folder / name).read_bytes() for name in FOREIGN}


def ready(source: Path, target: Path, to: str = "dcp", **more: Any) -> Any:
    run = RunOptions(workers=1, fsync=more.pop("fsync", False))
    return prepare(source, target, ConvertOptions(to, transfer=TransferOptions(run=run, **more)))


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


@pytest.mark.parametrize("to", ["dcp", "safetensors", "dcp-safetensors"])
@pytest.mark.parametrize("old", SAMPLES)
def test_what_no_checkpoint_holds_stays(old: str, to: str, out: Path) -> None:
    target = out / "run"
    shutil.copytree(case(SAMPLES[old]).path, target)
    put_foreign(target)
    before = {path.stat().st_ino for path in target.rglob("*.py")}
    convert_to(to, case("dcp_base").path, target, overwrite=True)
    assert foreign_of(target) == FOREIGN
    assert {path.stat().st_ino for path in target.rglob("*.py")} == before, "copied"
    shutil.rmtree(target / "src")
    assert read_back(to, target) == case("dcp_base").truth
    assert hidden(out) == []


def test_a_dry_run_says_what_stays(out: Path) -> None:
    target = out / "run"
    shutil.copytree(case("dcp_fsdp2_tp").path, target)
    put_foreign(target)
    before = sorted(target.rglob("*"))
    words = ["convert", str(case("dcp_base").path), str(target), "--to", "dcp", "--overwrite"]
    found = CliRunner().invoke(app, [*words, "--dry-run"])
    assert found.exit_code == 0
    for name in ("train.py", "src/", ".git/", "wandb/", "tokenizer.json"):
        assert name in found.stderr
    assert "distcp" not in found.stderr
    assert sorted(target.rglob("*")) == before
    found = CliRunner().invoke(app, [*words, "--dry-run", "--json", "-q"])
    assert "train.py" in " ".join(json.loads(found.stdout)["notes"])


@pytest.mark.parametrize("name", ["tokenizer.json", "merges.txt"])
def test_a_name_that_is_taken_is_refused(name: str, out: Path) -> None:
    """A file of the new one, and one that is not the old one's."""
    source, target = out / "source", out / "run"
    shutil.copytree(case("hf_shards").path, source)
    (source / name).write_bytes(b"of the model")
    shutil.copytree(case("dcp_base").path, target)
    (target / name).write_bytes(b"mine")
    with pytest.raises(Unsupported, match=f"{name}: not part of the checkpoint there"):
        convert_to("safetensors", source, target, overwrite=True)
    assert (target / name).read_bytes() == b"mine"
    assert read_back("dcp", target) == case("dcp_base").truth
    assert hidden(out) == []


def test_text_that_a_person_wrote_is_not_replaced_by_the_models(out: Path) -> None:
    source = out / "source"
    shutil.copytree(case("hf_shards").path, source)
    (source / "README.md").write_text("of the model")
    convert_to("safetensors", source, out / "m")
    convert_to("safetensors", source, out / "m", overwrite=True)
    (out / "m" / "README.md").write_text("my own")
    with pytest.raises(Unsupported, match=r"README\.md"):
        convert_to("safetensors", source, out / "m", overwrite=True)
    assert (out / "m" / "README.md").read_text() == "my own"


def test_what_would_be_read_as_a_part_of_the_new_one_is_named(out: Path) -> None:
    """The old one, of another format, did not read it."""
    import torch

    target = out / "run"
    shutil.copytree(case("dcp_fsdp2_tp").path, target)
    torch.save({"w": torch.ones(1), "of another": 1}, out / "s.pt")
    convert_to("hf", out / "s.pt", out / "other")
    shutil.copy(out / "other" / "model.extra.pt", target)
    with pytest.raises(TransferError, match=r"model\.extra\.pt.* would be read as part") as caught:
        convert_to("safetensors", case("hf_shards").path, target, overwrite=True)
    assert str(caught.value).count(str(target)) == 1
    assert str(caught.value.hint).startswith("move it away")
    assert read_back("dcp", target) == case("dcp_fsdp2_tp").truth


def test_nothing_is_left_where_no_folder_can_be_made(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))

    monkeypatch.setattr(Path, "mkdir", fails)
    with pytest.raises(Unsupported, match="cannot be written to"):
        ready(case("dcp_base").path, out / "m").run()
    assert list(out.iterdir()) == []


def test_a_folder_that_cannot_be_read_as_a_checkpoint_is_left(out: Path) -> None:
    target = out / "run"
    shutil.copytree(case("hf_shards").path, target)
    weights = next(target.glob("*.safetensors"))
    weights.write_bytes(b"\xff" * 64)
    (target / "train.py").write_text("mine")
    try:
        convert_to("dcp", case("dcp_base").path, target, overwrite=True)
    except Unsupported:
        assert weights.exists()
    assert (target / "train.py").read_text() == "mine"


def test_a_link_to_a_folder_is_not_replaced(out: Path) -> None:
    convert_to("dcp", case("dcp_base").path, out / "real")
    (out / "run").symlink_to("real")
    with pytest.raises(Unsupported, match="is a link"):
        convert_to("dcp", case("dcp_fsdp2_tp").path, out / "run", overwrite=True)
    assert read_back("dcp", out / "real") == case("dcp_base").truth


def test_a_kept_file_that_transformers_opens_first_ends_the_commit(out: Path) -> None:
    """Shards take the place of a torch checkpoint, and old weights lie beside it."""
    convert_to("dcp", case("dcp_base").path, out / "m")
    (out / "m" / "model.safetensors").write_bytes(b"old")
    before = {path.name: path.read_bytes() for path in (out / "m").iterdir()}
    with pytest.raises(TransferError, match=r"model\.safetensors: .*would be read"):
        convert_to("hf", case("dcp_base").path, out / "m", overwrite=True, max_shard_size=1_000)
    assert {path.name: path.read_bytes() for path in (out / "m").iterdir()} == before


def test_a_file_that_is_not_a_checkpoint_is_not_replaced(out: Path) -> None:
    (out / "m.txt").write_bytes(b"dear diary")
    with pytest.raises(UsageError, match="whose name ends in one of"):
        convert_to("torch-save", case("dcp_base").path, out / "m.txt", overwrite=True)
    assert (out / "m.txt").read_bytes() == b"dear diary"


# What ckptool needs beside the target, and did not make


@pytest.mark.parametrize("more", [{}, {"overwrite": True}, {"resume": True}], ids=str)
def test_a_folder_of_the_hidden_name_is_left(more: dict[str, Any], out: Path) -> None:
    (out / ".m.partial").mkdir()
    (out / ".m.partial" / "thesis.txt").write_text("all of it")
    with pytest.raises(Unsupported, match=r"\.m\.partial: is in the way"):
        ready(case("dcp_base").path, out / "m", **more).run()
    assert (out / ".m.partial" / "thesis.txt").read_text() == "all of it"
    assert hidden(out) == [".m.partial"]


@pytest.mark.parametrize("name", ["0", "1", "mark", "commit"])
def test_a_planted_link_is_not_followed(name: str, out: Path) -> None:
    (out / "precious").write_text("keep me")
    (out / f".m.partial.journal.{name}").symlink_to("precious")
    with pytest.raises(Unsupported, match="is in the way"):
        ready(case("dcp_base").path, out / "m").run()
    assert (out / "precious").read_text() == "keep me"
    assert (out / f".m.partial.journal.{name}").is_symlink()


def test_a_file_named_as_a_journal_is_left(out: Path) -> None:
    (out / ".m.partial.journal.0").write_text("my own journal")
    with pytest.raises(Unsupported, match="is in the way"):
        ready(case("dcp_base").path, out / "m").run()
    assert (out / ".m.partial.journal.0").read_text() == "my own journal"


class Stop(Exception):
    """The end of a run that is cut short."""


class Stopping:
    """Progress that stops the run once a file is finished."""

    def __init__(self, out: Path) -> None:
        self.journal = out / ".m.partial.journal.0"

    def __call__(self, count: int) -> None:
        if self.journal.exists() and "done" in self.journal.read_text():
            raise Stop


@pytest.fixture
def stopped(out: Path) -> Path:
    """The staged files of a conversion that stopped before its end."""
    with pytest.raises(Stop):
        ready(case("dcp_fsdp2_tp").path, out / "m").run(Stopping(out))
    return out / ".m.partial"


def finished(stopped: Path) -> list[Path]:
    lines = stopped.with_name(".m.partial.journal.0").read_text().splitlines()[1:]
    return [stopped / json.loads(line)["done"] for line in lines]


def test_a_finished_file_that_was_damaged_since_is_written_again(out: Path, stopped: Path) -> None:
    done = finished(stopped)
    assert done
    for path in done:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    ready(case("dcp_fsdp2_tp").path, out / "m", resume=True).run()
    assert read_back("dcp", out / "m") == case("dcp_fsdp2_tp").truth


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_link_among_the_staged_files_is_not_followed(kind: str, out: Path, stopped: Path) -> None:
    (out / "precious").mkdir()
    (out / "precious" / "file").write_text("keep me")
    name = finished(stopped)[0].name if kind == "file" else "sub"
    (stopped / name).unlink(missing_ok=True)
    (stopped / name).symlink_to("../precious/file" if kind == "file" else "../precious")
    with pytest.raises(Unsupported, match="is in the way"):
        ready(case("dcp_fsdp2_tp").path, out / "m", resume=True).run()
    assert (out / "precious" / "file").read_text() == "keep me"


# File systems that cannot exchange two folders


def refusing() -> Callable[..., bool]:
    real = disk._rename

    def renamed(one: Path, other: Path, flag: int) -> bool:
        return False if flag == disk._EXCHANGE else real(one, other, flag)

    return renamed


def test_without_an_exchange_it_is_reported_that_there_was_a_moment_without(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = out / "run"
    shutil.copytree(case("dcp_fsdp2_tp").path, target)
    put_foreign(target)
    monkeypatch.setattr(disk, "_rename", refusing())
    report = ready(case("dcp_base").path, target, overwrite=True).run()
    assert "for a moment neither" in report.notes[-1]
    assert foreign_of(target) == FOREIGN
    assert read_back("dcp", target) == case("dcp_base").truth
    assert hidden(out) == []


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EBUSY])
def test_a_folder_that_cannot_be_renamed_is_replaced_file_by_file(
    number: int, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an overlay refuses to rename a folder of a lower layer."""
    target, real = out / "run", os.rename
    shutil.copytree(case("dcp_fsdp2_tp").path, target)
    put_foreign(target)

    def rename(one: Path, other: Path) -> None:
        if Path(one) == target:
            raise OSError(number, os.strerror(number))
        real(one, other)

    monkeypatch.setattr(disk, "_rename", refusing())
    monkeypatch.setattr(os, "rename", rename)
    report = ready(case("dcp_base").path, target, overwrite=True).run()
    assert "until the last file" in report.notes[-1]
    assert foreign_of(target) == FOREIGN
    assert read_back("dcp", target) == case("dcp_base").truth
    assert hidden(out) == []


def test_an_error_after_the_commit_says_that_the_new_one_stands(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = out / "run"
    shutil.copytree(case("dcp_fsdp2_tp").path, target)
    put_foreign(target)
    words = (case("dcp_base").path, target)
    with monkeypatch.context() as context:
        context.setattr(os, "scandir", failing(os.scandir, ".run.partial"))
        with pytest.raises(Committed, match="complete, but cleaning up failed") as caught:
            ready(*words, overwrite=True).run()
    assert caught.value.exit_code == 5
    assert read_back("dcp", target) == case("dcp_base").truth
    ready(*words, overwrite=True, resume=True).run()
    assert foreign_of(target) == FOREIGN
    assert hidden(out) == []


def test_an_error_while_a_killed_commit_is_rolled_back_names_no_new_one(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = out / "m.pt"
    ready(case("dcp_fsdp2_tp").path, target, "torch-save").run()
    old = target.read_bytes()
    with monkeypatch.context() as context:
        context.setattr(FileCommit, "_put_main", failed)
        context.setattr(
            Stage, "discard", lambda stage, **how: stage.target.close()
        )  # as a kill leaves it
        with pytest.raises(TransferError):
            ready(case("dcp_base").path, target, "torch-save", overwrite=True).run()
    again = {"overwrite": True, "resume": True}
    with monkeypatch.context() as context:
        context.setattr(NoteFile, "remove", failed)
        with pytest.raises(TransferError, match="could not be rolled back") as caught:
            ready(case("dcp_base").path, target, "torch-save", **again).run()
    assert not isinstance(caught.value, Committed)
    assert target.read_bytes() == old
    ready(case("dcp_base").path, target, "torch-save", **again).run()
    assert read_back("torch-save", target) == case("dcp_base").truth
    assert hidden(out) == []


def failed(it: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def failing(real: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function that fails once the folder of this name was swapped away."""

    def call(path: Any) -> Any:
        if str(path).rstrip("/").endswith(name) and (Path(path) / "train.py").exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    return call


def test_what_ckptool_wrote_for_megatron_is_replaced(out: Path) -> None:
    import torch

    torch.save({"embedding.word_embeddings.weight": torch.ones(4, 2)}, out / "s.pt")
    for more in ({}, {"overwrite": True}):
        convert_to("megatron-torch_dist", out / "s.pt", out / "m", **more)
    assert (out / "m" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert hidden(out) == []


def test_a_side_file_goes_with_the_old_one(out: Path) -> None:
    import torch

    torch.save({"w": torch.ones(2), "step": 3}, out / "s.pt")
    torch.save({"w": torch.zeros(2)}, out / "t.pt")
    convert_to("safetensors", out / "s.pt", out / "m.safetensors")
    assert (out / "m.extra.pt").exists()
    convert_to("safetensors", out / "t.pt", out / "m.safetensors", overwrite=True)
    assert not (out / "m.extra.pt").exists()
    assert hidden(out) == []


@pytest.mark.parametrize("more", [{}, {"more": 5}])
@pytest.mark.parametrize(("to", "name"), [("safetensors", "m.safetensors"), ("hf", "run")])
def test_a_side_file_of_another_stays(to: str, name: str, more: dict[str, Any], out: Path) -> None:
    import torch

    torch.save({"w": torch.ones(2), **more}, out / "s.pt")
    convert_to(to, out / "s.pt", out / name)
    side = out / "m.extra.pt" if to == "safetensors" else out / "run" / "model.extra.pt"
    torch.save({"notes": [1, 2]}, side)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    if to == "hf" and not more:
        convert_to(to, out / "s.pt", out / name, overwrite=True)
        assert "model.extra.pt" not in open_checkpoint(out / name).catalog.files
        assert side.read_bytes() == before[side]
        return
    with pytest.raises(Unsupported, match=r"extra\.pt"):
        convert_to(to, out / "s.pt", out / name, overwrite=True)
    assert {path: path.read_bytes() for path in before} == before


def test_a_side_file_is_never_the_source(out: Path) -> None:
    import torch

    torch.save({"w": torch.ones(2), "step": 3}, out / "s.pt")
    convert_to("safetensors", out / "s.pt", out / "m.safetensors")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    pairs = (("m.extra.pt", "m.safetensors"), ("m.safetensors", "m.extra.pt"))
    for (source, target), to in zip(pairs, ("safetensors", "torch-save"), strict=True):
        with pytest.raises(UsageError, match="must not contain one another"):
            convert_to(to, out / source, out / target, overwrite=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_pipe_is_not_replaced(out: Path) -> None:
    os.mkfifo(out / "m.pt")
    with pytest.raises(Unsupported, match="not a checkpoint, and is not replaced"):
        convert_to("torch-save", case("dcp_base").path, out / "m.pt", overwrite=True)
    assert (out / "m.pt").is_fifo()


def test_a_name_that_is_not_a_text_can_be_written_to(out: Path) -> None:
    target = out / os.fsdecode(b"\xff.pt")
    convert_to("torch-save", case("dcp_base").path, target)
    assert read_back("torch-save", target) == case("dcp_base").truth


@pytest.mark.parametrize("target", SUFFIX)
def test_overwriting_ones_own_output(target: str, out: Path) -> None:
    path = out / f"m{SUFFIX[target]}"
    for name in ("hf_shards", "dcp_base", "dcp_base"):
        convert_to(target, case(name).path, path, overwrite=True)
    assert read_back(target, path) == case("dcp_base").truth


@pytest.mark.parametrize("exchanges", [True, False])
def test_what_was_private_stays_private(
    exchanges: bool, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr("ckptool.engine.write.commit.exchange", lambda *_: False)
    target = out / "run"
    for _ in range(2):
        convert_to("dcp", case("dcp_base").path, target, overwrite=True)
        target.chmod(0o2750)
        (target / ".metadata").chmod(0o600)
    convert_to("dcp", case("dcp_base").path, target, overwrite=True)
    modes = [path.stat().st_mode & 0o7777 for path in (target, target / ".metadata")]
    assert modes == [0o2750, 0o600]
    assert read_back("dcp", target) == case("dcp_base").truth


def test_an_owner_that_this_machine_does_not_know(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that maps few users: the mode is kept all the same."""

    def refuse(*args: object) -> None:
        raise OSError(errno.EINVAL, "invalid argument")

    path = out / "m.safetensors"
    convert_to("safetensors", case("dcp_base").path, path)
    path.chmod(0o640)
    real = os.lstat
    monkeypatch.setattr(os, "chown", refuse)
    monkeypatch.setattr(os, "lstat", lambda at: owned(real(at), 7) if at == path else real(at))
    convert_to("safetensors", case("hf_shards").path, path, overwrite=True)
    assert path.stat().st_mode & 0o777 == 0o640


def owned(status: os.stat_result, user: int) -> os.stat_result:
    """A status as another user's file has it."""
    return os.stat_result([*status[:4], user, *status[5:10]])


def test_a_file_keeps_its_mode(out: Path) -> None:
    path = out / "m.safetensors"
    for mode in (0o640, 0o400):
        convert_to("safetensors", case("dcp_base").path, path, overwrite=True)
        path.chmod(mode)
    convert_to("safetensors", case("hf_shards").path, path, overwrite=True)
    assert path.stat().st_mode & 0o777 == 0o400


def test_notes_are_for_what_is_written(out: Path) -> None:
    """What is refused says why, and nothing of what would have been written."""
    words = ["convert", str(case("dcp_base").path), str(out / "m"), "--to", "hf", "--no-fsync"]
    written = CliRunner().invoke(app, words)
    refused = CliRunner().invoke(app, words)
    assert "note:" in written.stderr
    assert "already exists" in str(refused.exception)
    assert refused.stderr == ""
