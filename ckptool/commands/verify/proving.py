"""verify --write-manifest and --manifest: from a path to a report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ckptool.commands.open import Opened, open_checkpoint
from ckptool.commands.rewriting import RewriteOptions, rewrite
from ckptool.commands.verify.codes import CODES, finding_of, require_codes
from ckptool.commands.verify.coverage import (
    Amount,
    amount,
    left_out,
    not_chosen,
    rewritten_coverage,
)
from ckptool.commands.verify.differences import (
    Narrowed,
    differences,
    manifest_catalog,
    narrowed,
    recorded_files,
)
from ckptool.commands.verify.findings import Severity, VerifyReport
from ckptool.commands.verify.manifest import Manifest, read_manifest
from ckptool.commands.verify.prove import (
    Measured,
    file_sizes,
    measure,
    measured_bytes,
    require_writable,
    write_manifest,
)
from ckptool.commands.verify.structure import applicable
from ckptool.commands.verify.verify import Started, VerifyOptions, examine
from ckptool.core.catalog import Catalog
from ckptool.engine.remote_path import Location
from ckptool.errors import Damaged, Hostile, Problem


@dataclass(frozen=True, slots=True)
class ProvingOptions:
    """``manifest`` is the file to prove by, or to write; ``overwrite`` replaces one.

    ``verify`` says how deep to look beside that: digests need every byte in any case. ``rewrite``
    is done to the checkpoint first, as ``convert`` does it; the manifest is then of the result, and
    of no file.
    """

    manifest: Location
    overwrite: bool = False
    verify: VerifyOptions = field(default_factory=lambda: VerifyOptions(quick=True))
    rewrite: RewriteOptions = field(default_factory=RewriteOptions)

    @property
    def is_whole(self) -> bool:
        """Whether the checkpoint is taken as it is."""
        return self.rewrite == RewriteOptions()


def write(path: Location, options: ProvingOptions, started: Started | None = None) -> VerifyReport:
    """Verify the checkpoint at ``path``, read all of it, and write its manifest where it is sound.

    Errors count though they are to be ignored. Raises as verify does, CannotDo where the manifest
    cannot be written.
    """
    require_writable(options.manifest, overwrite=options.overwrite)
    # Damage that is ignored would be taken for the truth from then on.
    options = replace(options, verify=replace(options.verify, ignore=_harmless(options.verify)))
    examined = examine(path, options.verify, started, digest=True)
    report, opened = examined.report, _opened(path, options)
    if not report.sound or opened is None:
        return _not_written(report, options)
    made = rewrite(opened, options.rewrite)
    files = sorted(file_sizes(opened.catalog)) if options.is_whole else []
    known = examined.digests if options.is_whole else {}
    measured = _measured(opened, made.catalog, files, options, started, known)
    found = [
        Problem(f"{name}: {why}", "manifest-incomplete", tensor=name)
        for name, why in measured.manifest.unproved.items()
    ]
    found += left_out(made, opened.path)
    report = _with(report, measured, [*examined.watched.problems(), *found], options.verify)
    if not report.sound or made.catalog.tensors.keys() - measured.manifest.tensors.keys():
        return _not_written(report, options)
    write_manifest(measured.manifest, options.manifest, overwrite=options.overwrite)
    written = measured.manifest
    rest = rewritten_coverage(made, written.tensors, len(written.values)).rest
    sentence = f"Sound: wrote {options.manifest}, {_told(written)}{_but(rest, path)}."
    return replace(report, sentence=sentence)


def prove(path: Location, options: ProvingOptions, started: Started | None = None) -> VerifyReport:
    """Verify the checkpoint at ``path``, read all of it, and compare it with a manifest.

    Raises as verify does, NotFound or Damaged where there is no manifest to prove by.
    """
    manifest = read_manifest(options.manifest)
    examined = examine(path, options.verify, started)
    report, opened = examined.report, _opened(path, options)
    if opened is None:
        sentence = f"Not proved by {options.manifest}; it cannot be read."
        return replace(report, sound=False, sentence=sentence)
    asked = applicable(options.rewrite, opened.catalog, manifest_catalog(manifest))
    made = rewrite(opened, asked)
    chosen = Narrowed(manifest, [], 0)
    if not options.is_whole:
        chosen = narrowed(manifest, made.catalog, options.rewrite.selection)
    recorded = chosen.manifest
    files = recorded_files(recorded, opened.catalog)
    measured = _measured(opened, made.catalog, files, options, started, {})
    found = [
        *differences(recorded, measured.manifest, opened.catalog),
        *left_out(made, opened.path),
    ]
    if chosen.tensors or chosen.values:
        found.append(not_chosen(options.manifest, chosen.tensors, chosen.values))
    report = _with(report, measured, [*examined.watched.problems(), *found], options.verify)
    alike = [name for name in recorded.tensors if name in measured.manifest.tensors]
    values = len(recorded.values.keys() & measured.manifest.values.keys())
    if not alike and (measured.manifest.tensors or not values):
        nothing = finding_of(Problem("no name of the one is in the other", "nothing-compared"))
        report = replace(report, findings=(*report.findings, nothing), sound=False)
    if not report.sound:
        count = len(report.fails(options.verify.strict))
        thing = f"{count:,} thing{' is' if count == 1 else 's are'}"
        sentence = f"Not proved by {options.manifest}; {thing} not as it should be."
        return replace(report, sentence=sentence)
    but = _but(rewritten_coverage(made, alike, values).rest, path)
    but += _but(amount(chosen.tensors, chosen.values), options.manifest)
    found_files = measured.manifest.files
    same = {name: file for name, file in recorded.files.items() if found_files.get(name) == file}
    sentence = f"Proved by {options.manifest}: {_told(replace(recorded, files=same))}{but}."
    return replace(report, sentence=sentence)


def _harmless(options: VerifyOptions) -> tuple[str, ...]:
    """The codes to ignore that are no errors."""
    require_codes(options.ignore)
    return tuple(code for code in options.ignore if CODES[code].severity is not Severity.ERROR)


def _but(rest: Amount, path: Location) -> str:
    """What of a checkpoint or manifest was left out."""
    return "" if rest == Amount() else f"; left out: {rest} of {path}"


def _opened(path: Location, options: ProvingOptions) -> Opened | None:
    try:
        return open_checkpoint(path, options.verify.read)
    except (Damaged, Hostile):
        return None


def _measured(
    opened: Opened,
    catalog: Catalog,
    files: list[str],
    options: ProvingOptions,
    started: Started | None,
    known: Mapping[str, str],
) -> Measured:
    total = measured_bytes(catalog, [name for name in files if name not in known])
    progress = started(total) if started is not None else lambda nbytes: None
    workers = options.verify.workers or opened.source.workers
    return measure(opened, catalog, workers, progress, files=files, known=known)


def _with(
    report: VerifyReport, measured: Measured, found: Iterable[Problem], options: VerifyOptions
) -> VerifyReport:
    """The report with what was found while everything was read."""
    problems = [*measured.problems, *found]
    more = [finding_of(problem) for problem in problems if problem.code not in options.ignore]
    findings = (*report.findings, *more)
    nbytes = report.nbytes + measured.nbytes
    report = replace(report, findings=findings, depth="content", nbytes=nbytes)
    return replace(report, sound=not report.fails(options.strict))


def _not_written(report: VerifyReport, options: ProvingOptions) -> VerifyReport:
    return replace(report, sound=False, sentence=f"Not sound; {options.manifest} is not written.")


def _told(manifest: Manifest) -> str:
    counts = (
        (len(manifest.tensors), "tensor"),
        (len(manifest.values), "value"),
        (len(manifest.files), "file"),
    )
    told = [f"{count:,} {noun}{'' if count == 1 else 's'}" for count, noun in counts if count]
    return ", ".join(told)
