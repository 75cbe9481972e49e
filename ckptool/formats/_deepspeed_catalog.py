"""From what all ranks of a DeepSpeed checkpoint hold to a catalog."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptool.core.catalog import Catalog, ObjectEntry
from ckptool.errors import damaged
from ckptool.formats._assemble import assemble
from ckptool.formats._companions import companions
from ckptool.formats._deepspeed_checkpoint import Checkpoint
from ckptool.formats._deepspeed_local import MASTER, Holding
from ckptool.formats._deepspeed_parallel import merge_into
from ckptool.formats._deepspeed_values import expert_degrees, param_groups, training_facts
from ckptool.formats._leaves import Assembled
from ckptool.formats.base import ScanOptions
from ckptool.formats.torch_save import unread_notes


def assembled(
    checkpoint: Checkpoint, holdings: Sequence[Holding], options: ScanOptions
) -> Assembled:
    """All model-parallel ranks' tensors and values. Raises Damaged where they contradict."""
    every = Holding()
    for holding in holdings:
        for rank, held in holding.leaves.items():
            every.add_leaves(held, rank)
    found = assemble(every.leaves, per_rank=options.per_rank)
    found.notes += [note for holding in holdings for note in holding.notes]
    info = _universal_info(checkpoint) if checkpoint.grid.tensor > 1 else {}
    merge_into(found, holdings, checkpoint.grid, info, options)
    aliases = checkpoint.aliases
    if aliases:
        found.objects["shared_params"] = ObjectEntry("shared_params", ("shared_params",), aliases)
    if found.problems:
        raise damaged(found.problems, subject=checkpoint.source.root)
    return found


def _universal_info(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """How tensor-parallel shards fit together, where the training script or DeepSpeed says so."""
    key = "universal_checkpoint_info"
    for state in (*checkpoint.models.values(), *checkpoint.optimizers.values()):
        inner = state.mapping(key) or state.inner("optimizer_state_dict").mapping(key)
        if inner:
            return inner
    return {}


def add_tied_masters(found: Assembled, aliases: Mapping[str, str]) -> None:
    """Give masters that are the only weights there are (ZeRO 3) their other names, too."""
    for alias, name in aliases.items():
        master = found.tensors.get(f"{MASTER}.{name}")
        if master is not None and f"module.{name}" not in found.tensors:
            other = f"{MASTER}.{alias}"
            found.tensors[other] = replace(master, name=other, path=(MASTER, alias))


def catalog_of(
    name: str, checkpoint: Checkpoint, found: Assembled, files: Iterable[str]
) -> Catalog:
    """The catalog of what was assembled; ``files`` are those of the checkpoint."""
    source, grid = checkpoint.source, checkpoint.grid
    optimizer = checkpoint.partitions(0)[0].state if checkpoint.optimizers else None
    info = training_facts(checkpoint.model, optimizer)
    stored = optimizer.stored if optimizer else checkpoint.model.stored.get("optimizer")
    degrees = expert_degrees(param_groups(stored))
    experts = f", EP {max(degrees)}" if degrees else ""
    info["parallelism"] = f"TP {grid.tensor}, PP {grid.pipeline}, DP {grid.data}{experts}"
    files = list(files)
    carried = {n: size for n, size in companions(source).items() if not n.startswith("zero_to_")}
    notes = [*checkpoint.notes, *found.notes, *unread_notes(found.objects)]
    return Catalog(
        name,
        found.tensors,
        found.objects,
        {file: source.files[file] for file in files},
        world_size=grid.size,
        info=info,
        notes=tuple(dict.fromkeys(notes)),
        conflicts=found.conflicts,
        companions=carried,
    )
