"""Each file of a checkpoint by itself, independent of the others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from ckptool.commands.open import Survey
from ckptool.commands.unread_files import Rules, uncommitted_folders, unfinished_file
from ckptool.commands.verify.checks.archives import ArchiveCheck
from ckptool.commands.verify.checks.pickles import PickleAudit
from ckptool.core.catalog import Catalog, Container
from ckptool.errors import CkptoolError, Damaged, Problem
from ckptool.formats import file_rule, single_file_suffixes
from ckptool.formats.base import FileRole, FileRule, Format
from ckptool.formats.shards import read_index
from ckptool.serialization.archive.read import is_legacy, is_zip, read_torch_file
from ckptool.serialization.archive.recover import find_archives
from ckptool.serialization.pickle.records import Global, Names
from ckptool.serialization.safetensors import read_safetensors
from ckptool.serialization.source import LARGEST_IN_ROWS, Source, expect_items, read_metadata
from ckptool.storage.files import Files

_LEGACY_HEAD = 1 << 24
_SMALL_JSON = 1 << 20
_CLOCK = 2.0
"""Seconds that the clocks of hosts which write one checkpoint may differ."""


def name_problems(source: Source, row: Format, rules: Rules) -> Iterator[Problem]:
    """Yield problems of names and sizes alone: empty files, and files of an unfinished write."""
    committing = {rule.committed_by for rule in rules.values() if rule and rule.committed_by}
    committing |= {rule.committed_by for rule in row.detection.files if rule.committed_by}
    for file, rule in rules.items():
        whole = file.removesuffix(".tmp")
        commits = whole != file and whole.rpartition("/")[2] in committing
        if commits and whole in source.files:
            message = f"{file} lies beside {whole}: a later save into this folder did not finish"
            yield Problem(message, "overwrite-interrupted", file=file)
        elif not commits and (unfinished := unfinished_file(file)):
            yield unfinished
        elif not source.files[file] and _must_hold_bytes(file, rule):
            yield Problem(f"{file}: the file is empty (0 bytes)", "file-empty", file=file)
    yield from uncommitted_folders(rules).values()
    yield from _unreadable_json(source, rules)


def _must_hold_bytes(file: str, rule: FileRule | None) -> bool:
    if file.endswith(tuple(single_file_suffixes())):
        return True
    return rule is not None and rule.role in (FileRole.METADATA, FileRole.JSON)


def _unreadable_json(source: Source, rules: Rules) -> Iterator[Problem]:
    """Yield the small files that are JSON by name but not by content."""
    for file, rule in rules.items():
        is_json = rule is not None and rule.role is FileRole.JSON
        if is_json and 0 < source.files[file] < _SMALL_JSON:
            try:
                json.loads(read_metadata(source, file))
            except (ValueError, RecursionError):
                yield Problem(f"{file}: not JSON", "metadata-unreadable", file=file)


def newer_than_metadata(source: Files, rules: Rules) -> Iterator[Problem]:
    """Yield the data files that were modified after the metadata that is written last."""
    for file, rule in rules.items():
        whole = f"{file[: file.rfind('/') + 1]}{rule.committed_by}" if rule else ""
        if rule is not None and rule.committed_by and whole in source.files:
            seconds = source.modified(file) - source.modified(whole)
            if seconds > _CLOCK:
                message = f"{file} was modified {seconds:,.0f} s after {whole}"
                yield Problem(message, "data-newer", file=file)


class FileCheck:
    """Checks files one by one: archives, headers, indexes and pickles.

    ``chosen`` decides which items of larger files are opened. ``archives`` has the bytes still to
    be read, unless it is ``quick``, ``problems`` the problems found.
    """

    def __init__(
        self, surveyed: Survey, chosen: Callable[[Container], bool], *, quick: bool
    ) -> None:
        self._source = source = surveyed.source
        self._headers = surveyed.headers
        self._chosen = chosen
        self.rules: Rules = {file: file_rule(surveyed.format, file) for file in source.files}
        self.pickles = PickleAudit()
        self.archives = ArchiveCheck(source, self.pickles, only_structure=quick)
        self._problems: list[Problem] = []
        self._unreadable: set[str] = set()

    @property
    def problems(self) -> list[Problem]:
        return [*self._problems, *self.archives.problems, *self.pickles.problems]

    def look_at_metadata(self, catalog: Catalog | None) -> None:
        """Check metadata files and whole-file archives, which ``--quick`` reads too."""
        inner = {item.file for item in catalog.archives} | catalog.bare if catalog else set()
        names_by_file = catalog.globals if catalog else {}
        for file, places in names_by_file.items():
            self.pickles.note(Names({Global(*name): at for name, at in places.items()}), file, 0)
        for file in self._files(catalog):
            if file not in inner and file not in names_by_file:
                self._attempt(file, self._look_at)

    def find_items(self) -> None:
        """Check the archives inside larger files whose positions no metadata records."""
        for file in self._source.files:
            if self._role(file) is FileRole.ITEMS:
                self._attempt(file, self._look_for_archives)

    def look_at_items(self, items: Iterable[Container]) -> None:
        """Check some archives inside larger files at the positions in the metadata."""
        chosen = sorted(filter(self._chosen, items), key=attrgetter("file", "offset"))
        expect_items(self._source, chosen)
        self._unreadable |= {item.file for item in chosen if not self.archives.look_at(item)}

    def look_beside_items(self, items: Iterable[Container]) -> None:
        """Check the rest of the files that contain items, once the items were checked."""
        by_file: dict[str, list[Container]] = {}
        for item in items:
            by_file.setdefault(item.file, []).append(item)
        for file, of_file in by_file.items():
            if file in self._unreadable:
                self._compare_with_found(file, of_file)
            self._require_claimed(file, of_file)

    def _files(self, catalog: Catalog | None) -> list[str]:
        """Return the files of the catalog and metadata, or all files without a catalog."""
        files = self._source.files
        if catalog is None:
            return list(files)
        listed = catalog.files.keys() | catalog.copies
        return [f for f in files if f in listed or self._role(f) is FileRole.METADATA]

    def _role(self, file: str) -> FileRole | None:
        rule = self.rules.get(file)
        return rule.role if rule else None

    def _attempt(self, file: str, look: Callable[[str], None]) -> None:
        try:
            look(file)
        except CkptoolError as error:
            self._problems += error.problems

    def _look_at(self, file: str) -> None:
        size, role = self._source.files[file], self._role(file)
        if role is FileRole.SAFETENSORS:
            self._look_at_safetensors(file)
        elif role is FileRole.INDEX:
            read_index(self._source, file)
        elif role is FileRole.METADATA:
            self.pickles.look_at(read_metadata(self._source, file, LARGEST_IN_ROWS), file, 0)
        elif size and role is not FileRole.ITEMS:
            self._look_at_torch_file(file, size)

    def _look_at_safetensors(self, file: str) -> None:
        header = self._headers.pop(file, None) or read_safetensors(self._source, file)
        tensors = header.tensors
        unaligned = [n for n, item in tensors.items() if item.offset % item.dtype.alignment]
        if unaligned:
            counts = f"{len(unaligned):,} of {len(tensors):,} tensors"
            message = f"{file}: {counts}, first {unaligned[0]}"
            self._problems.append(Problem(message, "safetensors-unaligned", file=file))

    def _look_at_torch_file(self, file: str, size: int) -> None:
        head = self._source.read(file, 0, min(size, 64))
        if is_zip(head):
            self.archives.look_at(Container(file, 0, size))
        elif is_legacy(head):
            data = self._source.read(file, 0, min(size, _LEGACY_HEAD))
            self.pickles.look_at(data, file, 0, pickles=5)
            storages = read_torch_file(self._source, file).storages.values()
            spare = size - max((s.offset + s.nbytes for s in storages), default=size)
            self._note_unused(file, spare, "any storage")
        elif file.endswith(tuple(single_file_suffixes())):
            read_torch_file(self._source, file)

    def _note_unused(self, file: str, spare: int, by: str) -> None:
        if spare:
            size = self._source.files.get(file, 0)
            message = f"{file}: {spare:,} of its {size:,} bytes are not used by {by}"
            self._problems.append(Problem(message, "bytes-unused", file=file))

    def _look_for_archives(self, file: str) -> None:
        spare = self._source.files[file]
        for item in find_archives(self._source, file):
            self.archives.look_at(item)
            spare -= item.nbytes
        if spare:
            message = f"{file}: {spare:,} of its bytes are not a complete torch.save archive"
            raise Damaged(message, "file-truncated", file=file)

    def _compare_with_found(self, file: str, items: list[Container]) -> None:
        """Note a file whose archives are not where the metadata says: it is of another save."""
        places = {(item.offset, item.nbytes) for item in find_archives(self._source, file)}
        strangers = places - {(item.offset, item.nbytes) for item in items}
        if len(strangers) * 2 > len(places):
            message = (
                f"{file}: {len(strangers):,} of its {len(places):,} archives are at offsets"
                " that the metadata does not name: it is of another save"
            )
            self._problems.append(Problem(message, "overwrite-interrupted", file=file))

    def _require_claimed(self, file: str, items: list[Container]) -> None:
        """Note bytes between and after the items of a file."""
        spare, position = 0, 0
        for start, end in sorted((item.offset, item.offset + item.nbytes) for item in items):
            spare += max(0, start - position)
            position = max(position, end)
        spare += max(0, self._source.files.get(file, 0) - position)
        self._note_unused(file, spare, "the metadata")
