"""Make the manifest of a checkpoint, and prove a checkpoint by a manifest."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptool.commands.open import Opened
from ckptool.commands.verify.manifest import (
    FileProof,
    Manifest,
    TensorProof,
    ValueProof,
    manifest_text,
)
from ckptool.commands.verify.readable import readable
from ckptool.commands.verify.structure import holds_no_values, unread_notes
from ckptool.commands.verify.values import text_digest, value_text
from ckptool.commands.verify.verify import Progress
from ckptool.core.catalog import Catalog
from ckptool.engine.checked import CheckedReads
from ckptool.engine.digest import digests, file_digests
from ckptool.engine.replicas import differing_replicas
from ckptool.errors import CannotDo, CkptoolError, Problem
from ckptool.formats._values import Foreign, type_name

_LONGEST_JSON = 1024


@dataclass(frozen=True, slots=True)
class Measured:
    """The manifest of a checkpoint as it is, and what keeps it from being whole.

    ``nbytes`` were read for it.
    """

    manifest: Manifest
    problems: tuple[Problem, ...]
    nbytes: int


def measured_bytes(catalog: Catalog, files: Collection[str]) -> int:
    """Bytes that ``measure`` reads."""
    tensors = sum(entry.nbytes for entry in catalog.tensors.values())
    sizes = file_sizes(catalog)
    return tensors + sum(sizes[name] for name in files)


def measure(
    opened: Opened,
    workers: int,
    progress: Progress = lambda nbytes: None,
    *,
    files: Collection[str],
) -> Measured:
    """Read all tensors of a checkpoint and digest them, and these of its ``files``.

    Every record's checksum is checked on the way, and copies are compared. What cannot be read has
    no digest and is a problem. Raises CannotDo where a value is too large to be written down.
    """
    catalog, lost = readable(opened, opened.catalog)
    reads = CheckedReads(opened.source.root)
    entries = list(catalog.tensors.values())
    problems: list[Problem] = [*_contradictions(opened.catalog), *lost.values()]
    found: dict[str, str] = {}
    try:
        found = digests(entries, reads.gatherer, workers, progress)
        problems += reads.problems(entries, workers)
        problems += differing_replicas(entries, opened.source.root)
    except CkptoolError as error:
        problems += error.problems
    tensors = {
        entry.name: TensorProof(entry.dtype.name, entry.shape, found[entry.name])
        for entry in entries
        if entry.name in found
    }
    values, unproved = _values(opened.catalog)
    proofs = _files(opened, files, workers, progress)
    manifest = Manifest(opened.format.name, tensors, values, unproved, proofs)
    return Measured(manifest, tuple(problems), measured_bytes(opened.catalog, files))


def _contradictions(catalog: Catalog) -> Iterator[Problem]:
    for name, why in catalog.conflicts.items():
        yield Problem(why, "ranks-disagree", tensor=name)


def _values(catalog: Catalog) -> tuple[dict[str, ValueProof], dict[str, str]]:
    """The proof of each value, and what has none."""
    known = Foreign()
    proofs, unproved = {}, {str(note.tensor): str(note) for note in unread_notes(catalog)}
    for name, entry in catalog.objects.items():
        if "torch storage" in known.of(entry.value):
            unproved[name] = f"a {type_name(entry.value)}, whose bytes ckptool does not read"
            continue
        text = value_text(entry.value, name)
        short = text if len(text) <= _LONGEST_JSON else None
        proofs[name] = ValueProof(text_digest(text), short)
    return proofs, unproved


def file_sizes(catalog: Catalog) -> dict[str, int]:
    """The checkpoint's files, those that go with a model included, with their sizes in bytes."""
    return catalog.files | catalog.companions


def _files(
    opened: Opened, files: Collection[str], workers: int, progress: Progress
) -> dict[str, FileProof]:
    sizes = file_sizes(opened.catalog)
    found = file_digests(files, opened.source.root, workers, progress)
    return {name: FileProof(sizes[name], found[name]) for name in found}


def write_manifest(manifest: Manifest, path: Path, *, overwrite: bool) -> None:
    """Write a manifest, whole or not at all. CannotDo where it exists or cannot be written."""
    require_writable(path, overwrite=overwrite)
    part = path.with_name(f".{path.name}.partial")
    try:
        with open(part, "w", encoding="utf-8") as stream:
            stream.write(manifest_text(manifest))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise CannotDo(f"{path}: cannot be written: {error.strerror}") from None


def require_writable(path: Path, *, overwrite: bool) -> None:
    """CannotDo where a manifest must not or cannot be written: ask before all is read."""
    if path.is_dir():
        raise CannotDo(f"{path}: is a folder, no file to write a manifest to")
    if not path.parent.is_dir():
        raise CannotDo(f"{path.parent}: no such folder to write into")
    if os.path.lexists(path) and not overwrite:
        raise CannotDo(f"{path} exists already", hint="--overwrite replaces it")


def recorded_files(manifest: Manifest, catalog: Catalog) -> list[str]:
    """The files a manifest was made of, where all are here with their sizes; else none."""
    sizes = file_sizes(catalog)
    recorded = {name: proof.nbytes for name, proof in manifest.files.items()}
    is_same = all(sizes.get(name) == nbytes for name, nbytes in recorded.items())
    return list(recorded) if is_same else []


def differences(recorded: Manifest, found: Manifest) -> Iterator[Problem]:
    """One problem for each thing that is not as the manifest says.

    The files are compared where ``found`` has their digests.
    """
    yield from _differing_tensors(recorded, found)
    yield from _differing_values(recorded, found)
    changed = [name for name, proof in found.files.items() if recorded.files.get(name) != proof]
    if _is_another_writing(recorded, found, changed):
        message = f"{len(recorded.files):,} files are recorded; those here are not the same"
        yield Problem(message, "manifest-other-files")
    elif changed:
        yield from (_differing_file(name, recorded, found) for name in changed)
    else:
        return
    for name in sorted({*recorded.unproved, *found.unproved}):
        why = recorded.unproved.get(name) or found.unproved[name]
        yield Problem(f"{name}: {why}", "manifest-unproved", tensor=name)


def _is_another_writing(recorded: Manifest, found: Manifest, changed: list[str]) -> bool:
    """Whether the files are other ones, not those of the manifest of which some have changed.

    A reshard may happen to write files of the same names and sizes; then no digest is the same.
    """
    if not found.files:
        return True
    kept = [name for name in found.files if name not in changed and found.files[name].nbytes]
    return len(changed) > 1 and not kept


def _differing_tensors(recorded: Manifest, found: Manifest) -> Iterator[Problem]:
    yield from _missing(recorded.tensors, found.tensors, "a tensor")
    for name, proof in recorded.tensors.items():
        other = found.tensors.get(name)
        if other is None or other == proof:
            continue
        here, said = (f"{one.dtype} {list(one.shape)}" for one in (other, proof))
        if here == said:
            here, said = (f"SHA-256 {one.sha256[:16]}..." for one in (other, proof))
        message = f"{name}: {here}, the manifest says {said}"
        yield Problem(message, "manifest-differs", tensor=name)


def _differing_values(recorded: Manifest, found: Manifest) -> Iterator[Problem]:
    if recorded.values and not found.values and holds_no_values(found.format):
        message = f"{len(recorded.values):,} values besides tensors, which {found.format}"
        yield Problem(f"{message} cannot hold, are not proved", "values-not-held")
        return
    yield from _missing(recorded.values, found.values, "a value")
    for name, proof in recorded.values.items():
        other = found.values.get(name)
        if other is not None and other.sha256 != proof.sha256:
            message = f"{name}: {_told(other)}, the manifest says {_told(proof)}"
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


def _differing_file(name: str, recorded: Manifest, found: Manifest) -> Problem:
    here, said = found.files[name].sha256[:16], recorded.files[name].sha256[:16]
    message = f"{name}: the file's SHA-256 is {here}..., the manifest says {said}..."
    return Problem(message, "manifest-differs", file=name)


def _told(proof: ValueProof) -> str:
    if proof.json is not None and len(proof.json) <= 80:
        return proof.json
    return f"SHA-256 {proof.sha256[:16]}..."
