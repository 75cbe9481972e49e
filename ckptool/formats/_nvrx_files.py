"""Which files of nvidia-resiliency-ext's local checkpoints to read.

``<rank>/iter_<iteration>_<owner>_local.pt``, written as ``_local.dirty.pt`` and then renamed. With
replication a rank's folder also holds files of other owners. An iteration is whole where every
owner has a file somewhere (nvidia-resiliency-ext 0.2 to 0.7, ``LocalCheckpointManager``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ckptool.errors import CkptoolError, Damaged, Problem
from ckptool.formats._torch_file import TorchFile, read_torch_file
from ckptool.formats.base import Source, first_missing, require_rank

_FILE = re.compile(r"([0-9]{1,9})/iter_([0-9]{7,18})_([0-9]{1,9})_local(\.dirty)?\.pt")


@dataclass(frozen=True, slots=True)
class Local:
    """The files of one iteration, one for each owner, and what a person should know of them."""

    iteration: int
    files: dict[int, TorchFile]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Copy:
    name: str
    folder: int
    iteration: int
    owner: int
    dirty: bool


def read_local(source: Source, world_size: int | None = None) -> Local:
    """The files of the newest iteration that is whole.

    ``world_size`` is the number of owners; where it is not known, that of the highest rank seen.
    Raises Damaged where no iteration is whole, with what each of them lacks.
    """
    copies = [copy for name in source.files if (copy := _parsed(name))]
    for copy in copies:
        require_rank(max(copy.folder, copy.owner), copy.name)
    highest = max(max(copy.folder, copy.owner) for copy in copies) + 1
    expected = world_size or highest
    failed: list[str] = []
    for iteration in sorted({copy.iteration for copy in copies}, reverse=True):
        mine = [copy for copy in copies if copy.iteration == iteration]
        files, notes = _opened(source, mine)
        missing = first_missing(files, expected)
        others = [owner for owner in files if owner >= expected]
        if not missing and not others:
            skipped = (f"{lack}; iteration {iteration:,} is read" for lack in failed)
            return Local(iteration, files, (*skipped, *notes))
        if others:
            failed.append(f"iteration {iteration:,} has a file of rank {max(others)}")
        else:
            failed.append(_lacks(iteration, missing, mine, notes))
    lacks = "\n".join(f"  - {lack}" for lack in failed)
    raise Damaged(
        Problem(f"{source.root}: no iteration is whole:\n{lacks}", "rank-missing"),
        hint="bring together the folders of all ranks, which lie on the machines that wrote them",
    )


def _parsed(name: str) -> _Copy | None:
    match = _FILE.fullmatch(name)
    if match is None:
        return None
    return _Copy(name, int(match[1]), int(match[2]), int(match[3]), match[4] is not None)


def _opened(source: Source, copies: list[_Copy]) -> tuple[dict[int, TorchFile], list[str]]:
    """For each owner the first copy that can be opened, its own before replicas."""
    files: dict[int, TorchFile] = {}
    notes: list[str] = []
    for copy in sorted(copies, key=lambda one: (one.owner, one.folder != one.owner, one.folder)):
        if copy.dirty or copy.owner in files:
            continue
        try:
            files[copy.owner] = read_torch_file(source, copy.name)
        except CkptoolError as error:
            message = f"not used: {error.message}"
            notes.append(Problem(message, "copy-damaged", file=copy.name))
            continue
        if copy.folder != copy.owner:
            notes.append(f"rank {copy.owner} is read from its replica {copy.name}")
    return files, notes


def _lacks(iteration: int, missing: list[int], copies: list[_Copy], notes: list[str]) -> str:
    dirty = {copy.owner for copy in copies if copy.dirty}
    what = ", ".join(f"{rank} (unfinished)" if rank in dirty else str(rank) for rank in missing)
    return ". ".join([f"iteration {iteration:,} lacks the file of rank {what}", *notes])


def other_copies(files: Collection[str], used: Collection[str]) -> set[str]:
    """The finished copies of files that are used, in other ranks' folders, of one iteration."""
    mine = {(copy.iteration, copy.owner) for name in used if (copy := _parsed(name))}
    others = {name: copy for name in set(files).difference(used) if (copy := _parsed(name))}
    return {
        name
        for name, copy in others.items()
        if (copy.iteration, copy.owner) in mine and not copy.dirty
    }


def files_used(source: Source, local: Local) -> Mapping[str, int]:
    """The files that are read, with their sizes."""
    return {file.what: source.files[file.what] for file in local.files.values()}
