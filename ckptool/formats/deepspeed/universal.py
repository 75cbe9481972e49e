"""Read a universal checkpoint: ``zero``, and the model files beside it.

The ``zero`` folder of a universal checkpoint: a folder per parameter, a file a state.

DeepSpeed's ``ds_to_universal`` (0.10 to 0.19) writes ``{"param": tensor, ...}``, from ZeRO 3 a bare
vector without a shape, and ``step.pt`` a bare tensor or number. It also writes masters for what has
none: frozen parameters, buffers and tied names, rounded; the model file has those as they were.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from ckptool.core.catalog import Catalog
from ckptool.errors import Damaged, SourceError
from ckptool.formats.base import ScanOptions
from ckptool.formats.deepspeed.checkpoint import Checkpoint, read_checkpoint, whole_entries
from ckptool.formats.deepspeed.files import (
    LATEST_UNIVERSAL,
    OPTIMIZER_STATE,
    find_files,
    tag_folder,
    without_copies,
)
from ckptool.formats.deepspeed.frozen import note_excluded
from ckptool.formats.deepspeed.partitions import MASTER, STATES, RankContents, Run, run_chunks
from ckptool.formats.deepspeed.scan import add_tied_masters, all_holdings, assembled, catalog_of
from ckptool.formats.deepspeed.states import (
    State,
    Vector,
    read_optimizer,
    refusal_of_error,
    require_shallow,
)
from ckptool.formats.deepspeed.values import optimizer_leaves, refused_leaves
from ckptool.formats.deepspeed.weights import trained_shapes
from ckptool.serialization.archive.read import read_torch_file
from ckptool.serialization.archive.tensors import shown
from ckptool.serialization.source import Source
from ckptool.serialization.state_dict.leaves import Barred, Leaf
from ckptool.serialization.state_dict.values import stray_notes


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


def _states(checkpoint: Checkpoint, holdings: list[RankContents], folder: str) -> RankContents:
    """Return what ``zero`` holds. Damaged where the state of a trained parameter is missing."""
    source, found = checkpoint.source, RankContents()
    if folder + OPTIMIZER_STATE not in source.files:
        message = f"{folder}{OPTIMIZER_STATE} is missing: the conversion to a universal checkpoint"
        raise Damaged(f"{message} was not finished", "save-incomplete")
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
        raise Damaged(message, "file-missing", tensor=missing[0])
    _add_common_step(found, optimizer, shapes)
    found.add_leaves(optimizer_leaves(optimizer, source), 0)
    found.add_leaves(refused_leaves(optimizer, ("optimizer",)), 0)
    return found


def _rounded(
    checkpoint: Checkpoint, holdings: list[RankContents], trained: Collection[str]
) -> Collection[str]:
    """Names that are not trained, but that the converter wrote masters of all the same."""
    in_model = {name for holding in holdings for _, name in holding.tensors}
    leaves = [leaf for h in holdings for held in h.leaves.values() for leaf in held.values()]
    others = {
        str(leaf.path[1]) for leaf in leaves if leaf.path[0] in ("module", "frozen", "buffer")
    }
    return (in_model | others | checkpoint.aliases.keys()) - set(trained) if trained else ()


def _add_common_step(found: RankContents, optimizer: State, names: Iterable[str]) -> None:
    """The step that ZeRO 3 keeps for all parameters, in what is left of rank 0's optimizer."""
    try:
        kept = require_shallow(optimizer.inner("optimizer_state_dict").inner("state").fields.get(0))
        step = kept.get("step") if isinstance(kept, dict) else None
    except Barred as error:
        step = error.refusal
    if step is not None and not any(name.startswith("step.") for name in found.leaves.get(0, {})):
        for name in names:
            found.add_leaf(("step", name), optimizer.vector(step) or step, 0)


_STEP = "step"
_SUFFIX = ".pt"
_FIELDS = frozenset("param cat_dim param_n_sub_params sub_param_shape vocab_tensor".split())
"""A parameter's state, and how it was cut for tensor parallelism, which is undone."""


def state_files(source: Source, folder: str) -> list[tuple[str, str, str]]:
    """Return parameter, kind and path of each state below ``zero``.

    A file is none that only one of several parameters has, unless optimizers call a state so.
    """
    files = list(_files_of_parameters(source, folder))
    counts = Counter(kind for _, kind, _ in files)
    several = len({name for name, _, _ in files}) > 1
    return [one for one in files if not several or one[1] in STATES or counts[one[1]] > 1]


def _files_of_parameters(source: Source, folder: str) -> Iterator[tuple[str, str, str]]:
    """Yield parameter, name without suffix and path of each file below ``zero``."""
    head = f"{folder}zero/"
    for path in source.files:
        name, slash, file = path.removeprefix(head).rpartition("/")
        if path.startswith(head) and slash and file.endswith(_SUFFIX):
            yield name, file.removesuffix(_SUFFIX), path


def add_states(
    found: RankContents,
    source: Source,
    folder: str,
    shapes: Mapping[str, tuple[int, ...]],
    rounded: Collection[str],
) -> list[str]:
    """Add all states; ``rounded`` are left out, and those of them that were there returned.

    A state that cannot be read, or must not be, is refused by its name.

    ``shapes`` are those of the parameters, for the vectors that have none.
    """
    left_out = []
    files = state_files(source, folder)
    with_moments = {name for name, kind, _ in files if kind != MASTER}
    for name, kind, path in files:
        if name in rounded and name not in with_moments:
            left_out.append(name)
            continue
        try:
            _add_state(found, source, (kind, name), path, shapes.get(name))
        except SourceError as error:
            why = refusal_of_error(error, f"{kind}.{name}")
            why.part = None if kind == MASTER else "optimizer"
            found.add_leaves({f"{kind}.{name}": Leaf((kind, name), why)}, 0)
    return left_out


def _add_state(
    found: RankContents,
    source: Source,
    name: tuple[str, str],
    path: str,
    shape: tuple[int, ...] | None,
) -> None:
    opened = read_torch_file(source, path)
    value = opened.value
    if isinstance(value, dict):
        found.notes += stray_notes(path, value.keys() - _FIELDS)
        value = value.get("param")
    vector = State(opened, {}, {}, {}).vector(value)
    if name[0] == _STEP and (vector is None or not vector.shape):
        found.add_leaf(name, vector or value, 0)
        return
    if vector is None:
        raise Damaged(
            f"{path}: holds {shown(value)}, a universal checkpoint a tensor", "tensor-record"
        )
    if isinstance(opened.value, dict) or shape is None or len(shape) == 1:
        found.add_whole(name, vector, 0)
        return
    _add_vector(found, name, vector, shape, path)


def _add_vector(
    found: RankContents, name: tuple[str, str], vector: Vector, shape: tuple[int, ...], path: str
) -> None:
    numel = math.prod(shape)
    if not vector.is_flat or vector.shape != (numel,):
        raise Damaged(
            f"{path}: {list(vector.shape)} for a parameter of shape {list(shape)}", "tensor-record"
        )
    chunks = run_chunks(Run(name[1], 0, numel, 0, 0), shape, vector.at, vector.dtype.itemsize, 0)
    found.add(name, vector.dtype, shape, chunks)
