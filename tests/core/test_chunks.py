"""Every container of chunks answers as these chunks in a tuple do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from ckptool.core.box import Box, BoxTable
from ckptool.core.catalog import Chunk, Extent, Record, TensorEntry
from ckptool.core.chunks import (
    Chunks,
    ChunkTable,
    ItemTable,
    LateChunks,
    RecordTable,
    WholeTensor,
    chunks_of,
)
from ckptool.core.dtype import BY_NAME

BOXES = [Box((0,), (2,)), Box((2,), (4,))]


def entry(chunks: Sequence[Chunk]) -> TensorEntry:
    return TensorEntry("t", ("t",), BY_NAME["uint8"], (4,), chunks)


def table() -> ChunkTable:
    boxes = BoxTable(np.array([[0], [2]]), np.array([[2], [4]]))
    items = ItemTable(("a", "b"), np.array([0, 1]), np.array([5, 7]), np.array([2, 2]))
    return ChunkTable(boxes, items, (3, None))


def opened(chunk: Chunk) -> Chunk:
    return replace(chunk, at=Extent(chunk.at.file, 0, (1,)))


def late() -> LateChunks:
    return LateChunks(table(), opened)


def records() -> RecordTable:
    return RecordTable(table(), np.array([6, 9]), np.array([11, 12], np.uint32), 1)


def whole() -> WholeTensor:
    return WholeTensor((Box((0,), (4,)),), "f", 9, (1,))


@pytest.mark.parametrize("make", [table, late, records, whole])
def test_answers_are_those_of_the_chunks(make: Callable[[], Chunks]) -> None:
    chunks = make()
    plain = chunks_of(entry(tuple(chunks)))
    assert chunks_of(entry(chunks)) is chunks
    assert isinstance(plain, Chunks)
    assert [*chunks.boxes] == [*plain.boxes]
    assert ([*chunks.spans.boxes], chunks.spans.ranks) == ([*plain.spans.boxes], plain.spans.ranks)
    assert chunks.located == plain.located
    assert [*chunks.opened] == [*plain.opened] == [*plain]
    assert chunks.alone
    assert chunks == plain


def test_what_is_bare_says_where_it_is() -> None:
    assert whole().bare
    assert whole().extent == ("f", 9, (1,))
    assert whole().cut == WholeTensor(whole().boxes, "f", 90, (1,)).cut
    assert not table().bare
    assert chunks_of(entry(tuple(whole()))).extent is None


def test_each_chunk_of_a_table_of_records_is_a_whole_one() -> None:
    runs = [*records().runs()]
    assert runs == [("a", 6, 2, Record("a", 6, 2, 11)), ("b", 9, 2, Record("b", 9, 2, 12))]
    assert [(c.at.file, c.at.offset, c.rank) for c in records()] == [("a", 6, 3), ("b", 9, None)]
    assert [c.at for c in records()] == [Extent(f, at, (1,), record) for f, at, _, record in runs]
    assert records().cut == table().cut != whole().cut


def test_a_late_chunk_is_opened_once_when_it_is_wanted() -> None:
    calls: list[Box] = []

    def noted(chunk: Chunk) -> Chunk:
        calls.append(chunk.box)
        return opened(chunk)

    chunks = LateChunks(table(), noted)
    assert not [*chunks.opened]
    assert chunks[1] is chunks[-1]
    assert [*chunks.opened] == [chunks[1]]
    assert [*chunks] == [*late()]
    assert calls == BOXES[::-1]
