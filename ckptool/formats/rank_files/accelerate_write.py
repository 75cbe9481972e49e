"""Lay out the folder that accelerate opens again under FSDP, and transformers' Trainer with it.

``pytorch_model_fsdp_0/`` and ``optimizer_0/`` are DCP folders (accelerate 1.15, sharded state).
Beside them are entries that are equal on all ranks, in a file each, and random states, in a file
per rank. The Trainer's (transformers 5) have different names: ``scheduler.pt`` for
``scheduler.bin``, ``rng_state_0.pth`` for ``random_states_0.pkl``; its ``trainer_state.json``,
which contains the step, is copied.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from ckptool.core.catalog import Catalog, Path, TensorEntry
from ckptool.core.layout import FileLayout, Layout
from ckptool.core.mesh import Mesh
from ckptool.core.selection import entries_of, keep_names
from ckptool.errors import Unsupported
from ckptool.formats import FORMATS
from ckptool.formats.base import Request
from ckptool.formats.companions import TRAINER_STATE
from ckptool.formats.rank_files.write import by_family, own_path, values_of
from ckptool.formats.writing import lay_out_companions, require_placed, select_plain
from ckptool.serialization.archive.write import archive_file
from ckptool.serialization.pickle.write import TensorRef

_FOLDERS = {"model": "pytorch_model_fsdp_0", "optimizer": "optimizer_0"}
_OF_A_RANK = {"random_states": "random_states_{}.pkl", "rng_state": "rng_state_{}.pth"}
_ONCE = re.compile(r"(?:scheduler|sampler|dl_state_dict|(scaler)|(custom_checkpoint))(?:_\d+)?")


def lay_out(catalog: Catalog, request: Request) -> Layout:
    """Lay out the two folders and the files beside them.

    Raises Unsupported if something has no place there.
    """
    mesh = require_placed(request).mesh
    for entry in entries_of(catalog):
        _require_place(entry.name, entry.path)
    families = {entry.name: str(entry.path[0]) for entry in entries_of(catalog)}
    outside_names = {name for name, family in families.items() if family not in _FOLDERS}
    files, notes = _files_beside(keep_names(catalog, outside_names), mesh)
    files = [*lay_out_companions(catalog, of_trainer=True), *files]
    for family, folder in _FOLDERS.items():
        names = {name for name, other in families.items() if other == family}
        part = keep_names(catalog, names)
        if part.tensors or part.objects:
            inner = FORMATS["dcp"].lay_out(replace(part, companions={}), request)
            files += [file.within(folder) for file in inner.files]
            notes += inner.notes
    return Layout(tuple(files), folder=True, notes=(*notes, *_note_numbers(catalog)))


def _require_place(name: str, path: Path) -> None:
    family = str(path[0]) if path else ""
    if family not in _FOLDERS and family not in _OF_A_RANK and not _ONCE.fullmatch(family):
        raise Unsupported(
            f"{name}: accelerate has no file for it: model.*, optimizer.*, scheduler.* and the like"
            " have one",
            hint="`ckptool convert SRC TMP --to dcp --rename REGEX=REPLACEMENT` renames first,"
            " --drop leaves out",
        )


def _note_numbers(catalog: Catalog) -> list[str]:
    """Return a note if optimizer state is by number, as in accelerate 1.6 under FSDP2."""
    paths = [entry.path for entry in catalog.tensors.values() if len(entry.path) > 2]
    numbered = any(
        path[:2] == ("optimizer", "state") and str(path[2]).isdecimal() for path in paths
    )
    return [
        "optimizer state is by number, as in the source; accelerate 1.15 wants names"
    ] * numbered


def _files_beside(catalog: Catalog, mesh: Mesh) -> tuple[list[FileLayout], list[str]]:
    """Lay out the files outside the DCP folders, and return notes on what they cannot hold."""
    objects, notes = select_plain(catalog)
    tensors = list(catalog.tensors.values())
    is_trainers = TRAINER_STATE in catalog.companions
    files = []
    for rank in mesh.ranks:
        leaves = [*_tensors_of(tensors, rank, mesh), *values_of(objects, rank, mesh)]
        for family, state in by_family(leaves).items():
            pattern = _OF_A_RANK.get(family)
            if pattern is None and rank > 0:
                continue
            name = pattern.format(rank) if pattern else _name(family, is_trainers=is_trainers)
            if pattern and is_trainers and mesh.size == 1:
                name = "rng_state.pth"
            files.append(archive_file(name, state, rank=rank if pattern else None))
    return files, notes


def _name(family: str, *, is_trainers: bool) -> str:
    """Return the name of a file that is written once."""
    match = _ONCE.fullmatch(family)
    if match and match[2]:
        return f"{family}.pkl"
    return f"{family}.pt" if is_trainers or (match and match[1]) else f"{family}.bin"


def _tensors_of(
    tensors: Iterable[TensorEntry], rank: int, mesh: Mesh
) -> Iterable[tuple[Path, Any]]:
    """Yield the whole tensors of a rank's files with their paths."""
    for entry in tensors:
        if (path := own_path(entry.path, rank, mesh)) is not None:
            yield path, TensorRef.whole(entry)
