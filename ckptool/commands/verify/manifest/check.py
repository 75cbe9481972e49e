"""verify --write-manifest and --manifest: from a path to a report.

How a checkpoint differs from what its manifest says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ckptool.commands.open import Opened, open_checkpoint
from ckptool.commands.options.source import RewriteOptions
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.rewrite import rewrite
from ckptool.commands.verify.codes import CODES, Severity, require_codes
from ckptool.commands.verify.compare.coverage import (
    Amount,
    amount,
    excluded,
    excluded_by_rewrite,
    rewritten_coverage,
)
from ckptool.commands.verify.compare.names import (
    Counterpart,
    applicable,
    counterpart,
    holds_no_values,
)
from ckptool.commands.verify.findings import VerifyReport, counted, ignored_errors
from ckptool.commands.verify.manifest.build import (
    Measured,
    file_sizes,
    measure,
    measured_bytes,
    require_writable,
    write_manifest,
)
from ckptool.commands.verify.manifest.schema import Manifest, ValueProof, read_manifest
from ckptool.commands.verify.verify import Started, examine
from ckptool.core.catalog import Catalog, ObjectEntry, TensorEntry, places
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
    verification = examine(path, options.verify, started, digest=True)
    report, opened = verification.report(), _opened(path, options)
    if not report.ok or opened is None:
        return _not_written(report, options)
    made = rewrite(opened, options.rewrite)
    files = sorted(file_sizes(opened.catalog)) if options.is_whole else []
    known = verification.digests if options.is_whole else {}
    measured = _measured(opened, made.catalog, files, options, started, known)
    problems = [
        *measured.problems,
        *(
            Problem(f"{name}: {why}", "manifest-incomplete", tensor=name)
            for name, why in measured.manifest.unproved.items()
        ),
        *excluded_by_rewrite(made, opened.path),
    ]
    report = verification.report(problems, compared=made.catalog, nbytes=measured.nbytes)
    if not report.ok or made.catalog.tensors.keys() - measured.manifest.tensors.keys():
        return _not_written(report, options)
    write_manifest(measured.manifest, options.manifest, overwrite=options.overwrite)
    written = measured.manifest
    rest = rewritten_coverage(made, written.tensors, len(written.values)).rest
    summary = f"OK: wrote {options.manifest}: {_contents(written)}{_but(rest, path)}"
    return replace(report, summary=summary)


def prove(path: Location, options: ProvingOptions, started: Started | None = None) -> VerifyReport:
    """Verify the checkpoint at ``path``, read all of it, and compare it with a manifest.

    Raises as verify does, NotFound or Damaged where there is no manifest to prove by.
    """
    manifest = read_manifest(options.manifest)
    verification, opened = examine(path, options.verify, started), _opened(path, options)
    if opened is None:
        summary = f"FAILED: cannot be read, so not compared with {options.manifest}"
        return replace(verification.report(), ok=False, summary=summary)
    asked = applicable(options.rewrite, opened.catalog, manifest_catalog(manifest))
    made = rewrite(opened, asked)
    chosen = counterpart(manifest_catalog(manifest), made.catalog, options.rewrite.selection)
    recorded = manifest if options.is_whole else narrowed(manifest, chosen)
    files = recorded_files(recorded, opened.catalog)
    measured = _measured(opened, made.catalog, files, options, started, {})
    problems = [
        *measured.problems,
        *differences(recorded, measured.manifest, made.catalog, opened.catalog),
        *excluded_by_rewrite(made, opened.path),
        *excluded(options.manifest, chosen.excluded, chosen.excluded_values),
    ]
    alike = [name for name in recorded.tensors if name in measured.manifest.tensors]
    values = len(recorded.values.keys() & measured.manifest.values.keys())
    is_compared = bool(alike) or (bool(values) and not measured.manifest.tensors)
    if not is_compared:
        problems.append(Problem("no tensor or value was compared", "nothing-compared"))
    report = verification.report(problems, compared=made.catalog, nbytes=measured.nbytes)
    report = replace(report, ok=report.ok and is_compared)
    if not report.ok:
        summary = f"FAILED: does not match {options.manifest}: {_count(report, options)}"
        return replace(report, summary=summary)
    but = _but(rewritten_coverage(made, alike, values).rest, path)
    but += _but(amount(chosen.excluded, chosen.excluded_values), options.manifest)
    same = _contents(_equal_part(recorded, measured.manifest))
    ignored = ignored_errors(report.ignored)
    return replace(report, summary=f"OK: matches {options.manifest}: {same}{but}{ignored}")


def _equal_part(recorded: Manifest, measured: Manifest) -> Manifest:
    """Return what a manifest says and the checkpoint is."""
    return replace(
        recorded,
        tensors=dict(recorded.tensors.items() & measured.tensors.items()),
        values=dict(recorded.values.items() & measured.values.items()),
        files=dict(recorded.files.items() & measured.files.items()),
    )


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


def _not_written(report: VerifyReport, options: ProvingOptions) -> VerifyReport:
    return replace(
        report,
        ok=False,
        summary=f"FAILED: {_count(report, options)}; {options.manifest} not written",
    )


def _contents(manifest: Manifest) -> str:
    """Return such as ``102 tensors, 16 values, 3 files``."""
    parts = ((manifest.tensors, "tensor"), (manifest.values, "value"), (manifest.files, "file"))
    return ", ".join(counted(len(entries), noun) for entries, noun in parts if entries)


def recorded_files(manifest: Manifest, catalog: Catalog) -> list[str]:
    """The files a manifest was made of that are here with the sizes it records."""
    sizes = catalog.files | catalog.companions
    return [name for name, proof in manifest.files.items() if sizes.get(name) == proof.nbytes]


def narrowed(manifest: Manifest, chosen: Counterpart) -> Manifest:
    """Return what of a manifest is to be compared: tensors and values, and no file."""
    return replace(
        manifest,
        tensors={new: manifest.tensors[old] for new, old in chosen.names.items()},
        values={name: manifest.values[name] for name in chosen.catalog.objects},
        unproved={name: manifest.unproved[name] for name in chosen.catalog.conflicts},
        files={},
    )


def manifest_catalog(manifest: Manifest) -> Catalog:
    """The names of a manifest as a catalog that holds nothing."""
    tensors = {
        name: TensorEntry(name, (name,), BY_NAME[proof.dtype], proof.shape, ())
        for name, proof in manifest.tensors.items()
    }
    values = {name: ObjectEntry(name, (name,), None) for name in manifest.values}
    return Catalog(manifest.format, tensors, values, {}, conflicts=dict(manifest.unproved))


def differences(
    recorded: Manifest, measured: Manifest, catalog: Catalog, stored: Catalog
) -> Iterator[Problem]:
    """Yield a problem for each thing that is not as the manifest says.

    ``measured`` has the digests of the files that are here with their recorded sizes, ``catalog``
    what was measured, ``stored`` that of the files.
    """
    changed = [name for name, proof in recorded.files.items() if measured.files.get(name) != proof]
    yield from _differing_tensors(recorded, measured, catalog, changed)
    yield from _differing_values(recorded, measured)
    if recorded.files and not changed:
        return
    if changed and _is_another_writing(recorded, measured, changed, stored):
        message = f"the checkpoint has other files than the {len(recorded.files):,} in the manifest"
        yield Problem(message, "manifest-other-files")
    else:
        yield from (_differing_file(name, recorded, measured, stored) for name in changed)
    for name in sorted({*recorded.unproved, *measured.unproved}):
        why = recorded.unproved.get(name) or measured.unproved[name]
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


def _differing_tensors(
    recorded: Manifest, measured: Manifest, catalog: Catalog, changed: Collection[str]
) -> Iterator[Problem]:
    """Yield the tensors that differ, each of a file that ``changed`` and holds some of it."""
    yield from _missing(recorded.tensors, measured.tensors, "a tensor")
    for name, proof in recorded.tensors.items():
        tensor = measured.tensors.get(name)
        if tensor is None or tensor == proof:
            continue
        file = None
        here, there = (f"{each.dtype} {list(each.shape)}" for each in (tensor, proof))
        if here == there:
            here, there = (f"SHA-256 {each.sha256[:16]}..." for each in (tensor, proof))
            entry = catalog.tensors.get(name)
            files = [at.file for at in places(entry)] if entry else []
            file = next((file for file in files if file in changed), next(iter(files), None))
        message = f"{name}: {here}; in the manifest {there}"
        yield Problem(message, "manifest-differs", file=file, tensor=name)


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
