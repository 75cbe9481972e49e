"""Parts that are killed, that another process takes over, or that begin at the wrong moment."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from parts.part_runs import MANY, asked, content, convert, finish, once, refused, write

from ckptool.engine.ranks import Ranks
from ckptool.engine.write import disk_target
from ckptool.engine.write.commit import FolderCommit
from ckptool.engine.write.existing import remove_staged
from ckptool.engine.write.journal import Journal
from ckptool.engine.write.schemas import JournalHead
from ckptool.errors import (
    TransferError,
)


def test_one_process_writes_a_part_at_a_time(three: Any, source: Path, tmp_path: Path) -> None:
    """Nor is it committed, or begun afresh, while one does."""
    planned, target = three
    second = planned(source, target, asked("2/3"))
    real = type(second)._move

    def meanwhile(self: Any, *words: Any) -> None:
        refused(lambda: finish(planned, source, target), "part 2 of 3 is not done")
        for work in (
            lambda: write(planned, source, target, "2/3"),
            lambda: planned(source, target, asked(overwrite=True)).run(),
            lambda: planned(source, target, asked(resume=True)).run(),
        ):
            refused(work, "another ckptool is writing")
        real(self, *words)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(second), "_move", once(real, meanwhile))
        second.run()
    finish(planned, source, target)
    assert target.is_dir()


def test_nothing_is_committed_while_a_part_that_was_done_goes_on(three: Any, source: Path) -> None:
    planned, target = three
    write(planned, source, target, "2/3")
    going_on = Journal(target.with_name(".m.partial.journal.1"))
    refused(lambda: finish(planned, source, target), "another ckptool is writing")
    going_on.close()
    finish(planned, source, target)


def test_one_process_takes_over_what_parts_have_done(three: Any, source: Path) -> None:
    planned, target = three
    planned(source, target, asked(resume=True)).run()
    assert target.is_dir()
    assert sorted(path.name for path in target.parent.iterdir()) == ["m"]


def test_who_takes_over_notes_what_the_parts_have_done(tmp_path: Path) -> None:
    """It may be killed as well."""
    part = Journal(tmp_path / "journal.0")
    part.resume(JournalHead("plan", "source", parts=2))
    part.done("a", 7)
    part.close()
    for _ in range(2):
        alone = Journal(tmp_path / "journal.0")
        alone.resume(JournalHead("plan", "source"))
        assert alone.finished["a"] == 7
        alone.close()


def test_no_run_that_begins_afresh_removes_parts_unasked(three: Any, source: Path) -> None:
    planned, target = three
    before = content(target.parent)
    again = planned(source, target, asked())
    refused(again.run, "holds the unfinished output of a run in 3 parts")
    assert "a run in 3 parts" in again.obstacle()
    assert content(target.parent) == before
    planned(source, target, asked(overwrite=True)).run()
    assert sorted(path.name for path in target.parent.iterdir()) == ["m"]


def test_a_part_that_ends_a_commit_cut_short_says_so(
    three: Any, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, target = three
    write(planned, source, target, "2/3")
    with monkeypatch.context() as patched:
        patched.setattr(FolderCommit, "clear", once(FolderCommit.clear, _interrupt))
        with pytest.raises(KeyboardInterrupt):
            finish(planned, source, target)
    report = planned(source, target, asked("1/3")).run()
    assert (report.written, report.part.done) == (True, True)
    assert "whose commit was interrupted" in report.notes[-1]
    assert sorted(path.name for path in target.parent.iterdir()) == ["m"]


def _interrupt(*words: Any) -> None:
    raise KeyboardInterrupt


def test_no_part_begins_once_one_process_has_taken_over(
    three: Any, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that failed would remove its files from what the other commits."""
    planned, target = three
    write(planned, source, target, "2/3")
    whole = planned(source, target, asked(resume=True))
    real = type(whole)._verify

    def meanwhile(self: Any, *words: Any) -> None:
        for part in ("1/3", "2/3"):
            refused(
                partial(write, planned, source, target, part),
                "the run began without --part|another ckptool",
            )
        monkeypatch.setattr(type(whole), "_verify", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(whole), "_verify", meanwhile)
    with pytest.raises(KeyboardInterrupt):
        whole.run()
    refused(lambda: finish(planned, source, target), "the run began without --part")
    planned(source, target, asked(resume=True)).run()
    assert sorted(path.name for path in target.parent.iterdir()) == ["m"]


def test_a_part_that_begins_while_others_are_removed_ends_the_new_run(
    three: Any, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, target = three
    real = remove_staged
    opened: list[Any] = []

    def meanwhile(*words: Any) -> None:
        real(*words)
        part = planned(source, target, asked("2/3"))
        stage = part.open_stage(Ranks())
        stage.begin()
        opened.append(stage)

    monkeypatch.setattr(disk_target, "remove_staged", meanwhile)
    refused(
        lambda: planned(source, target, asked(overwrite=True)).run(), "another ckptool is writing"
    )
    opened[0].target.close()
    assert not target.exists()


def test_a_part_goes_on_without_verification_only_from_an_untouched_source(
    three: Any, source: Path, tmp_path: Path
) -> None:
    planned, target = three
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    planned(copy, target, asked("2/3", verify=False)).run()
    file = copy / "__0_0.distcp"
    before = file.stat()
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    again = planned(copy, target, asked("2/3", verify=False))
    refused(again.run, "the source was written to, or touched")
    planned(copy, target, asked("2/3")).run()


def test_files_that_go_before_a_part_is_done_end_it(
    three: Any, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, target = three
    last = planned(source, target, asked("2/3", verify=False))
    real = type(last)._move

    def losing(self: Any, stage: Any, *words: Any) -> None:
        real(self, stage, *words)
        (stage.target.folder / stage._names[0]).unlink()

    with monkeypatch.context() as patched:
        patched.setattr(type(last), "_move", losing)
        refused(last.run, "removed or cut short", TransferError)
    refused(lambda: finish(planned, source, target, verify=False), "part 2 of 3 is not done")
    write(planned, source, target, "2/3")
    finish(planned, source, target)


def test_files_that_go_before_the_commit_end_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, target = convert("hf", **MANY), tmp_path / "m"
    whole = planned(source, target, asked())
    real = type(whole)._verify

    def losing(self: Any, stage: Any, *words: Any) -> Any:
        found = real(self, stage, *words)
        next(stage.target.folder.glob("model-*.safetensors")).unlink()
        return found

    monkeypatch.setattr(type(whole), "_verify", losing)
    refused(whole.run, "removed or cut short", TransferError)
    assert not target.exists()


@pytest.mark.parametrize("end", [b"", b"\xff\xfe", b'{"part": {"verified": true, '])
def test_a_part_of_which_the_journal_is_cut_is_not_done(
    end: bytes, three: Any, source: Path
) -> None:
    planned, target = three
    write(planned, source, target, "2/3")
    journal = cut_short(target, end)
    refused(lambda: finish(planned, source, target), "part 2 of 3 is not done")
    write(planned, source, target, "2/3")
    assert b"\xff" not in journal.read_bytes()
    finish(planned, source, target)


@pytest.mark.parametrize("end", [b"\xff\xfe\n", b'{"part": {"verified": true}}\n'])
def test_a_part_of_which_the_journal_is_damaged_is_named(
    end: bytes, three: Any, source: Path
) -> None:
    planned, target = three
    write(planned, source, target, "2/3")
    journal = cut_short(target, end)
    words = "journal.1: is not as ckptool wr"
    refused(lambda: finish(planned, source, target), words)
    refused(lambda: write(planned, source, target, "2/3"), words)
    journal.unlink()
    write(planned, source, target, "2/3")
    finish(planned, source, target)


def cut_short(target: Path, end: bytes) -> Path:
    """Give the second part's journal another end."""
    journal = target.parent / ".m.partial.journal.1"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:-1], end]))
    return journal


def test_a_part_that_was_killed_as_it_began_is_named(three: Any, source: Path) -> None:
    planned, target = three
    (target.parent / ".m.partial.journal.1").touch()
    refused(lambda: finish(planned, source, target), "part 2 of 3 is not done")
    write(planned, source, target, "2/3")
    finish(planned, source, target)


def test_what_stands_is_replaced_at_the_end_alone(source: Path, tmp_path: Path) -> None:
    old, planned, target = convert("hf"), convert("hf", **MANY), tmp_path / "m"
    old(source, target, asked()).run()
    (target / "notes.txt").write_text("mine")
    before = content(target)
    refused(lambda: write(planned, source, target, "1/2"), "already exists")
    for part in ("1/2", "2/2"):
        planned(source, target, asked(part, overwrite=True)).run()
        assert content(target) == before
    refused(lambda: finish(planned, source, target), "already exists")
    finish(planned, source, target, overwrite=True)
    assert (target / "notes.txt").read_text() == "mine"
    assert len(content(target)) > len(before)
