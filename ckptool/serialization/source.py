"""The place of a checkpoint, and reads of it that every format makes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import NamedTuple, Protocol

from ckptool.errors import Damaged
from ckptool.serialization.file_kinds import HEAD, detect_placeholder

LARGEST = 1 << 29
"""Bytes of the largest pickle that is read."""
LARGEST_IN_ROWS = 1 << 32
"""Bytes of the largest one of which all but ``LARGEST`` are rows that become columns."""


class SpanReader(Protocol):
    """Reads many spans; files may stay open until it is closed."""

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``; Damaged if the file ends before."""

    def close(self) -> None:
        """Close all files."""


class Source(Protocol):
    """A folder of files, or one file, that can be read at any offset."""

    @property
    def root(self) -> str:
        """Return the folder, as the user would name it."""

    @property
    def files(self) -> Mapping[str, int]:
        """Return the size in bytes of each file below the root, by its relative path with ``/``."""

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """Return exactly ``nbytes`` bytes at ``offset``; Damaged if the file ends before."""

    def reader(self) -> SpanReader:
        """Return a reader of many spans."""

    def narrowed(self, folder: str) -> Source:
        """Return the part below a subfolder, as a source of its own."""

    def expect(self, spans: Iterable[tuple[str, int, int]]) -> None:
        """Announce the next reads: file, offset and bytes. A store fetches them ahead."""


class EachRead(NamedTuple):
    """Reads spans of a source that cannot keep files open."""

    source: Source

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``; Damaged if the file ends before."""
        buffer[:] = self.source.read(file, offset, len(buffer))

    def close(self) -> None:
        """Do nothing."""


def require(source: Source, file: str, *, wanted_by: str) -> int:
    """Return the size in bytes of a file that metadata names; Damaged if it is missing."""
    size = source.files.get(file)
    if size is not None:
        return size
    is_outside = file.startswith(("/", "\\")) or ".." in file.replace("\\", "/").split("/")
    message = f"{file!r}, referenced by {wanted_by}, is"
    if is_outside:
        raise Damaged(f"{message} outside the folder", "path-outside", file=file)
    raise Damaged(f"{message} missing", "file-missing", file=file)


MOST_RANKS = 1 << 20
EDGE = 2048
"""Bytes at each end of an archive that are read at once."""
_HEAD = 256 << 10
"""Bytes that contain most headers and directories of files."""
_OF_A_FILE = 128
"""At first at most one in so many of a file's bytes is read for its directory."""


def read_metadata(source: Source, file: str, largest: int = LARGEST) -> bytes:
    """Return a whole file of metadata, JSON or pickle; Damaged if it is too large to be one."""
    size = source.files[file]
    if size > largest:
        raise Damaged(f"{file}: {size:,} bytes; metadata is read up to {largest:,} bytes")
    data = source.read(file, 0, size)
    kind = detect_placeholder(data[:HEAD])
    if kind is not None:
        hint = kind.hint_for(file)
        raise Damaged(f"{file}: {kind.what}", "file-type-mismatch", file=file, hint=hint)
    return data


def expect_heads(source: Source, files: Iterable[str]) -> None:
    """Announce that the beginnings of these files, with the headers, are read next."""
    sizes = source.files
    source.expect((file, 0, min(sizes[file], _HEAD)) for file in files if file in sizes)


def expect_edges(source: Source, places: Iterable[tuple[str, int, int]]) -> None:
    """Announce that both ends of small archives are read next: file, offset and bytes of each."""
    source.expect(span for place in places for span in edge_spans(*place))


def expect_archives(source: Source, files: Iterable[str]) -> None:
    """Announce that both ends of these files, with their directories, are read next."""
    sizes = ((file, source.files[file]) for file in files if file in source.files)
    edges = (edge_spans(file, 0, size, min(_HEAD, size // _OF_A_FILE)) for file, size in sizes)
    source.expect(span for both in edges for span in both)


def edge_spans(
    file: str, offset: int, nbytes: int, edge: int = EDGE
) -> tuple[tuple[str, int, int], ...]:
    """Return what is read of an archive to open it: both ends, or all of a small one."""
    edge = max(edge, EDGE)
    if nbytes <= 4 * edge:
        return ((file, offset, nbytes),)
    return (file, offset, edge), (file, offset + nbytes - edge, edge)


def find_missing_ranks(present: Collection[int], expected: int) -> list[int]:
    """Return the missing ranks below ``expected``, the first twelve of them."""
    return list(islice((rank for rank in range(expected) if rank not in present), 12))


def require_rank(rank: int, what: str) -> None:
    """Raise Damaged if a rank, or a world size, is out of range."""
    if rank > MOST_RANKS:
        message = f"{what}: rank {rank:,}; ckptool reads up to {MOST_RANKS:,} ranks"
        raise Damaged(message, "rank-missing")
