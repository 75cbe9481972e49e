"""Hostile zip directories."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import attack_build as b
import pytest
from attack_harness import Outcome, attack, attack_all
from honest_files import W, le, require_honest

import ckptool

HONEST = b.torch_zip(b.program(b.dct(w=b.tensor())))


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


@pytest.mark.parametrize("name", list(ZIPS))
def test_zip(name: str, tmp_path: Path) -> None:
    path = tmp_path / "src" / "x.pt"
    path.parent.mkdir()
    path.write_bytes(ZIPS[name]())
    require_honest(attack(path, to=("safetensors",)))


@pytest.mark.parametrize("name", [PKL, DATA])
def test_a_record_that_torch_takes_for_a_folder_is_refused(name: bytes, tmp_path: Path) -> None:
    """torch 2.13 makes a tensor of memory that it does not fill."""
    path = tmp_path / "src" / "x.pt"
    path.parent.mkdir()
    path.write_bytes(patched(HONEST, entry_at(HONEST, name) + 38, le(0x10, 4)))
    outcome = attack(path, to=("safetensors",))
    assert (outcome.kind, "is marked as a folder" in outcome.message) == ("error", True)


@pytest.mark.parametrize("version", [None, b"0\n", b"11\n", b"", b"three", b"9" * 30])
def test_a_version_that_torch_refuses_is_no_sound_archive(
    version: bytes | None, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    file = tmp_path / "x.pt"
    with zipfile.ZipFile(BytesIO(HONEST)) as honest:
        records = {name: honest.read(name) for name in honest.namelist()}
    records["archive/version"] = version or b""
    if version is None:
        del records["archive/version"]
    file.write_bytes(b.stored_zip(records))
    with pytest.raises((RuntimeError, IndexError)):
        torch.load(file)
    report = ckptool.verify(file)
    assert [finding.code for finding in report.findings] == ["archive-content"]


def real_zip() -> bytes:
    torch = pytest.importorskip("torch")

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
