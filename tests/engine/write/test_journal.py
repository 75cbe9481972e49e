"""What a journal notes, who may go on with it, and which of the noted files still count."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine.write.trees import fill

from ckptool.commands.options.run import RunOptions
from ckptool.core.catalog import Catalog
from ckptool.core.layout import FileLayout, Layout, Literal
from ckptool.core.planning.plan import Plan
from ckptool.engine.checksum import crc32
from ckptool.engine.write import journal as journals
from ckptool.engine.write.journal import Journal, JournalNotes, find_finished, read_journal
from ckptool.engine.write.schemas import FileMark, JournalHead, PartEnd
from ckptool.engine.write.work import Work
from ckptool.errors import Unsupported
from ckptool.storage.disk import identity
from ckptool.storage.virtual.memory import MemoryFiles

HEAD = JournalHead("plan", "source", files={"a": 1, "b": 2})
PART = JournalHead("plan", "source", parts=3)
END = PartEnd[FileMark](True, "state", {"a": (1, 2, 3)}, [])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".m.partial.journal.0"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    """A journal that is begun, with one finished file."""
    opened = Journal(path)
    opened.begin(HEAD)
    opened.done("a", 1)
    yield opened
    opened.close()


def again(path: Path, head: JournalHead = HEAD, *others: Path) -> Journal:
    """The journal of a later run."""
    resumed = Journal(path)
    resumed.resume(head, others)
    return resumed


# What is noted


def test_a_journal_says_how_it_begins_and_what_is_finished(journal: Journal) -> None:
    journal.done("sub/b", 2)
    assert read_journal(journal.path) == JournalNotes(
        HEAD, {"a": 1, "sub/b": 2}, None, journal.path.stat().st_size
    )
    first = json.loads(journal.path.read_text().splitlines()[0])
    assert first == {
        "schema": "ckptool.journal/1", "plan": "plan", "source": "source", "files": {"a": 1, "b": 2}
    }  # fmt: skip


def test_half_a_line_at_its_end_is_left_out(journal: Journal) -> None:
    whole = journal.path.stat().st_size
    journal.done("b", 2)
    os.truncate(journal.path, journal.path.stat().st_size - 3)
    assert read_journal(journal.path) == JournalNotes(HEAD, {"a": 1}, None, whole)


@pytest.mark.parametrize("begun", [b"", b'{"schema', b'{"schema": "ckptool.journal/1", "plan"'])
def test_a_journal_whose_run_was_killed_as_it_began_says_nothing(begun: bytes, path: Path) -> None:
    path.write_bytes(begun)
    assert read_journal(path) == JournalNotes()


def test_the_end_of_a_part_is_that_of_its_last_line(path: Path) -> None:
    journal = Journal(path)
    journal.begin(PART)
    journal.done("a", 1)
    journal.end(END)
    assert read_journal(path).end == END
    journal.done("b", 2)
    assert read_journal(path).end is None, "it was begun again"
    journal.close()


@pytest.mark.parametrize(
    "line",
    [b"\xff", b"{}", b'{"done": "c"}', b'{"done": "c", "crc32": -1}', b'{"part": {}}', b"[]"],
)
def test_a_line_that_no_run_writes_is_refused(line: bytes, journal: Journal) -> None:
    with journal.path.open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(Unsupported, match="is not as ckptool writes it"):
        read_journal(journal.path)


def test_another_file_is_in_the_way(path: Path) -> None:
    path.write_bytes(b"mine\n")
    for use in (read_journal, Journal):
        with pytest.raises(Unsupported, match="is in the way"):
            use(path)
    assert path.read_bytes() == b"mine\n"


def test_a_link_is_in_the_way(path: Path, tmp_path: Path) -> None:
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Unsupported, match="is in the way"):
        Journal(path)
    assert not (tmp_path / "elsewhere").exists()


# Who may write it


def test_one_process_at_a_time_has_a_journal(journal: Journal) -> None:
    with pytest.raises(Unsupported, match="another ckptool is writing this target"):
        Journal(journal.path)
    assert journal.is_open
    journal.close()
    assert not journal.is_open
    Journal(journal.path).close()


def test_a_journal_that_its_owner_has_removed_meanwhile_is_not_taken(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock

    def after_its_end(file: int, operation: int) -> None:
        path.unlink()
        path.touch()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", after_its_end)
    with pytest.raises(Unsupported, match="another ckptool is writing this target"):
        Journal(path)


def test_a_journal_that_is_removed_while_it_is_taken_is_anothers(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def identity_of_what_goes(place: Path) -> int | None:
        found = identity(place)
        place.unlink()
        return found

    monkeypatch.setattr(journals, "identity", identity_of_what_goes)
    with pytest.raises(Unsupported, match="another ckptool is writing this target"):
        Journal(path)


def test_a_file_system_without_locks_is_not_taken_for_another_process(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(Unsupported, match="cannot be locked: No locks available"):
        Journal(path)


# Who may go on with it


def test_the_same_run_goes_on(journal: Journal) -> None:
    journal.close()
    resumed = again(journal.path)
    assert resumed.finished == {"a": 1}
    resumed.done("b", 2)
    resumed.close()
    assert read_journal(journal.path).finished == {"a": 1, "b": 2}


def test_half_a_line_is_cut_off_before_the_next(journal: Journal) -> None:
    journal.close()
    with journal.path.open("ab") as file:
        file.write(b'{"done": "b", "cr')
    resumed = again(journal.path)
    resumed.done("c", 3)
    resumed.close()
    assert read_journal(journal.path).finished == {"a": 1, "c": 3}


def test_a_run_that_was_killed_as_it_began_begins_here(path: Path) -> None:
    path.write_bytes(b'{"schema": "ckpt')
    again(path).close()
    assert read_journal(path).head == HEAD


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (JournalHead("other", "source"), "cannot resume: the plan has changed since"),
        (JournalHead("plan", "other"), "cannot resume: the source has changed since"),
    ],
)
def test_another_run_does_not_go_on(head: JournalHead, words: str, journal: Journal) -> None:
    journal.close()
    before = journal.path.read_bytes()
    other = Journal(journal.path)
    with pytest.raises(Unsupported, match=words) as told:
        other.resume(head)
    assert told.value.hint == "run again without --resume to start over"
    assert not other.is_open
    assert journal.path.read_bytes() == before


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        (PART, JournalHead("plan", "source", parts=4), "the run began in 3 parts"),
        (HEAD, PART, "the run began without --part"),
        (PART, JournalHead("other", "source", parts=3), "the plan is another"),
        (PART, JournalHead("plan", "other", parts=3), "the source is another"),
    ],
)
def test_a_part_of_another_run_does_not_go_on(
    first: JournalHead, then: JournalHead, words: str, path: Path
) -> None:
    journal = Journal(path)
    journal.begin(first)
    journal.close()
    with pytest.raises(Unsupported, match=f"cannot continue: {words}"):
        again(path, then)


def test_what_other_ranks_have_finished_counts(journal: Journal, tmp_path: Path) -> None:
    """Each goes on in its own journal, and leaves those of the others as they are."""
    other = Journal(tmp_path / "journal.1")
    other.begin(JournalHead("plan", "source"))
    other.done("b", 2)
    for each in (journal, other):
        each.close()
    before = other.path.read_bytes()
    resumed = again(journal.path, HEAD, other.path)
    assert resumed.finished == {"a": 1, "b": 2}
    resumed.close()
    assert other.path.read_bytes() == before
    assert read_journal(journal.path).finished == {"a": 1}


def test_the_journal_of_another_rank_must_be_of_the_same_run(
    journal: Journal, tmp_path: Path
) -> None:
    journal.close()
    other = Journal(tmp_path / "journal.1")
    other.begin(JournalHead("other", "source"))
    other.close()
    with pytest.raises(Unsupported, match=r"journal\.1: cannot resume: the plan has changed"):
        again(journal.path, HEAD, other.path)


def test_one_process_takes_over_what_a_part_has_finished(path: Path) -> None:
    """Its journal is then no part's, so that no part goes on."""
    journal = Journal(path)
    journal.begin(PART)
    journal.done("a", 1)
    journal.end(END)
    journal.close()
    again(path).close()
    noted = read_journal(path)
    assert (noted.head, noted.finished, noted.end) == (HEAD, {"a": 1}, None)
    with pytest.raises(Unsupported, match="the run began without --part"):
        again(path, PART)


# Which files still count


CONTENT = {"same": b"same", "changed": b"before", "cut": b"whole", "linked": b"linked"}
CONTENT |= {"gone": b"gone", "later": b"later", "another's": b"other"}


def work_of(names: list[str]) -> Work:
    """All files of a plan, of which some are this process's."""
    files = tuple(FileLayout(name, (Literal(data),)) for name, data in CONTENT.items())
    plan = Plan(Catalog("dcp", {}, {}, {}), Layout(files, folder=True))
    numbers = [plan.numbers[name] for name in names]
    return Work(plan, MemoryFiles({}), RunOptions(workers=1), numbers)


def test_a_finished_file_counts_if_it_is_whole_and_unchanged(path: Path, tmp_path: Path) -> None:
    folder = fill(tmp_path / "staged", CONTENT)
    journal = Journal(path)
    journal.begin(HEAD)
    for name in CONTENT.keys() - {"later"}:
        journal.done(name, crc32(CONTENT[name]))
    journal.close()
    (folder / "changed").write_bytes(b"after!")
    (folder / "cut").write_bytes(b"who")
    (folder / "gone").unlink()
    os.link(folder / "linked", tmp_path / "of another folder")
    work = work_of([name for name in CONTENT if name != "another's"])
    resumed = again(path)
    finished = find_finished(work, folder, resumed)
    resumed.close()
    assert [work.plan.layout.files[number].path for number in finished] == ["same"]
