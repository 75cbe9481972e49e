"""Open the checkpoints that are merged, rewrite each as asked, and join their files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import count

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.merge.recipe import Recipe
from ckptool.commands.merge.rewriter import Rewriter
from ckptool.commands.open import OpenedCheckpoint, Opens, open_checkpoint, require_agreement
from ckptool.commands.options.read import AS_DETECTED, ReadOptions
from ckptool.commands.options.rewrite import RewriteOptions
from ckptool.commands.rewrite import RewriteResult, rewrite
from ckptool.core.catalog import Catalog
from ckptool.core.sharding.coverage import coverage_problems
from ckptool.errors import Damaged, Hostile, damaged
from ckptool.formats.companions import relocate
from ckptool.formats.safetensors import delta_notes
from ckptool.storage.url import Location
from ckptool.storage.virtual.placed import PlacedFiles, join_folders

_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_GAPS = "a shard is missing or its metadata is wrong; --drop NAME leaves a tensor out"


class Operand(Struct, frozen=True):
    """A checkpoint that is merged: as it was opened, and what it was rewritten to.

    ``label`` is its name among the others. The ``catalog`` names its files as the joined files do:
    those of the first as they are, those of others below a ``folder``.
    """

    label: str
    opened: OpenedCheckpoint
    rewritten: RewriteResult
    catalog: Catalog
    folder: str = ""


def open_operands(
    recipe: Recipe, read: ReadOptions, rewriting: RewriteOptions
) -> dict[Location, Operand]:
    """Open every checkpoint, rewritten in the same way, but not cast: that is for the result.

    An adapter and deltas, which are no weights, are opened as they are. Weights that two places
    lead to, as a folder and its file, are one operand. Raises UsageError for a pattern that means
    nothing in any of them, Unsupported if none has quantized tensors to dequantize.
    """
    rewriter = Rewriter(replace(rewriting, casts=None))
    plain_rewriter = Rewriter(RewriteOptions())
    labels = _labels(recipe.places)
    operands = dict[Location, Operand]()
    first_places, firsts = dict[object, Location](), dict[Location, Location]()
    for place, label in labels.items():
        key: object = place
        if place in recipe.deltas:
            operand = _open_delta(place, label)
        elif place == recipe.lora:
            operand = _open(_adapter_file(place), label, AS_DETECTED, plain_rewriter)
        else:
            operand = _open(place, label, read, rewriter)
            key = operand.opened.path.resolve(), *sorted(operand.opened.catalog.files)
        firsts[place] = first_places.setdefault(key, place)
        operands.setdefault(firsts[place], operand)
    rewriter.require_used()
    operands = _relocate(operands)
    return {place: operands[first] for place, first in firsts.items()}


def model_only(rewriting: RewriteOptions) -> RewriteOptions:
    """Return options that keep the model alone of a checkpoint."""
    selection = replace(rewriting.selection, model_only=True)
    return replace(rewriting, selection=selection)


def join(operands: Mapping[Location, Operand]) -> PlacedFiles:
    """Return the files of all checkpoints as one."""
    sources = {operand.folder: operand.opened.source for operand in operands.values()}
    return join_folders(sources.pop(""), sources)


def _open(place: Location, label: str, read: ReadOptions, rewriter: Rewriter) -> Operand:
    opened = _open_place(place, read)
    rewritten = rewriter.rewrite(opened)
    if problems := coverage_problems(rewritten.catalog.tensors.values()):
        raise damaged(problems, subject="the chunks", hint=_GAPS).within(str(opened.path))
    return Operand(label, opened, rewritten, rewritten.catalog)


def _open_place(place: Location, read: ReadOptions) -> OpenedCheckpoint:
    """Open a checkpoint; errors name its place, as all may have files of the same names."""
    try:
        return open_checkpoint(place, read, whole=False, placements=False)
    except (Damaged, Hostile) as error:
        text = str(error)
        if text.startswith(f"{place.name}: ") and place.name != str(place):
            raise error.in_folder(str(place.parent)) from None
        raise error if text.startswith(str(place)) else error.within(str(place)) from None


def _adapter_file(place: Location) -> Location:
    """Return the file of an adapter's folder, in which may be a model or a trainer's state, too."""
    files = (place / name for name in _ADAPTERS) if place.is_dir() else ()
    return next((file for file in files if file.exists()), place)


def _open_delta(place: Location, label: str) -> Operand:
    # an index alone, of a version in which nothing changed, is taken for no checkpoint
    read = ReadOptions(from_format="hf" if place.is_dir() else None)
    opened = _open_place(place, read)
    as_is = rewrite(opened, RewriteOptions(), opens=Opens.AT_ONCE, check=require_agreement)
    notes = [note for note in as_is.catalog.notes if note not in delta_notes(opened.catalog.info)]
    return Operand(label, opened, as_is, replace(as_is.catalog, notes=tuple(notes)))


def _relocate(operands: Mapping[Location, Operand]) -> dict[Location, Operand]:
    """Return checkpoints with the files of all but the first below a folder of their own."""
    (place, first), *rest = operands.items()
    names, result = {file.partition("/")[0] for file in first.opened.source.files}, {place: first}
    for place, operand in rest:
        folder = _free(operand.label, names)
        names.add(folder)
        catalog = relocate(operand.catalog, folder)
        companions = {f"{folder}/{name}": size for name, size in catalog.companions.items()}
        catalog = replace(catalog, companions=companions)
        result[place] = replace(operand, catalog=catalog, folder=folder)
    return result


def _labels(places: Sequence[Location]) -> dict[Location, str]:
    """Return a short name of each place: its last part, with a number if others have it, too."""
    labels: dict[Location, str] = {}
    for place in places:
        name = place.name if place.name not in ("", "..") else "checkpoint"
        labels[place] = _free(name, labels.values())
    return labels


def _free(name: str, names: Collection[str]) -> str:
    """Return a name, with the least number after it with which it is not taken."""
    candidates = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(candidate for candidate in candidates if candidate not in names)
