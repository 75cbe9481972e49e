"""Name what is written as a trainer's files call it: a model alone, and an optimizer."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from ckptool.core.catalog import Catalog
from ckptool.core.selection import entries_of, rename
from ckptool.core.state_category import state_category

_MODEL = "model"
_OPTIMIZERS = ("optim", "optimizer")


def in_families(catalog: Catalog, families: Collection[str]) -> Catalog:
    """Return a catalog whose names begin with the families that a format has, with a note.

    Only what is sure is renamed: a model's tensors, by names that are not nested, become the family
    ``model``, and an optimizer gets the format's name. Without ``families`` all names are allowed.
    """
    tops = {str(entry.path[0]) for entry in entries_of(catalog) if entry.path}
    if not families or not tops:
        return catalog
    family = next((name for name in _OPTIMIZERS if name in families), None)
    names = [name for name in _OPTIMIZERS if name in tops]
    if family and names and family not in names:
        renamed = rename(
            catalog,
            lambda name: (
                name.replace(f"{names[0]}.", f"{family}.", 1)
                if name.startswith(f"{names[0]}.")
                else name
            ),
        )
        return _note(renamed, f"{names[0]}.* is written as {family}.*")
    is_model = not catalog.objects and not names and not tops.intersection(families)
    tensors = catalog.tensors.values()
    if is_model and all(len(e.path) == 1 and state_category(e) == _MODEL for e in tensors):
        renamed = rename(catalog, lambda name: f"{_MODEL}.{name}")
        return _note(renamed, f"all names are written as {_MODEL}.*, as they are of a model alone")
    return catalog


def _note(catalog: Catalog, note: str) -> Catalog:
    return replace(catalog, notes=(*catalog.notes, note))
