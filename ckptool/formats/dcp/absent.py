"""Why files that a DCP folder needs are not in it: one problem for all that have one cause.

Each rank writes its own files, and rank 0 the ``.metadata`` that names them all. Without a shared
file system each node has only those of its own ranks (torch 2.1 to 2.15).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ckptool.core.text import list_some, plural
from ckptool.errors import Damaged, Problem
from ckptool.formats.dcp.tables import DATA, rank_of
from ckptool.serialization.source import Source

_COPY = (
    "if each node saved to a disk of its own, copy the files of all nodes into one folder, with"
    " the .metadata of rank 0"
)
_SHOWN = 4


def no_metadata(source: Source, metadata: str) -> Damaged:
    """Return the error of a folder without metadata files.

    A save that did not finish has none, nor has a node without rank 0.
    """
    sizes = {name: size for name, size in source.files.items() if name.endswith(".distcp")}
    ranks = {int(match[1]) for name in sizes if (match := DATA.fullmatch(name))}
    words = [
        plural(len(sizes), "file"),
        plural(len(ranks), "rank"),
        plural(sum(sizes.values()), "byte"),
    ]
    empty = sum(not size for size in sizes.values())
    files = ", ".join([*words, f"{plural(empty, 'file')} empty"] if empty else words)
    draft = f"{metadata}.tmp"
    state = f"only {draft} is there" if draft in source.files else f"there is no {metadata}"
    if ranks and 0 not in ranks and draft not in source.files:
        message = (
            f"{source.root}: the files of {_name(ranks)} of a DCP folder, as one node has them:"
            f" those of rank 0, which writes {metadata}, are not here; nothing else names what"
            f" data files hold ({files})"
        )
        hint = f"{_COPY}; if it has none, the save never finished: use the previous checkpoint"
        return Damaged(message, "rank-missing", hint=hint)
    if place := _elsewhere(source, metadata):
        message = f"{source.root}: a DCP folder without its {metadata}; one lies in {place}"
        hint = f"if it names these files ({files}), move it to them"
        return Damaged(message, "file-missing", file=metadata, hint=hint)
    message = (
        f"{source.root}: a DCP folder whose save never finished: {state}; nothing else names"
        f" what its data files hold ({files})"
    )
    hint = f"use the previous checkpoint; {metadata} is written last, once all data is safe"
    return Damaged(message, "save-incomplete", hint=hint)


def join_absent(
    source: Source, problems: list[Problem], names: Iterable[tuple[str, str]]
) -> list[Problem]:
    """Return the problems, with one for all files that are missing for the same reason.

    The reason is that they lie in another folder, or that all files of their ranks are missing.
    ``names`` are the files with the names that each has items of.
    """
    missing = {p.file: p for p in problems if p.code == "file-missing" and p.file}
    places = {file: place for file in missing if (place := _elsewhere(source, file))}
    ranks = {file: rank_of(file) for file in missing if file not in places}
    present = {rank_of(file) for file in source.files}
    joined: list[Problem] = []
    if places:
        problem = missing[next(iter(places))]
        joined.append(_in_other_folders(source, [*places.values()], problem))
    of_ranks = {rank for rank in ranks.values() if rank is not None}
    if len(ranks) > 1 and None not in ranks.values() and present.isdisjoint(of_ranks):
        lacking = len({name for file, name in names if file in ranks})
        joined.append(_of_other_ranks(list(ranks), of_ranks, present, lacking))
        places |= dict.fromkeys(ranks, "")
    codes = ("file-missing", "data-missing")
    return [*joined, *(p for p in problems if p.code not in codes or p.file not in places)]


def _elsewhere(source: Source, file: str) -> str | None:
    """Return a file of the same name in a folder below."""
    ending = f"/{file.rpartition('/')[2]}"
    return next((name for name in source.files if name.endswith(ending)), None)


def _in_other_folders(source: Source, places: Sequence[str], first: Problem) -> Problem:
    message = f"{first}; it lies in another folder: {places[0]}"
    if len(places) > 1:
        message = f"{len(places):,} files that .metadata names are missing here, and lie in other"
        message += f" folders: {list_some(places, _SHOWN)}"
    folder = list_some(sorted({place.rpartition("/")[0] for place in places}), _SHOWN)
    hint = f"move the .distcp files of {folder} into {source.root}"
    file = first.file if len(places) == 1 else None
    return Problem(message, "file-missing", file=file).with_hint(hint)


def _of_other_ranks(
    files: Sequence[str], ranks: Collection[int], present: Collection[int | None], lacking: int
) -> Problem:
    numbers = {rank for rank in present if rank is not None}
    what = f"only those of {_name(numbers)} are here" if numbers else "no data file is here"
    message = f"files of other nodes are missing: {what}, none of {_name(ranks)}"
    message += f" ({plural(len(files), 'file')} that .metadata names, first {files[0]!r};"
    message += f" {plural(lacking, 'name')} affected)"
    return Problem(message, "rank-missing").with_hint(_COPY)


def _name(ranks: Collection[int]) -> str:
    numbers = [str(rank) for rank in sorted(ranks)]
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {list_some(numbers, 2 * _SHOWN)}"
