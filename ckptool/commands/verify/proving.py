"""verify --write-manifest and --manifest: from a path to a report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ckptool.commands.open import Opened, open_checkpoint
from ckptool.commands.verify.codes import finding_of
from ckptool.commands.verify.differences import differences, recorded_files
from ckptool.commands.verify.findings import VerifyReport
from ckptool.commands.verify.manifest import Manifest, read_manifest
from ckptool.commands.verify.prove import (
    Measured,
    file_sizes,
    measure,
    measured_bytes,
    require_writable,
    write_manifest,
)
from ckptool.commands.verify.verify import Started, VerifyOptions, examine
from ckptool.engine.remote_path import Location
from ckptool.errors import Damaged, Hostile, Problem


@dataclass(frozen=True, slots=True)
class ProvingOptions:
    """``manifest`` is the file to prove by, or to write; ``overwrite`` replaces one.

    ``verify`` says how deep to look beside that: digests need every byte in any case.
    """

    manifest: Location
    overwrite: bool = False
    verify: VerifyOptions = field(default_factory=lambda: VerifyOptions(quick=True))


def write(path: Location, options: ProvingOptions, started: Started | None = None) -> VerifyReport:
    """Verify the checkpoint at ``path``, read all of it, and write its manifest where it is sound.

    Raises as verify does, CannotDo where the manifest cannot be written.
    """
    require_writable(options.manifest, overwrite=options.overwrite)
    examined = examine(path, options.verify, started, digest=True)
    report, opened = examined.report, _opened(path, options)
    if not report.sound or opened is None:
        return _not_written(report, options)
    files = sorted(file_sizes(opened.catalog))
    measured = _measured(opened, files, options, started, examined.digests)
    found = [
        Problem(f"{name}: {why}", "manifest-incomplete", tensor=name)
        for name, why in measured.manifest.unproved.items()
    ]
    report = _with(report, measured, [*examined.watched.problems(), *found], options.verify)
    if not report.sound:
        return _not_written(report, options)
    write_manifest(measured.manifest, options.manifest, overwrite=options.overwrite)
    sentence = f"Sound: wrote {options.manifest}, {_told(measured.manifest)}."
    return replace(report, sentence=sentence)


def prove(path: Location, options: ProvingOptions, started: Started | None = None) -> VerifyReport:
    """Verify the checkpoint at ``path``, read all of it, and compare it with a manifest.

    Raises as verify does, NotFound or Damaged where there is no manifest to prove by.
    """
    recorded = read_manifest(options.manifest)
    examined = examine(path, options.verify, started)
    report, opened = examined.report, _opened(path, options)
    if opened is None:
        sentence = f"Not proved by {options.manifest}; it cannot be read."
        return replace(report, sound=False, sentence=sentence)
    files = recorded_files(recorded, opened.catalog)
    measured = _measured(opened, files, options, started, {})
    found = differences(recorded, measured.manifest, opened.catalog)
    report = _with(report, measured, [*examined.watched.problems(), *found], options.verify)
    if not report.sound:
        count = len(report.fails(options.verify.strict))
        counted = f"{count:,} thing{' is' if count == 1 else 's are'}"
        sentence = f"Not proved by {options.manifest}; {counted} not as it should be."
        return replace(report, sentence=sentence)
    sentence = f"Proved by {options.manifest}: {_told(measured.manifest)}."
    return replace(report, sentence=sentence)


def _opened(path: Location, options: ProvingOptions) -> Opened | None:
    try:
        return open_checkpoint(path, options.verify.read)
    except (Damaged, Hostile):
        return None


def _measured(
    opened: Opened,
    files: list[str],
    options: ProvingOptions,
    started: Started | None,
    known: Mapping[str, str],
) -> Measured:
    total = measured_bytes(opened.catalog, [name for name in files if name not in known])
    progress = started(total) if started is not None else lambda nbytes: None
    workers = options.verify.workers or opened.source.workers
    return measure(opened, workers, progress, files=files, known=known)


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
