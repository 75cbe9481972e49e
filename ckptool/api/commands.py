"""The commands as functions: the same options as keywords, the commands' own reports.

Work on many objects at once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from ckptool.api.keywords import Converting, Reading, Resharding
from ckptool.api.options import AnyPath, Keywords, documented, location
from ckptool.commands.convert import ConvertReport, prepare
from ckptool.commands.detect import KnownFormat, known_formats
from ckptool.commands.inspect import inspect as _inspect
from ckptool.commands.inspect.inspect import InspectReport
from ckptool.commands.options.source import ReadOptions
from ckptool.commands.options.target import ConvertOptions, ReshardOptions
from ckptool.commands.reshard.reshard import ReshardReport, prepare_reshard
from ckptool.engine.ranks import join_ranks

if TYPE_CHECKING:
    from ckptool.commands.inspect.stats import TensorStats
    from ckptool.core.keymap.model import KeyMap


Progress = Callable[[int], None]


def silent(nbytes: int) -> None:
    """Tell nobody."""


@documented(Reading)
def inspect(
    path: AnyPath, *, values: bool | None = None, **options: Unpack[Reading]
) -> InspectReport:
    """Describe the checkpoint at ``path`` from its metadata alone.

    ``values`` stored among the data are read from a disk; from a URL only if it is True. Raises
    NotFound, Unrecognised, Damaged or Hostile, as every function here does.
    """
    place = location(path)
    values = isinstance(place, Path) if values is None else values
    read = Keywords("inspect", options, Reading).options(ReadOptions, values=values)
    return _inspect.inspect(place, read)


@documented(Reading)
def stats(
    path: AnyPath, tensors: str | Sequence[str] = "*", **options: Unpack[Reading]
) -> list[TensorStats]:
    """Read the tensors that match a glob: min, max, mean, std, zeros, NaN and Inf of each.

    As ``ckptool inspect PATH --stats GLOB``; memory is bounded whatever their size.
    """
    from ckptool.commands.inspect.stats import stats as _stats
    from ckptool.commands.open import open_checkpoint

    read = Keywords("stats", options, Reading).options(ReadOptions)
    opened = open_checkpoint(location(path), read)
    return _stats(opened, [tensors] if isinstance(tensors, str) else tensors)


@documented(Converting)
def convert(
    source: AnyPath,
    target: AnyPath,
    *,
    to: str,
    progress: Progress = silent,
    **options: Unpack[Converting],
) -> ConvertReport:
    """Write ``source`` in the format ``to`` at ``target``, whole or not at all.

    ``progress`` is told of bytes as they are written. Raises UsageError or Unsupported where it
    cannot be done as asked, TransferError where it fails midway: ``resume=True`` then continues.
    """
    asked = Keywords("convert", options, Converting).options(ConvertOptions, to=to)
    prepared = prepare(location(source), location(target), asked)
    return prepared.report if asked.transfer.dry_run else prepared.run(progress)


@documented(Resharding)
def reshard(
    source: AnyPath,
    target: AnyPath | None = None,
    *,
    progress: Progress = silent,
    **options: Unpack[Resharding],
) -> ReshardReport:
    """Write ``source`` for a new device mesh at ``target``, or beside it, named after the mesh.

    Under torchrun the ranks share the work; there must be no process group yet. Raises as
    ``convert`` does, on every rank the same.
    """
    asked = Keywords("reshard", options, Resharding).options(ReshardOptions)
    where = None if target is None else location(target)
    with join_ranks() as group:
        prepared = group.together(lambda: prepare_reshard(location(source), where, asked))
        if asked.check:
            from ckptool.commands.reshard.load_check import check_loads, require_loadable

            group.together(lambda: require_loadable(prepared, group))
        if asked.transfer.dry_run:
            return prepared.report
        report = prepared.run(progress, group)
        if asked.check:
            check_loads(prepared, group)
        return report


def list_formats() -> tuple[KnownFormat, ...]:
    """Every format: whether it is read, and written by ``convert`` and by ``reshard``."""
    return known_formats()


def list_maps() -> Mapping[str, KeyMap]:
    """The key maps that come with ckptool, by the name that ``map=`` takes."""
    from ckptool.commands.keymap.builtin import builtin_maps

    return dict(builtin_maps())


def map_text(name: str) -> str:
    """A built-in key map as the TOML file that it is, to begin one's own with."""
    from ckptool.commands.keymap import builtin as maps

    return maps.map_text(name)


@contextmanager
def no_collecting() -> Iterator[None]:
    """No garbage collection: a catalog is many objects and no cycle, and torch is many more."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
