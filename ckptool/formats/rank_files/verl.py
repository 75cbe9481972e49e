"""Lay out the files of verl's FSDPCheckpointManager (verl 0.9) on a new mesh.

Each rank has ``model_world_size_W_rank_R.pt``, ``optim_...`` and ``extra_state_...``, the last with
the scheduler and its own random states; beside them lie ``fsdp_config.json`` and the model's
configuration and tokenizer in ``huggingface/``. The number of ranks is in the names, so that
nothing loads on another number of them.
"""

from __future__ import annotations

import json

from msgspec.structs import replace

from ckptool.core.catalog import Catalog, Path
from ckptool.core.layout import FileLayout, Layout, Literal
from ckptool.core.selection import entries_of
from ckptool.errors import Unsupported
from ckptool.formats.base import Request
from ckptool.formats.companions import OF_VERL
from ckptool.formats.rank_files.names import VERL_FAMILIES
from ckptool.formats.rank_files.write import RankTensors, by_family, values_of
from ckptool.formats.writing import lay_out_companions, require_placed, select_plain
from ckptool.serialization.archive.write import archive_file

CONFIG = "fsdp_config.json"
_MESH = {1: ("fsdp",), 2: ("ddp", "fsdp")}
"""What verl calls the dims of its mesh, by which it knows the tensors that it loads."""


def lay_out(catalog: Catalog, request: Request) -> Layout:
    """Lay out a file of each family for each rank. Unsupported if a name is of no family."""
    placed = require_placed(request)
    if placed.mesh.names is None:
        names = _MESH.get(len(placed.mesh.shape))
        placed = replace(placed, mesh=replace(placed.mesh, names=names))
    for entry in entries_of(catalog):
        if len(entry.path) < 2 or entry.path[0] not in VERL_FAMILIES:
            raise Unsupported(
                f"{entry.name}: verl has only files of {', '.join(VERL_FAMILIES)}",
                hint="`ckptool convert SRC TMP --to dcp --rename REGEX=REPLACEMENT` renames first",
            )
    tensors = RankTensors(catalog, placed)
    objects, notes = select_plain(catalog)
    size = placed.mesh.size
    files = [file.within(OF_VERL) for file in lay_out_companions(catalog)]
    for rank in range(size):
        leaves = [*tensors.leaves(rank), *values_of(objects, rank, placed.mesh)]
        numbered = ((_with_number(path), leaf) for path, leaf in leaves)
        for family, state in by_family(numbered).items():
            name = f"{family}_world_size_{size}_rank_{rank}.pt"
            files.append(archive_file(name, state, rank=rank))
    version = catalog.info.get("FSDP version")
    if version is not None:
        config = {"FSDP_version": int(version), "world_size": size}
        files.append(FileLayout(CONFIG, (Literal(json.dumps(config, indent=4).encode()),)))
    return Layout(tuple(files), folder=True, notes=(*notes, *tensors.notes))


def _with_number(path: Path) -> Path:
    """Return the path of an optimizer's state with the parameter's number as an integer.

    DCP makes text of it (torch 2.13), and ``Optimizer.load_state_dict`` takes the state of no
    parameter from that, without a word.
    """
    head, number, rest = path[:2], path[2:3], path[3:]
    if head == ("optim", "state") and number and str(number[0]).isdecimal():
        return (*head, int(str(number[0])), *rest)
    return path
