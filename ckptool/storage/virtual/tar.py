"""The files in a tar archive, read in place: nothing is unpacked.

Supports the three dialects that Python's ``tarfile`` and GNU tar write: ustar, pax (long names and
sizes from 8 GiB in records before a member) and GNU's (long names before, sizes in base 256).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

from ckptool.errors import Damaged, Problem
from ckptool.storage.file_status import by_folder, within_folder
from ckptool.storage.files import FileReader, Files, ReadSpan, read_exactly, too_short

BLOCK = 512
MAGIC_AT = 257
MAGIC = b"ustar"
_REGULAR = (b"0", b"\0", b"7")
_FOLDER = b"5"
_PAX, _PAX_OF_ALL = b"x", b"g"
_LONG_NAME, _LONG_LINK = b"L", b"K"
_KINDS = {b"1": "a hard link", b"2": "a symbolic link", b"S": "a sparse file"}
_LONGEST = 1 << 16
"""Bytes of a name or of pax records before a member: paths have up to 4,096."""
_MOST = 1 << 18
"""Headers of an archive that are read."""
_PAX_RECORD = re.compile(rb"([1-9][0-9]{0,5}) ([^=\n]{1,256})=")


class Span(NamedTuple):
    """The place of a member's bytes in the archive."""

    offset: int
    nbytes: int


def is_tar(source: Files, file: str) -> bool:
    """Return whether a file begins as an uncompressed tar archive."""
    end = MAGIC_AT + len(MAGIC)
    return source.files[file] >= end and source.read(file, MAGIC_AT, len(MAGIC)) == MAGIC


class TarFiles:
    """The files in a tar archive, or those below a folder in it, readable at any offset.

    ``root`` is the archive's path and the folder in it; ``archive`` is a file of ``holder``.
    """

    def __init__(self, root: str, holder: Files, archive: str, spans: Mapping[str, Span]) -> None:
        self.root = root
        self.files: Mapping[str, int] = {name: span.nbytes for name, span in spans.items()}
        self.unlisted: Mapping[str, Problem] = {}
        self.policy = holder.policy
        self._holder = holder
        self._archive = archive
        self._spans = spans

    @classmethod
    def of(cls, holder: Files, archive: str) -> TarFiles:
        """List the members of an archive. Raises Damaged if one cannot be read in place."""
        spans = _list_members(holder, archive)
        return cls(f"{holder.root}/{archive}", holder, archive, spans)

    def narrowed(self, folder: str) -> TarFiles:
        """Return the part below a subfolder, as a source of its own."""
        return self._part(f"{self.root}/{folder}", within_folder(self._spans, folder))

    def subfolders(self) -> dict[str, TarFiles]:
        """Return every folder below, at any depth, as a source of its own."""
        grouped = by_folder(self._spans).items()
        return {folder: self._part(f"{self.root}/{folder}", below) for folder, below in grouped}

    def alone(self, name: str) -> TarFiles:
        """Return one of the files alone."""
        folder, _, last = name.rpartition("/")
        root = f"{self.root}/{folder}" if folder else self.root
        return self._part(root, {last: self._spans[name]})

    def fingerprint(self, files: Iterable[str], *, exact: bool = False) -> str:
        """Return a SHA-256 (hex) that changes with the archive."""
        return self._holder.fingerprint([self._archive], exact=exact)

    def changed(self, files: Iterable[str]) -> list[str]:
        """Return all of the files if the archive was written, replaced or removed."""
        names = list(files)
        return names if names and self._holder.changed([self._archive]) else []

    def modified(self, file: str) -> float:
        """Return when the archive was last modified, in seconds since the epoch; 0 if unknown."""
        return self._holder.modified(self._archive)

    def expect(self, spans: Iterable[tuple[str, int, int]]) -> None:
        """Prepare for the next reads: file, offset and bytes of each."""
        self._holder.expect(map(self._place, spans))

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """Return exactly ``nbytes`` at ``offset``; Damaged if the file ends before."""
        return read_exactly(self, file, offset, nbytes)

    def plan_reads(self, runs: Iterable[ReadSpan]) -> Callable[[], None]:
        """Prepare for all next reads, in order."""
        return self._holder.plan_reads(map(self._place, runs))

    def keep(self, nbytes: int) -> None:
        """Keep at most so many bytes of what was read, or fetched ahead."""
        self._holder.keep(nbytes)

    def reader(self) -> TarReader:
        """Return a reader for one thread."""
        return TarReader(self._holder.reader(), self._archive, self._spans)

    def _part(self, root: str, spans: Mapping[str, Span]) -> TarFiles:
        return TarFiles(root, self._holder, self._archive, spans)

    def _place(self, run: ReadSpan) -> ReadSpan:
        file, offset, nbytes = run
        return self._archive, self._spans[file].offset + offset, nbytes


class TarReader:
    """Positioned reads of an archive's members for one thread, never past a member's end."""

    def __init__(self, reader: FileReader, archive: str, spans: Mapping[str, Span]) -> None:
        self._reader = reader
        self._archive = archive
        self._spans = spans

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``; Damaged if the file ends before."""
        start = self._start(file, offset, buffer.nbytes)
        self._reader.read_into(self._archive, start, buffer)

    def read_runs(self, file: str, offset: int, step: int, runs: Sequence[memoryview]) -> None:
        """Fill each run, the first from ``offset``, each other ``step`` bytes after the last."""
        if runs:
            start = self._start(file, offset, step * (len(runs) - 1) + runs[-1].nbytes)
            self._reader.read_runs(self._archive, start, step, runs)

    def close(self) -> None:
        """Release all resources."""
        self._reader.close()

    def _start(self, file: str, offset: int, nbytes: int) -> int:
        span = self._spans[file]
        if offset < 0 or offset + nbytes > span.nbytes:
            raise too_short(file, offset, nbytes, span.nbytes)
        return span.offset + offset


class _Header(NamedTuple):
    """The block before a member. ``at`` is the offset of its data."""

    kind: bytes
    name: str
    nbytes: int
    at: int


def _list_members(holder: Files, archive: str) -> dict[str, Span]:
    """Return the place of each regular file; Damaged for any that cannot be read in place."""
    spans: dict[str, Span] = {}
    for_all: dict[str, str] = {}
    own: dict[str, str] = {}
    size, at = holder.files[archive], 0
    with closing(holder.reader()) as reader:

        def read(offset: int, nbytes: int) -> bytes:
            if offset + nbytes > size:
                raise _cut(archive, offset + nbytes, size)
            data = bytearray(nbytes)
            reader.read_into(archive, offset, memoryview(data))
            return bytes(data)

        for _ in range(_MOST):
            block = read(at, BLOCK)
            if not any(block) and not own:
                return spans
            header = _parse_header(archive, block, at)
            if header.kind in (_PAX, _PAX_OF_ALL, _LONG_NAME, _LONG_LINK):
                if header.nbytes > _LONGEST:
                    raise _refused(archive, at, f"{header.nbytes:,} bytes before a member")
                data = read(header.at, header.nbytes)
                known = for_all if header.kind == _PAX_OF_ALL else own
                _note(archive, at, header.kind, data, known)
            else:
                said, own = for_all | own, {}
                header = _amend(archive, at, header, said)
                _add(archive, at, header, spans, size)
            at = header.at + -(-header.nbytes // BLOCK) * BLOCK
    raise _refused(archive, at, f"more than {_MOST:,} members")


def _parse_header(archive: str, block: bytes, at: int) -> _Header:
    """Parse a block of POSIX.1-1988 (ustar), or of GNU tar. Raises Damaged."""
    checksum = sum(block[:148]) + sum(block[156:]) + 8 * ord(" ")
    if block[MAGIC_AT : MAGIC_AT + len(MAGIC)] != MAGIC or _number(block[148:156]) != checksum:
        raise _refused(archive, at, "no header of a member, or one that was changed")
    nbytes = _number(block[124:136])
    if nbytes is None:
        raise _refused(archive, at, f"a size that is no number: {block[124:136]!r}")
    kind, name = block[156:157], _text(block[:100])
    if block[262:263] == b"\0" and block[345]:  # of POSIX; GNU has times there
        name = f"{_text(block[345:500])}/{name}"
    return _Header(kind, name, nbytes, at + BLOCK)


def _number(field: bytes) -> int | None:
    """Return a number in octal digits, or in base 256 after a byte of 0x80; else None."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:])
    digits = field.strip(b" \0")
    return int(digits, 8) if re.fullmatch(b"[0-7]+", digits) else None


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _note(archive: str, at: int, kind: bytes, data: bytes, known: dict[str, str]) -> None:
    """Add the records before a member to what is known of it. Raises Damaged."""
    if kind == _LONG_LINK:
        return  # the link itself is refused
    found = {"path": _text(data)} if kind == _LONG_NAME else _pax_records(archive, at, data)
    if kind != _PAX_OF_ALL and not known.keys().isdisjoint(found):
        raise _refused(archive, at, "two names or sizes for one member")
    known |= found


def _pax_records(archive: str, at: int, data: bytes) -> dict[str, str]:
    """Return the POSIX.1-2001 (pax) records that determine a member's bytes, or its name."""
    found: dict[str, str] = {}
    start = 0
    while start < len(data):
        match = _PAX_RECORD.match(data, start)
        end = start + int(match[1]) if match else 0
        if match is None or end <= match.end() or data[end - 1 : end] != b"\n":
            raise _refused(archive, at, "records before a member that are none of pax")
        key = match[2].decode("utf-8", "replace")
        if key in ("path", "size") or key.startswith("GNU.sparse."):
            found[key] = data[match.end() : end - 1].decode("utf-8", "surrogateescape")
        start = end
    return found


def _amend(archive: str, at: int, header: _Header, said: Mapping[str, str]) -> _Header:
    """Return a header with the name and size in bytes from earlier records; a folder's is 0."""
    if any(key.startswith("GNU.sparse.") for key in said):
        raise _refused(archive, at, "a sparse file")
    if "size" in said:
        if re.fullmatch("[0-9]{1,18}", said["size"]) is None:
            raise _refused(archive, at, f"a size that is no number: {said['size'][:40]!r}")
        header = header._replace(nbytes=int(said["size"]))
    header = header._replace(name=said.get("path", header.name))
    if header.kind == b"\0" and header.name.endswith("/"):  # before POSIX.1-1988
        header = header._replace(kind=_FOLDER)
    return header._replace(nbytes=0) if header.kind == _FOLDER else header


def _add(archive: str, at: int, header: _Header, spans: dict[str, Span], size: int) -> None:
    """Add a member to ``spans``. Raises Damaged if it cannot be read in place."""
    parts = [part for part in header.name.split("/") if part not in ("", ".")]
    name = "/".join(parts)
    shown = ascii(header.name[:200])
    if header.name.startswith("/") or ".." in parts or not name.isprintable():
        message = f"{archive}: the tar archive has a member {shown}, outside the folder"
        raise Damaged(message, "path-outside", file=archive)
    if header.kind == _FOLDER:
        return
    if header.kind not in _REGULAR:
        what = _KINDS.get(header.kind, f"a member of type {header.kind!r}")
        raise _refused(archive, at, f"{shown}, {what}")
    if not name or name in spans:
        raise _refused(archive, at, f"{shown}, a second one of this name" if name else "no name")
    if header.at + header.nbytes > size:
        raise _cut(archive, header.at + header.nbytes, size)
    spans[name] = Span(header.at, header.nbytes)


def _cut(archive: str, end: int, size: int) -> Damaged:
    message = (
        f"{archive}: the tar archive goes on to offset {end:,} at least, but the file has"
        f" {size:,} bytes; it is truncated"
    )
    return Damaged(message, "file-truncated", file=archive, end=end)


def _refused(archive: str, at: int, what: str) -> Damaged:
    message = f"{archive}: the tar archive has at offset {at:,}: {what}"
    hint = f"tar -tvf {archive} lists it; only plain files of one name each are read in place"
    return Damaged(Problem(message, "tar-structure", file=archive), hint=hint)
