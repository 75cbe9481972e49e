"""Pairs of archives that differ in a storage and its checksum, so that they may seem alike.

Nothing is wrong with the first of a pair. With the second is, as someone forged the first so that
something else is where its storage, or another part that archives have of their own, may differ.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from ckptool.serialization.zip import CENTRAL, END, END64, LOCAL, LOCATOR64

STREAMED = 8
VALUE = b"\x80\x02N."
VERSION = b"3\n"
NOTHING = (0, 0, 0)


def sums(content: bytes) -> tuple[int, int, int]:
    return zlib.crc32(content), len(content), len(content)


def local_header(name: str, noted: tuple[int, int, int] = NOTHING) -> bytes:
    header = LOCAL.pack(b"PK\x03\x04", 0, STREAMED, 0, 0, 0, *noted, len(name), 0)
    return header + name.encode()


def descriptor(content: bytes) -> bytes:
    return b"PK\x07\x08" + b"".join(number.to_bytes(4, "little") for number in sums(content))


def record(name: str, content: bytes, noted: tuple[int, int, int] = NOTHING) -> bytes:
    return local_header(name, noted) + content + descriptor(content)


def entry(name: str, content: bytes, at: int) -> bytes:
    """Return the directory's entry of a record whose local header is at a place."""
    fields = (0, 0, STREAMED, 0, 0, 0, *sums(content), len(name), 0, 0, 0, 0, 0, at)
    return CENTRAL.pack(b"PK\x01\x02", *fields) + name.encode()


def archive(body: bytes, entries: Iterable[bytes], end64_at: int | None = None) -> bytes:
    """Return an archive whose zip64 end record, if not at its own place, is at another one."""
    directory = [*entries]
    count, nbytes, start = len(directory), sum(map(len, directory)), len(body)
    wide = end64(count, nbytes, start)
    if end64_at is not None:
        wide = bytes(len(wide))
    locator = LOCATOR64.pack(b"PK\x06\x07", 0, start + nbytes if end64_at is None else end64_at, 1)
    return body + b"".join(directory) + wide + locator + end(count, nbytes, start)


def end64(count: int, nbytes: int, start: int) -> bytes:
    return END64.pack(b"PK\x06\x06", 44, 0, 0, 0, 0, count, count, nbytes, start)


def end(count: int, nbytes: int, start: int) -> bytes:
    return END.pack(b"PK\x05\x06", 0, 0, count, count, nbytes, start, 0)


def begin(root: str = "archive") -> tuple[bytes, list[bytes]]:
    """Return the records before the storages, and their entries in the directory."""
    pickle, version = f"{root}/data.pkl", f"{root}/version"
    first = record(pickle, VALUE)
    entries = [entry(pickle, VALUE, 0), entry(version, VERSION, len(first))]
    return first + record(version, VERSION), entries


def plain(storage: bytes, noted: tuple[int, int, int] = NOTHING, *, root: str = "archive") -> bytes:
    """Return an archive with a storage, whose local header may note its checksum and size, too."""
    first, entries = begin(root)
    data = f"{root}/data/0"
    body = first + record(data, storage, noted)
    return archive(body, [*entries, entry(data, storage, len(first))])


def noted_twice() -> tuple[bytes, bytes]:
    """The local header of the second notes the checksum of the first."""
    return plain(b"one", sums(b"one")), plain(b"two", sums(b"one"))


def header_in_storage() -> tuple[bytes, bytes]:
    """The local header of another storage is in a storage: that of the second is destroyed."""

    def forged(mark: bytes) -> bytes:
        first, entries = begin()
        outer = b"storage" + mark + local_header("archive/data/1")[len(mark) :]
        inner = descriptor(outer)
        at = len(first) + len(local_header("archive/data/0")) + len(b"storage")
        body = first + local_header("archive/data/0") + outer + inner + descriptor(inner)
        entries += [entry("archive/data/0", outer, len(first)), entry("archive/data/1", inner, at)]
        return archive(body, entries)

    return forged(b"PK\x03\x04"), forged(b"none")


def end_in_storage() -> tuple[bytes, bytes]:
    """The zip64 end record is in a storage: that of the second is destroyed."""
    name, (first, entries) = "archive/data/0", begin()
    nbytes = sum(map(len, entries)) + len(entry(name, b"", 0))
    at = len(first) + len(local_header(name))
    start = len(first) + len(record(name, bytes(END64.size)))

    def forged(storage: bytes) -> bytes:
        directory = [*entries, entry(name, storage, len(first))]
        return archive(first + record(name, storage), directory, at)

    right = end64(len(entries) + 1, nbytes, start)
    return forged(right), forged(b"none" + right[4:])


def end_in_name() -> tuple[bytes, bytes]:
    """The name of the last record ends where the mark of a zip64 locator would be."""

    def forged(root: str) -> bytes:
        (first, entries), storage = begin(root), b"storage"
        body = first + record(f"{root}/data/123456", storage)
        entries.append(entry(f"{root}/data/123456", storage, len(first)))
        directory = b"".join(entries)
        return body + directory + end(len(entries), len(directory), len(body))

    return forged("archives"), forged("PK\x06\x07ives")


FORGERIES = [noted_twice, header_in_storage, end_in_storage, end_in_name]
