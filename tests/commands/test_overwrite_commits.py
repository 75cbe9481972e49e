"""--overwrite where something stands in its way: planted files, and disks that cannot exchange."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import case, read_back
from overwritten import FOREIGN, foreign_of, hidden, put_foreign, ready

from ckptool.engine.progress import Progress
from ckptool.engine.write.stage import Stage
from ckptool.errors import Committed, TransferError, Unsupported
from ckptool.storage import disk
from ckptool.storage.commit_note import NoteFile


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


def stopping(out: Path) -> Progress:
    """Return progress that stops the run once a file is finished."""
    journal = out / ".m.partial.journal.0"

    def stop(done: int, total: int) -> None:
        if journal.exists() and "done" in journal.read_text():
            raise Stop

    return Progress(stop)


@pytest.fixture
def stopped(out: Path) -> Path:
    """The staged files of a conversion that stopped before its end."""
    with pytest.raises(Stop):
        ready(case("dcp_fsdp2_tp").path, out / "m").run(stopping(out))
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
def test_a_folder_that_cannot_be_renamed_stays_as_it_was(
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
    with pytest.raises(TransferError, match="cannot be renamed, and so not be replaced") as caught:
        ready(case("dcp_base").path, target, overwrite=True).run()
    assert "--resume" in (caught.value.hint or "")
    assert foreign_of(target) == FOREIGN
    assert read_back("dcp", target) == case("dcp_fsdp2_tp").truth
    monkeypatch.undo()
    shutil.rmtree(target)
    ready(case("dcp_base").path, target, resume=True).run()
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
    assert "the same with --resume in place of --overwrite" in (caught.value.hint or "")
    assert read_back("dcp", target) == case("dcp_base").truth
    ready(*words, resume=True).run()
    assert foreign_of(target) == FOREIGN
    assert hidden(out) == []


def test_an_error_while_a_killed_commit_is_rolled_back_names_no_new_one(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = out / "m.pt"
    ready(case("dcp_fsdp2_tp").path, target, "torch-save").run()
    old, replace = target.read_bytes(), os.replace

    def replace_all_but_the_target(source: Path, place: Path) -> None:
        if place == target:
            failed(place)
        replace(source, place)

    with monkeypatch.context() as context:
        context.setattr(os, "replace", replace_all_but_the_target)
        context.setattr(
            Stage, "discard", lambda stage, **how: stage.target.close()
        )  # as a kill leaves it
        with pytest.raises(TransferError):
            ready(case("dcp_base").path, target, "torch-save", overwrite=True).run()
    with monkeypatch.context() as context:
        context.setattr(NoteFile, "remove", failed)
        with pytest.raises(TransferError, match="could not be rolled back") as caught:
            ready(case("dcp_base").path, target, "torch-save", resume=True).run()
    assert not isinstance(caught.value, Committed)
    assert target.read_bytes() == old
    ready(case("dcp_base").path, target, "torch-save", resume=True).run()
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
