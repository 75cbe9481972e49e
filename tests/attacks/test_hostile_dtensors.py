"""Hostile records of DTensors and ShardedTensors in rank files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attack_build as b
import pytest
from attack_harness import attack
from dcp_records import BOMB, Make, number, size, text, world


def rank_file(x: bytes) -> bytes:
    return b.program(b.dct(x=x))


def ranks_of(*values: bytes) -> Make:
    def make(folder: Path) -> Path:
        for rank, value in enumerate(values):
            b.torch_file(folder / f"checkpoint_{rank}.pt", rank_file(value))
        return folder

    return make


def sharded(rank: int, placements: bytes | None = None, **spec: bytes) -> bytes:
    place = b.tup(b.shard(number(0))) if placements is None else placements
    return b.dtensor(b.mesh_1d(2, rank), place, size(4, 3), **spec)


def both(**changes: Any) -> Make:
    return ranks_of(sharded(0, **changes), sharded(1, **changes))


def with_mesh(
    mesh: bytes, placements: bytes | None = None, shape: bytes | None = None, **kw: Any
) -> Make:
    place = b.tup(b.shard(number(0))) if placements is None else placements
    whole = size(4, 3) if shape is None else shape
    value = b.dtensor(mesh, place, whole, **kw)
    return ranks_of(value, value)


def axes(*pairs: tuple[int, int]) -> bytes:
    return b.tup(*(b.flat_layout(number(n), number(s)) for n, s in pairs))


def striped(factor: int) -> bytes:
    """A 2 x 2 mesh, both tensor dims cut into ``2 * factor`` stripes, local tensors of one byte."""
    local = b.tensor(
        shape=b.tup(number(factor), number(factor)), strides=b.tup(number(0), number(0))
    )
    place = b.tup(b.strided(number(0), number(factor)), b.strided(number(1), number(factor)))
    mesh = b.mesh(axes((2, 2), (2, 1)), world(0, 1, 2, 3), at=b.tup(number(0), number(0)))
    return b.dtensor(mesh, place, size(2 * factor, 2 * factor), local)


NESTED_SHAPE = b"K\2" + b"\x85" * 5000


EXPANDED_RANKS = b.tensor(
    b.storage(text("0"), b.glob("torch", "LongStorage"), number(3)),
    shape=b.tup(number(2**40)),
    strides=b.tup(number(0)),
)


DTENSORS: dict[str, Make] = {
    "honest": both(),
    "shard of dim 5": both(placements=b.tup(b.shard(number(5)))),
    "shard of dim -3": both(placements=b.tup(b.shard(number(-3)))),
    "shard of dim 10**6000": both(placements=b.tup(b.shard(number(10**6000)))),
    "shard of dim text": both(placements=b.tup(b.shard(text("0")))),
    "shard of dim doubling": both(placements=b.tup(b.shard(BOMB))),
    "no placements": both(placements=b")"),
    "placements None": both(placements=b"N"),
    "placements a number": both(placements=number(1)),
    "placements a text": both(placements=text("S")),
    "two placements on one dim": both(placements=b.tup(b.replicate(), b.replicate())),
    "placement unknown": both(placements=b.tup(b.new(b.glob("x", "Odd"), b.dct()))),
    "placement a call of a call": both(
        placements=b.tup(b.call(b.glob("a", "b")) + b")\x81" + b.dct() + b"b")
    ),
    "placement doubling": both(placements=b.tup(BOMB)),
    "partial doubling": both(
        placements=b.tup(b.new(b.glob("x", "Partial"), b.dct(reduce_op=BOMB)))
    ),
    "split factor 0": both(placements=b.tup(b.strided(number(0), number(0)))),
    "split factor -1": both(placements=b.tup(b.strided(number(0), number(-1)))),
    "split factor 2**62": both(placements=b.tup(b.strided(number(0), number(2**62)))),
    "2**18 pieces in two dims": ranks_of(striped(2**9), striped(2**9)),
    "2**34 pieces in two dims": ranks_of(striped(2**17), striped(2**17)),
    "stripes of 2**62 rows": with_mesh(
        b.mesh_1d(2, 0),
        b.tup(b.strided(number(0), number(1 << 19))),
        size(2**40),
        local=b.tensor(shape=b.tup(number(2**39)), strides=b.tup(number(0))),
    ),
    "global shape negative": with_mesh(b.mesh_1d(2, 0), shape=size(-4, 3)),
    "global shape 2**62": with_mesh(b.mesh_1d(2, 0), shape=size(2**62, 3)),
    "global shape of one dim": with_mesh(b.mesh_1d(2, 0), shape=size(4)),
    "local shape contradicts": with_mesh(b.mesh_1d(2, 0), shape=size(6, 3)),
    "local tensor missing": both(local=b"N"),
    "local tensor a DTensor": both(local=sharded(0)),
    "mesh of 10**9 ranks": with_mesh(b.mesh(axes((10**9, 1)), world(0, 1))),
    "mesh of 10**9 x 10**9": with_mesh(
        b.mesh(axes((10**9, 1), (10**9, 1)), world(0, 1)), b.tup(b.replicate(), b.replicate())
    ),
    "mesh of 3000 x 3000 x 3000": with_mesh(
        b.mesh(axes((3000, 0), (3000, 0), (3000, 0)), world(0, 1)), b.tup(*[b.replicate()] * 3)
    ),
    "mesh of 10**12 x 0": with_mesh(
        b.mesh(axes((10**12, 1), (0, 1)), world(0, 1)), b.tup(b.replicate(), b.replicate())
    ),
    "mesh of no ranks": with_mesh(b.mesh(axes((0, 1)), world())),
    "mesh of no dims": with_mesh(b.mesh(b")", world(0, 1)), b")"),
    "mesh layout leaves the ranks": with_mesh(b.mesh(axes((2, 5)), world(0, 1))),
    "mesh stride negative": with_mesh(b.mesh(axes((2, -1)), world(0, 1))),
    "mesh stride 0": with_mesh(b.mesh(axes((2, 0)), world(0, 1))),
    "mesh names a rank twice": with_mesh(b.mesh(axes((2, 1)), world(0, 0))),
    "mesh without the rank": with_mesh(b.mesh(axes((2, 1)), world(5, 6), rank=number(5))),
    "mesh without the rank, unsaid": with_mesh(b.mesh(axes((2, 1)), world(5, 6), rank=b"N")),
    "mesh rank huge": with_mesh(b.mesh(axes((2, 1)), world(0, 10**9))),
    "mesh rank of 6,000 digits": with_mesh(b.mesh(axes((2, 1)), world(0, 10**6000))),
    "mesh ranks nested": with_mesh(b.mesh(axes((2, 1)), BOMB)),
    "sub-mesh unsaid": with_mesh(b.mesh(axes((2, 1)), world(0, 1, 2, 3), rank=b"N")),
    "sub-mesh at no place": with_mesh(b.mesh(axes((2, 1)), world(0, 1, 2, 3), at=b"N")),
    "sub-mesh at the wrong place": with_mesh(
        b.mesh(axes((2, 1)), world(0, 1, 2, 3), at=b.tup(number(7)))
    ),
    "axes a number": with_mesh(b.mesh(number(3), world(0, 1))),
    "axes without fields": with_mesh(b.mesh(b.tup(b.new(b.glob("x", "_FlatLayout"))), world(0, 1))),
    "axis shape and stride differ": with_mesh(
        b.mesh(b.tup(b.flat_layout(b.tup(number(2), number(1)), number(1))), world(0, 1))
    ),
    "axis shape doubling": with_mesh(b.mesh(b.tup(b.flat_layout(BOMB, BOMB)), world(0, 1))),
    "axis shape nested": with_mesh(
        b.mesh(b.tup(b.flat_layout(NESTED_SHAPE, NESTED_SHAPE)), world(0, 1))
    ),
    "axis shape itself": with_mesh(
        b.mesh(b.tup(b.flat_layout(b"]" + b.put(9) + b.get(9) + b"a", number(1))), world(0, 1))
    ),
    "layout None": with_mesh(
        b.new(b.glob("torch.distributed.device_mesh", "DeviceMesh"), b.dct(_layout=b"N"))
    ),
    "layout without ranks": with_mesh(
        b.new(
            b.glob("torch.distributed.device_mesh", "DeviceMesh"),
            b.dct(_layout=b.new(b.glob("x", "_MeshLayout"), b.dct(axes=axes((2, 1))))),
        )
    ),
    "layout of torch 2.10, shape None": with_mesh(
        b.new(
            b.glob("torch.distributed.device_mesh", "DeviceMesh"),
            b.dct(
                _layout=b.new(b.glob("x", "_MeshLayout"), b.dct(shape=b"N", stride=b"N")),
                _flatten_rank_map=world(0, 1),
            ),
        )
    ),
    "mesh None": with_mesh(b"N"),
    "mesh itself": with_mesh(b.new(b.glob("x", "DeviceMesh")) + b.put(9) + b.get(9) + b"b"),
    "mesh names doubling": with_mesh(
        b.mesh_1d(2, 0) + b"}" + text("_mesh_dim_names") + BOMB + b"sb"
    ),
    "old mesh of floats": with_mesh(b.old_mesh(b.tensor())),
    "old mesh expanded to 2**40": with_mesh(b.old_mesh(EXPANDED_RANKS)),
    "old mesh a list": with_mesh(b.old_mesh(world(0, 1))),
    "shard order out of range": both(
        shard_order=b.tup(b.call(b.glob("x", "E"), number(0), b.tup(number(9), number(3))))
    ),
    "shard order negative": both(
        shard_order=b.tup(b.call(b.glob("x", "E"), number(-1), b.tup(number(0))))
    ),
    "shard order doubling": both(shard_order=b.tup(b.call(b.glob("x", "E"), BOMB, BOMB))),
    "spec None": ranks_of(sharded(0).replace(b"_spec", b"_spex"), sharded(1)),
    "four ranks say, two are there": lambda folder: ranks_of(
        b.dtensor(b.mesh_1d(4, 0), b.tup(b.shard(number(0))), size(8, 3)),
        b.dtensor(b.mesh_1d(4, 1), b.tup(b.shard(number(0))), size(8, 3)),
    )(folder),
    "ranks disagree on shape": ranks_of(
        sharded(0), b.dtensor(b.mesh_1d(2, 1), b.tup(b.shard(number(0))), size(4, 4))
    ),
    "ranks disagree on placements": ranks_of(sharded(0), sharded(1, b.tup(b.replicate()))),
    "DTensor here, plain there": ranks_of(sharded(0), b.tensor()),
    "expanded copies of 2**50 that differ": lambda folder: expanded_copies(folder),
}


def expanded_copies(folder: Path) -> Path:
    """Two replicas of 2**50 elements in 24 bytes whose checksums differ."""
    wide = b.tensor(shape=b.tup(number(2**50)), strides=b.tup(number(0)))
    b.torch_file(folder / "checkpoint_0.pt", rank_file(wide))
    b.torch_file(folder / "checkpoint_1.pt", rank_file(wide), {"0": b.WEIGHT[:-1] + b"\1"})
    return folder


@pytest.mark.parametrize("name", list(DTENSORS))
def test_dtensor(name: str, tmp_path: Path) -> None:
    source = DTENSORS[name](tmp_path / "src" / "ck")
    outcome = attack(source, to=("safetensors", "dcp"))
    assert outcome.answered, str(outcome)
    if name == "honest":
        assert outcome.kind == "ok", str(outcome)
    if "disagree" in name or "contradicts" in name or name.startswith("four ranks"):
        assert outcome.exit_code == 3, str(outcome)


@pytest.mark.parametrize(
    ("rank", "members"), [(1, (0, 1)), (2, (2, 3))], ids=["second of two", "of a later stage"]
)
def test_one_rank_file_by_itself(rank: int, members: tuple[int, ...], tmp_path: Path) -> None:
    """A rank file opened alone must not be taken for rank 0's."""
    mesh = b.mesh(axes((2, 1)), world(*members), rank=number(rank), at=b.tup(number(rank % 2)))
    value = b.dtensor(mesh, b.tup(b.shard(number(0))), size(4, 3))
    path = b.torch_file(tmp_path / "src" / "part.pt", rank_file(value))
    from ckptool.commands.open import open_checkpoint
    from ckptool.errors import CkptoolError

    assert attack(path, to=("safetensors",)).exit_code == 3
    try:
        chunks = open_checkpoint(path).catalog.tensors["x"].chunks
    except CkptoolError:
        return
    assert [chunk.box.lo for chunk in chunks] == [((rank % 2) * 2, 0)]


def sharded_tensor(offsets: bytes, sizes: bytes, shape: bytes, **group: bytes) -> bytes:
    place = b.new(
        b.glob("torch.distributed.remote_device", "_remote_device"), b.dct(_rank=number(0))
    )
    meta = b.new(
        b.glob("torch.distributed._shard.metadata", "ShardMetadata"),
        b.tup(b"N", b.dct(shard_offsets=offsets, shard_sizes=sizes, placement=place)),
    )
    shard = b.new(b.glob("x", "Shard"), b.tup(b"N", b.dct(tensor=b.tensor(), metadata=meta)))
    every = b.new(
        b.glob("x", "ShardedTensorMetadata"), b.dct(shards_metadata=b.lst(meta), size=shape)
    )
    fields = {"global_rank": number(0), "global_world_size": number(1)} | group
    state = b.tup(b.lst(shard), every, b.new(b.glob("x", "Group"), b.dct(**fields)), b"N", b"N")
    cls = b.glob("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")
    wrapped = b.tup(cls, b.glob("torch", "float32"), shape)
    return b.call(
        b.glob("torch._tensor", "_rebuild_from_type_v2"),
        b.glob("torch._utils", "f"),
        cls,
        wrapped,
        state,
    )


SHARDED: dict[str, bytes] = {
    "honest": sharded_tensor(size(0, 0), size(2, 3), size(2, 3)),
    "offsets of one dim": sharded_tensor(size(0), size(2, 3), size(2, 3)),
    "box of one dim": sharded_tensor(size(0), size(6), size(2, 3)),
    "offsets negative": sharded_tensor(size(-1, 0), size(2, 3), size(2, 3)),
    "offsets huge": sharded_tensor(size(2**62, 0), size(2, 3), size(2, 3)),
    "shape huge": sharded_tensor(size(0, 0), size(2, 3), size(2**62, 3)),
    "rank huge": sharded_tensor(size(0, 0), size(2, 3), size(2, 3), global_rank=number(10**6000)),
    "world huge": sharded_tensor(
        size(0, 0), size(2, 3), size(2, 3), global_world_size=number(10**12)
    ),
    "offsets doubling": sharded_tensor(BOMB, size(2, 3), size(2, 3)),
    "offsets None": sharded_tensor(b"N", size(2, 3), size(2, 3)),
}


@pytest.mark.parametrize("name", list(SHARDED))
def test_sharded_tensor(name: str, tmp_path: Path) -> None:
    path = b.torch_file(tmp_path / "src" / "ck" / "model_rank0.pt", rank_file(SHARDED[name]))
    outcome = attack(path.parent, to=("safetensors",))
    assert outcome.answered, str(outcome)
