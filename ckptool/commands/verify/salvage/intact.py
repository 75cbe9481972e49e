"""Find which tensors of a damaged checkpoint are intact, and why the others are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.open import OpenedCheckpoint
from ckptool.commands.verify.compare.names import readable
from ckptool.core.catalog import Catalog, Chunk, Copy, EncodedBlob, Extent, TensorEntry
from ckptool.engine.check.digest import DamageMap, file_digests
from ckptool.engine.check.replicas import differing_replicas
from ckptool.errors import Problem, Unsupported
from ckptool.serialization.state_dict.values import Repeated

_OF_WHOLE_FILES = frozenset(["rank-copied", "overwrite-interrupted", "item-mismatch"])
"""The codes that put everything in a file in doubt."""


class IntactPart(Struct, frozen=True):
    """The intact part of a catalog, and the ``losses``: why the rest is not intact, by name.

    ``unproved`` counts tensors in bytes for which no checksum is stored.
    """

    catalog: Catalog
    losses: dict[str, str]
    unproved: int


def find_intact(opened: OpenedCheckpoint, problems: Iterable[Problem], workers: int) -> IntactPart:
    """Return the intact part of a checkpoint: tiled by chunks that are as they were written.

    ``problems`` are those of the scan; entries that they name are lost. Every chunk is read. An
    intact copy replaces a damaged chunk; differing copies are lost. Raises Unsupported if files of
    several saves are mixed, as nothing is certain then.
    """
    problems, source = list(problems), opened.source
    losses = _losses_of_problems(opened.catalog, problems)
    suspect = _suspect_files(problems) | _copied_files(problems, opened, workers)
    catalog = _without(opened.catalog, losses, suspect)
    catalog, unreadable = readable(opened, catalog)
    losses |= {name: str(problem) for name, problem in unreadable.items()}
    losses |= _losses_of_files(catalog, _suspect_files(unreadable.values()))
    catalog = _without(catalog, losses, set())
    damage = DamageMap(catalog.tensors.values(), source, workers)
    tensors: dict[str, TensorEntry] = {}
    for name, entry in catalog.tensors.items():
        repaired = _with_intact_chunks(entry, damage)
        if isinstance(repaired, str):
            losses[name] = repaired
        elif differing := differing_replicas([repaired], source):
            losses[name] = str(differing[0])
        else:
            tensors[name] = repaired
    unproved = sum(map(_is_unproved, tensors.values()))
    return IntactPart(replace(catalog, tensors=tensors), losses, unproved)


def _losses_of_problems(catalog: Catalog, problems: list[Problem]) -> dict[str, str]:
    """Return why names are lost: problems mention them, or they are contradictory or not read."""
    mixed = [problem for problem in problems if problem.code == "saves-mixed"]
    if mixed:
        raise Unsupported(
            f"nothing can be recovered: {mixed[0]}",
            hint="move the files of each save into a folder of their own",
        )
    losses = {name: str(why) for name, why in catalog.conflicts.items()}
    for problem in problems:
        if problem.tensor is not None:
            losses.setdefault(problem.tensor, str(problem))
    repeated = (name for name, one in catalog.objects.items() if isinstance(one.value, Repeated))
    return losses | dict.fromkeys(repeated, "a value that contains itself")


def _suspect_files(problems: Iterable[Problem]) -> set[str]:
    """Return the files that a problem puts in doubt as a whole."""
    return {p.file for p in problems if p.file and p.code in _OF_WHOLE_FILES}


def _copied_files(problems: list[Problem], opened: OpenedCheckpoint, workers: int) -> set[str]:
    """Return files with a problem that equal another one byte for byte: it was copied over them."""
    sizes = opened.source.files
    files = {p.file for p in problems if p.file is not None and sizes.get(p.file)}
    suspects = {sizes[file] for file in files}
    candidates = [file for file, size in sizes.items() if size in suspects]
    digests = file_digests(candidates, opened.source, workers)
    counts = Counter(digests.values())
    return {file for file in files if counts[digests[file]] > 1}


def _losses_of_files(catalog: Catalog, suspect: set[str]) -> dict[str, str]:
    """Return why tensors with a chunk in a suspect file, with other items than expected, are lost.

    Such a file may be another rank's or of another save, and an item of the right shape in it
    another tensor.
    """
    losses = {}
    for name, entry in catalog.tensors.items():
        file = next((chunk.at.file for chunk in entry.chunks if chunk.at.file in suspect), None)
        if file is not None:
            losses[name] = f"{name}: {file} holds other items than the metadata says"
    return losses


def _without(catalog: Catalog, losses: dict[str, str], suspect: set[str]) -> Catalog:
    """Return the catalog without the losses, and without anything in suspect files."""
    tensors = {}
    for name, entry in catalog.tensors.items():
        if name not in losses:
            chunks = (
                _chunk_of(chunk, [c for c in _copies(chunk) if c.at.file not in suspect])
                for chunk in entry.chunks
            )
            intact = tuple(chunk for chunk in chunks if chunk is not None)
            tensors[name] = replace(entry, chunks=intact)
    objects = {name: entry for name, entry in catalog.objects.items() if name not in losses}
    return replace(catalog, tensors=tensors, objects=objects, conflicts={})


def _copies(chunk: Chunk) -> list[Copy]:
    """Return a chunk's own place and its copies."""
    return [Copy(chunk.at, chunk.rank or 0), *chunk.copies]


def _chunk_of(chunk: Chunk, copies: list[Copy]) -> Chunk | None:
    """Return the chunk at the first of these copies, with the rest as copies; None without any."""
    if not copies:
        return None
    first, *rest = copies
    rank = chunk.rank if first.at is chunk.at else first.rank
    return Chunk(chunk.box, first.at, rank, tuple(rest))


def _with_intact_chunks(entry: TensorEntry, damage: DamageMap) -> TensorEntry | str:
    """Return the tensor with damaged chunks replaced by copies, or its problem."""
    chunks = []
    itemsize = entry.source_dtype.itemsize
    for chunk in entry.chunks:
        copies = _copies(chunk)
        reasons = [damage.problem(copy.at, chunk.box.shape, itemsize) for copy in copies]
        good = [copy for copy, why in zip(copies, reasons, strict=True) if why is None]
        repaired = _chunk_of(chunk, good)
        if repaired is None:
            return f"{entry.name} {chunk.box}: {reasons[0]}"
        chunks.append(repaired)
    return replace(entry, chunks=tuple(chunks))


def _is_unproved(entry: TensorEntry) -> bool:
    """Return whether some of the tensor's bytes have no checksum."""
    return any(
        chunk.box.volume
        and not (isinstance(chunk.at, Extent | EncodedBlob) and chunk.at.record is not None)
        for chunk in entry.chunks
    )
