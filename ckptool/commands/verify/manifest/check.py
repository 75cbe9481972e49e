"""verify --write-manifest and --manifest: from a path to a report.

How a checkpoint differs from what its manifest says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ckptool.commands.open import Opened, open_checkpoint
from ckptool.commands.options.source import RewriteOptions, Selection
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.rewrite import rewrite
from ckptool.commands.verify.codes import CODES, Severity, require_codes
from ckptool.commands.verify.compare.coverage import (
    Amount,
    amount,
    counted,
    left_out,
    not_chosen,
    rewritten_coverage,
)
from ckptool.commands.verify.compare.names import applicable, counterpart, holds_no_values
from ckptool.commands.verify.findings import finding_of
from ckptool.commands.verify.manifest.build import (
    Measured,
    file_sizes,
    measure,
    measured_bytes,
    require_writable,
    write_manifest,
)
from ckptool.commands.verify.manifest.schema import Manifest, ValueProof, read_manifest
from ckptool.commands.verify.report import VerifyReport
from ckptool.commands.verify.verify import Started, examine
from ckptool.core.catalog import Catalog, ObjectEntry, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.errors import Damaged, Hostile, Problem
from ckptool.storage.url import Location


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

    Errors count though they are to be ignored. Raises as verify does, Unsupported where the
    manifest cannot be written.
    """
    require_writable(options.manifest, overwrite=options.overwrite)
    # Damage that is ignored would be taken for the truth from then on.
    options = replace(options, verify=replace(options.verify, ignore=_harmless(options.verify)))
    examined = examine(path, options.verify, started, digest=True)
    report, opened = examined.report, _opened(path, options)
    if not report.ok or opened is None:
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
    if not report.ok or made.catalog.tensors.keys() - measured.manifest.tensors.keys():
        return _not_written(report, options)
    write_manifest(measured.manifest, options.manifest, overwrite=options.overwrite)
    written = measured.manifest
    rest = rewritten_coverage(made, written.tensors, len(written.values)).rest
    summary = f"OK: wrote {options.manifest}: {_told(written)}{_but(rest, path)}"
    return replace(report, summary=summary)


def prove(path: Location, options: ProvingOptions, started: Started | None = None) -> VerifyReport:
    """Verify the checkpoint at ``path``, read all of it, and compare it with a manifest.

    Raises as verify does, NotFound or Damaged where there is no manifest to prove by.
    """
    manifest = read_manifest(options.manifest)
    examined = examine(path, options.verify, started)
    report, opened = examined.report, _opened(path, options)
    if opened is None:
        summary = f"FAILED: cannot be read, so not compared with {options.manifest}"
        return replace(report, ok=False, summary=summary)
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
        nothing = finding_of(Problem("no name in common", "nothing-compared"))
        report = replace(report, findings=(*report.findings, nothing), ok=False)
    if not report.ok:
        summary = f"FAILED: does not match {options.manifest}: {_count(report, options)}"
        return replace(report, summary=summary)
    but = _but(rewritten_coverage(made, alike, values).rest, path)
    but += _but(amount(chosen.tensors, chosen.values), options.manifest)
    found_files = measured.manifest.files
    same = {name: file for name, file in recorded.files.items() if found_files.get(name) == file}
    summary = f"OK: matches {options.manifest}: {_told(replace(recorded, files=same))}{but}"
    return replace(report, summary=summary)


def _count(report: VerifyReport, options: ProvingOptions) -> str:
    return counted(len(report.fails(options.verify.strict)), "problem")


def _harmless(options: VerifyOptions) -> tuple[str, ...]:
    """The codes to ignore that are no errors."""
    require_codes(options.ignore)
    return tuple(code for code in options.ignore if CODES[code].severity is not Severity.ERROR)


def _but(rest: Amount, path: Location) -> str:
    """What of a checkpoint or manifest was left out."""
    return "" if rest == Amount() else f"; excluded: {rest} of {path}"


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
    report = replace(report, findings=findings, depth="full", nbytes=nbytes)
    return replace(report, ok=not report.fails(options.strict))


def _not_written(report: VerifyReport, options: ProvingOptions) -> VerifyReport:
    return replace(
        report,
        ok=False,
        summary=f"FAILED: {_count(report, options)}; {options.manifest} not written",
    )


def _told(manifest: Manifest) -> str:
    counts = (
        (len(manifest.tensors), "tensor"),
        (len(manifest.values), "value"),
        (len(manifest.files), "file"),
    )
    told = [f"{count:,} {noun}{'' if count == 1 else 's'}" for count, noun in counts if count]
    return ", ".join(told)


def recorded_files(manifest: Manifest, catalog: Catalog) -> list[str]:
    """The files a manifest was made of that are here with the sizes it records."""
    sizes = catalog.files | catalog.companions
    return [name for name, proof in manifest.files.items() if sizes.get(name) == proof.nbytes]


@dataclass(frozen=True, slots=True)
class Narrowed:
    """What of a manifest a selection is about, and the tensors and values that it leaves out."""

    manifest: Manifest
    tensors: list[TensorEntry]
    values: int


def narrowed(manifest: Manifest, catalog: Catalog, selection: Selection) -> Narrowed:
    """What of a manifest a selection that ``catalog`` is left of is about, as ``counterpart``.

    No file is: the tensors and values are what counts.
    """
    whole = manifest_catalog(manifest)
    theirs = counterpart(whole, catalog, selection)
    names = set(theirs.names.values())
    kept = replace(
        manifest,
        tensors={new: manifest.tensors[old] for new, old in theirs.names.items()},
        values={name: manifest.values[name] for name in theirs.catalog.objects},
        unproved={name: manifest.unproved[name] for name in theirs.catalog.conflicts},
        files={},
    )
    gone = [entry for name, entry in whole.tensors.items() if name not in names]
    return Narrowed(kept, gone, len(manifest.values) - len(kept.values))


def manifest_catalog(manifest: Manifest) -> Catalog:
    """The names of a manifest as a catalog that holds nothing."""
    tensors = {
        name: TensorEntry(name, (name,), BY_NAME[proof.dtype], proof.shape, ())
        for name, proof in manifest.tensors.items()
    }
    values = {name: ObjectEntry(name, (name,), None) for name in manifest.values}
    return Catalog(manifest.format, tensors, values, {}, conflicts=dict(manifest.unproved))


def differences(recorded: Manifest, found: Manifest, catalog: Catalog) -> Iterator[Problem]:
    """One problem for each thing that is not as the manifest says.

    ``found`` has the digests of the files that are here with their recorded sizes.
    """
    yield from _differing_tensors(recorded, found)
    yield from _differing_values(recorded, found)
    changed = [name for name, proof in recorded.files.items() if found.files.get(name) != proof]
    if recorded.files and not changed:
        return
    if changed and _is_another_writing(recorded, found, changed, catalog):
        message = f"{len(recorded.files):,} files in the manifest; the checkpoint has other files"
        yield Problem(message, "manifest-other-files")
    else:
        yield from (_differing_file(name, recorded, found, catalog) for name in changed)
    for name in sorted({*recorded.unproved, *found.unproved}):
        why = recorded.unproved.get(name) or found.unproved[name]
        yield Problem(f"{name}: {why}", "manifest-unchecked", tensor=name)


def _is_another_writing(
    recorded: Manifest, found: Manifest, changed: list[str], catalog: Catalog
) -> bool:
    """Whether the files are other ones, not those of the manifest of which some have changed.

    A reshard may happen to write files of the same names and sizes; then no digest is the same but
    those of what goes with any copy of a model, such as its config.json.
    """
    if found.format != recorded.format:
        return True
    kept = found.files.keys() - set(changed) - catalog.companions.keys()
    if any(found.files[name].nbytes for name in kept):
        return False
    return len(recorded.files) > 1 or not found.files


def _differing_tensors(recorded: Manifest, found: Manifest) -> Iterator[Problem]:
    yield from _missing(recorded.tensors, found.tensors, "a tensor")
    for name, proof in recorded.tensors.items():
        other = found.tensors.get(name)
        if other is None or other == proof:
            continue
        here, said = (f"{one.dtype} {list(one.shape)}" for one in (other, proof))
        if here == said:
            here, said = (f"SHA-256 {one.sha256[:16]}..." for one in (other, proof))
        message = f"{name}: {here}; in the manifest {said}"
        yield Problem(message, "manifest-differs", tensor=name)


def _differing_values(recorded: Manifest, found: Manifest) -> Iterator[Problem]:
    if recorded.values and not found.values and holds_no_values(found.format):
        message = f"{len(recorded.values):,} non-tensor values, which {found.format}"
        yield Problem(f"{message} cannot hold, are not checked", "values-unsupported")
        return
    yield from _missing(recorded.values, found.values, "a value")
    for name, proof in recorded.values.items():
        other = found.values.get(name)
        if other is not None and other.sha256 != proof.sha256:
            message = (
                f"{name}: {_tell_difference(other)}; in the manifest {_tell_difference(proof)}"
            )
            yield Problem(message, "manifest-differs", tensor=name)


def _missing(
    recorded: Mapping[str, object], found: Mapping[str, object], what: str
) -> Iterator[Problem]:
    for name in recorded:
        if name not in found:
            yield Problem(f"{name}: {what}", "manifest-missing", tensor=name)
    for name in found:
        if name not in recorded:
            yield Problem(f"{name}: {what}", "manifest-extra", tensor=name)


def _differing_file(name: str, recorded: Manifest, found: Manifest, catalog: Catalog) -> Problem:
    size = (catalog.files | catalog.companions).get(name)
    if size is None:
        return Problem(f"{name}: a file", "manifest-missing", file=name)
    said = recorded.files[name]
    if size != said.nbytes:
        message = f"{name}: the file has {size:,} bytes; in the manifest {said.nbytes:,}"
    else:
        here = found.files[name].sha256[:16]
        message = f"{name}: SHA-256 {here}...; in the manifest"
        message += f" {said.sha256[:16]}..."
    return Problem(message, "manifest-differs", file=name)


def _tell_difference(proof: ValueProof) -> str:
    if proof.json is not None and len(proof.json) <= 80:
        return proof.json
    return f"SHA-256 {proof.sha256[:16]}..."
