"""Hostile DCP metadata, and names that claim what they are not."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attack_build as b
import pytest
from attack_harness import VERIFY, attack
from dcp_records import BOMB, Make, chunk, number, size, text
from honest_files import require_honest

WHOLE = chunk(size(0, 0), size(2, 3))


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
        entries, items = list[tuple[bytes, bytes]](), list[tuple[bytes, bytes]]()
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


@pytest.mark.parametrize("shape", [(6,), (2, 3, 1), (1, 3), (2, 2), ()])
def test_verify_says_that_a_chunk_is_outside_of_any_tensor(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    """Checks of what weights and moments hold look at no such chunk."""
    (tmp_path / "src").mkdir()
    meta, zeros = b.tensor_meta(size(*shape), WHOLE), b.item(storages={"0": bytes(24)})
    names = "w", "m.0.weight", "optimizer.state.w.exp_avg", "optimizer.state.w.exp_avg_sq"
    spots = [b.where(text(f"__{n}_0.distcp"), number(0), number(len(zeros))) for n in range(4)]
    entries = [(text(name), meta) for name in names]
    items = [(b.index(text(n), size(0, 0)), spot) for n, spot in zip(names, spots, strict=True)]
    source = b.dcp(tmp_path / "src" / "ck", zeros, b.metadata(entries, items))
    for rank in range(1, 4):
        (source / f"__{rank}_0.distcp").write_bytes(zeros)
    outcome = attack(source, to=(VERIFY,))
    assert (outcome.kind, "chunk-outside" in outcome.message) == ("reported", True), outcome


@pytest.mark.parametrize(
    ("name", "path"), [("w", ("x",)), ("x", ("w",)), ("x", ("x", 3)), ("w", None), ("x", None)]
)
def test_verify_names_what_has_another_path(
    name: str, path: tuple[str | int, ...] | None, tmp_path: Path
) -> None:
    """Of a value, too: torch's converter to one file puts it there, or finds no such key."""
    pytest.importorskip("torch")
    source = b.value_dcp(tmp_path / "src" / "ck", b.program(number(7)))
    metadata = pickle.loads((source / ".metadata").read_bytes())
    paths = {"w": ("w",), "x": ("x",), name: path}
    metadata.planner_data = {name: path for name, path in paths.items() if path is not None}
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    outcome = attack(source, to=(VERIFY,))
    assert (outcome.kind, "name-mismatch" in outcome.message) == ("reported", True), outcome


@pytest.mark.parametrize("name", ["TensorStorageMetadata", "ChunkStorageMetadata", "MetadataIndex"])
def test_verify_names_a_class_that_torch_does_not_have(name: str, tmp_path: Path) -> None:
    """Such a file reads like any other, but torch cannot load it."""
    source = b.value_dcp(tmp_path / "src" / "ck", b.program(number(7)))
    data = (source / ".metadata").read_bytes()
    assert name.encode() in data
    (source / ".metadata").write_bytes(data.replace(name.encode(), name.upper().encode()))
    outcome = attack(source, to=(VERIFY,))
    assert (outcome.kind, outcome.message) == ("reported", "unknown-global"), outcome
