"""Which tensors of a damaged checkpoint are whole nevertheless, and why the others are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ckptool.commands.open import Opened
from ckptool.commands.verify.compare.names import readable, unread_notes
from ckptool.core.catalog import Catalog, Chunk, Copy, EncodedBlob, Extent, TensorEntry
from ckptool.engine.check.digest import Intact, file_digests
from ckptool.engine.check.replicas import differing_replicas
from ckptool.errors import Problem, Unsupported
from ckptool.serialization.state_dict.values import UNREAD_TENSOR, Foreign, type_name

_SPOILS_ITS_FILE = frozenset(["rank-copied", "overwrite-interrupted", "item-mismatch"])
_SPOILS_ALL = frozenset(["saves-mixed"])


@dataclass(frozen=True, slots=True)
class Wholeness:
    """What is whole of a catalog, and why the rest is not, by name.

    ``unproved`` of the tensors lie in bytes for which no checksum is stored.
    """

    catalog: Catalog
    lost: dict[str, str]
    unproved: int


def whole_part(opened: Opened, problems: Iterable[Problem], workers: int) -> Wholeness:
    """What of a checkpoint's catalog is whole: tiled by chunks that are as they were written.

    ``problems`` are those of the scan; what they name is lost. Every chunk is read. Where a
    damaged one has a whole copy, that takes its place; copies that differ are lost. Raises
    Unsupported where files of several saves are mixed, for then nothing is certain.
    """
    problems = list(problems)
    lost = _blamed(opened.catalog, problems)
    spoilt = _spoilt(problems) | _copied(problems, opened, workers)
    catalog = _trusted(opened.catalog, lost, spoilt)
    catalog, unreadable = readable(opened, catalog)
    lost |= {name: str(problem) for name, problem in unreadable.items()}
    for name, why in _suspect(catalog, _spoilt(unreadable.values())):
        lost[name] = why
    catalog = _trusted(catalog, lost, set())
    source = opened.source
    intact = Intact(catalog.tensors.values(), source, workers)
    kept: dict[str, TensorEntry] = {}
    for name, entry in catalog.tensors.items():
        whole = _with_intact_chunks(entry, intact)
        if isinstance(whole, str):
            lost[name] = whole
            continue
        different = differing_replicas([whole], source)
        if different:
            lost[name] = str(different[0])
        else:
            kept[name] = whole
    unproved = sum(map(_is_unproved, kept.values()))
    return Wholeness(replace(catalog, tensors=kept), lost, unproved)


def _blamed(catalog: Catalog, problems: list[Problem]) -> dict[str, str]:
    """Names that problems spoil, with why."""
    mixed = [problem for problem in problems if problem.code in _SPOILS_ALL]
    if mixed:
        raise Unsupported(
            f"nothing can be recovered: {mixed[0]}",
            hint="move the files of each save into a folder of their own",
        )
    lost = {name: str(why) for name, why in catalog.conflicts.items()}
    for problem in problems:
        if problem.tensor is not None:
            lost.setdefault(problem.tensor, str(problem))
    known = Foreign()
    for name, value in catalog.objects.items():
        if UNREAD_TENSOR in known.of(value.value):
            lost[name] = f"unsupported type {type_name(value.value)}"
    return lost | {str(note.tensor): str(note) for note in unread_notes(catalog)}


def _spoilt(problems: Iterable[Problem]) -> set[str]:
    """The files that a problem puts in doubt as a whole."""
    return {one.file for one in problems if one.file and one.code in _SPOILS_ITS_FILE}


def _copied(problems: list[Problem], opened: Opened, workers: int) -> set[str]:
    """Files with a problem that are byte for byte another file: copied over what was there."""
    sizes = opened.source.files
    blamed = {one.file for one in problems if one.file is not None and sizes.get(one.file)}
    suspects = {sizes[file] for file in blamed}
    digests = file_digests(
        [file for file, size in sizes.items() if size in suspects], opened.source, workers
    )
    counts = Counter(digests.values())
    return {file for file in blamed if counts[digests[file]] > 1}


def _suspect(catalog: Catalog, spoilt: set[str]) -> Iterator[tuple[str, str]]:
    """Tensors with a chunk in a file that turned out to hold other items than it should.

    Such a file may be another rank's or of another save, and an item of the right shape in it
    another tensor.
    """
    for name, entry in catalog.tensors.items():
        file = next((chunk.at.file for chunk in entry.chunks if chunk.at.file in spoilt), None)
        if file is not None:
            yield name, f"{name}: {file} holds other items than the metadata says"


def _trusted(catalog: Catalog, lost: dict[str, str], spoilt: set[str]) -> Catalog:
    """Without what is lost, and without anything that lies in a spoilt file."""
    return replace(
        catalog,
        tensors={
            name: replace(entry, chunks=tuple(_elsewhere(entry, spoilt)))
            for name, entry in catalog.tensors.items()
            if name not in lost
        },
        objects={name: entry for name, entry in catalog.objects.items() if name not in lost},
        conflicts={},
    )


def _elsewhere(entry: TensorEntry, spoilt: set[str]) -> Iterator[Chunk]:
    """The chunks, or copies of them, that lie in other files."""
    for chunk in entry.chunks:
        held = [copy for copy in _copies(chunk) if copy.at.file not in spoilt]
        if held:
            yield _chunk_of(chunk, held)


def _copies(chunk: Chunk) -> list[Copy]:
    """A chunk's own place and its copies."""
    return [Copy(chunk.at, chunk.rank or 0), *chunk.copies]


def _chunk_of(chunk: Chunk, held: list[Copy]) -> Chunk:
    """The chunk as the first of these holds it, the others as its copies."""
    first, *others = held
    rank = chunk.rank if first.at is chunk.at else first.rank
    return Chunk(chunk.box, first.at, rank, tuple(others))


def _with_intact_chunks(entry: TensorEntry, intact: Intact) -> TensorEntry | str:
    """The tensor with what is damaged replaced by its copies, or what is wrong with it."""
    chunks = []
    itemsize = entry.source_dtype.itemsize
    for chunk in entry.chunks:
        wrong = [intact.problem(copy.at, chunk.box.shape, itemsize) for copy in _copies(chunk)]
        good = [copy for copy, why in zip(_copies(chunk), wrong, strict=True) if why is None]
        if not good:
            return f"{entry.name} {chunk.box}: {wrong[0]}"
        chunks.append(_chunk_of(chunk, good))
    return replace(entry, chunks=tuple(chunks))


def _is_unproved(entry: TensorEntry) -> bool:
    """Whether some of the tensor's bytes have no checksum."""
    return any(
        chunk.box.volume
        and not (isinstance(chunk.at, Extent | EncodedBlob) and chunk.at.record is not None)
        for chunk in entry.chunks
    )
