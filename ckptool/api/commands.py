"""The commands as functions: the same options as keywords, the commands' own reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from ckptool.api.keywords import (
    AnyPath,
    Comparing,
    Converting,
    Keywords,
    Reading,
    Resharding,
    Verifying,
    location,
)
from ckptool.commands import inspect as _inspect
from ckptool.commands.convert import ConvertOptions, ConvertReport, prepare
from ckptool.commands.inspect import InspectReport
from ckptool.commands.reshard import ReshardOptions, ReshardReport, prepare_reshard
from ckptool.commands.verify import against as _against
from ckptool.commands.verify import verify as _verify
from ckptool.commands.verify.against import AgainstOptions, AgainstReport
from ckptool.commands.verify.compare import Tolerance
from ckptool.commands.verify.findings import VerifyReport
from ckptool.commands.verify.verify import VerifyOptions
from ckptool.engine.ranks import ranks

Progress = Callable[[int], None]


def _silent(nbytes: int) -> None:
    """Tell nobody."""


def inspect(path: AnyPath, **options: Unpack[Reading]) -> InspectReport:
    """Describe the checkpoint at ``path`` from its metadata alone.

    Raises NotFound, Unrecognised, Damaged or Hostile, as every function here does.
    """
    return _inspect.inspect(location(path), Keywords("inspect", options, Reading).reading())


def convert(
    source: AnyPath,
    target: AnyPath,
    *,
    to: str,
    progress: Progress = _silent,
    **options: Unpack[Converting],
) -> ConvertReport:
    """Write ``source`` in the format ``to`` at ``target``, whole or not at all.

    ``progress`` is told of bytes as they are written. Raises UsageError or CannotDo where it
    cannot be done as asked, TransferError where it fails midway: ``resume=True`` then continues.
    """
    said = Keywords("convert", options, Converting)
    asked = said.options(
        ConvertOptions,
        to=to,
        read=said.reading(),
        selection=said.selection(),
        map=said.mapping(),
        transfer=said.transfer(),
    )
    prepared = prepare(location(source), location(target), asked)
    return prepared.report if said.get("dry_run") else prepared.run(progress)


def reshard(
    source: AnyPath,
    target: AnyPath | None = None,
    *,
    progress: Progress = _silent,
    **options: Unpack[Resharding],
) -> ReshardReport:
    """Write ``source`` for a new device mesh at ``target``, or beside it, named after the mesh.

    Under torchrun the ranks share the work; there must be no process group yet. Raises as
    ``convert`` does, on every rank the same.
    """
    said = Keywords("reshard", options, Resharding)
    verify = said.get("verify")
    asked = said.options(
        ReshardOptions,
        read=said.reading(),
        map=said.mapping(),
        transfer=said.transfer(verify=verify is None or verify),
    )
    where = None if target is None else location(target)
    with ranks() as group:
        prepared = group.together(lambda: prepare_reshard(location(source), where, asked))
        return prepared.report if said.get("dry_run") else prepared.run(progress, group)


def verify(path: AnyPath, **options: Unpack[Verifying]) -> VerifyReport:
    """Check that the checkpoint at ``path`` is whole, unchanged and safe: see ``sound``."""
    return _verify.verify(location(path), _verifying(Keywords("verify", options, Verifying)))


def compare(path: AnyPath, other: AnyPath, **options: Unpack[Comparing]) -> AgainstReport:
    """Compare two checkpoints of any formats, bit by bit, or as numbers where asked.

    As ``ckptool verify PATH --against OTHER``; ``verify.sound`` of the report says whether they
    are the same.
    """
    said = Keywords("compare", options, Comparing)
    tolerant = said.get("rtol") is not None or said.get("atol") is not None
    asked = said.options(
        AgainstOptions,
        other=location(other),
        selection=said.selection(),
        tolerance=said.options(Tolerance) if tolerant else None,
        verify=_verifying(said),
    )
    return _against.against(location(path), asked)


def _verifying(said: Keywords) -> VerifyOptions:
    return said.options(VerifyOptions, read=said.reading())
