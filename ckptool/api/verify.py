"""Whether checkpoints are whole, the same, the newest good one, and what is left of a bad one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from ckptool.api.commands import Progress, silent
from ckptool.api.keywords import AnyPath, Checking, Comparing, Salvaging, Verifying
from ckptool.api.options import Said, documented, location
from ckptool.commands.rewrite import RewriteOptions
from ckptool.commands.verify import verify as _verify
from ckptool.commands.verify.report import VerifyReport
from ckptool.commands.verify.verify import VerifyOptions
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.commands.verify.compare.against import AgainstReport
    from ckptool.commands.verify.run_folder import RunReport
    from ckptool.commands.verify.salvage.salvage import SalvageReport


@documented(Verifying)
def verify(
    path: AnyPath, *, progress: Progress = silent, **options: Unpack[Verifying]
) -> VerifyReport:
    """Check that the checkpoint at ``path`` is whole, unchanged and safe: see ``sound``.

    ``write_manifest`` is written where it is sound; by a ``manifest`` it is proved to be what was
    written then, in whatever format. Raises NotFound and Unrecognised where there is no
    checkpoint, and nothing for damage: that is in the report.
    """
    said = Said("verify", options, Verifying)
    asked, written, read = _options(said), said.get("write_manifest"), said.get("manifest")
    rewrite = said.rewriting()
    if written is None and read is None:
        if rewrite != RewriteOptions():
            raise UsageError("what to take of it and how needs a manifest, or compare()")
        return _verify.verify(location(path), asked, lambda total: progress)
    if written is not None and read is not None:
        raise UsageError("manifest and write_manifest: one at a time")
    from ckptool.commands.verify.manifest.check import ProvingOptions, prove, write

    if written is not None:
        proving = ProvingOptions(written, said.get("overwrite", False), asked, rewrite)
        return write(location(path), proving, lambda total: progress)
    if asked.sample == 1 and not asked.finite:
        asked = replace(asked, quick=True)
    proving = ProvingOptions(read, verify=asked, rewrite=rewrite)
    return prove(location(path), proving, lambda total: progress)


@documented(Comparing)
def compare(
    path: AnyPath, other: AnyPath, *, progress: Progress = silent, **options: Unpack[Comparing]
) -> AgainstReport:
    """Compare two checkpoints of any formats, bit by bit, or as numbers where asked.

    As ``ckptool verify PATH --against OTHER``; ``verify.sound`` of the report says whether they
    are the same.
    """
    from ckptool.commands.verify.compare.against import AgainstOptions, against
    from ckptool.commands.verify.compare.tensors import Tolerance

    said = Said("compare", options, Comparing)
    tolerant = said.get("rtol") is not None or said.get("atol") is not None
    asked = said.options(
        AgainstOptions,
        other=location(other),
        rewrite=said.rewriting(),
        tolerance=said.options(Tolerance) if tolerant else None,
        verify=_options(said),
    )
    return against(location(path), asked, lambda total: progress)


@documented(Checking)
def verify_run(run: AnyPath, *, every: bool = False, **options: Unpack[Checking]) -> RunReport:
    """Verify a run's steps from the newest to the first whole one: see ``latest_good``.

    As ``ckptool verify RUN --latest-good``, or with ``every`` step as ``--all``.
    """
    from ckptool.commands.verify.run_folder import verify_run as _verify_run

    return _verify_run(location(run), _options(Said("verify_run", options, Checking)), every=every)


@documented(Salvaging)
def salvage(
    path: AnyPath, target: AnyPath, *, progress: Progress = silent, **options: Unpack[Salvaging]
) -> SalvageReport:
    """Write what is provably whole of a damaged checkpoint to ``target``: see ``lost``.

    ``target`` is a DCP folder, or a .safetensors or .pt file; a list of what is lost comes beside
    it. Raises CannotDo where nothing is whole.
    """
    from ckptool.commands.verify.salvage.salvage import SalvageOptions, plan_salvage

    said = Said("salvage", options, Salvaging)
    asked = SalvageOptions(said.reading(), said.transfer())
    return plan_salvage(location(path), location(target), asked).run(progress)


def _options(said: Said) -> VerifyOptions:
    return said.options(VerifyOptions, read=said.reading())
