"""The content of a DCP folder's metadata files, checked against the data files."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import pairwise

from msgspec import Struct, field

from ckptool.core.catalog import Chunk, Container, Path
from ckptool.core.chunks import ChunkTable
from ckptool.errors import Damaged, Problem
from ckptool.formats.base import ScanOptions
from ckptool.formats.dcp.absent import join_absent, no_metadata
from ckptool.formats.dcp.metadata import DcpMetadata, TensorMetadata, parse
from ckptool.formats.dcp.tables import DATA, are_sound, rank_of
from ckptool.serialization.source import (
    LARGEST_IN_ROWS,
    Source,
    find_missing_ranks,
    read_metadata,
    require,
    require_rank,
)

METADATA = ".metadata"
RANK_METADATA = re.compile(r"__([0-9]{1,9})\.metadata")
ZSTD = "stream.zstd/1"

DAMAGE_HINT = (
    "the save was interrupted, or files were lost or mixed with another save's: use another"
    " copy, or the previous checkpoint"
)


class Inventory(Struct):
    """The joint content of the metadata files.

    ``tables``, ``chunks`` and ``values`` are by name, values with the rank of each item;
    ``extents`` are file, offset and bytes of every item that is in no table, with its name;
    ``archives`` those of them that can be opened. ``damaged_files`` have a problem of their own,
    which covers all of their items.
    """

    types: dict[str, TensorMetadata] = field(default_factory=dict)
    tables: dict[str, ChunkTable] = field(default_factory=dict)
    chunks: dict[str, list[Chunk]] = field(default_factory=lambda: defaultdict(list))
    values: dict[str, list[tuple[int, Container]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    paths: dict[str, Path] = field(default_factory=dict)
    extents: list[tuple[str, int, int, str]] = field(default_factory=list)
    archives: list[Container] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    damaged_files: set[str] = field(default_factory=set)

    def path(self, name: str) -> Path:
        """Return the path of a name in the state dict."""
        return self.paths.get(name, (name,))

    def unplaced(self) -> list[Problem]:
        """Return a problem for each name without a path, where others have one."""
        names = [*self.types, *self.values] if self.paths else []
        return [
            Problem(f"{name}: planner_data has no path for it", "name-mismatch", tensor=name)
            for name in names
            if name not in self.paths
        ]


def take_inventory(source: Source, parsed: Mapping[str, DcpMetadata]) -> Inventory:
    """Collect the content of the metadata files, with its contradictions."""
    inventory = Inventory()
    for file, metadata in parsed.items():
        tables = {n: e.table for n, e in metadata.tensors.items() if e.table is not None}
        if tables and len(parsed) == 1:  # else each item is looked at, to say which is wrong
            items = [table.items for table in tables.values()]
            sound = are_sound(items, metadata.items.values(), source.files)
            inventory.tables = tables if sound else {}
        _add_metadata(source, file, metadata, inventory)
    inventory.problems += _shared_bytes(inventory.extents)
    inventory.problems += [
        Problem(
            f"{name}: a tensor in one rank's metadata, a value in another's",
            "ranks-disagree",
            tensor=name,
        )
        for name in inventory.values
        if name in inventory.types
    ]
    if inventory.problems:
        names = ((file, name) for file, _, _, name in inventory.extents)
        inventory.problems = join_absent(source, inventory.problems, names)
    return inventory


def read_metadata_files(
    source: Source, options: ScanOptions, metadata: str
) -> dict[str, DcpMetadata]:
    """Read the metadata of a folder, by file: ``metadata`` of all ranks, or else each rank's own.

    Raises Damaged without any; the missing metadata of a rank is reported.
    """
    by_rank = {name: int(m[1]) for name in source.files if (m := RANK_METADATA.fullmatch(name))}
    if metadata not in source.files and not by_rank:
        raise no_metadata(source, METADATA)
    _require_ranks(source)
    if metadata in source.files:
        return {metadata: _read(source, metadata)}
    options.report(_missing_ranks({*by_rank.values()}, source), subject=source.root)
    names = sorted(by_rank, key=by_rank.__getitem__)
    parsed = {name: options.attempt(partial(_read, source, name)) for name in names}
    return {name: metadata for name, metadata in parsed.items() if metadata is not None}


def _read(source: Source, file: str) -> DcpMetadata:
    return parse(read_metadata(source, file, LARGEST_IN_ROWS), file)


def _require_ranks(source: Source) -> None:
    for name in source.files:
        match = DATA.fullmatch(name) or RANK_METADATA.fullmatch(name)
        if match:
            require_rank(int(match[1]), name)


def _missing_ranks(ranks: set[int], source: Source) -> list[Problem]:
    writers = {int(m[1]) for name in source.files if (m := DATA.fullmatch(name))}
    missing = find_missing_ranks(ranks, max(ranks | writers) + 1)
    if not missing:
        return []
    message = f"{source.root}: __{missing[0]}.metadata is missing (ranks {missing})"
    return [Problem(message, "rank-missing")]


def _add_metadata(source: Source, file: str, metadata: DcpMetadata, inventory: Inventory) -> None:
    inventory.paths |= metadata.paths
    used: set[tuple[str, tuple[int, ...] | None]] = set()
    for name, entry in metadata.tensors.items():
        first_entry = inventory.types.setdefault(name, entry)
        if (first_entry.dtype, first_entry.shape) != (entry.dtype, entry.shape):
            message = f"{name}: {file} says {entry.dtype} {list(entry.shape)}, another"
            message += f" {first_entry.dtype} {list(first_entry.shape)}"
            inventory.problems.append(Problem(message, "ranks-disagree", file=file, tensor=name))
        if name in inventory.tables:
            continue
        stored: Iterable[Container | None]
        if entry.table is not None:
            stored = entry.table.items
        else:
            claimed = [(name, box.lo) for box in entry.boxes]
            used.update(claimed)
            stored = map(metadata.items.get, claimed)
        for box, item in zip(entry.boxes, stored, strict=True):
            if item is None:
                message = f"{name}: chunk {box} has no data (none is listed in {file})"
                inventory.problems.append(Problem(message, "data-missing", file=file, tensor=name))
                continue
            _add_item(source, file, name, item, inventory)
            inventory.chunks[name].append(Chunk(box, item, rank_of(item.file)))
    for name in metadata.bytes_names:
        item = metadata.items.get((name, None))
        if item is None:
            message = f"{name}: has no data (none is listed in {file})"
            inventory.problems.append(Problem(message, "data-missing", file=file, tensor=name))
            continue
        used.add((name, None))
        if _add_item(source, file, name, item, inventory):
            inventory.values[name].append((rank_of(item.file) or 0, item))
        else:
            message = f"{name}: a value whose data in {item.file} is lost"
            inventory.problems.append(Problem(message, "data-missing", file=item.file, tensor=name))
    for name, offset in metadata.items.keys() - used:
        message = f"{name}: {file} stores an item at {offset} that no chunk claims"
        inventory.problems.append(Problem(message, "data-unused", file=file, tensor=name))


def _add_item(source: Source, file: str, name: str, item: Container, inventory: Inventory) -> bool:
    """Return whether an item can be opened as an archive; if not, note why."""
    inventory.extents.append((item.file, item.offset, item.nbytes, name))
    size = source.files.get(item.file)
    is_read = not item.transforms or set(item.transforms) == {ZSTD}
    if size and item.offset + item.nbytes <= size and is_read:
        inventory.archives.append(item)
        return True
    problem = _item_problem(source, file, name, item)
    if problem.tensor is not None:
        inventory.problems.append(problem)
    elif item.file not in inventory.damaged_files:
        inventory.problems.append(problem)
        inventory.damaged_files.add(item.file)
    return False


def _item_problem(source: Source, file: str, name: str, item: Container) -> Problem:
    """Return why an item cannot be opened; a problem without a tensor concerns the whole file."""
    try:
        size = require(source, item.file, wanted_by=file)
    except Damaged as error:
        return error.message
    if not size:
        message = f"{item.file}: the file is empty (0 bytes)"
        return Problem(message, "file-empty", file=item.file)
    end = item.offset + item.nbytes
    if end > size:
        message = f"{name}: {file} puts it at bytes {item.offset:,} to"
        message += f" {end:,} of {item.file}, which has {size:,} bytes"
        return Problem(message, "file-truncated", file=item.file, tensor=name, end=end)
    unknown = [step for step in item.transforms if step != ZSTD]
    message = f"{name}: stored through {unknown[0]!r}, which ckptool cannot undo"
    return Problem(message, "transform-unknown", file=item.file, tensor=name)


def _shared_bytes(extents: list[tuple[str, int, int, str]]) -> list[Problem]:
    problems: list[Problem] = []
    extents.sort()
    for (file, offset, length, name), (next_file, next_offset, _, other) in pairwise(extents):
        if next_offset < offset + length and file == next_file:
            message = f"{other}: begins at byte {next_offset:,} of {file}, inside the item of"
            message += f" {name} ({offset:,} to {offset + length:,})"
            problems.append(Problem(message, "items-overlap", file=file, tensor=other))
    return problems
