"""A damaged source as if its files were as long as they say, so that a scan reads all they name.

What is not there is read as zeros, and lies where no file has bytes: whoever reads the tensors from
the files themselves finds out which of them are lost.

The catalog of a damaged checkpoint: what a scan could read, or what data files say alone.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from ckptool.commands.open import Survey, scan_options
from ckptool.commands.options.source import ReadOptions
from ckptool.core.catalog import Catalog
from ckptool.core.rewrite import unstacked
from ckptool.errors import CkptoolError, Damaged, Problem, Unsupported
from ckptool.serialization.archive.read import is_legacy, is_zip, read_torch_file
from ckptool.serialization.archive.recover import Recovered, legacy_counts, recovered
from ckptool.serialization.safetensors import promised_size, read_safetensors
from ckptool.serialization.source import Source
from ckptool.serialization.state_dict.leaves import read_leaves
from ckptool.serialization.zip import DEFLATED, STORED, ZipRecord
from ckptool.storage.local import Files

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_WIDE = struct.Struct("<2H3Q")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_IN_EXTRA = 0xFFFFFFFF


@dataclass(slots=True)
class _Longer:
    """A file of ``size`` bytes; behind those it has lie ``pieces`` by their place, and zeros."""

    size: int
    pieces: dict[int, bytes] = field(default_factory=dict)
    _starts: list[int] = field(default_factory=list)

    def pieces_from(self, offset: int, nbytes: int) -> Iterator[tuple[int, bytes]]:
        """The pieces that may reach into ``nbytes`` from ``offset``, which lie in rising order."""
        if len(self._starts) != len(self.pieces):
            self._starts = list(self.pieces)
        first = max(0, bisect_right(self._starts, offset) - 1)
        for start in islice(self._starts, first, bisect_left(self._starts, offset + nbytes)):
            yield start, self.pieces[start]

    def append(self, piece: bytes) -> None:
        self.pieces[self.size] = piece
        self.size += len(piece)


class MendedSource:
    """A source some files of which are longer than they are."""

    def __init__(self, source: Files, longer: Mapping[str, _Longer]) -> None:
        self._source, self._longer = source, longer
        self.root = source.root
        self.files: Mapping[str, int] = {
            **source.files,
            **{name: one.size for name, one in longer.items()},
        }

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """As the source reads; Damaged behind the end that the file should have."""
        longer = self._longer.get(file)
        if longer is None or offset + nbytes <= self._source.files[file]:
            return self._source.read(file, offset, nbytes)
        if offset < 0 or nbytes < 0 or offset + nbytes > longer.size:
            raise Damaged(f"{file}: {nbytes:,} bytes are expected at {offset:,}")
        return self._joined(file, longer, offset, nbytes)

    def _joined(self, file: str, longer: _Longer, offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        there = max(0, self._source.files[file] - offset)
        data[:there] = self._source.read(file, offset, there) if there else b""
        for start, piece in longer.pieces_from(offset, nbytes):
            low, high = max(start, offset), min(start + len(piece), offset + nbytes)
            if low < high:
                data[low - offset : high - offset] = piece[low - start : high - start]
        return bytes(data)

    def expect(self, spans: Iterable[tuple[str, int, int]]) -> None:
        """Not told: some of them are nowhere."""

    def narrowed(self, folder: str) -> MendedSource:
        """As the source narrows."""
        head = folder + "/"
        inside = {n[len(head) :]: one for n, one in self._longer.items() if n.startswith(head)}
        return MendedSource(self._source.narrowed(folder), inside)


@dataclass(frozen=True, slots=True)
class Mended:
    """A source with its cut files at full length. ``problems`` say what is wrong with them."""

    source: MendedSource
    files: frozenset[str]
    problems: tuple[Problem, ...]


def mended(source: Files) -> Mended | None:
    """The source with every file that can be lengthened; None where there is none."""
    problems: list[Problem] = []
    longer: dict[str, _Longer] = {}
    for file in source.files:
        error = _error(source, file)
        lengthened = _lengthened(source, file) if error is not None else None
        if error is not None and lengthened is not None:
            longer[file] = lengthened
            problems += error.problems
    if not longer:
        return None
    return Mended(MendedSource(source, longer), frozenset(longer), tuple(problems))


def _error(source: Source, file: str) -> CkptoolError | None:
    """What a file that this knows to mend breaks."""
    try:
        if file.endswith(".safetensors"):
            read_safetensors(source, file)
        elif _is_torch(source, file):
            read_leaves(read_torch_file(source, file), source)
    except CkptoolError as error:
        return error
    return None


def _is_torch(source: Source, file: str) -> bool:
    head = source.read(file, 0, min(source.files[file], 64))
    return not file.endswith(".distcp") and (is_zip(head) or is_legacy(head))


def _lengthened(source: Source, file: str) -> _Longer | None:
    try:
        if file.endswith(".safetensors"):
            size = promised_size(source, file)
            return _Longer(size) if size > source.files[file] else None
        if is_legacy(source.read(file, 0, min(source.files[file], 64))):
            return _Longer(*legacy_counts(source, file))
        return _with_directory(source.files[file], recovered(source, file))
    except CkptoolError:
        return None


def _with_directory(size: int, found: Recovered) -> _Longer:
    """An archive with its lost storages, all zeros, and a directory behind what is left of it."""
    longer = _Longer(size)
    records = [*found.records, *_appended(longer, found.lost)]
    start = longer.size
    longer.append(b"".join(map(_central, records)))
    count, nbytes = len(records), longer.size - start
    end = longer.size
    longer.append(
        _END64.pack(b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, nbytes, start)
        + _LOCATOR64.pack(b"PK\x06\x07", 0, end, 1)
        + _END.pack(b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, _IN_EXTRA, _IN_EXTRA, 0)
    )
    return longer


def _appended(longer: _Longer, lost: Mapping[str, int]) -> Iterator[ZipRecord]:
    """Records that are called deflated, so that none has a checksum to be compared by."""
    for name, nbytes in lost.items():
        text, header = name.encode("utf-8", "replace"), longer.size
        longer.append(_LOCAL.pack(b"PK\x03\x04", 0, 0, 0, 0, 0, 0, 0, 0, len(text), 0) + text)
        method = DEFLATED if nbytes else STORED
        yield ZipRecord(name, method, 0, nbytes, nbytes, longer.size, header, 0)
        longer.size += nbytes


def _central(record: ZipRecord) -> bytes:
    text = record.name.encode("utf-8", "replace")
    wide = _WIDE.pack(1, 24, record.size, record.stored, record.header)
    sizes = (record.crc32, _IN_EXTRA, _IN_EXTRA, len(text), len(wide))
    fields = (0, 0, record.flags, record.method, 0, 0, *sizes, 0, 0, 0, 0, _IN_EXTRA)
    return _CENTRAL.pack(b"PK\x01\x02", *fields) + text + wide


_METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What is left to work with. ``unknown`` says what no file tells any more."""

    catalog: Catalog
    problems: tuple[Problem, ...]
    unknown: tuple[str, ...] = ()


def rebuild(found: Survey, options: ReadOptions) -> Rebuilt:
    """The catalog of what was surveyed, cut files included.

    Where that is none: from the data files alone, where the format can. Raises Unsupported
    where nothing can be read.
    """
    longer = mended(found.source)
    again = _scanned_again(found, longer, options) if longer is not None else None
    if again is not None:
        return again
    if found.catalog is not None:
        unknown = (*_unrecorded(found.catalog), *_unseen(found, found.problems))
        return Rebuilt(found.catalog, found.problems, unknown)
    if found.format.recover is not None:
        recovery = found.format.recover(found.source)
        unknown = (*recovery.unknown, *_unrecorded(recovery.catalog))
        return Rebuilt(recovery.catalog, (*found.problems, *recovery.problems), unknown)
    raise Unsupported(
        f"{found.path}: nothing can be read: {found.problems[0]}",
        hint=f"run: ckptool verify {found.path}",
    )


def _scanned_again(found: Survey, longer: Mended, options: ReadOptions) -> Rebuilt | None:
    """With the files that were cut as long as they should be; what is lost shows when read."""
    problems: list[Problem] = []
    asked = scan_options(options, found.format, problems)
    try:
        catalog = found.format.scan(longer.source, asked)
    except CkptoolError:
        return None
    catalog = unstacked(catalog) if options.split_stacked else catalog
    files = {name: found.source.files[name] for name in catalog.files}
    catalog = replace(catalog, files=files)
    unknown = (*_unrecorded(catalog), *_unseen(found, problems))
    return Rebuilt(catalog, (*longer.problems, *problems), unknown)


def _unrecorded(catalog: Catalog) -> tuple[str, ...]:
    notes = [note for note in catalog.notes if isinstance(note, Problem)]
    return tuple(str(note) for note in notes if note.code == "world-size-unrecorded")


def _unseen(found: Survey, problems: Iterable[Problem]) -> tuple[str, ...]:
    """What may have lain in files that cannot be read, where those files alone said so."""
    if found.format.name == "dcp" and _METADATA in found.source.files:
        return ()
    files = dict.fromkeys(one.file for one in problems if one.file and not one.tensor)
    return tuple(f"what only {file} contained" for file in files)
