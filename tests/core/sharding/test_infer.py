from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from conftest import calls_of
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from trials import trials

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Chunk, Extent, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.mesh import Mesh, Placements, Replicate, Shard, StridedShard
from ckptool.core.sharding.dtensor import LocalShard, local_shards
from ckptool.core.sharding.infer import Inference, infer, with_inferred_mesh

NESTED = (StridedShard(0, 2), Shard(0))


def chunked(
    name: str, shape: tuple[int, ...], chunks: Sequence[tuple[Box, int | None]]
) -> TensorEntry:
    """A tensor of these boxes, each with the rank that wrote it."""
    nowhere = Extent("file", 0, (0,) * len(shape))
    parts = tuple(Chunk(box, nowhere, rank) for box, rank in chunks)
    return TensorEntry(name, (name,), BY_NAME["float32"], shape, parts)


def spans(shard: LocalShard, length: int) -> tuple[int, int]:
    """The rows of a 1-D shard; an empty one lies at the end, as torch lists it."""
    box = shard.pieces[0].box if shard.pieces else Box((length,), (length,))
    return box.lo[0], box.hi[0]


def along(placements: Placements, dim: int) -> Placements:
    """The placements as they cut ``dim`` alone, of a tensor that has no other."""
    cuts = (Shard, StridedShard)
    return tuple(
        replace(one, dim=0) if isinstance(one, cuts) and one.dim == dim else Replicate()
        for one in placements
    )


def boxes_by_rank(shape: Sequence[int], mesh: Sequence[int], placements: Placements) -> list[Box]:
    columns = [
        [spans(shard, length) for shard in local_shards((length,), mesh, along(placements, dim))]
        for dim, length in enumerate(shape)
    ]
    return [Box(*zip(*spans, strict=True)) for spans in zip(*columns, strict=True)]


def written(
    name: str,
    shape: Sequence[int],
    mesh: Sequence[int],
    placements: Placements,
    writers: random.Random | None = None,
    lists_empty: bool = True,
) -> TensorEntry:
    """A tensor as DCP stores it: every box once, by one of its ranks (the lowest by default)."""
    holders: dict[Box, list[int]] = {}
    for rank, box in enumerate(boxes_by_rank(shape, mesh, placements)):
        if box.volume or lists_empty:
            holders.setdefault(box, []).append(rank)
    chosen = {box: writers.choice(some) if writers else some[0] for box, some in holders.items()}
    return chunked(name, tuple(shape), tuple(chosen.items()))


def assert_explains(inference: Inference, tensor: TensorEntry) -> None:
    """Every placement reported for the tensor gives its boxes, held by the ranks that wrote."""
    assert inference.mesh is not None
    for placements in inference.placements[tensor.name]:
        held = local_shards(tensor.shape, inference.mesh.shape, placements)
        boxes = {piece.box for shard in held for piece in shard.pieces}
        assert boxes == {chunk.box for chunk in tensor.chunks if chunk.box.volume}
        for chunk in tensor.chunks:
            assert chunk.rank is not None
            pieces = [piece.box for piece in held[chunk.rank].pieces]
            assert pieces == [chunk.box] * bool(chunk.box.volume)


@st.composite
def placements_on(draw: st.DrawFn, mesh: list[int]) -> Placements:
    """Plain shards of two tensor dims, or strided ones as FSDP2 writes them."""
    if len(mesh) > 1 and draw(st.booleans()):
        strided = StridedShard(draw(st.integers(0, 1)), mesh[-1])
        return (Replicate(),) * (len(mesh) - 2) + (strided, Shard(strided.dim))
    one = st.one_of(st.just(Replicate()), st.builds(Shard, st.integers(0, 1)))
    return tuple(draw(one) for _ in mesh)


@settings(max_examples=trials(60))
@given(st.data(), st.lists(st.integers(2, 4), min_size=1, max_size=3), st.booleans())
def test_what_is_inferred_explains_the_chunks(
    data: st.DataObject, mesh: list[int], lists_empty: bool
) -> None:
    writers = random.Random(data.draw(st.integers(0, 999)))
    shapes = st.tuples(st.integers(1, 40), st.integers(1, 40))
    tensors = [
        written(
            str(index),
            data.draw(shapes),
            mesh,
            data.draw(placements_on(mesh)),
            writers,
            lists_empty,
        )
        for index in range(data.draw(st.integers(1, 4)))
    ]
    inference = infer(tensors, Mesh.of(mesh).size)
    if inference.mesh is None:
        assert len(inference.ambiguous) > 1
        assert len(inference.ambiguous[0]) < len(mesh) or tuple(mesh) in inference.ambiguous
        return
    assert len(inference.mesh.shape) < len(mesh) or inference.mesh.shape == tuple(mesh)
    for tensor in tensors:
        assert_explains(inference, tensor)


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((4,), (Shard(0),)),
        ((4,), (Shard(1),)),
        ((2, 2), NESTED),
        ((2, 2), (Shard(0), Shard(1))),
        ((2, 2), (Shard(0), Replicate())),
        ((2, 2), (Replicate(), Shard(0))),
        ((4, 2), NESTED),
        ((2, 4), (StridedShard(0, 4), Shard(0))),
        ((2, 2, 2), (Replicate(), StridedShard(1, 2), Shard(1))),
        ((2, 2, 2), (StridedShard(0, 4), StridedShard(0, 2), Shard(0))),
    ],
)
def test_placements_are_found_again(mesh: tuple[int, ...], placements: Placements) -> None:
    inference = infer([written("w", (37, 40), mesh, placements)], Mesh.of(mesh).size)
    assert inference == Inference(Mesh.of(mesh), {"w": (placements,)})


def test_fsdp2_over_tensor_parallel() -> None:
    mesh = (2, 2)
    expected: dict[str, Placements] = {
        "column": NESTED,
        "row": (Shard(0), Shard(1)),
        "norm": (Shard(0), Replicate()),
        "step": (Replicate(), Replicate()),
    }
    shapes = {"column": (37, 12), "row": (12, 37), "norm": (13,), "step": ()}
    tensors = [
        written(name, shapes[name], mesh, placements)
        for name, placements in expected.items()
        if name != "step"
    ]
    tensors.append(chunked("step", (), ((Box((), ()), 3),)))
    assert infer(tensors, 4) == Inference(Mesh.of(mesh), {n: (p,) for n, p in expected.items()})


def test_a_flat_mesh_is_preferred_to_one_of_more_dims() -> None:
    tensor = written("w", (64, 8), (2, 4), (Shard(0), Shard(0)))
    assert infer([tensor], 8) == Inference(Mesh.of((8,)), {"w": ((Shard(0),),)})


def test_whole_tensors_are_replicated_on_a_flat_mesh() -> None:
    tensors = [
        chunked(name, (3, 4), ((Box.whole((3, 4)), rank),)) for rank, name in enumerate("ab")
    ]
    replicated = ((Replicate(),),)
    expected = Inference(Mesh.of((4,)), {"a": replicated, "b": replicated})
    assert infer(tensors, 4) == expected


def test_a_tensor_without_elements_counts_as_replicated() -> None:
    tensor = chunked("none", (0, 4), ((Box((0, 0), (0, 4)), 0),))
    assert infer([tensor], 2).placements == {"none": ((Replicate(),),)}


def test_one_rank_alone() -> None:
    assert infer([chunked("w", (4,), ((Box((0,), (4,)), 0),))], 1).mesh == Mesh.of((1,))


def test_shapes_that_explain_equally_well_are_listed() -> None:
    grid = written("w", (8, 8), (2, 4), (Shard(0), Shard(1)))
    unknown = chunked("w", (8, 8), [(chunk.box, None) for chunk in grid.chunks])
    inference = infer([unknown], 8)
    assert inference == Inference(None, {}, ((2, 4), (4, 2)))
    assert infer([grid], 8).mesh == Mesh.of((2, 4))


def test_placements_that_writers_do_not_tell_apart_are_listed() -> None:
    halves = chunked("w", (8,), ((Box((0,), (4,)), 0), (Box((4,), (8,)), 3)))
    inference = infer([halves], 4)
    assert inference.mesh == Mesh.of((2, 2))
    assert set(inference.placements["w"]) == {(Shard(0), Replicate()), (Replicate(), Shard(0))}


def test_an_empty_chunk_tells_a_shard_from_a_whole_tensor() -> None:
    whole, empty = Box((0,), (1,)), Box((1,), (1,))
    assert infer([chunked("w", (1,), ((whole, 0),))], 2).placements["w"] == ((Replicate(),),)
    assert infer([chunked("w", (1,), ((whole, 0), (empty, 1)))], 2).placements["w"] == (
        (Shard(0),),
    )


def test_the_writer_of_an_empty_chunk_must_hold_nothing() -> None:
    whole, empty = Box((0,), (1,)), Box((1,), (1,))
    assert infer([chunked("w", (1,), ((whole, 1), (empty, 0)))], 2).mesh is None
    inner = infer([chunked("w", (1,), ((whole, 2), (empty, 1)))], 4)
    assert inner.placements == {"w": ((Replicate(), Shard(0)),)}


def test_the_same_box_may_come_from_several_ranks() -> None:
    low, high = Box((0,), (4,)), Box((4,), (8,))
    every_rank = chunked("w", (8,), ((low, 0), (high, 1), (low, 2), (high, 3)))
    assert infer([every_rank], 4).placements["w"] == ((Replicate(), Shard(0)),)


RAGGED = [
    chunked("uneven", (10,), ((Box((0,), (3,)), 0), (Box((3,), (10,)), 1))),
    chunked("twice", (8,), tuple((Box((2 * i,), (2 * i + 2,)), i // 2) for i in range(4))),
    chunked("gap", (8,), ((Box((0,), (4,)), 0), (Box((5,), (8,)), 1))),
    chunked(
        "no grid",
        (4, 4),
        (
            (Box((0, 0), (2, 2)), 0),
            (Box((0, 2), (2, 4)), 1),
            (Box((2, 0), (4, 4)), 2),
        ),
    ),
    chunked("nothing", (4,), ()),
    chunked("other rank", (4, 4), ((Box((0,), (4,)), 0),)),
]


@pytest.mark.parametrize("ragged", RAGGED, ids=lambda tensor: tensor.name)
def test_a_tensor_that_no_mesh_explains_leaves_none(ragged: TensorEntry) -> None:
    regular = written("w", (8,), (4,), (Shard(0),))
    assert replace(infer([regular, ragged], 4), unexplained=False) == Inference(None, {})


def test_tensors_that_disagree_leave_no_mesh() -> None:
    by_rows = written("a", (8,), (2, 2), NESTED)
    in_turn = written("b", (8,), (4,), (Shard(0),))
    assert infer([by_rows], 4).mesh == Mesh.of((2, 2))
    both = infer([by_rows, in_turn], 4)
    assert both.placements == {"a": (NESTED,), "b": ((Shard(0), Shard(0)),)}


def test_a_rank_beyond_those_seen_widens_the_world() -> None:
    assert infer([written("w", (8,), (4,), (Shard(0),))], 2).mesh == Mesh.of((4,))


def test_a_world_past_all_reason_is_not_searched() -> None:
    halves = chunked("w", (2,), ((Box((0,), (1,)), 0), (Box((1,), (2,)), 10**12)))
    assert infer([halves], 1).mesh is None


@pytest.mark.parametrize("varied", [False, True])
def test_a_thousand_tensors_of_64_ranks_cost_few_calls(varied: bool) -> None:
    writers = random.Random(1)
    kinds: itertools.cycle[Placements] = itertools.cycle(
        [(StridedShard(0, 8), Shard(0)), (Shard(0), Shard(1)), (Shard(0), Replicate())]
    )
    tensors = [
        written(str(index), (4096 + varied * index % 40, 512), (8, 8), next(kinds), writers)
        for index in range(1000)
    ]
    assert infer(tensors, 64).mesh == Mesh.of((8, 8))
    assert calls_of(lambda: infer(tensors, 64)) < 8 * 64 * 1000


def test_a_mesh_of_more_dims_than_are_tried_is_said_not_to_be_explained() -> None:
    shape = (16, 9)
    cut: Placements = (Shard(0), Replicate(), Replicate(), Shard(0))
    several = {"a": cut, "b": cut[::-1], "c": (*cut[1:], cut[0])}
    tensors = {name: written(name, shape, (2, 2, 2, 2), each) for name, each in several.items()}
    catalog = with_inferred_mesh(Catalog("dcp", tensors, {}, {}, world_size=16))
    assert catalog.mesh is None
    assert catalog.notes == (
        "no device mesh of up to 3 dims explains the chunks of all tensors: their placements are"
        " not inferred",
    )
