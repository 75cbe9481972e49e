"""Drop the optimizer's state of a step: the rest takes its place, in the step's own format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ckptool.commands.convert import ConvertReport, prepare_save
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.target import SaveOptions, TransferOptions
from ckptool.commands.transfer.transfer import Transfer, require_agreement
from ckptool.core.catalog import Catalog
from ckptool.core.layout import Layout
from ckptool.core.state_category import is_state_of_optimizer, state_category, with_every_part
from ckptool.core.text import list_some
from ckptool.engine.run_options import RunOptions
from ckptool.engine.write.stage import Stage, StageOptions
from ckptool.errors import Unsupported
from ckptool.formats.writing import CARRIED
from ckptool.storage.commit_note import targets_with_notes
from ckptool.storage.tar import TarFiles
from ckptool.storage.url import Location

Strip = Transfer[ConvertReport]


def plan_strip(parts: Sequence[Location], read: ReadOptions, workers: int | None) -> list[Strip]:
    """Plan to replace each checkpoint of a step that has an optimizer's state by one without.

    Names, shards and values stay as they are. The new one is compared with the old one before both
    exchange their names; only then the old one goes. Raises Unsupported where the optimizer cannot
    be separated: in a store, in a format that is not written, beside what this cannot write, or
    where a tensor may be a model's module of an optimizer's name.
    """
    strips = [_plan(part, read, RunOptions(workers)) for part in parts]
    return [strip for strip in strips if strip is not None]


def freed_bytes(strips: Sequence[Strip]) -> int:
    """Return how much less the new checkpoints take than the old ones, in bytes."""
    old = sum(sum(strip.opened.catalog.files.values()) for strip in strips)
    return old - sum(strip.plan.layout.nbytes for strip in strips)


def finish_strips(folder: Location) -> None:
    """Finish what a killed run was exchanging in a folder; the one that goes is removed.

    Raises Unsupported where something there is not as it was noted.
    """
    for target in targets_with_notes(folder) if isinstance(folder, Path) else ():
        Stage(target, Layout((), folder=True), StageOptions("", "")).finish_earlier()


def _plan(part: Location, read: ReadOptions, run: RunOptions) -> Strip | None:
    """Plan for one checkpoint; None where it has no optimizer's state."""
    opened = open_checkpoint(part, read)
    catalog = with_every_part(opened.catalog)
    kept = _without_optimizer(catalog)
    dropped = catalog.tensors.keys() - kept.tensors.keys()
    if not dropped:
        return None
    unsure = sorted(name for name in dropped if not is_state_of_optimizer(name))
    if unsure:
        raise Unsupported(f"{list_some(unsure)} may be the model's")
    name = opened.format.name
    if not isinstance(opened.path, Path):
        raise Unsupported("stores cannot replace a checkpoint in one step")
    if opened.format.convert is None:
        raise Unsupported(f"ckptool does not write {name}")
    if isinstance(opened.source, TarFiles):
        raise Unsupported("ckptool does not write archives")
    if not any(state_category(entry) == "model" for entry in kept.tensors.values()):
        raise Unsupported("it has no tensors of a model")
    require_agreement(catalog)
    opened = replace(opened, catalog=opened.open_containers(kept))
    transfer = TransferOptions(overwrite=True, run=run)
    strip = prepare_save(opened, opened.path, SaveOptions(name, transfer=transfer))
    layout = strip.plan.layout
    if layout.folder != opened.path.is_dir():
        raise Unsupported(f"ckptool writes {name} in one file")
    if changes := [note for note in layout.notes if not note.startswith(CARRIED)]:
        raise Unsupported(changes[0])
    if (obstacle := strip.obstacle()) is not None:
        raise Unsupported(obstacle)
    return strip


def _without_optimizer(catalog: Catalog) -> Catalog:
    """Leave out an optimizer's tensors and the values beside them: a value alone is a setting."""
    tensors = {n: e for n, e in catalog.tensors.items() if state_category(e) != "optimizer"}
    heads = {name.partition(".")[0] for name in catalog.tensors.keys() - tensors.keys()}
    objects = {
        name: entry
        for name, entry in catalog.objects.items()
        if state_category(entry) != "optimizer" or name.partition(".")[0] not in heads
    }
    return replace(catalog, tensors=tensors, objects=objects)
