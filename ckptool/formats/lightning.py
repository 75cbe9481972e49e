"""Lightning's own files: ``meta.pt`` beside DCP files, or all in one file with optimizers.

Its strategies save the model and ``optimizer_0`` and so on with DCP, and the rest (loops, callbacks
and schedulers) in ``meta.pt``: a folder without it is "not a valid checkpoint". A whole checkpoint
is one file with all of that at the top level; the Trainer's has the model in ``state_dict`` and a
list of optimizers in ``optimizer_states`` (Lightning 2.6).
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from ckptool.core.catalog import Catalog, Index, Path, flat_name
from ckptool.core.layout import FileLayout
from ckptool.core.selection import (
    AnyEntry,
    drop_names,
    entries_of,
    keep_names,
    with_entries,
    without_first_step,
)
from ckptool.errors import Unsupported
from ckptool.formats.writing import nest_state
from ckptool.serialization.archive.write import ROOT, archive_file

META = "meta.pt"
WRITER = "Lightning"
_FAMILY = "meta"
_VERSION = "meta.pytorch-lightning_version"
_OPTIMIZER = re.compile(r"optimizer_(\d{1,6})")


def split_meta(catalog: Catalog) -> tuple[Catalog, list[FileLayout]]:
    """Return the catalog that Lightning saves with DCP, and the ``meta.pt`` with the rest, if any.

    The catalog's values are those that are to be written.
    """
    names = _meta_names(catalog)
    if not names:
        return catalog, []
    meta = without_first_step(keep_names(catalog, names))
    state = nest_state(list(meta.tensors.values()), list(meta.objects.values()))
    file = archive_file(META, state, root=ROOT)
    return drop_names(catalog, names), [file]


def as_one_file(catalog: Catalog) -> Catalog:
    """Return the catalog with the paths that its entries have in a checkpoint of one file.

    The catalog of any other writer is returned unchanged. Raises Unsupported if a value of
    ``meta.pt`` and one beside it would have the same path.
    """
    names = _meta_names(catalog)
    if not names:
        return catalog
    rest = {e.path[0] for e in entries_of(catalog) if e.name not in names and e.path}
    is_trainers = _VERSION in catalog.objects
    model = "model" if is_trainers and "state_dict" not in rest else "state_dict"

    def placed(entry: AnyEntry) -> AnyEntry:
        inner: Path = entry.path[1:]
        if entry.name in names:
            if inner[0] in rest:
                raise Unsupported(f"{entry.name}: {inner[0]!r} is also beside {META}")
            return replace(entry, path=inner)
        first = str(entry.path[0]) if entry.path else ""
        if is_trainers and first == model:
            return replace(entry, path=("state_dict", *inner))
        if is_trainers and (number := _OPTIMIZER.fullmatch(first)):
            return replace(entry, path=("optimizer_states", Index(int(number[1])), *inner))
        return entry

    return with_entries(catalog, [placed(entry) for entry in entries_of(catalog)])


def named_as_one_file(catalog: Catalog) -> Catalog:
    """Return the catalog with the names that its entries have in a checkpoint of one file."""
    file = as_one_file(catalog)
    if file is catalog:
        return catalog
    return with_entries(file, (replace(e, name=flat_name(e.path)) for e in entries_of(file)))


def _meta_names(catalog: Catalog) -> set[str]:
    """Return the names from Lightning's ``meta.pt``; none for another writer."""
    if catalog.info.get("writer") != WRITER:
        return set()
    paths = {entry.name: entry.path for entry in entries_of(catalog)}
    return {name for name, path in paths.items() if len(path) > 1 and path[0] == _FAMILY}
