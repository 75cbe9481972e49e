"""Shards are cut as torch cuts them, and each is written once."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import (
    TENSORS_OF,
    Bits,
    case,
    read_back,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_runs import MESHES, RULES, reshard, source
from trials import trials

from ckptool.commands.open import open_checkpoint
from ckptool.commands.reshard.reshard import ReshardReport
from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Chunk, Extent, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.layout import Data
from ckptool.core.mesh import Mesh, Placement, Replicate, Shard, StridedShard
from ckptool.core.sharding.placement import POLICIES, PlacedTensors
from ckptool.formats import FORMATS
from ckptool.formats.base import Request


@pytest.fixture(scope="module")
def truth(source: Path) -> dict[str, Bits]:
    return read_back("dcp", source)


def ours(report: ReshardReport) -> dict[str, dict[int, set[Box]]]:
    """The boxes of each tensor that are in each rank's file."""
    return by_rank(report.files)


def by_rank(files: Sequence[Any]) -> dict[str, dict[int, set[Box]]]:
    found: dict[str, dict[int, set[Box]]] = defaultdict(lambda: defaultdict(set))
    for file in files:
        for part in file.parts:
            if isinstance(part, Data):
                found[part.name][file.rank].add(part.pieces[0].box)
    return found


def torch_boxes(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: Sequence[Placement]
) -> list[Box]:
    """The box of each rank, as torch's checkpoint of a DTensor says it."""
    from torch.distributed.tensor import _utils

    theirs = [_theirs(one, len(shape)) for one in placements]
    found = []
    for coordinate in itertools.product(*map(range, mesh)):
        at = coordinate.__getitem__
        size, offset = _utils._compute_local_shape_and_global_offset(shape, mesh, at, theirs)
        found.append(Box.at(offset, size))
    return found


def _theirs(placement: Placement, rank: int) -> Any:
    from torch.distributed.tensor import placement_types

    if isinstance(placement, Shard):
        return placement_types.Shard(placement.dim % rank)
    return placement_types.Replicate()


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 17), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    dims = st.integers(-len(shape), len(shape) - 1)
    kinds = st.one_of(st.builds(Shard, dims), st.just(Replicate()))
    return shape, mesh, tuple(draw(kinds) for _ in mesh)


def layout_of(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...], target: str
) -> dict[int, set[Box]]:
    whole = Box.whole(shape)
    chunk = Chunk(whole, Extent("f", 0, (4,) * len(shape)), 0)
    one = TensorEntry("w", ("w",), BY_NAME["float32"], shape, (chunk,))
    placed = PlacedTensors(Mesh.of(mesh), {"w": placements})
    layout = FORMATS[target].lay_out(
        Catalog("dcp", {"w": one}, {}, {}), Request("r", placed=placed)
    )
    return by_rank(layout.files)["w"]


@pytest.mark.parametrize("target", ["dcp", "dcp-safetensors"])
@settings(max_examples=trials(60))
@given(case=cuts())
def test_chunks_are_those_of_torchs_dtensor(target: str, case: Any) -> None:
    shape, mesh, placements = case
    written = layout_of(shape, mesh, placements, target)
    boxes = [box for ranks in written.values() for box in ranks]
    assert len(boxes) == len(set(boxes)), "a replica is written once"
    expected = torch_boxes(shape, mesh, placements)
    if math.prod(shape):
        assert set(boxes) == {box for box in expected if box.volume}
        assert all(expected[rank] == box for rank, ranks in written.items() for box in ranks)
    else:
        assert boxes == [Box.whole(shape)]


@given(st.integers(1, 60), st.integers(1, 5), st.integers(2, 4))
def test_fsdp2_over_tensor_parallelism_cuts_as_it_does(rows: int, dp: int, tp: int) -> None:
    written = layout_of((rows,), (dp, tp), (StridedShard(0, tp), Shard(0)), "dcp")
    for rank, boxes in written.items():
        held = _chunk(_chunk(torch.arange(rows), tp, rank % tp), dp, rank // tp)
        found = [i for box in boxes for i in range(box.lo[0], box.hi[0])]
        assert found == held.tolist()
    assert sum(box.volume for boxes in written.values() for box in boxes) == rows


def _chunk(values: torch.Tensor, count: int, index: int) -> torch.Tensor:
    parts = values.chunk(count) if len(values) else ()
    return parts[index] if index < len(parts) else values[:0]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("policy", POLICIES)
def test_each_box_is_written_once_by_a_rank_that_holds_it(
    policy: str, mesh: str, source: Path, out: Path
) -> None:
    report = reshard(source, out / "r", mesh, policy=policy, to="dcp")
    shapes = {name: entry.shape for name, entry in open_checkpoint(source).catalog.tensors.items()}
    for name, ranks in ours(report).items():
        boxes = [box for held in ranks.values() for box in held]
        assert len(boxes) == len(set(boxes))
        assert sum(box.volume for box in boxes) == math.prod(shapes[name])
        expected = torch_boxes(shapes[name], report.mesh.shape, report.choices[name].placements)
        for rank, held in ranks.items():
            assert held <= {expected[rank]} or not math.prod(shapes[name])


def test_each_rank_has_one_file(source: Path, out: Path) -> None:
    report = reshard(source, out / "r", "2x4", policy="fsdp", to="dcp")
    ranks = [file.rank for file in report.files if file.rank is not None]
    assert ranks == list(range(8))
    assert sorted(p.name for p in (out / "r").iterdir()) == sorted(f.path for f in report.files)
    assert report.files[-1].path == ".metadata"


def test_replicas_are_spread_over_the_ranks(out: Path) -> None:
    state = {f"w{i}": torch.ones(100) for i in range(8)}
    dcp.save(state, checkpoint_id=out / "s", no_dist=True)
    report = reshard(out / "s", out / "r", "4", policy="replicate")
    sizes = {file.rank: file.nbytes for file in report.files if file.rank is not None}
    assert sorted(sizes) == [0, 1, 2, 3]
    assert max(sizes.values()) < 1.05 * min(sizes.values())


def test_a_replica_is_written_by_the_rank_with_the_fewest_bytes(out: Path) -> None:
    dcp.save({"cut": torch.ones(5, 100), "whole": torch.ones(50)}, checkpoint_id=out / "s")
    report = reshard(out / "s", out / "r", "2", rules=("whole=Replicate()",), policy="fsdp")
    assert {name: sorted(ranks) for name, ranks in ours(report).items()} == {
        "cut": [0, 1],  # three rows, and two
        "whole": [1],
    }


@pytest.mark.parametrize(("mesh", "rules"), RULES, ids=str)
def test_rank_files_hold_dtensors(
    mesh: str, rules: tuple[str, ...], source: Path, truth: dict[str, Bits], out: Path
) -> None:
    report = reshard(source, out / "r", mesh, rules=rules, policy="fsdp", to="rank-local")
    whole = TENSORS_OF["dcp"](source)
    for rank in range(report.mesh.size):
        loaded = TENSORS_OF["torch-save"](out / "r" / f"checkpoint_{rank}.pt")
        assert loaded.keys() == whole.keys()
        for name, tensor in loaded.items():
            assert tuple(tensor.shape) == tuple(whole[name].shape)
            assert tensor.dtype == whole[name].dtype
            if hasattr(tensor, "placements"):
                assert tuple(tensor.device_mesh.shape) == report.mesh.shape
                assert tensor.device_mesh.mesh_dim_names == report.mesh.names


@pytest.mark.parametrize(
    ("mesh", "names"), [("3", ("fsdp",)), ("dp=3", ("dp",)), ("2x2", None)], ids=str
)
def test_the_sources_dims_keep_their_names(
    mesh: str, names: tuple[str, ...] | None, out: Path
) -> None:
    source = case("rank_verl").path / "global_step_5" / "actor"
    assert reshard(source, out / "r", mesh).mesh.names == names
    state = torch.load(next((out / "r").glob("model_*_0.pt")), weights_only=False)
    verl = ("ddp", "fsdp")  # what verl's own files have for two dims
    assert state["one"].device_mesh.mesh_dim_names == (names or verl)
