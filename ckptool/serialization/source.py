"""The place of a checkpoint, and reads of it that every format makes."""

from __future__ import annotations

import json
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby, islice, pairwise
from typing import Any, Protocol

from ckptool.core.catalog import Container
from ckptool.errors import Damaged, Denied, NotFound, Problem
from ckptool.serialization.file_kinds import HEAD, detect_placeholder

LARGEST = 1 << 29
"""Bytes of the largest pickle that is read."""
LARGEST_IN_ROWS = 1 << 32
"""Bytes of the largest one of which all but ``LARGEST`` are rows that become columns."""


_BYTE_ORDER_MARKS = (BOM_UTF8, BOM_UTF16_LE, BOM_UTF16_BE)


class SpanReader(Protocol):
    """Reads many spans; files may stay open until it is closed."""

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``; Damaged if the file ends before."""

    def close(self) -> None:
        """Close all files."""


_PIECE = 1 << 22
_AHEAD, _MOST_AHEAD = 512, 1 << 18
"""Bytes that are read at once, at least; doubled each time the next are near, up to the most."""
_NEAR = 1 << 12


class Source(Protocol):
    """A folder of files, or one file, that can be read at any offset."""

    @property
    def root(self) -> str:
        """Return the folder, as the user would name it."""

    @property
    def files(self) -> Mapping[str, int]:
        """Return the size in bytes of each file below the root, by its relative path with ``/``."""

    @property
    def unlisted(self) -> Mapping[str, Problem]:
        """Return why other files and folders below are missing in ``files``, by path."""

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """Return exactly ``nbytes`` bytes at ``offset``; Damaged if the file ends before."""

    def reader(self) -> SpanReader:
        """Return a reader of many spans."""

    def narrowed(self, folder: str) -> Source:
        """Return the part below a subfolder, as a source of its own."""

    def expect(self, spans: Iterable[tuple[str, int, int]]) -> None:
        """Announce the next reads: file, offset and bytes. A store fetches them ahead."""


class NearReads:
    """Small reads of one thread: those near one another are from a block that is read at once."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._file, self._start, self._block = "", 0, b""

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """Return exactly ``nbytes`` bytes at ``offset``; Damaged if the file ends before."""
        at, length = offset - self._start, len(self._block)
        is_near = file == self._file and 0 <= at <= length + _NEAR
        if not is_near or at + nbytes > length:
            ahead = min(2 * length, _MOST_AHEAD) if is_near else 0
            rest = self.source.files.get(file, 0) - offset
            self._block = self.source.read(file, offset, max(nbytes, min(max(ahead, _AHEAD), rest)))
            self._file, self._start, at = file, offset, 0
        return self._block[at : at + nbytes]


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


def is_there(source: Source, file: str) -> bool:
    """Return whether a file is there, False only if it is known that nothing is.

    Raises NotFound if what is there is no file, or cannot be examined; Denied, an OSError, if a
    store does not say.
    """
    if file in source.files:
        return True
    why = source.unlisted.get(file)
    if why is None:
        return False
    if why.code == Denied.code:
        hint = "ask for permission to read and to list the folder, or copy it"
        raise Denied(f"{file}: nothing says whether it is there: {why}", hint)
    raise NotFound(Problem(f"{file}: {why}", why.code, file=file))


def parse_json_object(data: bytes, file: str) -> dict[str, Any]:
    """Return the JSON object of a file; Damaged for anything but one in UTF-8 without a mark.

    transformers and diffusers read no other text.
    """
    if data.startswith(_BYTE_ORDER_MARKS):
        hint = f"iconv or an editor writes {file} again as UTF-8 without it"
        message = f"{file}: not a JSON object: begins with a byte-order mark"
        raise Damaged(message, "metadata-unreadable", file=file, hint=hint)
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        message = f"{file}: not a JSON object: {error}"
        raise Damaged(message, "metadata-unreadable", file=file) from None
    if not isinstance(content, dict):
        message = f"{file}: not a JSON object"
        raise Damaged(message, "metadata-unreadable", file=file)
    return content


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


def expect_items(source: Source, items: Iterable[Container]) -> None:
    """Announce that items, small archives in files, are opened next: both ends of each are read."""
    source.expect(span for at in items for span in edge_spans(at.file, at.offset, at.nbytes))


def expect_archives(source: Source, files: Iterable[str]) -> None:
    """Announce that both ends of these files, with their directories, are read next."""
    sizes = ((file, source.files[file]) for file in files if file in source.files)
    edges = (edge_spans(file, 0, size, min(_HEAD, size // _OF_A_FILE)) for file, size in sizes)
    source.expect(span for ends in edges for span in ends)


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


def missing_files(first: str, present: Collection[int], expected: int) -> str | None:
    """Return a sentence on the ranks without a file like the first; None if each has one."""
    missing = find_missing_ranks(present, expected)
    more = expected - sum(rank < expected for rank in present) - len(missing)
    ranks = ", ".join(map(str, missing)) + f" and {more:,} more" * bool(more)
    what = f"{first} and its like: the file of rank {ranks} of {expected} is missing"
    return what if missing else None


def are_of_a_node(ranks: Sequence[int]) -> bool:
    """Return whether ranks are all that one node may have: dealt out one by one, or in blocks.

    Then blocks are of one length, at one distance, and those of other nodes fill what is between.
    """
    numbered = groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    blocks = [[rank for _, rank in block] for _, block in numbered]
    lengths = {len(block) for block in blocks}
    distances = {right[0] - left[0] for left, right in pairwise(blocks)}
    is_even = len(lengths) < 2 and len(distances) < 2
    return is_even and all(distance % length == 0 for distance in distances for length in lengths)


def require_rank(rank: int, what: str) -> None:
    """Raise Damaged if a rank, or a world size, is out of range."""
    if rank > MOST_RANKS:
        message = f"{what}: rank {rank:,}; ckptool reads up to {MOST_RANKS:,} ranks"
        raise Damaged(message, "rank-missing")


def file_digest(source: Source, file: str, algorithm: str, head: bytes = b"") -> str:
    """Return the digest (hex) of ``head`` and a whole file, of any algorithm of hashlib."""
    import hashlib

    size = source.files[file]
    total = hashlib.new(algorithm, head, usedforsecurity=False)
    for start in range(0, size, _PIECE):
        total.update(source.read(file, start, min(_PIECE, size - start)))
    return total.hexdigest()
