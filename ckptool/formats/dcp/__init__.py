"""torch.distributed.checkpoint folders: ``.metadata`` and ``__{rank}_{n}.distcp`` files.

Read: torch 2.1 to 2.15, by any conforming writer (FSDP1 and 2, torchtitan, Lightning with its
``meta.pt``, nvidia-resiliency-ext), several files per rank, one file per item, zstd stream
extension, and saves without collectives (one ``__{rank}.metadata`` per rank). Each item is a
torch.save archive of one chunk or one value. Written: as torch 2.13 does, one file per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from ckptool.core.box import distinct
from ckptool.core.catalog import UNREAD, Catalog, ObjectEntry, TensorEntry, merge_copies
from ckptool.core.chunks import ItemTable, Joined
from ckptool.core.text import plural
from ckptool.errors import Problem
from ckptool.formats.base import (
    Deferred,
    Detection,
    FileRole,
    FileRule,
    Format,
    Reading,
    ScanOptions,
    Writing,
)
from ckptool.formats.companions import add_tensor_parallelism, describe_framework
from ckptool.formats.dcp.inventory import (
    DAMAGE_HINT,
    METADATA,
    RANK_METADATA,
    Inventory,
    read_metadata_files,
    take_inventory,
)
from ckptool.formats.dcp.items import locate, read_values
from ckptool.formats.dcp.metadata import DcpMetadata, SavePlan
from ckptool.formats.dcp.numbers import number_states
from ckptool.formats.dcp.tables import DATA
from ckptool.formats.lightning import META, WRITER
from ckptool.serialization.source import Source, expect_items
from ckptool.serialization.state_dict.assemble import assemble
from ckptool.serialization.state_dict.flat_params import HINT, find_members, is_flat, unflatten
from ckptool.serialization.state_dict.leaves import Assembled, read_file_leaves
from ckptool.serialization.state_dict.tree import find_free_name

__all__ = ["FORMAT", "DcpMetadata", "SavePlan", "locate", "read_folder", "scan"]


def _probe(source: Source) -> bool:
    names = [name for name in source.files if "/" not in name]
    return any(
        name in (METADATA, f"{METADATA}.tmp")
        or name.endswith(".distcp")
        or RANK_METADATA.fullmatch(name)
        for name in names
    )


def scan(source: Source, options: ScanOptions, *, metadata: str = METADATA) -> Catalog:
    """Return the catalog of a DCP folder, from its ``metadata`` file or the ranks' own."""
    catalog, _ = read_folder(source, options, values=options.values, metadata=metadata)
    catalog = add_tensor_parallelism(options.with_placements(catalog))
    return number_states(_unflatten(source, catalog, options))


def read_folder(
    source: Source, options: ScanOptions, *, values: bool = True, metadata: str = METADATA
) -> tuple[Catalog, dict[str, DcpMetadata]]:
    """Read a DCP folder: its catalog, with no mesh yet, and its metadata files.

    Without ``values`` only metadata is read: values are ``UNREAD``. A value that cannot or must not
    be read is a conflict of its own.
    """
    parsed = read_metadata_files(source, options, metadata)
    inventory = take_inventory(source, parsed)
    options.report(inventory.problems, subject=source.root, hint=DAMAGE_HINT)
    contents = Assembled()
    for name, entry in inventory.types.items():
        chunks = inventory.tables.get(name) or merge_copies(inventory.chunks[name])
        tensor = TensorEntry(name, inventory.path(name), entry.dtype, entry.shape, chunks)
        contents.tensors[name] = tensor
    if values:
        _add_values(source, options, inventory, contents)
    elif inventory.values:
        names = inventory.values
        contents.objects |= {n: ObjectEntry(n, inventory.path(n), UNREAD) for n in names}
        contents.notes.append(
            f"{plural(len(names), 'value')} in data files not read; --values reads them"
        )
    if META in source.files:
        _add(contents, options.attempt(partial(_read_lightning, source)))
    options.report(contents.take_problems(), subject=source.root, hint=DAMAGE_HINT)
    return _catalog(source, parsed, inventory, contents), parsed


def _add_values(
    source: Source, options: ScanOptions, inventory: Inventory, contents: Assembled
) -> None:
    items = [item for items in inventory.values.values() for _, item in items]
    expect_items(source, items)
    for name, of_ranks in inventory.values.items():
        work = partial(read_values, source, name, of_ranks, inventory.path(name))
        _add(contents, options.attempt(work))


def _add(contents: Assembled, value: Assembled | None) -> None:
    """Add the content of a value, under new names if others have the same."""
    if value is None:
        return
    used = {*contents.tensors, *contents.objects}
    inner: tuple[dict[str, Any], ...] = (value.tensors, value.objects)
    for entries in inner:
        for name in entries.keys() & used:
            free = find_free_name(name, {*used, *value.tensors, *value.objects})
            entries[free] = replace(entries.pop(name), name=free)
            value.notes.append(f"{free} is inside a value; {name!r} is another one")
    contents.add(value)


def _unflatten(source: Source, catalog: Catalog, options: ScanOptions) -> Catalog:
    """Unflatten FSDP1's flat parameters if ``options`` has them, else note them."""
    flats = {name: entry for name, entry in catalog.tensors.items() if is_flat(name)}
    if not flats:
        return catalog
    if not options.flat_params:
        note = f"FSDP1 flat parameters are kept as they are ({', '.join(flats)}); {HINT}"
        return replace(catalog, notes=(*catalog.notes, note))
    tensors = {name: e for name, e in catalog.tensors.items() if name not in flats}
    members = find_members(flats, options.flat_params)
    for name, entry in locate(source, catalog.with_tensors(flats)).tensors.items():
        tensors |= {part.name: part for part in unflatten(entry, members[name])}
    return options.with_placements(replace(catalog, tensors=tensors, mesh=None))


def _read_lightning(source: Source) -> Assembled:
    """Read Lightning's ``meta.pt``, a family of its own beside the DCP files."""
    return assemble({0: read_file_leaves(source, META, prefix=("meta",))})


def _files_of(tables: Sequence[ItemTable]) -> set[str]:
    """Return the files of the items of any table; all tables name the same files."""
    if not tables:
        return set()
    import numpy as np

    numbers = distinct(np.concatenate([table.file_numbers for table in tables]))
    return {tables[0].files[number] for number in numbers.tolist()}


def _catalog(
    source: Source, parsed: dict[str, DcpMetadata], inventory: Inventory, contents: Assembled
) -> Catalog:
    used = {file for file, _, _, _ in inventory.extents} | set(parsed) | {META}
    items = [table.items for table in inventory.tables.values()]
    used |= _files_of(items)
    data = [name for name in source.files if DATA.fullmatch(name)]
    stale = [name for name in data if name not in used and source.files[name]]
    ranks = {int(m[1]) for name in data if name not in stale and (m := DATA.fullmatch(name))}
    planned = max((len(m.plans or ()) for m in parsed.values()), default=0)
    notes = [
        Problem(f"{name} is not in the metadata (left by another save)", "file-unused", file=name)
        for name in stale
    ]
    notes += [
        Problem(
            f"{name} is not read: {METADATA}, of another save, is used instead",
            "file-unused",
            file=name,
        )
        for name in source.files
        if RANK_METADATA.fullmatch(name) and name not in parsed and METADATA in parsed
    ]
    notes += inventory.unplaced()
    version = next((m.version for m in parsed.values() if m.version), None)
    is_lightning = META in source.files
    info = {"writer": WRITER if is_lightning else "torch.distributed.checkpoint"}
    info |= {"metadata version": version} if version else {}
    contents.notes[:0] = notes
    return contents.catalog(
        "dcp",
        source,
        (name for name in source.files if name in used or name in data),
        world_size=max([planned, *(rank + 1 for rank in ranks)], default=1),
        info=info | describe_framework(contents.objects),
        archives=Joined([inventory.archives, *items]) if items else tuple(inventory.archives),
        globals={file: metadata.positions for file, metadata in parsed.items()},
    )


FORMAT = Format(
    "dcp",
    "torch.distributed.checkpoint folder (.metadata and .distcp files)",
    Detection(
        _probe,
        files=(
            FileRule(r"(__\d+)?\.metadata", FileRole.METADATA),
            FileRule(r".*\.distcp", FileRole.ITEMS, committed_by=METADATA),
        ),
    ),
    Reading(scan, locate=locate, recover=Deferred("ckptool.formats.dcp.recover:recover")),
    Writing(
        convert=Deferred("ckptool.formats.dcp.write:lay_out"),
        reshard=Deferred("ckptool.formats.dcp.write:lay_out"),
        of_ranks=True,
    ),
)
