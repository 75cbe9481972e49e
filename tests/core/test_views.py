"""Parts of tensors as places, and every change of a tensor's geometry: against numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import (
    Chunk,
    Container,
    Copy,
    EncodedBlob,
    Extent,
    Place,
    StridedPart,
    TensorEntry,
    places,
)
from ckptool.core.dtype import BY_NAME
from ckptool.core.sharding.coverage import coverage_problem
from ckptool.core.views import (
    insert_dim,
    join,
    merge_dims,
    narrow,
    pad,
    part_of_place,
    permute,
    reads_any_order,
    split_dim,
    unstack,
    whole_tensor,
)
from ckptool.errors import Unsupported

SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
ITEM = 8


def values_at(data: np.ndarray, at: Place, shape: tuple[int, ...]) -> np.ndarray:
    assert isinstance(at, Extent)
    found = np.empty(shape, data.dtype)
    for index in np.ndindex(*shape):
        byte = at.offset + sum(i * s for i, s in zip(index, at.strides, strict=True))
        found[index] = data.reshape(-1)[byte // ITEM]
    return found


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    lo = [draw(st.integers(0, size - 1)) for size in shape]
    hi = [draw(st.integers(first + 1, size)) for first, size in zip(lo, shape, strict=True)]
    return Box(tuple(lo), tuple(hi))


def narrowed(at: Place, shape: tuple[int, ...], box: Box) -> Place:
    """Return where a box of a tensor at a place is."""
    entry = whole_tensor("t", ("t",), BY_NAME["int64"], shape, at)
    for dim, (low, high) in enumerate(zip(box.lo, box.hi, strict=True)):
        entry = narrow(entry, dim, low, high)
    return entry.chunks[0].at


@given(SHAPES, st.data())
def test_a_box_of_a_tensor_however_its_strides_lie(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    stored = np.arange(math.prod(shape)).reshape([shape[d] for d in order])
    tensor = stored.transpose(np.argsort(order))
    at = Extent("f", 0, tuple(tensor.strides))
    box = data.draw(boxes(shape))
    place = narrowed(at, shape, box)
    wanted = tensor[tuple(map(slice, box.lo, box.hi))]
    assert (values_at(stored, place, box.shape) == wanted).all()


@given(SHAPES, st.data())
def test_a_flat_run_of_a_tensor(shape: tuple[int, ...], data: st.DataObject) -> None:
    tensor = np.arange(math.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, tensor.size))
    stop = data.draw(st.integers(start, tensor.size))
    run = tensor.reshape(-1)[start:stop].copy()
    found = np.full(shape, -1)
    chunk = Chunk(Box((start,), (stop,)), Extent("f", 0, (ITEM,)))
    vector = TensorEntry("t", ("t",), BY_NAME["int64"], (tensor.size,), (chunk,))
    for part in split_dim(vector, 0, shape).chunks:
        found[tuple(map(slice, part.box.lo, part.box.hi))] = values_at(run, part.at, part.box.shape)
    flat = found.reshape(-1)
    assert (flat[start:stop] == run).all()
    assert (np.delete(flat, np.s_[start:stop]) == -1).all()


def test_a_part_of_an_item_that_is_not_opened_yet() -> None:
    item = Container("f", 100, 900)
    once = narrowed(item, (4, 6), Box((1, 0), (3, 6)))
    assert once == Container("f", 100, 900, (), StridedPart((4, 6), 6, (6, 1)))
    twice = narrowed(once, (2, 6), Box((1, 2), (2, 5)))
    assert twice == Container("f", 100, 900, (), StridedPart((4, 6), 14, (6, 1)))


def test_what_opens_a_container_is_no_part_of_where_it_is() -> None:
    class Opened:
        start, edges = 0, ()

        def place(self, at: Container, shape: tuple[int, ...]) -> Extent:
            return Extent(at.file, at.offset, (1,))

    item = Container("f", 100, 900)
    assert {replace(item, opening=Opened()), item, Container("f", 100, 901)} == {
        item,
        Container("f", 100, 901),
    }


def test_a_part_of_what_must_be_decoded_first() -> None:
    packed = EncodedBlob("f", 0, 9, "zstd", 96, 0, (24, 8))
    part = narrowed(packed, (4, 3), Box((2, 1), (3, 2)))
    assert isinstance(part, EncodedBlob)
    assert part.start == 56


def test_a_reshape_that_strides_cannot_express() -> None:
    transposed = Extent("f", 0, (8, 32))
    with pytest.raises(ValueError, match="elements lie"):
        part_of_place(transposed, (4, 3), (12,), 0, (1,), ITEM)


@given(SHAPES, st.data())
def test_a_part_that_reads_any_order_is_the_same_in_all(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    """Dims that are split, permuted, cut and merged, of an item that is not opened yet."""
    entry = TensorEntry("t", ("t",), BY_NAME["int64"], shape, ())
    values = np.arange(math.prod(shape)).reshape(shape)
    made = replace(entry, chunks=(Chunk(Box.whole(shape), Container("f", 0, 9)),))
    for _ in range(data.draw(st.integers(0, 3))):
        dim = data.draw(st.integers(0, len(made.shape) - 1))
        size = made.shape[dim]
        kind = data.draw(st.sampled_from(["split", "permute", "narrow", "merge"]))
        if kind == "split":
            by = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
            sizes = [size // by, by]
            made = split_dim(made, dim, sizes)
            values = values.reshape(made.shape)
        elif kind == "permute":
            order = data.draw(st.permutations(range(len(made.shape))))
            made, values = permute(made, order), values.transpose(order)
        elif kind == "narrow":
            start = data.draw(st.integers(0, size - 1))
            made = narrow(made, dim, start, size)
            values = values[(slice(None),) * dim + (slice(start, size),)]
        elif dim + 1 < len(made.shape):
            made = merge_dims(made, dim, 2)
            values = values.reshape(made.shape)
    stored = np.arange(math.prod(shape)).reshape(shape)
    order = data.draw(st.permutations(range(len(shape))))
    turned = stored.transpose(order).copy()
    at = Extent("f", 0, tuple(turned.transpose(np.argsort(order)).strides))
    for chunk in made.chunks:
        assert isinstance(chunk.at, Container)
        part = chunk.at.part or StridedPart(shape, 0, row_major_strides(shape, 1))
        if reads_any_order(part, chunk.box.shape):
            place = part_of_place(at, shape, chunk.box.shape, part.start, part.strides, ITEM)
            wanted = values[tuple(map(slice, chunk.box.lo, chunk.box.hi))]
            assert (values_at(turned, place, chunk.box.shape) == wanted).all()


def test_a_part_that_has_two_stored_dims_as_one_reads_one_order() -> None:
    assert reads_any_order(StridedPart((4, 6), 6, (12, 3)), (2, 2))
    assert not reads_any_order(StridedPart((4, 6), 0, (1,)), (24,))
    assert not reads_any_order(StridedPart((4, 6), 2, (4,)), (2,))


INT = BY_NAME["int32"]
Array = np.ndarray[Any, Any]


class Files:
    """Files that hold the chunks of tensors; a packed chunk is a file of its own."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    def store(self, values: Array, order: tuple[int, ...], gap: int) -> tuple[str, tuple[int, ...]]:
        """A file with the values, dims in another order, ``gap`` unused elements after each row."""
        turned = values.transpose(order)
        wide = np.full((*turned.shape[:-1], turned.shape[-1] + gap) if order else (), -1, "i4")
        wide[..., : turned.shape[-1]] = turned
        strides = dict(zip(order, row_major_strides(wide.shape, 4), strict=True))
        name = f"file{len(self.data)}"
        self.data[name] = wide.tobytes()
        return name, tuple(strides[dim] for dim in range(values.ndim))

    def load(self, entry: TensorEntry, *, copies: bool = False) -> Array:
        """The tensor's values, from its chunks or from the first copy of each."""
        whole = np.full(entry.shape, -7, "i4")
        for chunk in entry.chunks:
            at = chunk.copies[0].at if copies and chunk.copies else chunk.at
            start, strides = self._address(at, chunk.box.shape)
            view = np.ndarray(chunk.box.shape, "i4", self.data[at.file], start, strides)
            whole[tuple(map(slice, chunk.box.lo, chunk.box.hi))] = view
        return whole

    def _address(self, at: Place, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Where the elements lie in their file; those of a container one after the other."""
        if isinstance(at, Container):
            part = at.part or StridedPart(shape, 0, row_major_strides(shape, 1))
            return part.start * 4, tuple(stride * 4 for stride in part.strides)
        assert isinstance(at, Extent | EncodedBlob)
        return (at.offset if isinstance(at, Extent) else at.start), at.strides


@st.composite
def cuts(draw: st.DrawFn, box: Box, depth: int = 3) -> list[Box]:
    """Boxes that tile ``box``, cut wherever."""
    dims = [dim for dim, size in enumerate(box.shape) if size > 1]
    if not dims or not depth or draw(st.booleans()):
        return [box]
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(box.lo[dim] + 1, box.hi[dim] - 1))
    head = Box(box.lo, (*box.hi[:dim], at, *box.hi[dim + 1 :]))
    tail = Box((*box.lo[:dim], at, *box.lo[dim + 1 :]), box.hi)
    return [*draw(cuts(head, depth - 1)), *draw(cuts(tail, depth - 1))]


@st.composite
def tensors(
    draw: st.DrawFn, shapes: st.SearchStrategy[tuple[int, ...]], files: Files | None = None
) -> tuple[Files, TensorEntry, Array]:
    """A tensor, chunked and stored somehow, with its values."""
    shape = draw(shapes)
    files = files or Files()
    values = np.arange(math.prod(shape), dtype="i4").reshape(shape) + 1000 * len(files.data)
    chunks = []
    for rank, box in enumerate(draw(cuts(Box.whole(shape)))):
        part = values[tuple(map(slice, box.lo, box.hi))]
        orders = st.permutations(range(len(shape))).map(tuple)
        where = [files.store(part, draw(orders), draw(st.integers(0, 2))) for _ in range(2)]
        file, strides = where[0]
        nbytes = len(files.data[file])
        blob = EncodedBlob(file, 0, 1, "zstd", nbytes, 0, strides)
        kinds: list[Place] = [Extent(file, 0, strides), blob]
        if strides == row_major_strides(box.shape, 4):
            kinds.append(Container(file, 0, nbytes))
        at = draw(st.sampled_from(kinds))
        chunks.append(Chunk(box, at, rank, (Copy(Extent(where[1][0], 0, where[1][1]), rank + 1),)))
    return files, TensorEntry("t", ("t",), INT, shape, tuple(chunks)), values


ENTRY_SHAPES = st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple)
SOLID = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


def require_equal(files: Files, entry: TensorEntry, wanted: Array) -> None:
    assert entry.shape == wanted.shape
    assert coverage_problem(entry) is None
    assert entry.chunks
    np.testing.assert_array_equal(files.load(entry), wanted)
    np.testing.assert_array_equal(files.load(entry, copies=True), wanted)


@given(tensors(ENTRY_SHAPES), st.data())
def test_narrow(made: tuple[Files, TensorEntry, Array], data: st.DataObject) -> None:
    files, entry, values = made
    dim = data.draw(st.integers(0, values.ndim - 1))
    start = data.draw(st.integers(0, values.shape[dim]))
    stop = data.draw(st.integers(start, values.shape[dim]))
    region = (slice(None),) * dim + (slice(start, stop),)
    require_equal(files, narrow(entry, dim, start, stop), values[region])


@given(tensors(ENTRY_SHAPES), st.data())
def test_join_undoes_narrow(made: tuple[Files, TensorEntry, Array], data: st.DataObject) -> None:
    files, entry, values = made
    dim = data.draw(st.integers(0, values.ndim - 1))
    at = data.draw(st.integers(0, values.shape[dim]))
    parts = [narrow(entry, dim, 0, at), narrow(entry, dim, at, values.shape[dim])]
    for part, wanted in zip(parts, np.split(values, [at], dim), strict=True):
        require_equal(files, part, wanted)
    require_equal(files, join(parts, dim), values)


@given(tensors(SOLID), st.data())
def test_joined_new_dims_undo_unstack(
    made: tuple[Files, TensorEntry, Array], data: st.DataObject
) -> None:
    files, entry, values = made
    dim = data.draw(st.integers(0, values.ndim - 1))
    parts = unstack(entry, dim)
    for index, part in enumerate(parts):
        require_equal(files, part, values.take(index, dim))
    require_equal(files, join([insert_dim(part, dim) for part in parts], dim), values)


@given(tensors(ENTRY_SHAPES), st.data())
def test_permute(made: tuple[Files, TensorEntry, Array], data: st.DataObject) -> None:
    files, entry, values = made
    dims = data.draw(st.permutations(range(values.ndim)))
    require_equal(files, permute(entry, dims), values.transpose(dims))


@given(tensors(SOLID), st.integers(0, 5), st.data())
def test_padding_repeats_the_last_index(
    made: tuple[Files, TensorEntry, Array], more: int, data: st.DataObject
) -> None:
    files, entry, values = made
    dim = data.draw(st.integers(0, values.ndim - 1))
    widths = [(0, more if d == dim else 0) for d in range(values.ndim)]
    padded = pad(entry, dim, values.shape[dim] + more)
    require_equal(files, padded, np.pad(values, widths, "edge"))
    require_equal(files, narrow(padded, dim, 0, values.shape[dim]), values)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple), st.data())
def test_views(sizes: tuple[int, ...], data: st.DataObject) -> None:
    """A dim viewed as several, these in another order, and as one dim again."""
    files, entry, values = data.draw(tensors(st.just((2, math.prod(sizes), 3))))
    apart = split_dim(entry, 1, sizes)
    require_equal(files, apart, values.reshape(2, *sizes, 3))
    require_equal(files, merge_dims(apart, 1, len(sizes)), values)
    order = data.draw(st.permutations(range(1, len(sizes) + 1)))
    dims = (0, *order, len(sizes) + 1)
    wanted = values.reshape(2, *sizes, 3).transpose(dims).reshape(values.shape)
    require_equal(files, merge_dims(permute(apart, dims), 1, len(sizes)), wanted)


@given(tensors(SOLID), st.data())
def test_a_new_dim_repeats(made: tuple[Files, TensorEntry, Array], data: st.DataObject) -> None:
    files, entry, values = made
    dim = data.draw(st.integers(0, values.ndim))
    wanted = np.repeat(np.expand_dims(values, dim), 3, dim)
    require_equal(files, insert_dim(entry, dim, 3), wanted)


def whole(*shape: int, dtype: str = "int32") -> TensorEntry:
    at = Extent("f", 0, row_major_strides(shape, 4))
    return TensorEntry("t", ("t",), BY_NAME[dtype], shape, (Chunk(Box.whole(shape), at),))


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (2, 2, 2), (1, 8, 1)])
def test_a_whole_row_major_chunk_stays_one_through_a_view(sizes: tuple[int, ...]) -> None:
    entry = whole(8, 3)
    assert len(split_dim(entry, 0, sizes).chunks) == 1
    assert merge_dims(split_dim(entry, 0, sizes), 0, len(sizes)).chunks == entry.chunks


def test_the_rotary_permutation_cuts_a_chunk_into_two_boxes_a_head() -> None:
    heads = split_dim(whole(4 * 8, 5), 0, (4, 4, 2))
    turned = merge_dims(permute(heads, (0, 2, 1, 3)), 0, 3)
    boxes = sorted((chunk.box for chunk in turned.chunks), key=lambda box: box.lo)
    assert [str(box) for box in boxes[:2]] == ["[0:4, 0:5]", "[4:8, 0:5]"]
    assert {at.strides for at in places(turned) if isinstance(at, Extent)} == {(40, 4)}
    assert len(turned.chunks) == 8


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (lambda: narrow(whole(4), 0, 2, 5), "2 to 5 is out of range in dim 0 of [4]"),
        (lambda: split_dim(whole(6), 0, (4, 2)), "dim 0 of [6] is not 4 x 2"),
        (lambda: join([whole(2, 3), whole(2, 4)], 0), "[2, 4]"),
        (lambda: join([whole(2), whole(2, dtype="float32")], 0), "float32"),
        (lambda: pad(whole(4), 0, 3), "cannot be padded to 3"),
        (lambda: pad(whole(0), 0, 3), "cannot be padded to 3"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_numbers(
    what: Callable[[], object], words: str
) -> None:
    with pytest.raises(Unsupported) as caught:
        what()
    assert words in caught.value.message


@pytest.mark.parametrize("at", [Extent("f", 8, (0, 4)), Extent("f", 8, (0, 1))])
def test_an_empty_tensor_has_a_place_too(at: Extent) -> None:
    assert part_of_place(at, (4, 0), (4, 0), 0, (0, 1), ITEM)
