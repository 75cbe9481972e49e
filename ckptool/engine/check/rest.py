"""What of an output is no tensor: headers, values, indexes and copied files, as they were made."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptool.core.layout import FileLayout, Literal, Part, Verbatim
from ckptool.engine.read.tiles import ByteReader
from ckptool.engine.write.run import read_verbatim
from ckptool.storage.local import Files, LocalSource


def differing_rest(files: Iterable[FileLayout], source: Files, folder: Path) -> str | None:
    """Return where a file below ``folder`` is first not as it was laid out; None where all are.

    That is its length, and all bytes but those of tensors and the checksums of these, which whoever
    reads them compares. Raises what reading a file of the source does that is copied.
    """
    reader = ByteReader(LocalSource(folder, {}))
    try:
        for file in files:
            nbytes = os.stat(folder / file.path).st_size
            if nbytes != file.nbytes:
                return f"{file.path} has {nbytes:,} bytes, not {file.nbytes:,}"
            for start, expected in _expected(file, source):
                length = len(expected)
                if reader.read(file.path, start, length) != expected:
                    return f"{file.path}: bytes {start:,} to {start + length:,} are not as made"
    finally:
        reader.close()
    return None


def _expected(file: FileLayout, source: Files) -> Iterator[tuple[int, memoryview]]:
    """Yield the bytes of a file that are no tensor's, a tile at most, each with its offset."""
    offset = 0
    for part in file.parts:
        start = offset
        for skip, data in _contents(part, source):
            for at in range(0, len(data), source.tile):
                piece = data[at : at + source.tile]
                yield start + skip + at, piece
        offset += part.nbytes


def _contents(part: Part, source: Files) -> Iterator[tuple[int, memoryview]]:
    """Yield what is known of a part, each run of bytes with its offset in the part."""
    if isinstance(part, Literal):
        data, at = memoryview(part.data), 0
        for patch in sorted(part.patches):
            yield at, data[at : patch.at]
            at = patch.at + 4
        yield at, data[at:]
    elif isinstance(part, Verbatim):
        at = 0
        for piece in read_verbatim(part, source):
            yield at, piece
            at += len(piece)
