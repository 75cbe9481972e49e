"""The files in a tar archive, read in place: nothing is unpacked.

``tarfile`` reads the headers, as it does for NeMo. It takes what is no header for the end, and
allows links and names outside the folder: that is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptool.errors import Damaged, Problem
from ckptool.storage.file_status import by_folder, within_folder
from ckptool.storage.files import FileReader, Files, ReadSpan, read_exactly, too_short

if TYPE_CHECKING:
    from tarfile import TarInfo

BLOCK = 512
MAGIC_AT = 257
MAGIC = b"ustar"
_REGULAR = (b"0", b"\0", b"7")
_KINDS = {b"1": "a hard link", b"2": "a symbolic link", b"S": "a sparse file"}
_LONGEST = 1 << 16
"""Bytes of a name or of pax records before a member: paths have up to 4,096."""
_MOST = 1 << 18
"""Members of an archive that are listed."""


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


class _Headers:
    """An archive as tarfile reads it: the headers, and the little that comes before some."""

    def __init__(self, reader: FileReader, archive: str, size: int) -> None:
        self._reader = reader
        self._archive = archive
        self._size = size
        self._at = 0

    def tell(self) -> int:
        """Return the offset of the next read."""
        return self._at

    def seek(self, offset: int) -> None:
        """Read from an offset on."""
        self._at = offset

    def read(self, nbytes: int) -> bytes:
        """Return the next bytes. Raises Damaged if they are not there, or too many."""
        if nbytes > _LONGEST:
            raise _refused(self._archive, self._at, f"{nbytes:,} bytes before a member")
        if self._at + nbytes > self._size:
            raise _cut(self._archive, self._at + nbytes, self._size)
        data = bytearray(nbytes)
        self._reader.read_into(self._archive, self._at, memoryview(data))
        self._at += nbytes
        return bytes(data)


def _list_members(holder: Files, archive: str) -> dict[str, Span]:
    """Return the place of each regular file; Damaged for any that cannot be read in place."""
    import tarfile

    spans: dict[str, Span] = {}
    size = holder.files[archive]
    with closing(holder.reader()) as reader:
        headers: Any = _Headers(reader, archive, size)
        try:
            tar: Any = tarfile.TarFile(fileobj=headers, encoding="utf-8")
            for _ in range(_MOST):
                if (member := tar.next()) is None:
                    break
                tar.members.clear()
                _add(archive, member, spans, size)
        except (tarfile.TarError, ArithmeticError, LookupError, ValueError) as error:
            raise _refused(archive, headers.tell(), f"no header of a member: {error}") from None
        headers.seek(tar.offset)
        if any(headers.read(BLOCK)):  # tarfile takes it for the end
            raise _refused(archive, tar.offset, "no header of a member: it was changed")
    return spans


def _add(archive: str, member: TarInfo, spans: dict[str, Span], size: int) -> None:
    """Add a member to ``spans``. Raises Damaged if it cannot be read in place."""
    parts = [part for part in member.name.split("/") if part not in ("", ".")]
    name = "/".join(parts)
    shown = ascii(member.name[:200])
    if member.name.startswith("/") or ".." in parts or not name.isprintable():
        message = f"{archive}: the tar archive has a member {shown}, outside the folder"
        raise Damaged(message, "path-outside", file=archive)
    if member.size < 0:
        raise _refused(archive, member.offset, f"{shown}, of a negative size")
    if member.isdir():
        return
    if member.issparse() or member.type not in _REGULAR:
        kind = b"S" if member.issparse() else member.type
        what = _KINDS.get(kind, f"a member of type {kind!r}")
        raise _refused(archive, member.offset, f"{shown}, {what}")
    if not name or name in spans:
        what = f"{shown}, a second one of this name" if name else "no name"
        raise _refused(archive, member.offset, what)
    if member.offset_data + member.size > size:
        raise _cut(archive, member.offset_data + member.size, size)
    spans[name] = Span(member.offset_data, member.size)


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
