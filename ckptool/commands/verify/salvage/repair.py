"""The catalog of a damaged checkpoint: with truncated files padded, or from data files alone.

A truncated file is scanned as if it had its stated length, with zeros for the lost bytes. Reading
the tensors from the real files later shows which of them are lost.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.commands.open import Survey, scan_options
from ckptool.commands.options.read import ReadOptions
from ckptool.core.catalog import Catalog
from ckptool.core.selection import split_stacked
from ckptool.errors import CkptoolError, Damaged, Problem, Refusal, Unsupported, refused
from ckptool.formats import file_rule
from ckptool.formats.base import FileRole, Recovery
from ckptool.serialization.archive.read import is_legacy, is_zip
from ckptool.serialization.archive.recover import Recovered, read_legacy_counts, recover_records
from ckptool.serialization.archive.write import end_records
from ckptool.serialization.safetensors import read_promised_size, read_safetensors
from ckptool.serialization.source import Source
from ckptool.serialization.state_dict.leaves import read_file_leaves
from ckptool.serialization.zip import CENTRAL, DEFLATED, IN_EXTRA, LOCAL, STORED, ZipRecord
from ckptool.storage.file_status import within_folder
from ckptool.storage.files import Files

_WIDE = struct.Struct("<2H3Q")


class _PaddedFile(Struct):
    """A file padded to ``size`` bytes; beyond its own bytes are ``pieces`` by place, and zeros."""

    size: int
    pieces: dict[int, bytes] = field(default_factory=dict)
    _starts: list[int] = field(default_factory=list)

    def pieces_from(self, offset: int, nbytes: int) -> Iterator[tuple[int, bytes]]:
        """Yield the pieces that may reach into ``nbytes`` from ``offset``, in ascending order."""
        if len(self._starts) != len(self.pieces):
            self._starts = list(self.pieces)
        first = max(0, bisect_right(self._starts, offset) - 1)
        for start in islice(self._starts, first, bisect_left(self._starts, offset + nbytes)):
            yield start, self.pieces[start]

    def append(self, piece: bytes) -> None:
        self.pieces[self.size] = piece
        self.size += len(piece)


class ZeroPaddedSource:
    """A source with some files padded to the length that they should have."""

    def __init__(self, source: Files, padded: Mapping[str, _PaddedFile]) -> None:
        self._source, self._padded = source, padded
        self.root = source.root
        self.unlisted = source.unlisted
        sizes = {name: file.size for name, file in padded.items()}
        self.files: Mapping[str, int] = {**source.files, **sizes}

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """Read as the source does. Raises Damaged beyond the padded end."""
        padded = self._padded.get(file)
        if padded is None or offset + nbytes <= self._source.files[file]:
            return self._source.read(file, offset, nbytes)
        if offset < 0 or nbytes < 0 or offset + nbytes > padded.size:
            raise Damaged(f"{file}: {nbytes:,} bytes are expected at {offset:,}")
        data = bytearray(nbytes)
        stored = max(0, self._source.files[file] - offset)
        data[:stored] = self._source.read(file, offset, stored) if stored else b""
        for start, piece in padded.pieces_from(offset, nbytes):
            low, high = max(start, offset), min(start + len(piece), offset + nbytes)
            if low < high:
                data[low - offset : high - offset] = piece[low - start : high - start]
        return bytes(data)

    def expect(self, spans: Iterable[tuple[str, int, int]]) -> None:
        """Do nothing: some of the spans are in no file."""

    def reader(self) -> ZeroPaddedSource:
        """Return itself, which keeps no file open."""
        return self

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``; Damaged beyond the padded end."""
        buffer[:] = self.read(file, offset, len(buffer))

    def close(self) -> None:
        """Do nothing."""

    def narrowed(self, folder: str) -> ZeroPaddedSource:
        """Return the source narrowed to a folder."""
        inside = within_folder(self._padded, folder)
        return ZeroPaddedSource(self._source.narrowed(folder), inside)


def pad_cut_files(source: Files) -> tuple[ZeroPaddedSource | None, list[Problem]]:
    """Return the source with truncated files padded, None if there are none; and the problems."""
    problems: list[Problem] = []
    padded: dict[str, _PaddedFile] = {}
    for name in source.files:
        error = _error(source, name)
        file = _pad(source, name) if error is not None else None
        if error is not None and file is not None:
            padded[name] = file
            problems += error.problems
    return (ZeroPaddedSource(source, padded) if padded else None), problems


def _error(source: Source, file: str) -> CkptoolError | None:
    """Return the problem of a safetensors or torch.save file, None if there is none."""
    try:
        if file.endswith(".safetensors"):
            read_safetensors(source, file)
        elif _is_torch(source, file):
            leaves = read_file_leaves(source, file).values()
            refusals = [leaf.value for leaf in leaves if isinstance(leaf.value, Refusal)]
            return refused(refusals, subject=file) if refusals else None
    except CkptoolError as error:
        return error
    return None


def _is_torch(source: Source, file: str) -> bool:
    rule = file_rule(None, file)
    if rule is not None and rule.role is FileRole.ITEMS:
        return False
    head = source.read(file, 0, min(source.files[file], 64))
    return is_zip(head) or is_legacy(head)


def _pad(source: Source, file: str) -> _PaddedFile | None:
    """Return a file padded to the length that it should have, None if that is unknown."""
    try:
        if file.endswith(".safetensors"):
            size = read_promised_size(source, file)
            return _PaddedFile(size) if size > source.files[file] else None
        if is_legacy(source.read(file, 0, min(source.files[file], 64))):
            return _PaddedFile(*read_legacy_counts(source, file))
        return _with_directory(source.files[file], recover_records(source, file))
    except CkptoolError:
        return None


def _with_directory(size: int, archive: Recovered) -> _PaddedFile:
    """Return an archive with lost storages, all zeros, and a directory after what is left."""
    padded = _PaddedFile(size)
    records = [*archive.records, *_append_records(padded, archive.lost)]
    start = padded.size
    padded.append(b"".join(map(_central, records)))
    padded.append(end_records(len(records), padded.size - start, start))
    return padded


def _append_records(padded: _PaddedFile, sizes: Mapping[str, int]) -> Iterator[ZipRecord]:
    """Yield records that are marked deflated, so that no checksum of them is compared."""
    for name, nbytes in sizes.items():
        text, header = name.encode("utf-8", "replace"), padded.size
        padded.append(LOCAL.pack(b"PK\x03\x04", 0, 0, 0, 0, 0, 0, 0, 0, len(text), 0) + text)
        method = DEFLATED if nbytes else STORED
        yield ZipRecord(name, method, 0, nbytes, nbytes, padded.size, header, 0)
        padded.size += nbytes


def _central(record: ZipRecord) -> bytes:
    text = record.name.encode("utf-8", "replace")
    wide = _WIDE.pack(1, 24, record.size, record.stored, record.header)
    sizes = (record.crc32, IN_EXTRA, IN_EXTRA, len(text), len(wide))
    fields = (0, 0, record.flags, record.method, 0, 0, *sizes, 0, 0, 0, 0, IN_EXTRA)
    return CENTRAL.pack(b"PK\x01\x02", *fields) + text + wide


def rebuild(surveyed: Survey, options: ReadOptions) -> Recovery:
    """Return the catalog of a survey, including truncated files.

    Without a catalog, it is made from the data files alone, if the format supports that. Raises
    Unsupported if nothing can be read.
    """
    source, problems = pad_cut_files(surveyed.source)
    if source is not None and (recovery := _scan(surveyed, source, problems, options)) is not None:
        return recovery
    if surveyed.catalog is not None:
        unknown = (*_unrecorded(surveyed.catalog), *_unknown_contents(surveyed, surveyed.problems))
        return Recovery(surveyed.catalog, surveyed.problems, unknown)
    if surveyed.format.reading.recover is not None:
        recovery = surveyed.format.reading.recover(surveyed.source)
        unknown = (*recovery.unknown, *_unrecorded(recovery.catalog))
        return Recovery(recovery.catalog, (*surveyed.problems, *recovery.problems), unknown)
    raise Unsupported(
        f"{surveyed.path}: nothing can be read: {surveyed.problems[0]}",
        hint=f"run: ckptool verify {surveyed.path}",
    )


def _scan(
    surveyed: Survey, source: ZeroPaddedSource, damage: list[Problem], options: ReadOptions
) -> Recovery | None:
    """Return what is in files padded to full length; lost parts show when they are read."""
    problems: list[Problem] = []
    how = scan_options(options, surveyed.format, problems)
    scanning = replace(how, user_file=surveyed.user_file)
    try:
        catalog = surveyed.format.scan(source, scanning)
    except CkptoolError:
        return None
    catalog = split_stacked(catalog) if options.split_stacked else catalog
    catalog = replace(catalog, files={n: surveyed.source.files[n] for n in catalog.files})
    unknown = (*_unrecorded(catalog), *_unknown_contents(surveyed, problems))
    return Recovery(catalog, (*damage, *problems), unknown)


def _unrecorded(catalog: Catalog) -> tuple[str, ...]:
    notes = [note for note in catalog.notes if isinstance(note, Problem)]
    return tuple(str(note) for note in notes if note.code == "world-size-unrecorded")


def _unknown_contents(surveyed: Survey, problems: Iterable[Problem]) -> tuple[str, ...]:
    """Return what unreadable files may have contained, if only they recorded it."""
    committed_by = {rule.committed_by for rule in surveyed.format.detection.files}
    if not committed_by.isdisjoint(surveyed.source.files):
        return ()
    files = dict.fromkeys(p.file for p in problems if p.file and not p.tensor)
    return tuple(f"what only {file} contained" for file in files)
