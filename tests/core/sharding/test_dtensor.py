from __future__ import annotations

import gzip
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import calls_of
from hypothesis import given, settings
from hypothesis import strategies as st
from trials import trials

from ckptool.core.box import Box, Piece
from ckptool.core.mesh import Mesh, Partial, Placement, Replicate, Shard, StridedShard
from ckptool.core.sharding.dtensor import LocalShard, local_shards
from ckptool.errors import Damaged, Unsupported

VECTORS = json.loads(
    gzip.decompress((Path(__file__).parent / "dtensor_vectors.json.gz").read_bytes())
)["vectors"]
FSDP2_OVER_TP = (StridedShard(0, 2), Shard(0))


def placement(fields: list[int]) -> Placement:
    return (Replicate, Shard, StridedShard)[len(fields)](*fields)


def runs(shard: LocalShard) -> list[list[list[int]]] | None:
    """Per dim [[start, length], ...], None for a shard that holds nothing."""
    if not shard.pieces:
        return None
    spans = [
        sorted({(p.local.lo[d], p.box.lo[d], p.box.shape[d]) for p in shard.pieces})
        for d in range(len(shard.shape))
    ]
    return [[[start, length] for _, start, length in dim] for dim in spans]


def rows(shard: LocalShard) -> list[int]:
    return [i for piece in shard.pieces for i in range(piece.box.lo[0], piece.box.hi[0])]


def test_every_vector_observed_in_torch() -> None:
    for kind, mesh, shape, fields, ranks in VECTORS:
        known = {position: rank[0] for position, rank in enumerate(ranks)}
        shards = local_shards(shape, mesh, [placement(f) for f in fields], local_shapes=known)
        expected = [(tuple(sizes), spans) for sizes, spans in ranks]
        assert [(s.shape, runs(s)) for s in shards] == expected, (kind, mesh, shape, fields)


def test_fsdp2_needs_no_local_shapes() -> None:
    for kind, mesh, shape, fields, ranks in VECTORS:
        if kind == "fsdp2":
            shards = local_shards(shape, mesh, [placement(f) for f in fields])
            assert [runs(s) for s in shards] == [rank[1] for rank in ranks]


class LocalMesh:
    """As much of torch's DeviceMesh as a placement's local cut asks for."""

    def __init__(self, shape: Sequence[int], coordinate: Sequence[int]) -> None:
        self.shape, self.coordinate = shape, coordinate

    def size(self, mesh_dim: int) -> int:
        return self.shape[mesh_dim]

    def get_coordinate(self) -> Sequence[int]:
        return self.coordinate


def torch_local(
    shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Placement], order: Sequence[int]
) -> list[Any]:
    """The local tensors of an arange tensor that torch cuts along the mesh dims in ``order``."""
    import torch

    locals_ = []
    for coordinate in itertools.product(*map(range, mesh)):
        local = torch.arange(math.prod(shape)).reshape(tuple(shape))
        stand_in: Any = LocalMesh(mesh, coordinate)
        for mesh_dim in order:
            local = torch_cut(local, placements[mesh_dim], stand_in, mesh_dim)
        locals_.append(local)
    return locals_


def torch_cut(local: Any, placement: Placement, mesh: Any, mesh_dim: int) -> Any:
    from torch.distributed.tensor import placement_types as theirs

    if isinstance(placement, Shard):
        return theirs.Shard(placement.dim)._shard_tensor(local, mesh, mesh_dim, None)
    if isinstance(placement, StridedShard):
        strided = theirs._StridedShard(placement.dim, split_factor=placement.split_factor)
        return strided._shard_tensor(local, mesh, mesh_dim, None)
    return local


def assert_holds(shards: Sequence[LocalShard], expected: Sequence[Any], shape: list[int]) -> None:
    import torch

    whole = torch.arange(math.prod(shape)).reshape(tuple(shape))
    for shard, local in zip(shards, expected, strict=True):
        assert shard.shape == tuple(local.shape)
        built = torch.full(shard.shape, -1)
        for piece in shard.pieces:
            built[slices(piece.local)] = whole[slices(piece.box)]
        assert torch.equal(built, local)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(map(slice, box.lo, box.hi))


@st.composite
def cases(draw: st.DrawFn, strided: bool) -> tuple[list[int], list[int], list[Placement]]:
    shape = draw(st.lists(st.integers(0, 14), min_size=1, max_size=3))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = st.integers(-len(shape), len(shape) - 1)
    kinds: list[st.SearchStrategy[Placement]] = [st.just(Replicate()), st.builds(Shard, dim)]
    if strided:
        kinds.append(st.builds(StridedShard, dim, st.integers(2, 5)))
    return shape, mesh, [draw(st.one_of(kinds)) for _ in mesh]


@settings(max_examples=trials(60))
@given(cases(strided=False))
def test_shards_equal_torch(case: tuple[list[int], list[int], list[Placement]]) -> None:
    shape, mesh, placements = case
    expected = torch_local(shape, mesh, modulo(placements, shape), range(len(mesh)))
    assert_holds(local_shards(shape, mesh, placements), expected, shape)


@settings(max_examples=trials(60))
@given(cases(strided=True))
def test_unexplained_strided_shards_are_read_from_left_to_right(
    case: tuple[list[int], list[int], list[Placement]],
) -> None:
    shape, mesh, placements = case
    unexplained: list[Placement] = [
        StridedShard(one.dim, 7) if isinstance(one, StridedShard) else one for one in placements
    ]
    expected = torch_local(shape, mesh, modulo(unexplained, shape), range(len(mesh)))
    assert_holds(local_shards(shape, mesh, unexplained), expected, shape)


@given(st.integers(0, 60), st.integers(2, 4), st.integers(2, 4), st.integers(1, 3))
def test_fsdp2_cuts_the_tensor_parallel_dim_first(n: int, dp: int, tp: int, replicas: int) -> None:
    mesh, shape = [replicas, dp, tp], [n, 2]
    expected = torch_local(shape, mesh, [Replicate(), Shard(0), Shard(0)], (2, 1))
    written: list[Placement] = [Replicate(), StridedShard(0, tp), Shard(0)]
    known = {position: tuple(local.shape) for position, local in enumerate(expected)}
    assert_holds(local_shards(shape, mesh, written, local_shapes=known), expected, shape)


def modulo(placements: Sequence[Placement], shape: Sequence[int]) -> list[Placement]:
    """The placements with dims counted from the front, as torch's public calls normalize them."""
    ranked: list[Placement] = []
    for one in placements:
        if isinstance(one, Shard):
            one = Shard(one.dim % len(shape))
        elif isinstance(one, StridedShard):
            one = StridedShard(one.dim % len(shape), one.split_factor)
        ranked.append(one)
    return ranked


@given(cases(strided=True))
def test_the_distinct_shards_cover_the_tensor_once(
    case: tuple[list[int], list[int], list[Placement]],
) -> None:
    shape, mesh, placements = case
    boxes = {p.box for shard in local_shards(shape, mesh, placements) for p in shard.pieces}
    assert sum(box.volume for box in boxes) == math.prod(shape)
    assert not any(a.intersect(b) for a, b in itertools.combinations(boxes, 2))


def test_nine_rows_on_four_by_two_have_two_readings() -> None:
    fsdp2 = local_shards((9,), (4, 2), FSDP2_OVER_TP)
    assert [rows(s) for s in fsdp2] == [[0, 1], [5], [2, 3], [6], [4], [7], [], [8]]
    left_to_right = local_shards((9,), (4, 2), FSDP2_OVER_TP, local_shapes={6: (1,)})
    assert [rows(s) for s in left_to_right] == [[0, 1], [5], [2, 3], [6], [4], [7], [8], []]


def test_local_shapes_that_no_reading_gives_name_the_position() -> None:
    with pytest.raises(Damaged) as error:
        local_shards((9,), (4, 2), FSDP2_OVER_TP, local_shapes={0: (2,), 6: (3,)})
    assert "position 6 of 4x2" in error.value.message
    assert "of shape [3], but" in error.value.message
    assert "StridedShard(0, 2), Shard(0)" in error.value.message


def test_shapes_decide_only_where_they_are_known() -> None:
    assert local_shards((9,), (4, 2), FSDP2_OVER_TP, local_shapes={}) == local_shards(
        (9,), (4, 2), FSDP2_OVER_TP, local_shapes={0: (2,)}
    )


def test_pieces_say_where_they_lie_in_the_local_tensor() -> None:
    shard = local_shards((8, 3), (2,), [StridedShard(0, 2)])[1]
    assert shard.shape == (4, 3)
    assert shard.pieces == (
        Piece(Box((2, 0), (4, 3)), Box((0, 0), (2, 3))),
        Piece(Box((6, 0), (8, 3)), Box((2, 0), (4, 3))),
    )


def test_an_empty_shard_has_no_pieces() -> None:
    assert local_shards((3, 5), (4,), [Shard(0)])[3] == LocalShard((0, 5), ())
    assert local_shards((0, 4), (2,), [Shard(0)]) == (LocalShard((0, 4), ()),) * 2


def test_a_scalar_is_one_piece() -> None:
    assert local_shards((), (2,), [Replicate()])[1].pieces == (Piece(Box((), ()), Box((), ())),)


def test_recorded_order_that_does_not_ascend_is_followed() -> None:
    shards = local_shards((8,), (2, 2), [Shard(0), Shard(0)], shard_order=[(0, (1, 0))])
    assert [rows(s) for s in shards] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    ascending = local_shards((9,), (4, 2), FSDP2_OVER_TP, shard_order=[(0, (0, 1))])
    assert ascending == local_shards((9,), (4, 2), FSDP2_OVER_TP)


@pytest.mark.parametrize("order", [(1, 0), (2, 0)])
def test_recorded_order_must_agree_with_the_placements(order: tuple[int, int]) -> None:
    placements = FSDP2_OVER_TP if order == (1, 0) else (Shard(0), Shard(0))
    with pytest.raises(Damaged, match="shard order"):
        local_shards((8,), (2, 2), placements, shard_order=[(0, order)])


@pytest.mark.parametrize(
    ("placements", "words"),
    [
        ([Shard(2)], r"Shard\(2\)"),
        ([Shard(-3)], r"Shard\(-3\)"),
        ([StridedShard(0, 0)], "split factor"),
        ([StridedShard(0, 1 << 40)], "stripes"),
        ([Shard(0), Shard(0)], "2 placements on a mesh of 1 dims"),
    ],
)
def test_placements_that_cannot_be(placements: list[Placement], words: str) -> None:
    with pytest.raises(Damaged, match=words):
        local_shards((1 << 40, 4), (4,), placements)


def test_stripes_of_all_dims_count_together() -> None:
    placements = [StridedShard(0, 512), StridedShard(1, 512)]
    with pytest.raises(Damaged, match="stripes"):
        local_shards((1 << 20, 1 << 20), (2, 2), placements)


def test_a_position_outside_the_mesh_is_damage() -> None:
    with pytest.raises(Damaged, match="position 4"):
        local_shards((8,), (4,), [Shard(0)], local_shapes={4: (2,)})


def test_partial_values_are_refused() -> None:
    with pytest.raises(Unsupported, match="addend"):
        local_shards((8,), (2,), [Partial("sum")])


def test_negative_dims_count_from_the_end() -> None:
    assert local_shards((4, 6), (2,), [Shard(-1)]) == local_shards((4, 6), (2,), [Shard(1)])


def test_placements_print_as_they_are_built() -> None:
    shown = [Shard(0), StridedShard(0, 2), Replicate(), Partial("sum")]
    expected = ["Shard(0)", "StridedShard(0, 2)", "Replicate()", "Partial(sum)"]
    assert list(map(str, shown)) == expected


def test_mesh_numbers_and_finds_ranks() -> None:
    mesh = Mesh.of((2, 3), ("dp", "tp"))
    assert mesh.size == 6
    assert [mesh.coordinate(rank) for rank in (0, 4, 6)] == [(0, 0), (1, 1), None]
    assert Mesh((2, 2), None, (3, 1, 0, 2)).coordinate(0) == (1, 0)


@pytest.mark.parametrize(
    ("shape", "names", "ranks"),
    [
        ((2, 2), None, (0, 1, 2)),
        ((2,), None, (1, 1)),
        ((2,), ("dp", "tp"), (0, 1)),
        ((0,), None, ()),
    ],
)
def test_mesh_fields_must_agree(
    shape: tuple[int, ...], names: tuple[str, ...] | None, ranks: tuple[int, ...]
) -> None:
    with pytest.raises(Damaged):
        Mesh(shape, names, ranks)


def test_two_thousand_positions_cost_few_calls() -> None:
    placements = (StridedShard(0, 4), Shard(1), Shard(0))
    calls = calls_of(lambda: local_shards((4097, 4096), (64, 8, 4), placements))
    assert calls < 100 * 64 * 8 * 4
