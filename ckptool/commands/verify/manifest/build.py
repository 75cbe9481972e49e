"""Make the manifest of a checkpoint, and prove a checkpoint by a manifest."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptool.commands.open import Opened
from ckptool.commands.verify.compare.names import readable, stored_tensors, unread_notes
from ckptool.commands.verify.compare.values import text_digest, value_text
from ckptool.commands.verify.manifest.schema import (
    MARK,
    FileProof,
    Manifest,
    TensorProof,
    ValueProof,
    manifest_text,
)
from ckptool.commands.verify.verify import Progress
from ckptool.core.catalog import Catalog
from ckptool.engine.check.digest import digests, file_digests
from ckptool.engine.check.replicas import differing_replicas
from ckptool.engine.read.tensors import CheckedSource, TensorSource
from ckptool.errors import CkptoolError, Problem, Unsupported
from ckptool.serialization.state_dict.values import UNREAD_TENSOR, Foreign, type_name
from ckptool.storage.disk import require_marked, write_whole
from ckptool.storage.url import Location

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
    catalog: Catalog,
    workers: int,
    progress: Progress = lambda nbytes: None,
    *,
    files: Collection[str],
    known: Mapping[str, str],
) -> Measured:
    """Read all tensors of a checkpoint and digest them, and these of its ``files``.

    ``catalog`` is that of ``opened``, rewritten or not.
    Every record's checksum is checked on the way, and copies are compared, unless that was done
    when the digests of files that are ``known`` were made. What cannot be read has no digest and is
    a problem. Raises Unsupported where a value is too large to be written down.
    """
    held, lost = readable(opened, catalog)
    checked = CheckedSource(opened.source)
    entries = list(held.tensors.values())
    problems: list[Problem] = [*_contradictions(catalog), *lost.values()]
    found: dict[str, str] = {}
    unchecked = TensorSource(opened.source)
    try:
        found = digests(entries, unchecked if known else checked, workers, progress)
        if not known:
            stored = [one for entry in entries for one in stored_tensors(entry)]
            problems += checked.problems(stored, workers)
            problems += differing_replicas(stored, opened.source)
    except CkptoolError as error:
        problems += error.problems
    tensors = {
        entry.name: TensorProof(entry.dtype.name, entry.shape, found[entry.name])
        for entry in entries
        if entry.name in found
    }
    values, unproved = _values(catalog)
    unread = [name for name in files if name not in known]
    sizes, found = (
        file_sizes(opened.catalog),
        file_digests(unread, opened.source, workers, progress),
    )
    proofs = {name: FileProof(sizes[name], sha) for name, sha in (found | dict(known)).items()}
    manifest = Manifest(opened.format.name, tensors, values, unproved, proofs)
    return Measured(manifest, tuple(problems), measured_bytes(catalog, unread))


def _contradictions(catalog: Catalog) -> Iterator[Problem]:
    for name, why in catalog.conflicts.items():
        if name not in _unplaced(catalog):
            code = why.code if isinstance(why, Problem) else "ranks-disagree"
            yield Problem(why, code, tensor=name)


def _unplaced(catalog: Catalog) -> dict[str, str]:
    """Names whose parts are there, but nothing says how they fit together."""
    return {
        name: str(why)
        for name, why in catalog.conflicts.items()
        if isinstance(why, Problem) and why.code == "sharding-unrecorded"
    }


def _values(catalog: Catalog) -> tuple[dict[str, ValueProof], dict[str, str]]:
    """The proof of each value, and what has none."""
    known = Foreign()
    proofs, unproved = {}, {str(note.tensor): str(note) for note in unread_notes(catalog)}
    unproved |= _unplaced(catalog)
    for name, entry in catalog.objects.items():
        if UNREAD_TENSOR in known.of(entry.value):
            unproved[name] = f"unsupported type {type_name(entry.value)}; not read"
            continue
        text = value_text(entry.value, name)
        short = text if len(text) <= _LONGEST_JSON else None
        proofs[name] = ValueProof(text_digest(text), short)
    return proofs, unproved


def file_sizes(catalog: Catalog) -> dict[str, int]:
    """The checkpoint's files, those that go with a model included, with their sizes in bytes."""
    return catalog.files | catalog.companions


def write_manifest(manifest: Manifest, path: Location, *, overwrite: bool) -> None:
    """Write a manifest, whole or not at all. Unsupported where it exists or cannot be written."""
    require_writable(path, overwrite=overwrite)
    if not isinstance(path, Path):
        path.write_bytes(manifest_text(manifest).encode())
        return
    write_whole(path, manifest_text(manifest).encode(), mark=MARK)


def require_writable(path: Location, *, overwrite: bool) -> None:
    """Unsupported where a manifest must not or cannot be written: ask before all is read."""
    if path.is_dir():
        raise Unsupported(f"{path}: is a folder; a manifest is a file")
    if isinstance(path, Path) and not path.parent.is_dir():
        raise Unsupported(f"{path.parent}: no such folder")
    if (path.exists() or (isinstance(path, Path) and path.is_symlink())) and not overwrite:
        raise Unsupported(f"{path} already exists", hint="--overwrite replaces it")
    if isinstance(path, Path):
        require_marked(path, MARK, noun="manifest")
