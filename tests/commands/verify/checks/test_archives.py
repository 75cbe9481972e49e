"""An archive similar to a sound one is judged as if it were the first to be checked."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from attack_archives import FORGERIES, plain
from fuzz_target import one_file

from ckptool.commands.verify.checks import archives
from ckptool.commands.verify.checks.archives import ArchiveCheck
from ckptool.commands.verify.checks.pickles import PickleAudit
from ckptool.core.catalog import Container
from ckptool.serialization.archive.templates import Sibling, Templates
from ckptool.serialization.zip import Region, ZipRecord, read_directory
from ckptool.storage.virtual.memory import MemoryFiles

torch = pytest.importorskip("torch")


class Unknown:
    """A class that no checkpoint is expected to name."""


def saved(seed: int, rows: int) -> bytes:
    stream = io.BytesIO()
    torch.save(torch.rand((rows, 20), generator=torch.manual_seed(seed)), stream)
    return stream.getvalue()


def judged(
    first: bytes, second: bytes, *, both: bool
) -> tuple[list[str], list[tuple[int, int, int | None, str]]]:
    """What is said of the second of two archives in one file, after the first or without it."""
    data = first + second
    check = ArchiveCheck(one_file(data, "items"), PickleAudit())
    if both:
        check.look_at(Container("items", 0, len(first)))
        assert not check.problems
    before = len(check.spans)
    check.look_at(Container("items", len(first), len(second)))
    spans = [(span.offset, span.nbytes, span.crc32, span.what) for span in check.spans[before:]]
    return list(check.problems), spans


@pytest.mark.parametrize("rows", [2, 300], ids=["all at hand", "both ends at hand"])
def test_a_changed_byte_shows_as_in_the_first(rows: int) -> None:
    first, second = saved(1, rows), saved(2, rows)
    end = len(second)
    for at in [*range(0, min(1000, end), 2), *range(max(0, end - 1300), end, 2)]:
        changed = second[:at] + bytes([second[at] ^ 0x41]) + second[at + 1 :]
        assert judged(first, changed, both=True) == judged(first, changed, both=False), at


@pytest.mark.parametrize("forged", FORGERIES)
def test_a_forged_archive_shows_as_in_the_first(
    forged: Callable[[], tuple[bytes, bytes]],
) -> None:
    problems, spans = judged(*forged(), both=False)
    assert problems
    assert judged(*forged(), both=True) == (problems, spans)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The files and offsets of the archives whose directories are read from now on."""
    found: list[tuple[str, int]] = []

    def noted(region: Region) -> dict[str, ZipRecord]:
        found.append((region.file, region.offset))
        return read_directory(region)

    monkeypatch.setattr(archives, "read_directory", noted)
    return found


@pytest.mark.parametrize(
    "pair", [(saved(1, 300), saved(2, 300)), (plain(b"one"), plain(b"two"))], ids=["torch", "plain"]
)
def test_one_that_differs_in_its_storage_is_not_opened(
    pair: tuple[bytes, bytes], opened: list[tuple[str, int]]
) -> None:
    problems, spans = judged(*pair, both=True)
    assert (problems, len(spans), opened) == ([], 1, [("items", 0)])


def test_of_the_files_of_ranks_one_is_opened(
    tmp_path: Path, opened: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their records have the files' names. A file of another size is not worth learning from."""
    learned: list[str] = []
    learn = Templates.learn

    def noted(self: Templates, region: Region, records: Collection[ZipRecord]) -> Sibling | None:
        learned.append(region.file)
        return learn(self, region, records)

    monkeypatch.setattr(Templates, "learn", noted)
    for name, rows in (("rank_0.pt", 300), ("rank_1.pt", 300), ("rank_2.pt", 300), ("one.pt", 9)):
        torch.save(torch.rand(rows, 20), tmp_path / name)
    files = {path.name: memoryview(path.read_bytes()) for path in sorted(tmp_path.iterdir())}
    check = ArchiveCheck(MemoryFiles(files), PickleAudit())
    for file, data in files.items():
        check.look_at(Container(file, 0, len(data)))
    assert not check.problems
    assert len(check.spans) == len(files)
    assert opened == [("one.pt", 0), ("rank_0.pt", 0)]
    assert learned == ["rank_0.pt"]


def test_a_pickle_that_others_are_not_judged_by() -> None:
    """What a pickle names is reported for each file, though all of the pickle is compared."""
    stream = io.BytesIO()
    torch.save({"weight": torch.zeros(300, 20), "of": Unknown()}, stream)
    files = {name: memoryview(stream.getvalue()) for name in ("a.pt", "b.pt")}
    pickles = PickleAudit()
    check = ArchiveCheck(MemoryFiles(files), pickles)
    for file, data in files.items():
        check.look_at(Container(file, 0, len(data)))
    assert [problem.file for problem in pickles.problems] == [*files]
