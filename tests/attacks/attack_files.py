"""Whole files of a checkpoint that are lost, exchanged, or from another checkpoint."""

from __future__ import annotations

import re
import struct
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path

from format_tables import VERIFY_DOC, rows_of

from ckptool.commands.open import open_checkpoint
from ckptool.core.catalog import Extent, Record, TensorEntry

KINDS = ("lost", "exchanged", "renumbered", "left over", "stray", "older")
DATA = (".pt", ".pth", ".bin", ".safetensors", ".distcp")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class FileMutation:
    """``kind`` is one of ``KINDS``; ``change`` does it to a copy of the checkpoint."""

    kind: str
    what: str
    change: Callable[[Path], None]


def files_of(folder: Path) -> list[str]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in found)


def families(files: list[str]) -> list[list[str]]:
    """Files whose names differ in numbers alone, two or more of them."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in files:
        if file.endswith(DATA) or not Path(file).suffix:
            found[_NUMBER.sub("#", file)].append(file)
    return [names for names in found.values() if len(names) > 1]


def further(names: list[str]) -> str:
    """The last name of a family, with a number that none of its files has."""
    numbers = [list(map(int, _NUMBER.findall(name))) for name in names]
    varying = [at for at in range(len(numbers[0])) if len({one[at] for one in numbers}) > 1]
    new = 1 + max(one[varying[0]] for one in numbers)
    last = names[-1]
    spot = [*_NUMBER.finditer(last)][varying[0]]
    return f"{last[: spot.start()]}{new:0{len(spot[0])}d}{last[spot.end() :]}"


def pairs(source: Path, names: list[str]) -> Iterator[tuple[str, str]]:
    """For each number that differs within a family two files that only it tells apart."""
    numbers = {name: _NUMBER.findall(name) for name in names}
    for at in range(len(numbers[names[0]])):
        for one, other in combinations(names, 2):
            differing = [
                n
                for n, (a, b) in enumerate(zip(numbers[one], numbers[other], strict=True))
                if a != b
            ]
            if differing == [at] and (source / one).read_bytes() != (source / other).read_bytes():
                yield one, other
                break


def mutations(source: Path, most: int) -> Iterator[FileMutation]:
    """What can happen to whole files of a checkpoint, at most so many of a kind."""
    files = files_of(source)
    data = [file for file in files if file.endswith(DATA)] or files
    data = [file for file in data if (source / file).stat().st_size]
    together = families(files)
    for file in spread(data, most):
        yield FileMutation("lost", file, partial(remove, file=file))
        older = older_bytes(source, file)
        if older is not None:
            yield FileMutation("older", file, partial(put, file=file, data=older))
    for names in spread(together, most):
        other, new = names[-1], further(names)
        last = (source / other).read_bytes()
        moved = partial(move, file=other, name=new)
        yield FileMutation("renumbered", f"{other} to {new}", moved)
        yield FileMutation("left over", new, partial(put, file=new, data=last))
        for one, two in pairs(source, names):
            exchanged = partial(exchange, one=one, two=two)
            yield FileMutation("exchanged", f"{one} and {two}", exchanged)
    for file in spread(data, 1):
        path = Path(file)
        name, content = str(path.with_name(f"old_{path.name}")), (source / file).read_bytes()
        yield FileMutation("stray", name, partial(put, file=name, data=content))


def spread(items: list, most: int) -> list:  # type: ignore[type-arg]
    """The last of the items, and others evenly before it."""
    if len(items) <= most:
        return items
    return [items[(len(items) - 1) * (at + 1) // most] for at in range(most)]


def remove(at: Path, file: str) -> None:
    (at / file).unlink()


def exchange(at: Path, one: str, two: str) -> None:
    first, second = (at / one).read_bytes(), (at / two).read_bytes()
    (at / one).write_bytes(second)
    (at / two).write_bytes(first)


def move(at: Path, file: str, name: str) -> None:
    (at / name).parent.mkdir(parents=True, exist_ok=True)
    (at / file).rename(at / name)


def put(at: Path, file: str, data: bytes) -> None:
    (at / file).parent.mkdir(parents=True, exist_ok=True)
    (at / file).write_bytes(data)


def older_bytes(source: Path, file: str) -> bytes | None:
    """The file as an earlier step's save would have left it: other values, correct checksums.

    Step counters are one less. None if no tensor's bytes are stored plainly in it.
    """
    opened = open_checkpoint(source)
    root = opened.path if opened.path.is_dir() else opened.path.parent
    data = bytearray((source / file).read_bytes())
    spots = {
        at.offset: (entry, at.record)
        for entry in opened.open_containers(opened.catalog).tensors.values()
        for chunk in entry.chunks
        if chunk.box.volume
        for at in (chunk.at, *(copy.at for copy in chunk.copies))
        if isinstance(at, Extent) and root / at.file == source / file
    }
    for offset, (entry, _) in spots.items():
        count_back(data, offset, entry)
    for record in {record for _, record in spots.values() if record}:
        renew(data, record)
    return bytes(data) if spots else None


def count_back(data: bytearray, offset: int, entry: TensorEntry) -> None:
    """One step less, or for what is no counter another lowest bit."""
    if entry.source_dtype.name == "float32" and not entry.shape:
        (value,) = struct.unpack_from("<f", data, offset)
        if value == int(value):
            struct.pack_into("<f", data, offset, value - 1)
            return
    data[offset] ^= 1


def renew(data: bytearray, record: Record) -> None:
    """Give a record of a zip the checksum that its bytes have now, in all places that state it."""
    found = zlib.crc32(bytes(data[record.offset : record.offset + record.nbytes]))
    for begin, entry in zip(starts(data, b"PK\3\4"), starts(data, b"PK\1\2"), strict=True):
        name, extra = struct.unpack_from("<HH", data, begin + 26)
        if begin + 30 + name + extra == record.offset:
            for at in (begin + 14, entry + 16, record.offset + record.nbytes + 4):
                if data[at : at + 4] == struct.pack("<I", record.crc32):
                    struct.pack_into("<I", data, at, found)


def starts(data: bytearray, mark: bytes) -> list[int]:
    return [match.start() for match in re.finditer(re.escape(mark), data)]


def said_in_docs() -> dict[str, dict[str, str]]:
    """The table: a format to what is seen of each kind of mutation."""
    rows = rows_of(VERIFY_DOC)
    assert tuple(rows.pop("")) == KINDS
    return {name: dict(zip(KINDS, cells, strict=True)) for name, cells in rows.items()}
