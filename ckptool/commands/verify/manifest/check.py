"""Compare a checkpoint with its manifest, and report the differences."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from msgspec.structs import replace

from ckptool.commands.options.question import Question
from ckptool.commands.options.rewrite import RewriteOptions
from ckptool.commands.verify.compare.coverage import align, amount, rewritten_coverage
from ckptool.commands.verify.compare.names import Counterpart, holds_no_values
from ckptool.commands.verify.findings import NOTHING_COMPARED, VerifyReport
from ckptool.commands.verify.manifest.build import (
    contents_text,
    excluded_text,
    file_sizes,
    measure,
    open_unless_damaged,
)
from ckptool.commands.verify.manifest.schema import CheckpointManifest, ValueProof, read_manifest
from ckptool.commands.verify.verification import examine
from ckptool.core.catalog import Catalog, ObjectEntry, TensorEntry, places
from ckptool.core.dtype import BY_NAME, short_name
from ckptool.core.text import plural
from ckptool.engine.progress import UNWATCHED, Progress
from ckptool.errors import Problem
from ckptool.storage.url import Location

_LONGEST_VALUE = 80


def check_manifest(
    path: Location, recorded_in: Location, question: Question, progress: Progress = UNWATCHED
) -> VerifyReport:
    """Verify the checkpoint at ``path``, read all of it, and compare it with a manifest.

    Its data is read only for the manifest, unless a sample or a search for NaN is requested. The
    rewriting is done first, as by ``convert``; files are then not compared. Raises as verify
    does, NotFound or Damaged if there is no manifest.
    """
    options, rewriting = question.check, question.rewrite
    manifest = read_manifest(recorded_in)
    if options.sample == 1 and not options.fail_nonfinite:
        options = replace(options, quick=True)
    verification, opened = examine(path, options, progress), open_unless_damaged(path, options)
    if opened is None:
        summary = f"FAILED: cannot be read, so not compared with {recorded_in}"
        return replace(verification.report(), ok=False, summary=summary)
    alignment = align(opened, rewriting, manifest_catalog(manifest), recorded_in)
    result, chosen = alignment.result, alignment.counterpart
    recorded = manifest if rewriting == RewriteOptions() else narrowed(manifest, chosen)
    sizes = file_sizes(opened.catalog)
    files = [name for name, proof in recorded.files.items() if sizes.get(name) == proof.nbytes]
    measured, problems, nbytes = measure(opened, result.catalog, options, progress, files, {})
    problems += differences(recorded, measured, result.catalog, opened.catalog)
    problems += alignment.notes
    names = [name for name in recorded.tensors if name in measured.tensors]
    values = len(recorded.values.keys() & measured.values.keys())
    if not names and (measured.tensors or not values):
        problems.append(Problem("no name is in both", NOTHING_COMPARED))
    report = verification.report(problems, compared=result.catalog, nbytes=nbytes)
    if not report.ok:
        count = plural(report.count_failures(options.strict), "problem")
        summary = f"FAILED: does not match {recorded_in}: {count}{report.ignored_text}"
        return replace(report, ok=False, summary=summary)
    equal = contents_text(
        recorded.tensors.items() & measured.tensors.items(),
        recorded.values.items() & measured.values.items(),
        recorded.files.items() & measured.files.items(),
    )
    rest = excluded_text(rewritten_coverage(result, names, values).rest, path)
    rest += excluded_text(amount(chosen.excluded, chosen.excluded_values), recorded_in)
    summary = f"OK: matches {recorded_in}: {equal}{rest}{report.ignored_text}"
    return replace(report, summary=summary)


def narrowed(manifest: CheckpointManifest, chosen: Counterpart) -> CheckpointManifest:
    """Return the part of a manifest to compare: tensors and values, but no files."""
    return replace(
        manifest,
        tensors={new: manifest.tensors[old] for new, old in chosen.names.items()},
        values={name: manifest.values[name] for name in chosen.catalog.objects},
        unproved={name: manifest.unproved[name] for name in chosen.catalog.conflicts},
        files={},
    )


def manifest_catalog(manifest: CheckpointManifest) -> Catalog:
    """Return the names of a manifest as a catalog without chunks."""
    tensors = {
        name: TensorEntry(name, (name,), BY_NAME[proof.dtype], proof.shape, ())
        for name, proof in manifest.tensors.items()
    }
    values = {name: ObjectEntry(name, (name,), None) for name in manifest.values}
    return Catalog(manifest.format, tensors, values, {}, conflicts=dict(manifest.unproved))


def differences(
    recorded: CheckpointManifest, measured: CheckpointManifest, catalog: Catalog, stored: Catalog
) -> Iterator[Problem]:
    """Yield a problem for each difference from the manifest.

    ``measured`` has the digests of the files with their recorded sizes, ``catalog`` is what was
    measured, ``stored`` is the catalog of the files.
    """
    changed = [name for name, proof in recorded.files.items() if measured.files.get(name) != proof]
    yield from _differing_tensors(recorded, measured, catalog, changed)
    yield from _differing_values(recorded, measured)
    if recorded.files and not changed:
        return
    if changed and _is_another_writing(recorded, measured, changed, stored):
        message = f"the checkpoint's files are not the {len(recorded.files):,} of the manifest"
        yield Problem(message, "manifest-other-files")
    else:
        sizes = file_sizes(stored)
        for name in changed:
            yield _differing_file(name, recorded, measured, sizes.get(name))
    for name in sorted({*recorded.unproved, *measured.unproved}):
        why = recorded.unproved.get(name) or measured.unproved[name]
        yield Problem(f"{name}: {why}", "manifest-unchecked", tensor=name)


def _is_another_writing(
    recorded: CheckpointManifest,
    measured: CheckpointManifest,
    changed: Collection[str],
    catalog: Catalog,
) -> bool:
    """Return whether the files are of another writing, not the recorded ones with changes.

    A reshard may produce files of the same names and sizes; then only the digests of files that go
    with any copy of a model, such as config.json, are equal.
    """
    if measured.format != recorded.format:
        return True
    equal = measured.files.keys() - set(changed) - catalog.companions.keys()
    if any(measured.files[name].nbytes for name in equal):
        return False
    return len(recorded.files) > 1 or not measured.files


def _differing_tensors(
    recorded: CheckpointManifest,
    measured: CheckpointManifest,
    catalog: Catalog,
    changed: Collection[str],
) -> Iterator[Problem]:
    """Yield the differing tensors, each of a file that ``changed`` and holds some of it."""
    yield from _one_sided(recorded.tensors, measured.tensors, "a tensor")
    for name, proof in recorded.tensors.items():
        tensor = measured.tensors.get(name)
        if tensor is None or tensor == proof:
            continue
        file = None
        text, recorded_text = (f"{short_name(t.dtype)} {list(t.shape)}" for t in (tensor, proof))
        if text == recorded_text:
            text, recorded_text = _short(tensor.sha256), _short(proof.sha256)
            entry = catalog.tensors.get(name)
            files = [at.file for at in places(entry)] if entry else []
            file = next((file for file in files if file in changed), next(iter(files), None))
        message = f"{name}: {text}; in the manifest {recorded_text}"
        yield Problem(message, "manifest-differs", file=file, tensor=name)


def _differing_values(
    recorded: CheckpointManifest, measured: CheckpointManifest
) -> Iterator[Problem]:
    if recorded.values and not measured.values and holds_no_values(measured.format):
        values = plural(len(recorded.values), "non-tensor value")
        message = f"{values}, which {measured.format} cannot hold: not checked"
        yield Problem(message, "values-unsupported")
        return
    yield from _one_sided(recorded.values, measured.values, "a value")
    for name, proof in recorded.values.items():
        value = measured.values.get(name)
        if value is not None and value.sha256 != proof.sha256:
            message = f"{name}: {_value_text(value)}; in the manifest {_value_text(proof)}"
            yield Problem(message, "manifest-differs", tensor=name)


def _one_sided(
    recorded: Mapping[str, object], measured: Mapping[str, object], what: str
) -> Iterator[Problem]:
    for name in recorded:
        if name not in measured:
            yield Problem(f"{name}: {what}", "manifest-missing", tensor=name)
    for name in measured:
        if name not in recorded:
            yield Problem(f"{name}: {what}", "manifest-extra", tensor=name)


def _differing_file(
    name: str, recorded: CheckpointManifest, measured: CheckpointManifest, nbytes: int | None
) -> Problem:
    if nbytes is None:
        return Problem(f"{name}: a file", "manifest-missing", file=name)
    proof = recorded.files[name]
    if nbytes != proof.nbytes:
        message = f"{name}: the file has {nbytes:,} bytes; in the manifest {proof.nbytes:,}"
    else:
        digest, recorded_digest = _short(measured.files[name].sha256), _short(proof.sha256)
        message = f"{name}: {digest}; in the manifest {recorded_digest}"
    return Problem(message, "manifest-differs", file=name)


def _value_text(proof: ValueProof) -> str:
    is_short = proof.json is not None and len(proof.json) <= _LONGEST_VALUE
    return str(proof.json) if is_short else _short(proof.sha256)


def _short(sha256: str) -> str:
    return f"SHA-256 {sha256[:16]}..."
