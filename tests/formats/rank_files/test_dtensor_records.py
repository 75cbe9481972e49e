"""The record of a DTensor, against torch's own pickles."""

from __future__ import annotations

import io
import math
import zipfile
from pathlib import Path
from typing import Any

import torch
from conftest import load_torch
from formats.rank_files.rank_writes import OF_TORCH, as_torch, rank_of_a_job, reshard, saved
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from trials import trials

from ckptool.core.catalog import TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.mesh import Mesh, Placements, Replicate, Shard, StridedShard
from ckptool.core.sharding.dtensor import local_shards
from ckptool.serialization.archive.write import RankRecords, lay_out_archive
from ckptool.serialization.pickle.load import read_pickle
from ckptool.serialization.pickle.records import Call, Global, Persistent


def placements_for(draw: Any, dims: int, rank: int) -> Placements:
    dim = st.integers(0, rank - 1)
    kinds: list[Any] = [st.builds(Replicate)]
    if rank:
        kinds += [st.builds(Shard, dim), st.builds(StridedShard, dim, st.integers(2, 4))]
    return tuple(draw(st.one_of(kinds)) for _ in range(dims))


@st.composite
def shares(draw: Any) -> tuple[Mesh, int, tuple[int, ...], Placements, str]:
    """A mesh, a rank of it, and shape, placements and element type of a tensor."""
    sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)
    shape = draw(sizes.filter(lambda found: math.prod(found) <= 16))
    names = draw(st.sampled_from([None, [f"dim{i}" for i in range(len(shape))]]))
    tensor = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    placements = placements_for(draw, len(shape), len(tensor))
    rank = draw(st.integers(0, math.prod(shape) - 1))
    return Mesh.of(shape, names), rank, tensor, placements, draw(st.sampled_from(OF_TORCH))


DEVICE_MESH = Global("torch.distributed.device_mesh", "DeviceMesh")


def plain(value: Any) -> Any:
    """Inert records as values that can be compared."""
    if isinstance(value, Call):
        state = value.state
        if value.function == DEVICE_MESH and isinstance(state, dict):
            state = {"_preserve_rank_order": False, **state}  # which torch writes since 2.15
        parts = (value.args, state, value.items, value.entries)
        return (str(value.function), value.is_new, *map(plain, parts))
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return plain(value.value) if isinstance(value, Persistent) else value


def pickled_by_torch(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    with zipfile.ZipFile(stream) as archive:
        return plain(read_pickle(archive.read("archive/data.pkl"), what="torch").value)


def pickled_by_us(value: Any) -> Any:
    literal: Any = lay_out_archive(value)[0]
    start = literal.data.index(b"\x80\x02")
    return plain(read_pickle(literal.data, what="ckptool", start=start).value)


@settings(max_examples=trials(60))
@given(shares())
def test_records_are_those_of_torch(share: Any) -> None:
    mesh, rank, shape, placements, dtype = share
    entry = TensorEntry("w", ("w",), BY_NAME[dtype], shape, ())
    shard = local_shards(shape, mesh.shape, placements)[rank]
    local = torch.empty(shard.shape, dtype=getattr(torch, dtype))
    with rank_of_a_job(rank, mesh.size):
        there = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
        strides = torch.empty(shape, device="meta").stride()
        meta = TensorMeta(torch.Size(shape), strides, local.dtype)
        spec = DTensorSpec(there, tuple(as_torch(placements)), meta)
        theirs = pickled_by_torch({"w": DTensor(local, spec, requires_grad=False)})
    ours = RankRecords(mesh, rank).dtensor(entry, shard, placements)
    assert pickled_by_us({"w": ours}) == theirs


def test_a_mesh_has_what_torch_2_15_compares() -> None:
    """Its ``DeviceMesh`` has no default for it, and other versions take what they do not know."""
    mesh = RankRecords(Mesh.of((2,)), 1)._mesh
    assert mesh.state["_preserve_rank_order"] is False
    recorded = vars(init_on_one_rank()).keys() - {"_pg_registry"}
    assert recorded <= mesh.state.keys()


def init_on_one_rank() -> Any:
    with rank_of_a_job(1, 2):
        return init_device_mesh("cpu", (2,))


def test_negative_dims_count_from_the_end() -> None:
    entry = TensorEntry("w", ("w",), BY_NAME["float32"], (4, 6), ())
    shards = local_shards((4, 6), (2,), (Shard(-1),))
    record = [
        pickled_by_us(RankRecords(Mesh.of((2,)), 1).dtensor(entry, shards[1], (Shard(dim),)))
        for dim in (-1, 1)
    ]
    assert record[0] == record[1]


def test_one_mesh_record_a_file(out: Path) -> None:
    state = {f"w{i}": torch.randn(8, 4) for i in range(20)}
    reshard(saved(state, out), out / "m", "2x2")
    loaded = load_torch(out / "m/checkpoint_3.pt")
    assert len({id(t.device_mesh) for t in loaded.values()}) == 1
    with zipfile.ZipFile(out / "m/checkpoint_3.pt") as archive:
        assert archive.testzip() is None
        assert len([n for n in archive.namelist() if "/data/" in n]) == 21
