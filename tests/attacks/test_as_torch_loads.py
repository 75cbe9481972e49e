"""What torch loads otherwise, or not at all, is refused, and verify says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attack_archives
import attack_build as b
import pytest
from attack_harness import VERIFY, attack

torch = pytest.importorskip("torch")

ONE = b.program(b.dct(w=b.tensor()))
FLAG_AT, LOCAL_FLAG_AT = 8, 6


def two_types(cls: str, numel: int) -> bytes:
    """A storage that is of floats to the first tensor, and of another type to the second."""
    other = b.storage(cls=b.glob("torch", cls), numel=b.number(numel))
    return b.torch_zip(
        b.program(b.pairs((b.text("w"), b.tensor()), (b.text("x"), b.tensor(other))))
    )


def empty(*shape: int) -> bytes:
    """A tensor without elements, beside an honest one."""
    sizes, strides = map(b.number, shape), [b.number(1)] * len(shape)
    return b.torch_zip(b.beside(b.tensor(shape=b.tup(*sizes), strides=b.tup(*strides))))


def flagged(flag: int) -> bytes:
    """An archive in which each record has a flag, in the directory and in its own header."""
    data = bytearray(b.torch_zip(ONE))
    for mark, at in ((b"PK\1\2", FLAG_AT), (b"PK\3\4", LOCAL_FLAG_AT)):
        start = data.find(mark)
        while start >= 0:
            data[start + at : start + at + 2] = flag.to_bytes(2, "little")
            start = data.find(mark, start + 1)
    return bytes(data)


def with_records(*names: str, without: str = "") -> bytes:
    """An archive with further records, which say that they are big-endian, or zeros."""
    records = {"archive/data.pkl": ONE, "archive/byteorder": b"little", "archive/data/0": b.WEIGHT}
    records |= {"archive/version": b"3\n"}
    return b.stored_zip(
        {name: data for name, data in records.items() if name != without}
        | {name: b"big" if "byte" in name.lower() else bytes(24) for name in names}
    )


def divided(mark: bytes, at: int, number: int) -> bytes:
    """An archive, with a zip64 end record, that says to be on other disks as well."""
    data = bytearray(attack_archives.plain(b.WEIGHT))
    start = data.rfind(mark) + at
    data[start : start + 2] = number.to_bytes(2, "little")
    return bytes(data)


def rebuilt(*extra: bytes, requires_grad: bytes = b"\x89") -> bytes:
    """A tensor of which the last arguments are others than torch writes."""
    body = b.tensor(extra=extra).replace(b"\x89", requires_grad)
    return b.torch_zip(b.program(b.dct(w=body)))


FILES: dict[str, Callable[[], bytes]] = {
    "a storage of floats and integers": lambda: two_types("IntStorage", 6),
    "a storage of floats and twice as many halves": lambda: two_types("HalfStorage", 12),
    "a storage of floats and bytes": lambda: two_types("UntypedStorage", 24),
    "empty, with dims that overflow": lambda: empty(2**62, 2**62, 0),
    "empty, with dims that overflow later": lambda: empty(0, 2**62, 2**62),
    "empty, with bytes that overflow": lambda: empty(0, 2**61),
    "byte order in upper case": lambda: with_records(
        "archive/BYTEORDER", without="archive/byteorder"
    ),
    "byte order twice": lambda: with_records("archive/ByteOrder"),
    "a storage's record twice": lambda: with_records("archive/DATA/0"),
    "the pickle's record twice": lambda: with_records("archive/DATA.pkl"),
    "requires_grad a number": lambda: rebuilt(requires_grad=b"K\1"),
    "requires_grad None": lambda: rebuilt(requires_grad=b"N"),
    "metadata a text": lambda: rebuilt(b.text("conj")),
    "an argument too many": lambda: rebuilt(b"}", b"}"),
    "a record on another disk": partial(divided, b"PK\1\2", 34, 1),
    "an end on another disk": partial(divided, b"PK\6\6", 16, 1),
    "a directory on another disk": partial(divided, b"PK\6\6", 20, 1),
    "two disks": partial(divided, b"PK\6\7", 16, 2),
    **{f"flag {flag:#x}": partial(flagged, flag) for flag in (0x1, 0x20, 0x40, 0x2000)},
}


@pytest.mark.parametrize("name", list(FILES))
def test_a_file_that_torch_loads_otherwise(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, FILES[name]())
    converted, verified = attack(path, to=("safetensors",)), attack(path, to=(VERIFY,))
    assert (converted.kind, converted.exit_code) == ("error", 3), converted
    assert verified.kind == "reported", verified


def written(folder: Path, data: bytes) -> Path:
    path = folder / "src" / "x.pt"
    path.parent.mkdir()
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("extra", [b"N", b"}"])
def test_metadata_of_nothing(extra: bytes, tmp_path: Path) -> None:
    path = written(tmp_path, rebuilt(extra))
    assert torch.load(path)["w"].numpy().tobytes() == b.WEIGHT
    assert attack(path, to=("safetensors", VERIFY)).kind == "ok"


@pytest.mark.parametrize("flag", [0x2, 0x4, 0x800])
def test_flags_that_torch_ignores(flag: int, tmp_path: Path) -> None:
    path = written(tmp_path, flagged(flag))
    loaded: dict[str, Any] = torch.load(path)
    assert loaded["w"].numpy().tobytes() == b.WEIGHT
    assert attack(path, to=("safetensors", VERIFY)).kind == "ok"


def test_an_empty_storage_of_two_types(tmp_path: Path) -> None:
    """torch saves a view of nothing as another type."""
    nothing = torch.empty(0)
    path = tmp_path / "src" / "x.pt"
    path.parent.mkdir()
    torch.save({"x": nothing, "y": nothing.view(torch.int32), "w": torch.ones(2)}, path)
    assert attack(path, to=("safetensors", VERIFY)).kind == "ok"


@pytest.mark.parametrize("order", [1, -1])
def test_bytes_of_a_type_without_a_storage(order: int, tmp_path: Path) -> None:
    """torch saves float8 in a storage without a type, and a view of its bytes in one of bytes."""
    weight = torch.arange(8).to(torch.float8_e4m3fn)
    state = dict([("w", weight), ("raw", weight.view(torch.uint8))][::order])
    path = tmp_path / "src" / "x.pt"
    path.parent.mkdir()
    torch.save(state, path)
    assert torch.load(path)["w"].view(torch.uint8).equal(state["raw"])
    assert attack(path, to=("safetensors", VERIFY)).kind == "ok"
