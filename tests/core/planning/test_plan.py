"""Plans: exact coverage or an error, and tiles that find their chunks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ckptool.core.box import Box, BoxTable, row_major_strides
from ckptool.core.catalog import Catalog, Chunk, Computed, Extent, StridedPart, TensorEntry
from ckptool.core.chunks import ChunkTable, ItemTable, LateChunks
from ckptool.core.dtype import BY_NAME
from ckptool.core.layout import Data, FileLayout, Layout, Literal
from ckptool.core.planning.groups import Group, Tile
from ckptool.core.planning.plan import Plan
from ckptool.core.sharding.coverage import coverage_problem
from ckptool.core.sharding.index import BoxIndex, ChunkIndex
from ckptool.errors import Damaged

F32 = BY_NAME["float32"]


def chunk(box: Box, rank: int | None = None) -> Chunk:
    return Chunk(box, Extent("f", 0, row_major_strides(box.shape, 4)), rank)


def entry(shape: tuple[int, ...], boxes: list[Box], name: str = "w") -> TensorEntry:
    return TensorEntry(name, (name,), F32, shape, tuple(map(chunk, boxes)))


@st.composite
def boxes_within(draw: st.DrawFn, shape: tuple[int, ...], margin: int = 0) -> Box:
    spans = [sorted(draw(st.tuples(*[st.integers(0, n + margin)] * 2))) for n in shape]
    return Box(tuple(lo for lo, _ in spans), tuple(hi for _, hi in spans))


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that tile the shape exactly: cut again and again where it happens to be cut."""
    found = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 5))):
        box = found.pop(draw(st.integers(0, len(found) - 1)))
        dims = [d for d, n in enumerate(box.shape) if n > 1]
        if not dims:
            found.append(box)
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(box.lo[dim] + 1, box.hi[dim] - 1))
        hi = (*box.hi[:dim], at, *box.hi[dim + 1 :])
        lo = (*box.lo[:dim], at, *box.lo[dim + 1 :])
        found += [Box(box.lo, hi), Box(lo, box.hi)]
    return draw(st.permutations(found))


SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)
SOME_BOXES = SHAPES.flatmap(
    lambda s: st.tuples(st.just(s), st.lists(boxes_within(s, margin=1), max_size=5))
)
TILED = SHAPES.flatmap(lambda s: st.tuples(st.just(s), tilings(s)))


@given(SOME_BOXES)
def test_coverage_is_what_counting_every_element_says(
    found: tuple[tuple[int, ...], list[Box]],
) -> None:
    shape, boxes = found
    inside = all(Box.whole(shape).contains(box) for box in boxes)
    count = np.zeros(shape, int)
    if inside:
        for box in boxes:
            count[tuple(map(slice, box.lo, box.hi))] += 1
    ok = inside and bool((count == 1).all())
    assert (coverage_problem(entry(shape, boxes)) is None) == ok


@given(TILED)
def test_tilings_are_not_problem(found: tuple[tuple[int, ...], list[Box]]) -> None:
    assert coverage_problem(entry(*found)) is None


def test_chunks_that_are_no_grid_are_judged_without_opening_them() -> None:
    boxes = [Box((0, 0), (3, 2)), Box((3, 0), (4, 2)), Box((0, 2), (1, 4)), Box((1, 2), (4, 4))]
    closed = entry((4, 4), boxes)
    lows, highs = map(np.array, zip(*boxes, strict=True))
    table = ChunkTable(BoxTable(lows, highs), ItemTable((), [], [], []), ())
    late = replace(closed, chunks=LateChunks(table, lambda chunk: pytest.fail("opened")))
    assert coverage_problem(late) is None


@given(TILED, st.data())
def test_the_index_finds_what_a_search_of_all_chunks_finds(
    found: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    tensor = entry(*found)
    wanted = data.draw(boxes_within(tensor.shape))
    hits = {(each.chunk.box, each.box) for each in ChunkIndex(tensor).find(wanted)}
    assert hits == {(b, common) for b in found[1] if (common := b.intersect(wanted)) is not None}


BOTH_TILED = SHAPES.flatmap(lambda s: st.tuples(st.just(s), tilings(s), tilings(s)))


@given(BOTH_TILED, st.integers(1, 64), st.integers(1, 3))
def test_any_cut_becomes_any_other(
    found: tuple[tuple[int, ...], list[Box], list[Box]], limit: int, files: int
) -> None:
    """Every byte of every output file is written once, with the element that belongs there."""
    shape, held, wanted = found
    tensor = entry(shape, held)
    values = np.arange(tensor.elements).reshape(shape)
    plan = plan_of(tensor, cut=wanted, files=files)
    images = [np.full((file.nbytes - 4) // 4, -1) for file in plan.layout.files]
    for tile in tiles_of(plan, limit):
        array = np.full(tile.shape, -1)
        for source in tile.sources:
            assert source.chunk.box.contains(source.box)
            assert (array[at(source.where)] == -1).all()
            array[at(source.where)] = values[at(source.box)]
        if tile.band is not None:
            band = values[at(tile.band)]
            for box, local in tile.pieces:
                array[at(local)] = band[at(box)]
        start = (tile.offset - 4) // 4
        place = images[tile.file][start : start + array.size]
        assert (place == -1).all()
        place[:] = array.reshape(-1)
    for number, image in enumerate(images):
        pieces = [values[at(box)].reshape(-1) for box in wanted[number::files]]
        assert image.tolist() == (np.concatenate(pieces).tolist() if pieces else [])


@pytest.mark.parametrize(("in_pieces", "tiles"), [(True, 2), (False, 8)])
def test_tiles_are_larger_if_they_are_computed_in_pieces(in_pieces: bool, tiles: int) -> None:
    one = entry((8, 4), [Box.whole((8, 4))])
    part = StridedPart(one.shape, 0, row_major_strides(one.shape, 1))
    computed = Computed((one,), part, lambda *_: np.zeros(0), in_pieces=in_pieces)
    plan = plan_of(replace(one, chunks=(Chunk(Box.whole(one.shape), computed),)))
    assert len(list(tiles_of(plan, 16))) == tiles


def groups_of(plan: Plan, limit: int) -> list[Group]:
    files = {number: file.parts for number, file in enumerate(plan.layout.files)}
    return plan.groups(files, limit)


def tiles_of(plan: Plan, limit: int) -> Iterator[Tile]:
    for group in groups_of(plan, limit):
        for job in plan.jobs(group, limit):
            yield from job


def at(box: Box) -> tuple[slice, ...]:
    return tuple(map(slice, box.lo, box.hi))


def plan_of(*tensors: TensorEntry, cut: list[Box] | None = None, files: int = 1) -> Plan:
    """A plan that writes each tensor whole, or in the boxes of ``cut``, in turn to the files."""
    parts = [Data.of(t.name, box, 4) for t in tensors for box in cut or [Box.whole(t.shape)]]
    layouts = [FileLayout(f"out{n}", (Literal(b"head"), *parts[n::files])) for n in range(files)]
    catalog = Catalog("test", {t.name: t for t in tensors}, {}, {})
    return Plan(catalog, Layout(tuple(layouts), folder=True))


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([Box((0,), (4,))], "4 of 8 elements"),
        ([Box((0,), (5,)), Box((4,), (8,))], "overlap"),
        ([Box((0,), (9,))], "outside"),
        ([], "0 of 8"),
        ([Box((0, 0), (8, 1))], "outside"),
    ],
)
def test_a_plan_names_what_is_wrong(boxes: list[Box], words: str) -> None:
    with pytest.raises(Damaged, match=words) as caught:
        plan_of(entry((8,), boxes))
    assert "w" in caught.value.message


def test_all_problems_are_shown_together() -> None:
    with pytest.raises(Damaged, match="2 problems") as caught:
        plan_of(entry((8,), [], "first"), entry((8,), [], "second"))
    assert "first" in caught.value.message
    assert "second" in caught.value.message


def test_a_small_tensor_is_read_once_for_all_that_is_written_of_it() -> None:
    rows, columns = ([Box.along(dim, 2 * i, [2 if d == dim else 4 for d in (0, 1)])
                      for i in (0, 1)] for dim in (0, 1))  # fmt: skip
    plan = plan_of(entry((4, 4), rows), cut=columns, files=2)
    jobs = [job for group in groups_of(plan, 64) for job in plan.jobs(group, 64)]
    assert [[tile.pieces[0].box for tile in job] for job in jobs] == [columns]
    larger = groups_of(plan, 63)
    assert [(len(group.parts), group.at_once) for group in larger] == [(2, False)]
    part = plan_of(entry((4, 4), rows), cut=columns, files=2).groups(
        {0: plan.layout.files[0].parts}, 64
    )
    assert not part[0].at_once, "half of it would be read in vain"
    alone = plan_of(entry((4, 4), rows))
    assert all(group.at_once for group in groups_of(alone, 64))
    assert not alone._indexes, "which chunks it is read from need not be searched"


def test_tensors_that_are_cut_alike_share_the_pieces_of_their_tiles() -> None:
    whole = [Box.whole((4, 4))]
    columns = [Box((0, low), (4, low + 2)) for low in (0, 2)]
    plan = plan_of(*(entry((4, 4), whole, name) for name in "ab"), cut=columns, files=2)
    jobs = [job for group in groups_of(plan, 8) for job in plan.jobs(group, 8)]
    first, second = ([job for job in jobs if job[0].entry.name == name] for name in "ab")
    assert len(first) == len(second) > 0
    for a, b in zip(chain(*first), chain(*second), strict=True):
        assert a.pieces is b.pieces


@pytest.mark.parametrize(("dim", "most"), [(0, 1024), (1, 256)])
def test_whole_rows_are_copied_in_larger_tiles(dim: int, most: int) -> None:
    """Rows that are gathered from columns take memory, those that are copied do not."""
    halves = [Box.along(dim, 32 * i, [32 if d == dim else 64 for d in (0, 1)]) for i in (0, 1)]
    plan = plan_of(entry((64, 64), halves))
    assert max(tile.nbytes for tile in tiles_of(plan, 256)) == most


def test_a_large_grid_is_planned_in_one_sweep() -> None:
    """A search of all chunks for each tile would be 64 million comparisons."""
    boxes = [Box((8 * i,), (8 * i + 8,)) for i in range(8000)]
    plan = plan_of(entry((64000,), boxes))
    assert sum(len(tile.sources) for tile in tiles_of(plan, 32)) == 8000


def test_what_many_chunks_have_in_common_with_a_box_is_found_one_by_one() -> None:
    class Boxes(list[Box]):
        looked_at = 0

        def __getitem__(self, at: Any) -> Any:
            self.looked_at += 1
            return super().__getitem__(at)

    boxes = Boxes(Box((8 * i,), (8 * i + 8,)) for i in range(8000))
    index = BoxIndex(boxes)
    boxes.looked_at = 0
    found = iter(index.find(Box((0,), (64000,))))
    assert [next(found)[0] for _ in range(3)] == [0, 1, 2]
    assert boxes.looked_at == 3
