"""Build the manifest of a checkpoint: read and hash every tensor, value and file."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from ckptool.commands.open import OpenedCheckpoint, open_checkpoint, require_sound
from ckptool.commands.options.question import Question
from ckptool.commands.options.rewrite import RewriteOptions
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.rewrite import rewrite
from ckptool.commands.verify.checks.consistency import conflict_problems
from ckptool.commands.verify.codes import is_error, require_codes
from ckptool.commands.verify.compare.coverage import (
    Amount,
    excluded_by_rewrite,
    rewritten_coverage,
)
from ckptool.commands.verify.compare.names import readable, stored_problems
from ckptool.commands.verify.compare.values import text_digest, value_text
from ckptool.commands.verify.findings import VerifyReport
from ckptool.commands.verify.manifest.schema import (
    CheckpointManifest,
    FileProof,
    TensorProof,
    ValueProof,
    require_replaceable,
    write_manifest,
)
from ckptool.commands.verify.verification import examine
from ckptool.core.catalog import Catalog
from ckptool.core.text import plural
from ckptool.engine.check.digest import digests, file_digests
from ckptool.engine.progress import UNWATCHED, Progress
from ckptool.engine.read.tensors import CheckedSource, TensorSource
from ckptool.errors import UNREAD, CkptoolError, Damaged, Hostile, Problem
from ckptool.serialization.state_dict.values import Repeated
from ckptool.storage.url import Location

_LONGEST_JSON = 1024
_UNPROVED = ("sharding-unrecorded", UNREAD)
"""The code of names whose parts are present, but whose arrangement is not recorded."""


def build_manifest(
    path: Location, target: Location, question: Question, progress: Progress = UNWATCHED
) -> VerifyReport:
    """Verify the checkpoint at ``path``, read all of it, and write its manifest unless it fails.

    The rewriting is done first, as by ``convert``; the manifest is then of the result, without
    files. Ignored errors count, too. Raises as verify does, Unsupported if the manifest cannot be
    written.
    """
    options, overwrite = question.check, question.manifest.overwrite
    require_replaceable(target, overwrite=overwrite)
    require_codes(options.ignore)
    # Ignored damage would count as the truth from then on.
    harmless = [code for code in options.ignore if not is_error(code)]
    options = replace(options, ignore=tuple(harmless))
    verification = examine(path, options, progress, digest=True)
    report, opened = verification.report(), open_unless_damaged(path, options)
    if not report.ok or opened is None:
        return _failure(report, target, options)
    result = rewrite(opened, question.rewrite, check=require_sound)
    files: list[str] = []
    hashes: Mapping[str, str] = {}
    if question.rewrite == RewriteOptions():
        files, hashes = sorted(file_sizes(opened.catalog)), verification.content.read.digests
    manifest, problems, nbytes = measure(opened, result.catalog, options, progress, files, hashes)
    problems += [
        Problem(f"{name}: {why}", "manifest-incomplete", tensor=name)
        for name, why in manifest.unproved.items()
    ]
    problems += excluded_by_rewrite(result, opened.path)
    report = verification.report(problems, compared=result.catalog, nbytes=nbytes)
    if not report.ok or result.catalog.tensors.keys() - manifest.tensors.keys():
        return _failure(report, target, options)
    write_manifest(manifest, target, overwrite=overwrite)
    rest = rewritten_coverage(result, manifest.tensors, len(manifest.values)).rest
    contents = contents_text(manifest.tensors, manifest.values, manifest.files)
    summary = f"OK: wrote {target}: {contents}{excluded_text(rest, path)}"
    return replace(report, summary=summary)


def _failure(report: VerifyReport, target: Location, options: VerifyOptions) -> VerifyReport:
    problems = plural(report.count_failures(options.strict), "problem")
    summary = f"FAILED: {problems}{report.ignored_text}; {target} not written"
    return replace(report, ok=False, summary=summary)


def contents_text(*parts: Collection[object]) -> str:
    """Return text such as ``102 tensors, 16 values, 3 files``."""
    nouns = zip(parts, ("tensor", "value", "file"), strict=True)
    return ", ".join(plural(len(entries), noun) for entries, noun in nouns if entries)


def excluded_text(rest: Amount, path: Location) -> str:
    """Return what of a checkpoint or manifest was excluded, for the end of a summary."""
    return "" if rest == Amount() else f"; excluded: {rest} of {path}"


def open_unless_damaged(path: Location, options: VerifyOptions) -> OpenedCheckpoint | None:
    """Return the checkpoint, None if it cannot be opened; the findings then say why."""
    try:
        return open_checkpoint(path, options.read, placements=False)
    except (Damaged, Hostile):
        return None


def measure(
    opened: OpenedCheckpoint,
    catalog: Catalog,
    options: VerifyOptions,
    progress: Progress,
    files: Collection[str],
    hashes: Mapping[str, str],
) -> tuple[CheckpointManifest, list[Problem], int]:
    """Return the manifest of a checkpoint, the problems in its way, and the bytes read for it.

    It covers all tensors and these ``files``. ``catalog`` is that of ``opened``, rewritten or not.
    Checksums of all records are checked and copies compared meanwhile, unless that was done when
    the ``hashes`` of files were taken. Unreadable entries have no digest and are problems. Raises
    Unsupported if a value is too large to be written.
    """
    sizes, source = file_sizes(opened.catalog), opened.source
    unread = [name for name in files if name not in hashes]
    nbytes = sum(entry.nbytes for entry in catalog.tensors.values())
    nbytes += sum(sizes[name] for name in unread)
    progress.begin(nbytes)
    workers = options.workers or source.policy.workers
    located, failures = readable(opened, catalog)
    entries = list(located.tensors.values())
    problems = [p for p in conflict_problems(catalog) if p.code not in _UNPROVED]
    problems += failures.values()
    checked = CheckedSource(source)
    hexes: dict[str, str] = {}
    try:
        hexes = digests(entries, TensorSource(source) if hashes else checked, workers, progress)
        if not hashes:
            problems += stored_problems(checked, entries, workers)
    except CkptoolError as error:
        problems += error.problems
    tensors = {
        entry.name: TensorProof(entry.dtype.name, entry.shape, hexes[entry.name])
        for entry in entries
        if entry.name in hexes
    }
    values, unproved = _values(catalog)
    file_hexes = file_digests(unread, source, workers, progress) | dict(hashes)
    proofs = {name: FileProof(sizes[name], sha256) for name, sha256 in file_hexes.items()}
    manifest = CheckpointManifest(opened.format.name, tensors, values, unproved, proofs)
    return manifest, problems, nbytes


def _values(catalog: Catalog) -> tuple[dict[str, ValueProof], dict[str, str]]:
    """Return the proof of each value, and the values without one."""
    proofs, unproved = {}, dict[str, str]()
    for name, why in catalog.conflicts.items():
        if isinstance(why, Problem) and why.code in _UNPROVED:
            unproved[name] = str(why)
    for name, entry in catalog.objects.items():
        if isinstance(entry.value, Repeated):
            unproved[name] = "a value that contains itself; not read"
            continue
        text = value_text(entry.value, name)
        short = text if len(text) <= _LONGEST_JSON else None
        proofs[name] = ValueProof(text_digest(text), short)
    return proofs, unproved


def file_sizes(catalog: Catalog) -> dict[str, int]:
    """Return the files of a checkpoint and of its model, with their sizes in bytes."""
    return catalog.files | catalog.companions
