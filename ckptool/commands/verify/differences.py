"""How a checkpoint differs from what its manifest says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ckptool.commands.selection import Selection
from ckptool.commands.verify.manifest import Manifest, ValueProof
from ckptool.commands.verify.structure import counterpart, holds_no_values
from ckptool.core.catalog import Catalog, ObjectEntry, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.errors import Problem


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
        message = f"{len(recorded.files):,} files are recorded; those here are not the same"
        yield Problem(message, "manifest-other-files")
    else:
        yield from (_differing_file(name, recorded, found, catalog) for name in changed)
    for name in sorted({*recorded.unproved, *found.unproved}):
        why = recorded.unproved.get(name) or found.unproved[name]
        yield Problem(f"{name}: {why}", "manifest-unproved", tensor=name)


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


def _differing_file(name: str, recorded: Manifest, found: Manifest, catalog: Catalog) -> Problem:
    size = (catalog.files | catalog.companions).get(name)
    if size is None:
        return Problem(f"{name}: a file", "manifest-missing", file=name)
    said = recorded.files[name]
    if size != said.nbytes:
        message = f"{name}: the file has {size:,} bytes, the manifest says {said.nbytes:,}"
    else:
        here = found.files[name].sha256[:16]
        message = f"{name}: the file's SHA-256 is {here}..., the manifest says"
        message += f" {said.sha256[:16]}..."
    return Problem(message, "manifest-differs", file=name)


def _told(proof: ValueProof) -> str:
    if proof.json is not None and len(proof.json) <= 80:
        return proof.json
    return f"SHA-256 {proof.sha256[:16]}..."
