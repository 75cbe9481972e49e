"""Hostile zip directories, safetensors headers and index files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attack_build as b
import pytest
from attack_harness import Outcome, attack, attack_all

HONEST = b.torch_zip(b.program(b.dct(w=b.tensor())))
W = ("F32", (2, 3), b.WEIGHT)


def end_record(data: bytes) -> tuple[int, list[int]]:
    at = data.rfind(b"PK\5\6")
    return at, list(struct.unpack_from("<4H2LH", data, at + 4))


def with_end(data: bytes, **changes: int) -> bytes:
    names = ["disk", "first", "here", "count", "size", "start", "comment"]
    at, fields = end_record(data)
    for name, value in changes.items():
        fields[names.index(name)] = value
    return data[: at + 4] + struct.pack("<4H2LH", *fields) + data[at + 22 :]


def with_zip64(data: bytes, count: int, size: int, start: int, where: int | None = None) -> bytes:
    at = data.rfind(b"PK\5\6")
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, at if where is None else where, 1)
    return data[:at] + end64 + locator + data[at:]


def entry_at(data: bytes, name: bytes) -> int:
    """Where the central directory's record of ``name`` begins."""
    return data.rfind(name, 0, end_record(data)[0]) - 46


def patched(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def le(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little")


PKL, DATA = b"archive/data.pkl", b"archive/data/0"
LOCAL_DATA = HONEST.find(DATA) - 30


def bomb_pkl() -> bytes:
    """A pickle of many empty lists, which deflate packs a thousandfold."""
    return b.program(b"](" + b"]" * 60_000_000 + b"e")


ZIPS: dict[str, Callable[[], bytes]] = {
    "empty directory": lambda: with_end(HONEST, count=0, here=0, size=0),
    "one record too few": lambda: with_end(HONEST, count=3, here=3),
    "count 65535": lambda: with_end(HONEST, count=65535, here=65535),
    "directory outside": lambda: with_end(HONEST, start=2**31),
    "directory size 4 GiB": lambda: with_end(HONEST, size=2**32 - 1),
    "directory over the end record": lambda: with_end(HONEST, size=end_record(HONEST)[1][4] + 10),
    "comment longer than the file": lambda: with_end(HONEST, comment=60_000),
    "end record in a comment": lambda: (
        with_end(HONEST, comment=22) + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0, 0, 0, 0, 0)
    ),
    "garbage after the end": lambda: HONEST + b"\0" * 100,
    "end record far from the end": lambda: HONEST + b"\0" * 70_000,
    "zip64 count 2**64-1": lambda: with_zip64(HONEST, 2**64 - 1, 100, 0),
    "zip64 size 2**63": lambda: with_zip64(HONEST, 1, 2**63, 0),
    "zip64 start 2**64-1": lambda: with_zip64(HONEST, 1, 46, 2**64 - 1),
    "zip64 record elsewhere": lambda: with_zip64(HONEST, 1, 46, 0, 2**64 - 1),
    "zip64 record at itself": lambda: with_zip64(HONEST, 1, 46, 0, 0),
    "zip64 sizes without extra": lambda: patched(HONEST, entry_at(HONEST, DATA) + 20, b"\xff" * 8),
    "record past the end": lambda: patched(HONEST, entry_at(HONEST, DATA) + 20, le(2**31, 4) * 2),
    "record smaller than its storage": lambda: patched(
        HONEST, entry_at(HONEST, DATA) + 20, le(8, 4) * 2
    ),
    "header of another record": lambda: patched(
        HONEST, entry_at(HONEST, DATA) + 42, le(HONEST.find(PKL) - 30, 4)
    ),
    "header outside": lambda: patched(HONEST, entry_at(HONEST, DATA) + 42, le(2**31, 4)),
    "stored and size differ": lambda: patched(HONEST, entry_at(HONEST, DATA) + 20, le(20, 4)),
    "unknown method": lambda: patched(HONEST, entry_at(HONEST, DATA) + 10, le(93, 2)),
    "says deflated, is stored": lambda: patched(HONEST, entry_at(HONEST, DATA) + 10, le(8, 2)),
    "longer local extra": lambda: patched(HONEST, LOCAL_DATA + 28, le(4, 2)),
    "local extra 65535": lambda: patched(HONEST, LOCAL_DATA + 28, le(65535, 2)),
    "local name length": lambda: patched(HONEST, LOCAL_DATA + 26, le(65535, 2)),
    "two records of one name": lambda: HONEST.replace(
        b"archive/version", b"archive/data/0\0"[:15]
    ).replace(b"archive/byteorder", b"archive/data.pkl\0"[:17]),
    "records share bytes": lambda: patched(
        HONEST, entry_at(HONEST, DATA) + 20, le(len(HONEST) - HONEST.find(DATA) - 14, 4) * 2
    ),
    "no data.pkl": lambda: b.stored_zip({"archive/version": b"3"}),
    "two data.pkl": lambda: b.stored_zip(
        {"a/data.pkl": b.program(b"N"), "b/data.pkl": b.program(b"N")}
    ),
    "data.pkl at the root": lambda: b.stored_zip({"/data.pkl": b.program(b.dct(x=b"N"))}),
    "names that climb": lambda: b.stored_zip(
        {"../../x/data.pkl": b.program(b.dct(w=b.tensor())), "../../x/data/0": b.WEIGHT}
    ),
    "names that are no utf-8": lambda: HONEST.replace(b"archive/version", b"\xff\xfe" + b"x" * 13),
    "byte order of a megabyte": lambda: b.stored_zip(
        {"a/data.pkl": b.program(b"N"), "a/byteorder": b"little" * 200_000}
    ),
    "deflated data.pkl": lambda: b.torch_zip(
        b.program(b.dct(w=b.tensor())), deflate=("archive/data.pkl",)
    ),
    "deflate bomb of lists": lambda: b.torch_zip(bomb_pkl(), deflate=("archive/data.pkl",)),
    "deflate bomb of a storage": lambda: b.torch_zip(
        b.program(
            b.dct(
                x=b.tensor(
                    b.storage(numel=b.number(50_000_000)),
                    shape=b.tup(b.number(50_000_000)),
                    strides=b.tup(b.number(1)),
                )
            )
        ),
        {"0": bytes(200_000_000)},
        deflate=("archive/data/0",),
    ),
    "12 MB of empty sets": lambda: b.torch_zip(b.program(b"](" + b"\x8f" * 12_000_000 + b"e")),
    "deflated size lies": lambda: lying_deflate(),
    "20,000 records": lambda: b.torch_zip(
        b.program(b.dct(w=b.tensor())), {str(i): b.WEIGHT for i in range(20_000)}
    ),
    "expanded to 2**60 elements": lambda: b.torch_zip(
        b.program(b.dct(x=b.tensor(shape=b.tup(b.number(2**60)), strides=b.tup(b.number(0)))))
    ),
}


def lying_deflate() -> bytes:
    data = b.torch_zip(b.program(b.dct(w=b.tensor())), deflate=("archive/data/0",))
    return patched(data, entry_at(data, DATA) + 24, le(2**31 - 1, 4))


def require_honest(outcome: Outcome) -> None:
    assert outcome.answered, str(outcome)
    if outcome.kind == "ok" and "w" in outcome.tensors:
        assert outcome.tensors["w"] == W, "a wrong tensor was written"


@pytest.mark.parametrize("name", list(ZIPS))
def test_zip(name: str, tmp_path: Path) -> None:
    path = tmp_path / "src" / "x.pt"
    path.parent.mkdir()
    path.write_bytes(ZIPS[name]())
    require_honest(attack(path, to=("safetensors",)))


def real_zip() -> bytes:
    torch = pytest.importorskip("torch")
    from io import BytesIO

    stream = BytesIO()
    state = {"w": torch.arange(6, dtype=torch.float32).reshape(2, 3), "step": 7}
    torch.save(state, stream)
    return stream.getvalue()


def many(folder: Path, variants: list[bytes], suffix: str = ".pt") -> list[Outcome]:
    """Outcomes of files with these contents, each in a folder of its own."""
    paths = []
    for number, data in enumerate(variants):
        path = folder / "src" / str(number) / f"x{suffix}"
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        paths.append(path)
    return attack_all(paths, to=("safetensors",))


@pytest.mark.parametrize("make", [lambda: HONEST, real_zip], ids=["small", "torch's"])
def test_zip_cut_anywhere(make: Callable[[], bytes], tmp_path: Path) -> None:
    whole = make()
    outcomes = many(tmp_path, [whole[:n] for n in range(0, len(whole), 97)])
    assert [str(o) for o in outcomes if o.kind != "error"] == []


def test_every_byte_of_the_headers_of_a_zip_flipped(tmp_path: Path) -> None:
    """Whatever header byte is wrong: an error, or the very same tensor."""
    start, pkl = HONEST.find(DATA), HONEST.find(PKL)
    spots = [*range(30 + len(PKL)), *range(start - 30, start + 14), *range(start + 38, len(HONEST))]
    assert pkl == 30
    variants = [patched(HONEST, at, bytes([HONEST[at] ^ 1 << (at % 8)])) for at in spots]
    wrong = []
    for at, outcome in zip(spots, many(tmp_path, variants), strict=True):
        if not outcome.answered or (outcome.kind == "ok" and outcome.tensors.get("w") != W):
            wrong.append(f"byte {at}: {outcome}")
    assert wrong == []


# Safetensors


def nested(depth: int) -> bytes:
    return b'{"w":' + b"[" * depth + b"]" * depth + b"}"


def rewritten(**changes: Any) -> bytes:
    return b.safetensors({"w": b.entry() | changes})


SAFETENSORS: dict[str, Callable[[], bytes]] = {
    "header length 2**63": lambda: le(2**63, 8) + b"{}",
    "header length 2**64-1": lambda: le(2**64 - 1, 8) + b"{}",
    "header length past the end": lambda: le(100, 8) + b"{}",
    "header length 0": lambda: le(0, 8) + b"{}",
    "header shorter than its JSON": lambda: le(10, 8) + b.safetensors({"w": b.entry()})[8:],
    "seven bytes": lambda: b"\1" * 7,
    "nested 1,000,000 deep": lambda: b.safetensors(nested(1_000_000)),
    "objects nested deep": lambda: b.safetensors(b'{"a":' * 200_000 + b"1" + b"}" * 200_000),
    "name twice": lambda: b.safetensors(
        b'{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
        b'"w":{"dtype":"F32","shape":[3,2],"data_offsets":[0,24]}}'
    ),
    "dtype twice": lambda: b.safetensors(
        b'{"w":{"dtype":"F32","dtype":"I32","shape":[2,3],"data_offsets":[0,24]}}'
    ),
    "shape overflows": lambda: rewritten(shape=[2**62, 2**62]),
    "shape of 4,000 digits": lambda: rewritten(shape=[10**4000, 10**4000]),
    "shape of 5,000 digits": lambda: b.safetensors(
        b'{"w":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,24]}}'
    ),
    "200,000 huge dims": lambda: rewritten(shape=[2**62] * 200_000),
    "200,000 dims of one": lambda: rewritten(shape=[1] * 200_000 + [6]),
    "a hundred dims of one": lambda: rewritten(shape=[1] * 100 + [6]),
    "empty, beyond 64 bits": lambda: b.safetensors(
        {"w": b.entry(shape=[0, 2**70], offsets=[0, 0])}, b""
    ),
    "negative shape": lambda: rewritten(shape=[-2, -3]),
    "float shape": lambda: rewritten(shape=[2.0, 3]),
    "bool shape": lambda: rewritten(shape=[True, 6]),
    "text shape": lambda: rewritten(shape="23"),
    "object shape": lambda: rewritten(shape={"0": 2}),
    "negative offsets": lambda: rewritten(data_offsets=[-24, 0]),
    "offsets reversed": lambda: rewritten(data_offsets=[24, 0]),
    "huge offsets": lambda: rewritten(data_offsets=[10**30, 10**30 + 24]),
    "offsets of 4,000 digits": lambda: rewritten(data_offsets=[10**4000, 10**4000 + 24]),
    "float offsets": lambda: rewritten(data_offsets=[0.0, 24]),
    "three offsets": lambda: rewritten(data_offsets=[0, 24, 48]),
    "offsets an object": lambda: rewritten(data_offsets={"0": 0, "24": 24}),
    "offsets text": lambda: rewritten(data_offsets="ab"),
    "infinite offsets": lambda: b.safetensors(
        b'{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,1e999]}}'
    ),
    "NaN shape": lambda: b.safetensors(
        b'{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,24]}}'
    ),
    "hole": lambda: b.safetensors({"w": b.entry(offsets=[4, 28])}, b"0000" + b.WEIGHT),
    "overlap": lambda: b.safetensors(
        {"w": b.entry(), "v": b.entry(offsets=[12, 36])}, b.WEIGHT * 2
    ),
    "same bytes twice": lambda: b.safetensors({"w": b.entry(), "v": b.entry()}),
    "bytes of no tensor": lambda: b.safetensors({"w": b.entry()}, b.WEIGHT + b"more"),
    "unknown dtype": lambda: rewritten(dtype="F31"),
    "dtype a list": lambda: rewritten(dtype=["F32"]),
    "dtype missing": lambda: b.safetensors({"w": {"shape": [2, 3], "data_offsets": [0, 24]}}),
    "entry a list": lambda: b.safetensors({"w": ["F32", [2, 3], [0, 24]]}),
    "entry a text": lambda: b.safetensors({"w": "dtype"}),
    "entry null": lambda: b.safetensors({"w": None}),
    "metadata a list": lambda: b.safetensors({"__metadata__": ["a"], "w": b.entry()}),
    "metadata of numbers": lambda: b.safetensors({"__metadata__": {"a": 1}, "w": b.entry()}),
    "metadata nested": lambda: b.safetensors({"__metadata__": {"a": {"b": "c"}}, "w": b.entry()}),
    "metadata a number": lambda: b.safetensors({"__metadata__": 3, "w": b.entry()}),
    "metadata surrogates": lambda: b.safetensors(
        b'{"__metadata__":{"a":"\\ud800"},"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}'
    ),
    "header a list": lambda: b.safetensors(b"[]"),
    "header a number": lambda: b.safetensors(b"1"),
    "header in utf-16": lambda: b.safetensors(json.dumps({"w": b.entry()}).encode("utf-16-le")),
    "header no utf-8": lambda: b.safetensors(b'{"\xff":{}}'),
    "name with control characters": lambda: b.safetensors({"\x1b]0;x\x07\n[/red]\0": b.entry()}),
    "name a path": lambda: b.safetensors({"../../../etc/passwd": b.entry()}),
    "name empty": lambda: b.safetensors({"": b.entry()}),
    "name a lone surrogate": lambda: b.safetensors(
        b'{"\\ud800":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}'
    ),
    "name of a megabyte": lambda: b.safetensors({"w" * 1_000_000: b.entry()}),
    "name __metadata__ alone": lambda: b.safetensors({"__metadata__": {}}, b""),
    "four bits, odd": lambda: rewritten(dtype="F4", shape=[49]),
    "four bits, no dims": lambda: rewritten(dtype="F4", shape=[]),
    "20,000 empty tensors": lambda: b.safetensors(
        {str(i): b.entry(shape=[0], offsets=[0, 0]) for i in range(20_000)}, b""
    ),
    "1,000,000 empty lists": lambda: b.safetensors(
        b'{"w":[' + b",".join([b"[]"] * 1_000_000) + b"]}"
    ),
}


@pytest.mark.parametrize("name", list(SAFETENSORS))
def test_safetensors(name: str, tmp_path: Path) -> None:
    path = tmp_path / "src" / "x.safetensors"
    path.parent.mkdir()
    path.write_bytes(SAFETENSORS[name]())
    outcome = attack(path, to=("safetensors", "torch-save"))
    assert outcome.answered, str(outcome)


DAMAGED_SAFETENSORS = (
    "name twice",
    "shape overflows",
    "negative shape",
    "float shape",
    "hole",
    "overlap",
    "same bytes twice",
    "bytes of no tensor",
    "unknown dtype",
    "bool shape",
    "three offsets",
    "metadata a list",
    "metadata of numbers",
    "metadata a number",
    "header in utf-16",
    "offsets an object",
)


@pytest.mark.parametrize("name", DAMAGED_SAFETENSORS)
def test_safetensors_that_must_be_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "src" / "x.safetensors"
    path.parent.mkdir()
    path.write_bytes(SAFETENSORS[name]())
    outcome = attack(path, to=("safetensors",))
    assert (outcome.kind, outcome.exit_code) == ("error", 3), str(outcome)


# Index files


def index(weight_map: Any, **more: Any) -> bytes:
    return json.dumps({"weight_map": weight_map} | more).encode()


INDEXES: dict[str, Callable[[], bytes]] = {
    "climbs out": lambda: index({"w": "../secret.safetensors"}),
    "climbs out and back": lambda: index({"w": "../ck/model.safetensors"}),
    "climbs inside": lambda: index({"w": "sub/../model.safetensors"}),
    "dot": lambda: index({"w": "./model.safetensors"}),
    "absolute": lambda: index({"w": "/etc/passwd"}),
    "absolute on windows": lambda: index({"w": "C:\\x.safetensors"}),
    "backslashes": lambda: index({"w": "..\\secret.safetensors"}),
    "url": lambda: index({"w": "file:///etc/passwd"}),
    "missing file": lambda: index({"w": "model-2.safetensors"}),
    "empty name": lambda: index({"w": ""}),
    "folder": lambda: index({"w": "."}),
    "itself": lambda: index({"w": "model.safetensors.index.json"}),
    "name with NUL": lambda: index({"w": "model.safetensors\0"}),
    "name of a megabyte": lambda: index({"w": "m" * 1_000_000}),
    "lone surrogate": lambda: b'{"weight_map":{"w":"\\ud800"}}',
    "number for a file": lambda: index({"w": 3}),
    "list for a file": lambda: index({"w": ["model.safetensors"]}),
    "null": lambda: index(None),
    "list": lambda: index([]),
    "empty": lambda: index({}),
    "no weight_map": lambda: b"{}",
    "a list at the top": lambda: b"[]",
    "a text at the top": lambda: b'"weight_map"',
    "not JSON": lambda: b"{",
    "no bytes": lambda: b"",
    "nested deep": lambda: b'{"weight_map":' + b"[" * 500_000,
    "metadata a list": lambda: index({"w": "model.safetensors"}, metadata=[]),
    "metadata nested deep": lambda: b'{"metadata":' + b"[" * 500_000,
    "total_size a text": lambda: index({"w": "model.safetensors"}, metadata={"total_size": "24"}),
    "total_size a list": lambda: index({"w": "model.safetensors"}, metadata={"total_size": [24]}),
    "total_size an object": lambda: index({"w": "model.safetensors"}, metadata={"total_size": {}}),
    "total_size a float": lambda: index({"w": "model.safetensors"}, metadata={"total_size": 24.5}),
    "total_size NaN": lambda: (
        b'{"weight_map":{"w":"model.safetensors"},"metadata":{"total_size":NaN}}'
    ),
    "total_size infinite": lambda: (
        b'{"weight_map":{"w":"model.safetensors"},"metadata":{"total_size":1e999}}'
    ),
    "total_size of 4,000 digits": lambda: index(
        {"w": "model.safetensors"}, metadata={"total_size": 10**4000}
    ),
    "more names than tensors": lambda: index({str(i): "model.safetensors" for i in range(50_000)}),
}


@pytest.mark.parametrize("name", list(INDEXES))
def test_index(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "src" / "ck"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b.safetensors({"w": b.entry()}))
    (tmp_path / "src" / "secret.safetensors").write_bytes(b.safetensors({"w": b.entry()}))
    (folder / "model.safetensors.index.json").write_bytes(INDEXES[name]())
    outcome = attack(folder, to=("safetensors", "torch-save"))
    require_honest(outcome)
    if name.startswith(("climbs", "absolute", "backslashes", "url")):
        assert outcome.kind == "error", "a file outside was read"


@pytest.mark.parametrize("name", list(INDEXES))
def test_bin_index(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "src" / "ck"
    b.torch_file(folder / "model.safetensors", b.program(b.dct(w=b.tensor())))
    (folder / "pytorch_model.bin.index.json").write_bytes(INDEXES[name]())
    require_honest(attack(folder, to=("safetensors", "torch-save")))
