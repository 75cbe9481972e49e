"""Hostile DCP metadata, DTensor records, and names that claim worlds of ranks."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attack_build as b
import pytest
from attack_harness import attack
from test_headers import require_honest

number, text, size, chunk = b.number, b.text, b.size, b.chunk
WHOLE = chunk(size(0, 0), size(2, 3))
Make = Callable[[Path], Path]


def one(**fields: Any) -> Make:
    return lambda folder: b.one_tensor_dcp(folder, **fields)


def linked(target: str) -> Make:
    """The data file is a link."""

    def make(folder: Path) -> Path:
        b.one_tensor_dcp(folder)
        data = folder / "__0_0.distcp"
        outside = folder.parent / "outside.distcp"
        data.rename(outside)
        data.symlink_to(target.format(outside=outside))
        return folder

    return make


def many_chunks(count: int, spread: Callable[[int], tuple[bytes, bytes]], shape: bytes) -> Make:
    """``count`` chunks, each of an item of no bytes."""

    def make(folder: Path) -> Path:
        chunks, items = [], []
        for i in range(count):
            offset, extent = spread(i)
            chunks.append(chunk(offset, extent))
            spot = b.where(text("__0_0.distcp"), number(0), number(0))
            items.append((b.index(text("w"), offset), spot))
        meta = b.metadata([(text("w"), b.tensor_meta(shape, *chunks))], items)
        return b.dcp(folder, b.item(), meta)

    return make


def two_on_one_item(folder: Path) -> Path:
    """Two chunks of one shape whose bytes are said to be one and the same item."""
    data = b.item()
    spot = b.where(text("__0_0.distcp"), number(0), number(len(data)))
    chunks = (chunk(size(0, 0), size(2, 3)), chunk(size(2, 0), size(2, 3)))
    meta = b.metadata(
        [(text("w"), b.tensor_meta(size(4, 3), *chunks))],
        [(b.index(text("w"), size(0, 0)), spot), (b.index(text("w"), size(2, 0)), spot)],
    )
    return b.dcp(folder, data, meta)


def two_names_on_one_item(folder: Path) -> Path:
    data = b.item()
    spot = b.where(text("__0_0.distcp"), number(0), number(len(data)))
    entry = b.tensor_meta(size(2, 3), WHOLE)
    meta = b.metadata(
        [(text("w"), entry), (text("v"), entry)],
        [(b.index(text("w"), size(0, 0)), spot), (b.index(text("v"), size(0, 0)), spot)],
    )
    return b.dcp(folder, data, meta)


def named_apart(folder: Path) -> Path:
    """Keys that differ in type and are one text."""
    data = b.item()
    where = [
        b.where(text("__0_0.distcp"), number(i * len(data)), number(len(data))) for i in (0, 1)
    ]
    entry = b.tensor_meta(size(2, 3), WHOLE)
    meta = b.metadata(
        [(number(1), entry), (text("1"), entry)],
        [(b.index(number(1), size(0, 0)), where[0]), (b.index(text("1"), size(0, 0)), where[1])],
    )
    return b.dcp(folder, data * 2, meta)


def per_rank(*ranks: str) -> Make:
    """Saved without collectives: one metadata file a rank."""

    def make(folder: Path) -> Path:
        for rank in ranks:
            b.one_tensor_dcp(folder, file=f"__{rank}_0.distcp")
            (folder / ".metadata").rename(folder / f"__{rank}.metadata")
        return folder

    return make


def two_ranks_of(world: int) -> Make:
    """Rows 0 and 1 of many short tensors, by the first and the last rank of a huge world."""

    def make(folder: Path) -> Path:
        last = f"__{world - 1}_0.distcp"
        data = b.item(
            b.program(
                b.tensor(shape=b.tup(number(1), number(6)), strides=b.tup(number(6), number(1)))
            )
        )
        entries, items = [], []
        for n in range(40):
            rows_ = [chunk(size(i, 0), size(1, 6)) for i in range(2 + n)]
            entries.append((text(f"w{n}"), b.tensor_meta(size(2 + n, 6), *rows_)))
            for i in range(2 + n):
                spot = b.where(text(last), number(len(items) * len(data)), number(len(data)))
                items.append((b.index(text(f"w{n}"), size(i, 0)), spot))
        b.dcp(folder, data * len(items), b.metadata(entries, items), last)
        return folder

    return make


def zstd(shape: tuple[int, ...], frame: bytes) -> Make:
    def make(folder: Path) -> Path:
        box = chunk(size(*[0] * len(shape)), size(*shape))
        spot = b.where(
            text("__0_0.distcp"),
            number(0),
            number(len(frame)),
            transform_descriptors=b.lst(text("stream.zstd/1")),
        )
        meta = b.metadata(
            [(text("w"), b.tensor_meta(size(*shape), box))],
            [(b.index(text("w"), size(*[0] * len(shape))), spot)],
        )
        return b.dcp(folder, frame, meta)

    return make


def zstd_bomb() -> bytes:
    zstandard = pytest.importorskip("zstandard")
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    piece = bytes(1 << 24)
    return b"".join([compressor.compress(piece) for _ in range(128)] + [compressor.flush()])


def sparse_metadata(folder: Path) -> Path:
    b.one_tensor_dcp(folder)
    with open(folder / ".metadata", "r+b") as stream:
        stream.truncate(100 << 30)
    return folder


def bytes_and_tensor(folder: Path) -> Path:
    """Rank 0 says that ``w`` is a tensor, rank 1 that it is a value."""
    per_rank("0", "1")(folder)
    data = b.item(b.program(text("x")), {})
    (folder / "__1_0.distcp").write_bytes(data)
    spot = b.where(text("__1_0.distcp"), number(0), number(len(data)))
    meta = b.metadata([(text("w"), b.bytes_meta())], [(b.index(text("w")), spot)])
    (folder / "__1.metadata").write_bytes(meta)
    return folder


BOMB = b"]" + b.put(1) + b"".join(b"0](" + b.get(i) * 2 + b"e" + b.put(i + 1) for i in range(1, 50))

DCP: dict[str, Make] = {
    "offset negative": one(offset=number(-1)),
    "offset 2**63": one(offset=number(2**63)),
    "offset 10**6000": one(offset=number(10**6000)),
    "length negative": one(length=number(-1)),
    "length 2**64": one(length=number(2**64)),
    "length 0": one(length=number(0)),
    "length 10": one(length=number(10)),
    "offset and length overflow": one(offset=number(2**63), length=number(2**63)),
    "offset a float": one(offset=b"G" + struct.pack(">d", 0.0)),
    "path climbs": one(path=text("../outside.distcp")),
    "path absolute": one(path=text("/etc/passwd")),
    "path climbs inside": one(path=text("sub/../__0_0.distcp")),
    "path with dot": one(path=text("./__0_0.distcp")),
    "path empty": one(path=text("")),
    "path NUL": one(path=text("__0_0.distcp\0")),
    "path a number": one(path=number(0)),
    "path None": one(path=b"N"),
    "path of 5,000 digits": one(path=text("__" + "1" * 5000 + "_0.distcp")),
    "path surrogates": one(path=text("\ud800")),
    "path a list that doubles": one(path=BOMB),
    "file of rank 99999999999": one(file="__99999999999_0.distcp"),
    "file of rank 4,000,000,000": one(file="__4000000000_0.distcp"),
    "file of a rank of 200 digits": one(file="__" + "9" * 200 + "_0.distcp"),
    "rank metadata 0 and 99999999999": per_rank("0", "99999999999"),
    "rank metadata 0 and 3,000,000": per_rank("0", "3000000"),
    "world of 131072": two_ranks_of(1 << 17),
    "world of 110880": two_ranks_of(110_880),
    "world of 131072, prime by far": two_ranks_of(131_071),
    "link to a file outside": linked("{outside}"),
    "link to a device": linked("/dev/zero"),
    "link to itself": linked("__0_0.distcp"),
    "link to a process file": linked("/proc/self/mem"),
    "shape of the chunk differs": one(chunks=(chunk(size(0, 0), size(3, 2)),)),
    "chunk of one dim": one(chunks=(chunk(size(0), size(6)),)),
    "chunk of three dims": one(chunks=(chunk(size(0, 0, 0), size(1, 2, 3)),)),
    "offsets and sizes differ in dims": one(chunks=(chunk(size(0, 0), size(2)),)),
    "no chunks": one(chunks=()),
    "no chunks, empty shape": one(chunks=(), shape=size(0, 3)),
    "no chunks, no dims": one(chunks=(), shape=size()),
    "chunk twice": one(chunks=(WHOLE, WHOLE)),
    "chunk outside": one(chunks=(chunk(size(2, 3), size(2, 3)),)),
    "chunk huge": one(chunks=(chunk(size(0, 0), size(2**62, 2**62)),), shape=size(2**62, 2**62)),
    "shape 10**6000": one(shape=size(10**6000, 3)),
    "shape negative": one(shape=size(-2, 3)),
    "shape None": one(shape=b"N"),
    "shape doubling": one(shape=b.call(b.glob("torch", "Size"), b"(" + BOMB + b"t")),
    "chunks a number": lambda folder: b.dcp(
        folder,
        b.item(),
        b.metadata([(text("w"), b.tensor_meta(size(2, 3)).replace(b"](e", b"K\1"))], []),
    ),
    "dtype unknown": lambda folder: b.dcp(
        folder, b.item(), b.metadata([(text("w"), b.tensor_meta(size(2, 3), dtype="nn"))], [])
    ),
    "dtype wide of the data": lambda folder: b.dcp(
        folder,
        b.item(),
        b.metadata(
            [(text("w"), b.tensor_meta(size(2, 3), WHOLE, dtype="float64"))],
            [
                (
                    b.index(text("w"), size(0, 0)),
                    b.where(text("__0_0.distcp"), number(0), number(500)),
                )
            ],
        ),
    ),
    "name a number of 6,000 digits": one(fqn=number(10**6000)),
    "name with a lone surrogate": one(fqn=text("\ud800")),
    "name with control characters": one(fqn=text("\x1b[2J\n[/red]")),
    "name empty": one(fqn=text("")),
    "name None": one(fqn=b"N"),
    "names that are one text": named_apart,
    "item without a name": lambda folder: b.dcp(
        folder,
        b.item(),
        b.metadata([], [(b.index(b"N"), b.where(text("x"), number(0), number(0)))]),
    ),
    "path of no steps": one(planner=b.pairs((text("w"), b")"))),
    "path of 50,000 steps": one(planner=b.pairs((text("w"), b.tup(*[text("a")] * 50_000)))),
    "path of huge numbers": one(planner=b.pairs((text("w"), b.tup(number(10**6000))))),
    "path doubling": one(planner=b.pairs((text("w"), b.tup(BOMB)))),
    "path of another name": one(planner=b.pairs((text("w"), b.tup(text("other"))))),
    "path negative": one(planner=b.pairs((text("w"), b.tup(number(-1))))),
    "planner a list": one(planner=b.lst(text("w"))),
    "transforms doubling": one(transform_descriptors=b.lst(BOMB)),
    "transforms a number": one(transform_descriptors=number(3)),
    "transforms a text": one(transform_descriptors=text("stream.zstd/1")),
    "zstd that is none": zstd((2, 3), b.item()),
    "zstd of a tensor that claims 2**62": zstd((2**62,), b"\x28\xb5\x2f\xfd" + bytes(20)),
    "zstd bomb behind an honest claim": lambda folder: zstd((1 << 28,), zstd_bomb())(folder),
    "zstd bomb behind a small claim": lambda folder: zstd((2, 3), zstd_bomb())(folder),
    "two chunks on one item": two_on_one_item,
    "two names on one item": two_names_on_one_item,
    "tensor on one rank, value on another": bytes_and_tensor,
    "3,000 chunks that never end": many_chunks(
        3000, lambda i: (size(i, i), size(3000, 1)), size(6000, 3000)
    ),
    "5,000 chunks of no bytes": many_chunks(5_000, lambda i: (size(i), size(1)), size(5_000)),
    "metadata sparse, 100 GiB": sparse_metadata,
    "metadata no bytes": lambda folder: b.dcp(folder, b.item(), b""),
    "metadata a list": lambda folder: b.dcp(folder, b.item(), b.program(b"]")),
    "metadata without fields": lambda folder: b.dcp(
        folder, b.item(), b.program(b.new(b.glob("x", "Metadata")))
    ),
    "metadata whose state is itself": lambda folder: b.dcp(
        folder, b.item(), b.program(b.new(b.glob("x", "Metadata")) + b.put(1) + b.get(1) + b"b")
    ),
    "metadata of texts": lambda folder: b.dcp(
        folder, b.item(), b.metadata([(text("w"), text("x"))], [])
    ),
    "metadata: index a text": lambda folder: b.dcp(
        folder,
        b.item(),
        b.metadata([(text("w"), b.tensor_meta(size(2, 3), WHOLE))], [(text("w"), text("x"))]),
    ),
}


@pytest.mark.parametrize("name", list(DCP))
def test_dcp(name: str, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    source = DCP[name](tmp_path / "src" / "ck")
    (tmp_path / "src" / "outside.distcp").touch()
    outcome = attack(source, to=("safetensors", "torch-save", "dcp"))
    require_honest(outcome)
    if name in ("two chunks on one item", "two names on one item", "names that are one text"):
        assert outcome.kind == "error", f"one item was taken for two: {outcome.tensors}"
    if name.startswith(("path climbs", "path absolute")):
        assert outcome.kind == "error", "a file outside was read"


def test_a_link_to_a_file_outside_is_followed(tmp_path: Path) -> None:
    """Hugging Face's cache and many a scratch file system keep every file behind a link."""
    (tmp_path / "src").mkdir()
    outcome = attack(DCP["link to a file outside"](tmp_path / "src" / "ck"), to=("safetensors",))
    assert outcome.kind == "ok", str(outcome)


# DTensors in rank files


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


def world(*members: int) -> bytes:
    return b.tup(*map(number, members))


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


# ShardedTensors


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


# torch_checkpointing's metadata.pkl and DCP's safetensors shards


def declared(body: bytes | None = None, **fields: bytes) -> Make:
    """One rank's safetensors file whose sharding only ``metadata.pkl`` knows."""

    def make(folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "model_0.safetensors").write_bytes(b.safetensors({"w": b.entry()}))
        items = b.dct(version=text("2.0"), world_size=number(1), metadata=b.dct())
        if body is not None:
            records = b.pairs((text('["w"]'), body))
            items = b.dct(
                version=text("2.0"),
                world_size=number(1),
                metadata=b.dct(model=b.dct(nested_path_to_metadata=records)),
            )
        if fields:
            items = b.dct(**({"world_size": number(1), "metadata": b.dct()} | fields))
        (folder / "metadata.pkl").write_bytes(b.program(items))
        return folder

    return make


def record(data: bytes, kind: str = "DTensorShardingMetadata") -> bytes:
    return b.lst(b.dct(sharding_metadata=b.dct(type=text(kind), data=data), ranks=b.lst(number(0))))


def json_family(content: bytes) -> Make:
    def make(folder: Path) -> Path:
        declared()(folder)
        (folder / "state_0.json").write_bytes(content)
        return folder

    return make


INFINITY = b"G" + struct.pack(">d", float("inf"))

DECLARED: dict[str, Make] = {
    "world size infinite": declared(world_size=INFINITY),
    "world size 10**11": declared(world_size=number(10**11)),
    "world size 10**6000": declared(world_size=number(10**6000)),
    "world size negative": declared(world_size=number(-5)),
    "world size text": declared(world_size=text("many")),
    "metadata a list": declared(metadata=b"]"),
    "metadata doubling": declared(metadata=BOMB),
    "path not JSON": declared(
        metadata=b.dct(model=b.dct(nested_path_to_metadata=b.pairs((text("["), b"]"))))
    ),
    "path nested deep": declared(
        metadata=b.dct(model=b.dct(nested_path_to_metadata=b.pairs((text("[" * 100_000), b"]"))))
    ),
    "ranks infinite": declared(b.lst(b.dct(sharding_metadata=b.dct(), ranks=b.lst(INFINITY)))),
    "record a text": declared(b.lst(b.dct(sharding_metadata=text("x"), ranks=b.lst(number(0))))),
    "record None": declared(b.lst(b.dct(sharding_metadata=b"N", ranks=b.lst(number(0))))),
    "record empty": declared(record(b.dct())),
    "record data None": declared(record(b"N")),
    "mesh empty": declared(
        record(b.dct(mesh_spec=b.dct(), global_shape=b.lst(number(2), number(3))))
    ),
    "mesh doubling": declared(
        record(
            b.dct(
                global_shape=b.lst(number(2), number(3)),
                mesh_spec=b.dct(mesh_shape=b.lst(number(1)), mesh_data=BOMB, mesh_dim_names=b"N"),
                placements=b"]",
            )
        )
    ),
    "mesh itself": declared(
        record(
            b.dct(
                global_shape=b.lst(number(2), number(3)),
                mesh_spec=b.dct(
                    mesh_shape=b.lst(number(1)), mesh_data=b"]" + b.put(9) + b.get(9) + b"a"
                ),
                placements=b"]",
            )
        )
    ),
    "placement of no type": declared(
        record(
            b.dct(
                global_shape=b.lst(number(2), number(3)),
                mesh_spec=b.dct(mesh_shape=b.lst(number(1)), mesh_data=b.lst(number(0))),
                placements=b.lst(b.dct()),
            )
        )
    ),
    "json not JSON": json_family(b"{"),
    "json a list": json_family(b"[1]"),
    "json nested deep": json_family(b"[" * 500_000),
    "json empty": json_family(b""),
    "json NaN": json_family(b'{"a": NaN}'),
}


@pytest.mark.parametrize("name", list(DECLARED))
def test_declared(name: str, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    outcome = attack(DECLARED[name](tmp_path / "src" / "ck"), to=("safetensors",))
    assert outcome.answered, str(outcome)


def shard_file(folder: Path, offsets: Any, name: str = "shard-00001-model-00001-of-00001") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    info = offsets if isinstance(offsets, str) else json.dumps({"w": {"saved_offsets": offsets}})
    header = {"__metadata__": {"DCP_SHARDING_INFO": info}, "w": b.entry()}
    (folder / f"{name}.safetensors").write_bytes(b.safetensors(header))
    return folder


SHARDS: dict[str, Make] = {
    "offsets infinite": lambda f: shard_file(f, '{"w":{"saved_offsets":[1e999,0]}}'),
    "offsets NaN": lambda f: shard_file(f, '{"w":{"saved_offsets":[NaN,0]}}'),
    "offsets negative": lambda f: shard_file(f, [-1, 0]),
    "offsets huge": lambda f: shard_file(f, [10**4000, 0]),
    "offsets text": lambda f: shard_file(f, "00"),
    "offsets too few": lambda f: shard_file(f, [0]),
    "info a list": lambda f: shard_file(f, "[]"),
    "info nested deep": lambda f: shard_file(f, "[" * 200_000),
    "info not JSON": lambda f: shard_file(f, "{"),
    "rank 0": lambda f: shard_file(f, [0, 0], "shard-00000-model-00001-of-00001"),
    "rank 99999999999": lambda f: shard_file(f, [0, 0], "shard-99999999999-model-00001-of-00001"),
    "rank 131072": lambda f: shard_file(f, [0, 0], "shard-131072-model-00001-of-00001"),
    "1 of 99999": lambda f: shard_file(f, [0, 0], "shard-00001-model-00001-of-99999"),
    "3,000 tensors": lambda f: many_slices(f, 3000),
}


def many_slices(folder: Path, count: int) -> Path:
    folder.mkdir(parents=True)
    info = {str(i): {"saved_offsets": [0, 0]} for i in range(count)}
    header: dict[str, Any] = {"__metadata__": {"DCP_SHARDING_INFO": json.dumps(info)}}
    header |= {str(i): b.entry(offsets=[24 * i, 24 * i + 24]) for i in range(count)}
    path = folder / "shard-00001-model-00001-of-00001.safetensors"
    path.write_bytes(b.safetensors(header, b.WEIGHT * count))
    return folder


@pytest.mark.parametrize("name", list(SHARDS))
def test_dcp_safetensors(name: str, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    outcome = attack(SHARDS[name](tmp_path / "src" / "ck"), to=("safetensors",))
    assert outcome.answered, str(outcome)


RANK_NAMES = [
    ("checkpoint_0.pt", "checkpoint_99999999999.pt"),
    ("checkpoint_0.pt", "checkpoint_3000000.pt"),
    ("model_world_size_99999999999_rank_0.pt", "model_world_size_99999999999_rank_1.pt"),
    ("model_rank0.pt", "model_rank" + "9" * 200 + ".pt"),
    ("model_rank\u0661.pt", "model_rank\u0660.pt"),
    ("model_rank-1.pt", "model_rank-0.pt"),
]


@pytest.mark.parametrize("names", [pytest.param(names, id=names[1][:40]) for names in RANK_NAMES])
def test_rank_file_names(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        b.torch_file(tmp_path / "src" / "ck" / name, b.program(b.dct(w=b.tensor())))
    outcome = attack(tmp_path / "src" / "ck", to=("safetensors",))
    assert outcome.answered, str(outcome)


@pytest.mark.parametrize(
    "name",
    ["model-00001-of-99999", "model-00001-of-99999999999", "model-" + "1" * 100 + "-of-00002"],
)
def test_shard_file_names(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "src" / "ck"
    folder.mkdir(parents=True)
    (folder / f"{name}.safetensors").write_bytes(b.safetensors({"w": b.entry()}))
    outcome = attack(folder, to=("safetensors",))
    assert outcome.exit_code == 3, str(outcome)
