"""The files in a tar archive, read in place: nothing is unpacked.

``tarfile`` reads the headers, as it does for NeMo. It takes what is no header for the end, and
allows links and names outside the folder: that is refused here.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

from ckptool.errors import Damaged, Problem
from ckptool.storage.files import FileReader, Files
from ckptool.storage.virtual.placed import Place, PlacedFiles

if TYPE_CHECKING:
    from tarfile import TarInfo

BLOCK = 512
MAGIC_AT = 257
MAGIC = b"ustar"
_REGULAR = (b"0", b"\0", b"7")
_KINDS = {b"1": "a hard link", b"2": "a symbolic link", b"S": "a sparse file"}
_LONGEST = 1 << 16
"""Bytes of headers, names and pax records before a member: paths have up to 4,096."""
_MOST = 1 << 18
"""Members of an archive that are listed."""


def is_tar(source: Files, file: str) -> bool:
    """Return whether a file begins as an uncompressed tar archive."""
    end = MAGIC_AT + len(MAGIC)
    return source.files[file] >= end and source.read(file, MAGIC_AT, len(MAGIC)) == MAGIC


class _Headers:
    """An archive as tarfile reads it: the headers, and the little that comes before some.

    It follows headers that only say something of the next one by a call within each call.
    """

    def __init__(self, reader: FileReader, archive: str, size: int) -> None:
        self._reader = reader
        self._archive = archive
        self._size = size
        self._at = 0
        self._budget = _LONGEST

    def begin_member(self) -> None:
        """Allow as many bytes as may come before a member."""
        self._budget = _LONGEST

    def tell(self) -> int:
        """Return the offset of the next read."""
        return self._at

    def seek(self, offset: int) -> None:
        """Read from an offset on."""
        self._at = offset

    def read(self, nbytes: int) -> bytes:
        """Return the next bytes. Raises Damaged if they are not there, or too many."""
        self._budget -= nbytes
        if self._budget < 0:
            what = f"more than {_LONGEST:,} bytes before a member"
            raise _refuse(self._archive, self._at, what)
        if self._at + nbytes > self._size:
            raise _cut(self._archive, self._at + nbytes, self._size)
        data = bytearray(nbytes)
        self._reader.read_into(self._archive, self._at, memoryview(data))
        self._at += nbytes
        return bytes(data)


def tar_members(holder: Files, archive: str) -> PlacedFiles:
    """Return the files in an archive. Raises Damaged if one cannot be read in place."""
    import tarfile

    places: dict[str, Place] = {}
    size = holder.files[archive]
    with closing(holder.reader()) as reader:
        headers: Any = _Headers(reader, archive, size)
        try:
            tar: Any = tarfile.TarFile(fileobj=headers, encoding="utf-8")
            for _ in range(_MOST):
                headers.begin_member()
                if (member := tar.next()) is None:
                    break
                tar.members.clear()
                place = Place(holder, archive, member.offset_data, member.size)
                _add(member, place, places, size)
        except (tarfile.TarError, ArithmeticError, LookupError, ValueError) as error:
            raise _refuse(archive, headers.tell(), f"no header of a member: {error}") from None
        headers.seek(tar.offset)
        if any(headers.read(BLOCK)):  # tarfile takes it for the end
            raise _refuse(archive, tar.offset, "no header of a member: it was changed")
    return PlacedFiles(f"{holder.root}/{archive}", places)


def _add(member: TarInfo, place: Place, places: dict[str, Place], size: int) -> None:
    """Add a member to ``places``. Raises Damaged if it cannot be read in place."""
    archive = place.name
    parts = [part for part in member.name.split("/") if part not in ("", ".")]
    name = "/".join(parts)
    shown = ascii(member.name[:200])
    if member.name.startswith("/") or ".." in parts or not name.isprintable():
        message = f"{archive}: the tar archive has a member {shown}, outside the folder"
        raise Damaged(message, "path-outside", file=archive)
    if member.size < 0:
        raise _refuse(archive, member.offset, f"{shown}, of a negative size")
    if member.isdir():
        return
    if member.issparse() or member.type not in _REGULAR:
        kind = b"S" if member.issparse() else member.type
        what = _KINDS.get(kind, f"a member of type {kind!r}")
        raise _refuse(archive, member.offset, f"{shown}, {what}")
    if not name or name in places:
        what = f"{shown}, a second one of this name" if name else "no name"
        raise _refuse(archive, member.offset, what)
    if place.offset + place.nbytes > size:
        raise _cut(archive, place.offset + place.nbytes, size)
    places[name] = place


def _cut(archive: str, end: int, size: int) -> Damaged:
    message = (
        f"{archive}: the tar archive goes on to offset {end:,} at least, but the file has"
        f" {size:,} bytes; it is truncated"
    )
    return Damaged(message, "file-truncated", file=archive, end=end)


def _refuse(archive: str, at: int, what: str) -> Damaged:
    message = f"{archive}: the tar archive has at offset {at:,}: {what}"
    hint = f"tar -tvf {archive} lists it; only plain files of one name each are read in place"
    return Damaged(Problem(message, "tar-structure", file=archive), hint=hint)
