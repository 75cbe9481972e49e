"""Whether checkpoints are whole, the same, the newest good one, and what is left of a bad one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from ckptool.api.commands import Progress, silent
from ckptool.api.keywords import Checking, Comparing, Salvaging, Verifying
from ckptool.api.options import AnyPath, Keywords, documented, location
from ckptool.commands.options.source import RewriteOptions
from ckptool.commands.options.verify import (
    CompareOptions,
    ManifestOptions,
    SalvageOptions,
    VerifyOptions,
)
from ckptool.commands.verify import verify as _verify
from ckptool.commands.verify.report import VerifyReport
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.commands.verify.compare.against import AgainstReport
    from ckptool.commands.verify.run_folder import RunReport
    from ckptool.commands.verify.salvage.salvage import SalvageReport


@documented(Verifying)
def verify(
    path: AnyPath, *, progress: Progress = silent, **options: Unpack[Verifying]
) -> VerifyReport:
    """Check that the checkpoint at ``path`` is whole, unchanged and safe: see ``ok``.

    ``write_manifest`` is written where it is sound; by a ``manifest`` it is proved to be what was
    written then, in whatever format. Raises NotFound and Unrecognised where there is no
    checkpoint, and nothing for damage: that is in the report.
    """
    keywords = Keywords("verify", options, Verifying)
    asked, rewrite = keywords.options(VerifyOptions), keywords.options(RewriteOptions)
    manifest = keywords.options(ManifestOptions)
    written, proof = manifest.write_manifest, manifest.manifest
    if written is not None and proof is not None:
        raise UsageError("manifest and write_manifest: one at a time")
    from ckptool.commands.verify.manifest.check import ProvingOptions, prove, write

    if written is not None:
        proving = ProvingOptions(written, manifest.overwrite, asked, rewrite)
        return write(location(path), proving, lambda total: progress)
    if proof is not None:
        if asked.sample == 1 and not asked.fail_nonfinite:
            asked = replace(asked, quick=True)
        proving = ProvingOptions(proof, verify=asked, rewrite=rewrite)
        return prove(location(path), proving, lambda total: progress)
    if rewrite != RewriteOptions():
        raise UsageError("selecting, renaming, mapping or casting needs a manifest, or compare()")
    return _verify.verify(location(path), asked, lambda total: progress)


@documented(Comparing)
def compare(
    path: AnyPath, other: AnyPath, *, progress: Progress = silent, **options: Unpack[Comparing]
) -> AgainstReport:
    """Compare two checkpoints of any formats, bit by bit, or as numbers where asked.

    As ``ckptool verify PATH --against OTHER``; ``verify.ok`` of the report says whether they
    are the same.
    """
    from ckptool.commands.verify.compare.against import AgainstOptions, against

    keywords = Keywords("compare", options, Comparing)
    asked = AgainstOptions(
        location(other),
        keywords.options(RewriteOptions),
        keywords.options(CompareOptions),
        keywords.options(VerifyOptions),
    )
    return against(location(path), asked, lambda total: progress)


@documented(Checking)
def verify_run(run: AnyPath, *, every: bool = False, **options: Unpack[Checking]) -> RunReport:
    """Verify a run's steps from the newest to the first whole one: see ``latest_good``.

    As ``ckptool verify RUN --latest-good``, or with ``every`` step as ``--all``.
    """
    from ckptool.commands.verify.run_folder import verify_run as _verify_run

    asked = Keywords("verify_run", options, Checking).options(VerifyOptions)
    return _verify_run(location(run), asked, every=every)


@documented(Salvaging)
def salvage(
    path: AnyPath, target: AnyPath, *, progress: Progress = silent, **options: Unpack[Salvaging]
) -> SalvageReport:
    """Write what is provably whole of a damaged checkpoint to ``target``: see ``lost``.

    ``target`` is a DCP folder, or a .safetensors or .pt file; a list of what is lost comes beside
    it. Raises Unsupported where nothing is whole.
    """
    from ckptool.commands.verify.salvage.salvage import plan_salvage

    asked = Keywords("salvage", options, Salvaging).options(SalvageOptions)
    return plan_salvage(location(path), location(target), asked).run(progress)
