"""Drop the optimizer's state of a step: the rest replaces it, in the step's own format."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.convert import ConvertReport, prepare_save
from ckptool.commands.open import OpenedCheckpoint, open_checkpoint, require_agreement
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import SaveOptions, TransferOptions
from ckptool.commands.runs.prune.optimizer_files import (
    require_optimizer,
    require_unlisted,
    separate_files,
)
from ckptool.commands.transfer.transfer import Transfer
from ckptool.core.catalog import Catalog
from ckptool.core.layout import FileLayout, Layout, Verbatim
from ckptool.core.planning.plan import Plan
from ckptool.core.selection import drop_names
from ckptool.core.state_category import (
    is_state_of_optimizer,
    optimizer_names,
    state_category,
    with_every_part,
)
from ckptool.core.text import list_some
from ckptool.engine.write.disk_target import DiskTarget
from ckptool.engine.write.existing import stamps
from ckptool.engine.write.removal import remove_file
from ckptool.engine.write.stage import StageOptions
from ckptool.errors import Unsupported
from ckptool.formats.companions import trainer_optimizer
from ckptool.formats.writing import CARRIED
from ckptool.storage.commit_note import targets_with_notes
from ckptool.storage.place import on_disk
from ckptool.storage.url import Location
from ckptool.storage.virtual.placed import PlacedFiles


class Strip(Struct, frozen=True):
    """How a checkpoint loses its optimizer's state; ``freed`` is in bytes."""

    freed: int
    run: Callable[[], object]


def plan_strip(parts: Sequence[Location], read: ReadOptions, workers: int | None) -> list[Strip]:
    """Plan to remove the optimizer's state from each checkpoint of a step that has one.

    Names, shards and values stay unchanged. A separate optimizer file is removed; otherwise a new
    checkpoint is compared with the old one before both exchange their names, and only then the old
    one is removed. Raises Unsupported if the optimizer cannot be separated: from other files in a
    store, from a format that ckptool does not write, or if a tensor may be a model's module of an
    optimizer's name.
    """
    strips = [_plan(part, read, RunOptions(workers)) for part in parts]
    return [strip for strip in strips if strip is not None]


def finish_strips(folder: Location) -> None:
    """Finish the exchange of a killed run in a folder; the old checkpoint is removed.

    Raises Unsupported if something there is not as noted.
    """
    for target in targets_with_notes(path) if (path := on_disk(folder)) else ():
        DiskTarget(target, Layout((), folder=True), StageOptions("", "")).finish_earlier()


def _plan(part: Location, read: ReadOptions, run: RunOptions) -> Strip | None:
    """Return the plan for one checkpoint; None if it has no optimizer's state."""
    opened = open_checkpoint(part, read)
    catalog = with_every_part(opened.catalog)
    rest = drop_names(catalog, optimizer_names(catalog))
    names = catalog.tensors.keys() - rest.tensors.keys()
    if not names:
        return _plan_removal(opened)
    if on_disk(opened.path) is None:
        raise Unsupported("stores cannot replace a checkpoint in one step")
    if isinstance(opened.source, PlacedFiles):
        raise Unsupported("ckptool does not write archives")
    if not any(state_category(entry) == "model" for entry in rest.tensors.values()):
        raise Unsupported("it has no tensors of a model")
    require_agreement(opened, catalog)
    options = TransferOptions(overwrite=True, run=run)
    is_written = opened.format.writing.convert is not None
    files = () if is_written else separate_files(opened, rest, [catalog.tensors[n] for n in names])
    suspects = sorted(name for name in names if not is_state_of_optimizer(name))
    if suspects:
        raise Unsupported(f"{list_some(suspects)} may be the model's")
    if not is_written:
        return _exchange(opened, _copy_without(opened, files, options))
    opened = replace(opened, catalog=opened.open_containers(rest))
    name = opened.format.name
    strip = prepare_save(opened, opened.path, SaveOptions(name, transfer=options))
    layout = strip.plan.layout
    folders = {file.path.rpartition("/")[0] for file in layout.files}
    if not folders <= {file.rpartition("/")[0] for file in opened.source.files}:
        raise Unsupported(f"ckptool writes {name} in other folders")
    if layout.folder != opened.path.is_dir():
        raise Unsupported(f"ckptool writes {name} in one file")
    if changes := [note for note in layout.notes if not note.startswith(CARRIED)]:
        raise Unsupported(changes[0])
    return _exchange(opened, strip)


def _plan_removal(opened: OpenedCheckpoint) -> Strip | None:
    """Plan to remove the optimizer's file of transformers' Trainer; None if there is none."""
    name = trainer_optimizer(opened.source.files, opened.catalog.files)
    if name is None:
        return None
    file = opened.path / name
    require_unlisted(opened.source, [name])
    require_optimizer(file)
    if file.is_symlink():
        raise Unsupported(f"{name} is a symbolic link")
    return Strip(opened.source.files[name], lambda: remove_file(file))


def _copy_without(
    opened: OpenedCheckpoint, excluded: Collection[str], options: TransferOptions
) -> Transfer[ConvertReport]:
    """Plan to write all files of a folder except those ``excluded``, unchanged."""
    files = {name: size for name, size in opened.source.files.items() if name not in excluded}
    links = [name for name in files if Path(f"{opened.path}/{name}").is_symlink()]
    if links:
        raise Unsupported(f"{links[0]} is a symbolic link, and the copy would have a file")
    parts = (FileLayout(name, (Verbatim(name, size),)) for name, size in files.items())
    plan = Plan(Catalog(opened.format.name, {}, {}, files), Layout(tuple(parts), folder=True))
    report = ConvertReport.of(opened, plan, opened.path, opened.format.name, options, notes=())
    return Transfer(opened, plan, opened.path, options, report, sorted(excluded))


def _exchange(opened: OpenedCheckpoint, strip: Transfer[ConvertReport]) -> Strip:
    """Return the strip that exchanges a checkpoint for its copy; Unsupported if it cannot."""
    if (obstacle := strip.obstacle()) is not None:
        raise Unsupported(obstacle)
    names = {*opened.catalog.files, *strip.plan.layout.sizes}
    sizes = opened.source.files
    freed = sum(sizes.get(name, 0) for name in names) - strip.plan.layout.nbytes
    return Strip(freed, partial(_keeping_times, opened, strip))


def _keeping_times(opened: OpenedCheckpoint, strip: Transfer[ConvertReport]) -> None:
    """Exchange a checkpoint for its copy, which gets the times at which the old one was saved.

    Without these, an old step would look like one of a training that began again later.
    """
    folder = Path(opened.source.root).resolve()
    times = {name: time for name, (_, time) in stamps(folder, opened.catalog.files).items()}
    strip.run()
    newest = max(times.values())
    for name in strip.plan.layout.sizes:
        time = times.get(name, newest)
        os.utime(folder / name, ns=(time, time), follow_symlinks=False)
