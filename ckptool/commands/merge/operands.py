"""Open the checkpoints that are merged, rewrite each as asked, and join their files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.convert import require_some
from ckptool.commands.open import OpenedCheckpoint, open_checkpoint
from ckptool.commands.options.read import AS_DETECTED, ReadOptions
from ckptool.commands.options.rewrite import RewriteOptions, Selection
from ckptool.commands.rewrite import RewriteResult, rewrite
from ckptool.core.catalog import Catalog
from ckptool.formats.companions import relocate
from ckptool.storage.url import Location
from ckptool.storage.virtual.joined import JoinedFiles


class Operand(Struct, frozen=True):
    """A checkpoint that is merged: as it was opened, and what it was rewritten to.

    ``label`` is its name among the others, a folder of the joined files; the ``catalog`` names
    files below it.
    """

    label: str
    opened: OpenedCheckpoint
    rewritten: RewriteResult
    catalog: Catalog


def open_operands(
    places: Sequence[Location],
    read: ReadOptions,
    rewriting: RewriteOptions,
    adapter: Location | None = None,
) -> dict[Location, Operand]:
    """Open every checkpoint, rewritten in the same way, but not cast: that is for the result.

    An ``adapter`` is opened as it is.
    """
    uncast = RewriteOptions(**{**vars(rewriting), "casts": None})
    how = dict.fromkeys(places, (read, uncast))
    if adapter is not None:
        how[adapter] = (AS_DETECTED, RewriteOptions())
    labels = _labels(list(how))
    return {place: _open(place, labels[place], *each) for place, each in how.items()}


def model_only(rewriting: RewriteOptions) -> RewriteOptions:
    """Return options that keep the model alone of a checkpoint."""
    selection = Selection(**{**vars(rewriting.selection), "model_only": True})
    return RewriteOptions(**{**vars(rewriting), "selection": selection})


def join(operands: Mapping[Location, Operand]) -> JoinedFiles:
    """Return the files of all checkpoints as one."""
    return JoinedFiles({operand.label: operand.opened.source for operand in operands.values()})


def _open(place: Location, label: str, read: ReadOptions, rewriting: RewriteOptions) -> Operand:
    opened = open_checkpoint(place, read, whole=False, placements=False)
    rewritten = rewrite(opened, rewriting, locate=True, defers=False, check=require_some)
    catalog = relocate(rewritten.catalog, label)
    beside = {f"{label}/{name}": size for name, size in catalog.companions.items()}
    return Operand(label, opened, rewritten, replace(catalog, companions=beside))


def _labels(places: Sequence[Location]) -> dict[Location, str]:
    """Return a short name of each place: its last part, with a number if others have it, too."""
    labels: dict[Location, str] = {}
    for place in places:
        name = place.name or "checkpoint"
        taken = labels.values()
        number = next(n for n in range(1, len(places) + 1) if _numbered(name, n) not in taken)
        labels[place] = _numbered(name, number)
    return labels


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"
