"""Read a universal checkpoint: ``zero``, and the model files beside it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ckptool.core.catalog import Catalog
from ckptool.errors import Damaged, Problem
from ckptool.formats._deepspeed_catalog import add_tied_masters, assembled, catalog_of
from ckptool.formats._deepspeed_checkpoint import Checkpoint, read_checkpoint
from ckptool.formats._deepspeed_files import (
    LATEST_UNIVERSAL,
    OPTIMIZER_STATE,
    find_files,
    tag_folder,
    without_copies,
)
from ckptool.formats._deepspeed_frozen import note_excluded
from ckptool.formats._deepspeed_holding import all_holdings
from ckptool.formats._deepspeed_local import MASTER, Holding
from ckptool.formats._deepspeed_parallel import whole_entries
from ckptool.formats._deepspeed_read import State, read_optimizer, require_shallow
from ckptool.formats._deepspeed_values import optimizer_leaves, refused_leaves
from ckptool.formats._deepspeed_weights import trained_shapes
from ckptool.formats._deepspeed_zero_folder import add_states, state_files
from ckptool.formats._refusing import Barred
from ckptool.formats.base import ScanOptions, Source


def scan(source: Source, options: ScanOptions) -> Catalog:
    """The catalog of the universal checkpoint that the marker names, or that the source is."""
    folder = tag_folder(source, LATEST_UNIVERSAL)
    files = find_files(without_copies(source.files), folder)
    checkpoint = read_checkpoint(source, files)
    holdings = all_holdings(checkpoint)
    states = _states(checkpoint, holdings, folder)
    holdings[0].add_leaves(states.leaves.get(0, {}), 0)
    holdings[0].notes += states.notes
    found = assembled(checkpoint, holdings, options)
    found.tensors |= whole_entries(states)
    add_tied_masters(found, checkpoint.aliases)
    note_excluded(checkpoint, found)
    kept = [path for _, _, path in state_files(source, folder)]
    paths = [*files.all, *kept, folder + OPTIMIZER_STATE, *([LATEST_UNIVERSAL] if folder else [])]
    return catalog_of("deepspeed-universal", checkpoint, found, paths)


def _states(checkpoint: Checkpoint, holdings: list[Holding], folder: str) -> Holding:
    """What ``zero`` holds. Damaged where the state of a trained parameter is missing."""
    source, found = checkpoint.source, Holding()
    if folder + OPTIMIZER_STATE not in source.files:
        message = f"{folder}{OPTIMIZER_STATE} is missing: the conversion to a universal checkpoint"
        raise Damaged(Problem(f"{message} was not finished", "save-unfinished"))
    optimizer = read_optimizer(source, folder + OPTIMIZER_STATE)
    shapes = {
        n: s for state in checkpoint.models.values() for n, s in trained_shapes(state).items()
    }
    left_out = add_states(found, source, folder, shapes, _rounded(checkpoint, holdings, shapes))
    if left_out:
        checkpoint.notes.append(
            f"not carried: masters of {', '.join(left_out)}, which are rounded copies of what the"
            " model file holds"
        )
    refused = found.leaves.get(0, {})
    held = {name for name in shapes if f"{MASTER}.{name}" in refused}
    missing = [n for n in shapes if (MASTER, n) not in found.tensors and n not in held]
    if missing:
        message = f"{folder}zero/{missing[0]}/{MASTER}.pt is missing ({len(missing)} such)"
        raise Damaged(Problem(message, "file-missing", tensor=missing[0]))
    _add_common_step(found, optimizer, shapes)
    found.add_leaves(optimizer_leaves(optimizer, source), 0)
    found.add_leaves(refused_leaves(optimizer, ("optimizer",)), 0)
    return found


def _rounded(
    checkpoint: Checkpoint, holdings: list[Holding], trained: Collection[str]
) -> Collection[str]:
    """Names that are not trained, but that the converter wrote masters of all the same."""
    in_model = {name for holding in holdings for _, name in holding.tensors}
    leaves = [leaf for h in holdings for held in h.leaves.values() for leaf in held.values()]
    others = {
        str(leaf.path[1]) for leaf in leaves if leaf.path[0] in ("module", "frozen", "buffer")
    }
    return (in_model | others | checkpoint.aliases.keys()) - set(trained) if trained else ()


def _add_common_step(found: Holding, optimizer: State, names: Iterable[str]) -> None:
    """The step that ZeRO 3 keeps for all parameters, in what is left of rank 0's optimizer."""
    try:
        kept = require_shallow(optimizer.inner("optimizer_state_dict").inner("state").fields.get(0))
        step = kept.get("step") if isinstance(kept, dict) else None
    except Barred as error:
        step = error.refusal
    if step is not None and not any(name.startswith("step.") for name in found.leaves.get(0, {})):
        for name in names:
            found.add_leaf(("step", name), optimizer.vector(step) or step, 0)
