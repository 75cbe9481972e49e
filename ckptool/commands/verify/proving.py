"""verify --write-manifest and --manifest: from a path to a report."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptool.commands.open import Opened, open_checkpoint
from ckptool.commands.verify.compare import Progress
from ckptool.commands.verify.findings import Finding, Severity, VerifyReport
from ckptool.commands.verify.manifest import Manifest, read_manifest
from ckptool.commands.verify.prove import (
    differences,
    file_sizes,
    measure,
    measured_bytes,
    recorded_files,
    require_writable,
    write_manifest,
)
from ckptool.commands.verify.verify import VerifyOptions, verify
from ckptool.engine.run import RunOptions
from ckptool.errors import Damaged, Hostile


@dataclass(frozen=True, slots=True)
class ProvingOptions:
    """``manifest`` is the file to prove by, or to write; ``overwrite`` replaces one."""

    manifest: Path
    writes: bool = False
    overwrite: bool = False
    per_rank: bool = False
    verify: VerifyOptions = field(default_factory=VerifyOptions)
    run: RunOptions = field(default_factory=RunOptions)


class Proving:
    """A checkpoint whose structure is verified and whose content is still to be read.

    Raises as verify does, and NotFound or Damaged where there is no manifest to prove by,
    CannotDo where one cannot be written.
    """

    def __init__(self, path: Path, options: ProvingOptions) -> None:
        self._options = options
        self._recorded = None if options.writes else read_manifest(options.manifest)
        if options.writes:
            require_writable(options.manifest, overwrite=options.overwrite)
        self._report = verify(path, options.verify)
        self._opened = self._open(path)
        self._files = self._files_to_read()

    @property
    def nbytes(self) -> int:
        """Bytes that ``run`` reads."""
        if self._opened is None:
            return 0
        return measured_bytes(self._opened.catalog, self._files)

    def run(self, progress: Progress = lambda nbytes: None) -> VerifyReport:
        """Read everything; write the manifest where all is sound, or prove by it."""
        if self._opened is None:
            return replace(self._report, sound=False, sentence="Not proved: it cannot be read.")
        workers = self._options.run.workers
        measured = measure(self._opened, workers, progress, files=self._files)
        found = [
            Finding(one.code, Severity.ERROR, str(one), one.file, one.tensor)
            for one in measured.problems
        ]
        if self._recorded is None:
            return self._written(measured.manifest, found)
        found += differences(self._recorded, measured.manifest)
        report = self._with(found)
        if not report.sound:
            return replace(report, sentence=f"Not proved by {self._options.manifest}.")
        sentence = f"Proved by {self._options.manifest}: {_told(measured.manifest)}."
        return replace(report, sentence=sentence)

    def _open(self, path: Path) -> Opened | None:
        name = self._options.verify.format_name
        try:
            return open_checkpoint(path, format_name=name, per_rank=self._options.per_rank)
        except (Damaged, Hostile):
            return None

    def _files_to_read(self) -> list[str]:
        if self._opened is None:
            return []
        if self._recorded is not None:
            return recorded_files(self._recorded, self._opened.catalog)
        return sorted(file_sizes(self._opened.catalog))

    def _written(self, manifest: Manifest, found: list[Finding]) -> VerifyReport:
        found += [
            Finding("manifest-unproved", Severity.WARNING, f"{name}: {why}", tensor=name)
            for name, why in manifest.unproved.items()
        ]
        report = self._with(found)
        path = self._options.manifest
        if not report.sound:
            return replace(report, sentence=f"Not sound: {path} is not written.")
        write_manifest(manifest, path, overwrite=self._options.overwrite)
        return replace(report, sentence=f"Sound; wrote {path}: {_told(manifest)}.")

    def _with(self, found: list[Finding]) -> VerifyReport:
        """The report with more findings."""
        options = self._options.verify
        more = [finding for finding in found if finding.code not in options.ignore]
        failing = (Severity.ERROR, Severity.WARNING) if options.strict else (Severity.ERROR,)
        sound = self._report.sound and not any(one.severity in failing for one in more)
        return replace(self._report, findings=(*self._report.findings, *more), sound=sound)


def _told(manifest: Manifest) -> str:
    counts = (
        (len(manifest.tensors), "tensor"),
        (len(manifest.values), "value"),
        (len(manifest.files), "file"),
    )
    told = [f"{count:,} {noun}{'' if count == 1 else 's'}" for count, noun in counts if count]
    return ", ".join(told)
