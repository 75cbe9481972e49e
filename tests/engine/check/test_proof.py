"""Written tensors are proved by what was read for them, however either side is cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trials import trials

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import Chunk, Extent, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.engine.check.pairs import PairSource, TensorPair
from ckptool.engine.check.proof import proof_jobs
from ckptool.engine.check.tensors import TensorComparison
from ckptool.engine.read.byte_reader import ByteReader
from ckptool.engine.read.range_check import RangeCheck
from ckptool.engine.read.sums import ReadSums
from ckptool.engine.read.tensors import TensorSource
from ckptool.engine.read.tiles import read_tiles
from ckptool.errors import Changed
from ckptool.storage.local import LocalReader, LocalSource

SHAPE = (5, 3, 4)
INT16 = BY_NAME["int16"]


def cuts(draw: st.DrawFn) -> list[Box]:
    """Boxes that tile the shape: a grid of random borders in each dim."""
    borders = [sorted({0, size, *draw(st.sets(st.integers(1, size - 1)))}) for size in SHAPE]
    spans = [[*pairwise(b)] for b in borders]
    boxes = [
        Box((a[0], b[0], c[0]), (a[1], b[1], c[1]))
        for a in spans[0]
        for b in spans[1]
        for c in spans[2]
    ]
    return draw(st.permutations(boxes))


def store(folder: Path, values: np.ndarray, boxes: Sequence[Box], name: str = "t") -> TensorEntry:
    """Write the chunks of a tensor to a file, with a gap before each."""
    folder.mkdir(exist_ok=True)
    chunks = []
    with open(folder / "data", "ab") as stream:
        for box in boxes:
            stream.write(b"\xff" * 6)
            chunks.append(Chunk(box, Extent("data", stream.tell(), strides(box))))
            stream.write(values[tuple(map(slice, box.lo, box.hi))].tobytes())
    return TensorEntry(name, (name,), INT16, SHAPE, tuple(chunks))


def strides(box: Box) -> tuple[int, ...]:
    return row_major_strides(box.shape, 2)


def read(
    source: LocalSource,
    entry: TensorEntry,
    pieces: Callable[[int], list[int]],
    sums: ReadSums | None = None,
) -> ReadSums:
    """Read each chunk in pieces of some numbers of elements, and note that."""
    sums = ReadSums() if sums is None else sums
    with closing(ByteReader(source, sums=sums)) as reader:
        for chunk in entry.chunks:
            left, at = chunk.box.volume, chunk.at.offset
            for count in [*pieces(left), left]:
                count = min(count, left)
                if count:
                    reader.read("data", at, 2 * count)
                at, left = at + 2 * count, left - count
    return sums


def prove(
    pairs: TensorPair | list[TensorPair], sums: ReadSums, sides: tuple[LocalSource, LocalSource]
) -> TensorComparison:
    pairs = pairs if isinstance(pairs, list) else [pairs]
    found = TensorComparison()
    source = PairSource(*map(TensorSource, sides))
    read_tiles(
        source,
        proof_jobs(pairs, sums, sides, RangeCheck()),
        found.look,
        1,
    )
    return found


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Each read of a disk: the folder, and how many bytes."""
    reads: list[tuple[str, int]] = []
    real = LocalReader.read_some

    def read_some(self: LocalReader, file: str, offset: int, buffer: memoryview) -> int:
        count = real(self, file, offset, buffer)
        reads.append((self._source.root, count))
        return count

    monkeypatch.setattr(LocalReader, "read_some", read_some)
    return reads


@st.composite
def made(draw: st.DrawFn) -> tuple[list[Box], list[Box], list[int], int]:
    """How both sides are cut, how many elements are read at a time, and one that is damaged."""
    pieces = draw(st.lists(st.integers(1, 40), max_size=4))
    return cuts(draw), cuts(draw), pieces, draw(st.integers(-1, math.prod(SHAPE) - 1))


@settings(max_examples=trials(60))
@given(made())
def test_one_wrong_element_is_found_and_named_however_both_are_cut(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[list[Box], list[Box], list[int], int]
) -> None:
    one_cut, other_cut, pieces, wrong = case
    folder = tmp_path_factory.mktemp("proof")
    values = np.arange(math.prod(SHAPE), dtype=np.int16).reshape(SHAPE)
    written = values.copy()
    if wrong >= 0:
        written.reshape(-1)[wrong] += 1
    one = store(folder / "one", values, one_cut)
    other = store(folder / "other", written, other_cut)
    sides = LocalSource.folder(folder / "one"), LocalSource.folder(folder / "other")
    sums = read(sides[0], one, lambda left: pieces)
    found = prove(TensorPair(one, other), sums, sides)
    assert not found.unreadable
    if wrong < 0:
        assert not found.differences
    else:
        first = tuple(int(n) for n in np.unravel_index(wrong, SHAPE))
        assert found.differences["t"].elements == 1
        assert found.differences["t"].first == first


def sides_of(folder: Path) -> tuple[TensorPair, tuple[LocalSource, LocalSource]]:
    values = np.arange(math.prod(SHAPE), dtype=np.int16).reshape(SHAPE)
    whole, halves = [Box.whole(SHAPE)], [Box((0, 0, 0), (2, 3, 4)), Box((2, 0, 0), SHAPE)]
    one, other = store(folder / "one", values, whole), store(folder / "other", values, halves)
    return TensorPair(one, other), (
        LocalSource.folder(folder / "one"),
        LocalSource.folder(folder / "other"),
    )


def test_the_source_is_not_read_again(tmp_path: Path, counted: list[tuple[str, int]]) -> None:
    pair, sides = sides_of(tmp_path)
    sums = read(sides[0], pair.one, lambda left: [7])
    counted.clear()
    assert not prove(pair, sums, sides).differences
    assert {root for root, _ in counted} == {str(tmp_path / "other")}
    assert sum(count for _, count in counted) <= (tmp_path / "other" / "data").stat().st_size


def test_small_tensors_of_all_cuts_are_proved_without_their_source(
    tmp_path: Path, counted: list[tuple[str, int]]
) -> None:
    rows = [Box((n, 0, 0), (n + 1, 3, 4)) for n in range(5)]
    columns = [Box((0, 0, n), (5, 3, n + 1)) for n in range(4)]
    middles = [Box((0, n, 0), (5, n + 1, 4)) for n in range(3)]
    pairs, wrong = [], {"b": (4, 2, 3)}
    for name, cut in zip("abc", (columns, columns, middles), strict=True):
        values = np.full(SHAPE, ord(name), np.int16)
        one = store(tmp_path / "one", values, rows, name)
        if name in wrong:
            values[wrong[name]] += 1
        pairs.append(TensorPair(one, store(tmp_path / "other", values, cut, name)))
    sides = LocalSource.folder(tmp_path / "one"), LocalSource.folder(tmp_path / "other")
    sums = ReadSums()
    for pair in pairs:
        read(sides[0], pair.one, lambda left: [7], sums)
    counted.clear()
    assert not prove([pairs[0], pairs[2]], sums, sides).differences
    assert {root for root, _ in counted} == {str(tmp_path / "other")}
    found = prove(pairs, sums, sides)
    assert {name: found.differences[name].first for name in found.differences} == wrong


@pytest.mark.parametrize("how", ["a gap", "half an element", "nothing"])
def test_what_was_not_read_in_whole_is_compared(
    how: str, tmp_path: Path, counted: list[tuple[str, int]]
) -> None:
    pair, sides = sides_of(tmp_path)
    sums, at = ReadSums(), pair.one.chunks[0].at.offset
    with closing(ByteReader(sides[0], sums=sums)) as reader:
        for start, nbytes in {
            "a gap": [(0, 60), (62, 58)],
            "half an element": [(0, 61), (61, 59)],
        }.get(how, []):
            reader.read("data", at + start, nbytes)
    counted.clear()
    assert not prove(pair, sums, sides).differences
    assert {root for root, _ in counted} == {str(tmp_path / "one"), str(tmp_path / "other")}


def test_of_a_part_only_what_was_written_counts(
    tmp_path: Path, counted: list[tuple[str, int]]
) -> None:
    pair, sides = sides_of(tmp_path)
    half = pair.other.chunks[:1]
    part = TensorPair(pair.one, TensorEntry("t", ("t",), INT16, SHAPE, half), boxes=(half[0].box,))
    sums = ReadSums()
    with closing(ByteReader(sides[0], sums=sums)) as reader:
        reader.read("data", pair.one.chunks[0].at.offset, 2 * half[0].box.volume)
        counted.clear()
        assert not prove(part, sums, sides).differences
        assert {root for root, _ in counted} == {str(tmp_path / "other")}
        reader.read("data", pair.one.chunks[0].at.offset, 2 * math.prod(SHAPE))
    counted.clear()
    again = ReadSums()
    again._notes |= sums._notes
    assert not prove(part, again, sides).differences


def test_a_source_that_gave_other_bytes_before_has_changed(tmp_path: Path) -> None:
    pair, sides = sides_of(tmp_path)
    sums = ReadSums()
    sums.note("data", pair.one.chunks[0].at.offset, memoryview(bytes(2 * math.prod(SHAPE))))
    (failure,) = prove(pair, sums, sides).unreadable.values()
    assert isinstance(failure.error, Changed)
    assert failure.side == 0
