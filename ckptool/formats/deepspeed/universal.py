"""Universal checkpoints, read: ``zero``, a folder per parameter, and model files.

DeepSpeed's ``ds_to_universal`` (0.10 to 0.19) writes ``{"param": tensor, ...}``, from ZeRO 3 a bare
vector without a shape, and ``step.pt`` a bare tensor or number. It also writes masters for entries
without one: frozen parameters, buffers and tied names, rounded; the model file has those unrounded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from ckptool.core.catalog import Catalog
from ckptool.errors import Damaged, SourceError, naming
from ckptool.formats.base import ScanOptions
from ckptool.formats.deepspeed.checkpoint import (
    LATEST_UNIVERSAL,
    OPTIMIZER_STATE,
    DeepSpeedCheckpoint,
    drop_copies,
    find_files,
    find_tag_folder,
    read_checkpoint,
)
from ckptool.formats.deepspeed.flat_runs import (
    MASTER,
    MODEL_KINDS,
    STATES,
    STEP,
    FlatRun,
    RankContents,
    is_flat,
)
from ckptool.formats.deepspeed.scan import assemble_contents, describe_checkpoint, read_contents
from ckptool.formats.deepspeed.states import (
    State,
    list_refused_leaves,
    make_refusal,
    read_optimizer,
    read_optimizer_leaves,
    read_trained_shapes,
    refuse_malformed,
    require_shallow_dict,
)
from ckptool.serialization.archive.read import read_torch_file
from ckptool.serialization.archive.tensors import describe
from ckptool.serialization.source import Source
from ckptool.serialization.state_dict.leaves import Barred, Leaf
from ckptool.serialization.state_dict.values import note_stray_keys

_SUFFIX = ".pt"
_FIELDS = frozenset("param cat_dim param_n_sub_params sub_param_shape vocab_tensor".split())
"""A parameter's state, and how it was cut for tensor parallelism, which is undone."""


@refuse_malformed
def scan(source: Source, options: ScanOptions) -> Catalog:
    """Return the catalog of the universal checkpoint that the marker names, or of the source."""
    folder = find_tag_folder(source, LATEST_UNIVERSAL)
    files = find_files(drop_copies(source.files), folder)
    checkpoint = read_checkpoint(source, files)
    contents = read_contents(checkpoint)
    states = _read_states(checkpoint, contents, folder)
    contents[0].add_leaves(states.leaves.get(0, {}), 0)
    contents[0].notes += states.notes
    assembled = assemble_contents(checkpoint, contents, options, states)
    state_paths = [path for _, _, path in _list_state_files(source, folder)]
    marker = [LATEST_UNIVERSAL] if folder else []
    paths = [*files.all, *state_paths, folder + OPTIMIZER_STATE, *marker]
    return describe_checkpoint("deepspeed-universal", checkpoint, assembled, paths)


def _read_states(
    checkpoint: DeepSpeedCheckpoint, contents: list[RankContents], folder: str
) -> RankContents:
    """Read the content of ``zero``; Damaged if a trained parameter's state is missing."""
    source, states = checkpoint.source, RankContents()
    if folder + OPTIMIZER_STATE not in source.files:
        message = f"{folder}{OPTIMIZER_STATE} is missing: the conversion to a universal checkpoint"
        raise Damaged(f"{message} was not finished", "save-incomplete")
    optimizer = read_optimizer(source, folder + OPTIMIZER_STATE)
    shapes: dict[str, tuple[int, ...]] = {}
    for state in checkpoint.models.values():
        shapes |= read_trained_shapes(state)
    rounded = _find_rounded(checkpoint, contents, shapes)
    left_out = _add_states(states, source, folder, shapes, rounded)
    if left_out:
        checkpoint.notes.append(
            f"not carried: masters of {', '.join(left_out)}, which are rounded copies of what the"
            " model file holds"
        )
    refused = states.leaves.get(0, {})
    missing = [
        name
        for name in shapes
        if (MASTER, name) not in states.tensors and f"{MASTER}.{name}" not in refused
    ]
    if missing:
        message = f"{folder}zero/{missing[0]}/{MASTER}.pt is missing ({len(missing):,} in total)"
        raise Damaged(message, "file-missing", tensor=missing[0])
    _add_common_step(states, optimizer, shapes)
    states.add_leaves(read_optimizer_leaves(optimizer, source), 0)
    states.add_leaves(list_refused_leaves(optimizer, ("optimizer",)), 0)
    return states


def _find_rounded(
    checkpoint: DeepSpeedCheckpoint, contents: list[RankContents], trained: Collection[str]
) -> Collection[str]:
    """Return untrained names of which the converter writes masters nevertheless."""
    in_model = {name for rank in contents for _, name in rank.tensors}
    leaves = [leaf for rank in contents for part in rank.leaves.values() for leaf in part.values()]
    in_model |= {str(leaf.path[1]) for leaf in leaves if leaf.path[0] in MODEL_KINDS}
    return (in_model | checkpoint.aliases.keys()) - set(trained) if trained else ()


def _add_common_step(contents: RankContents, optimizer: State, names: Iterable[str]) -> None:
    """Add the common step of ZeRO 3's parameters, from the rest of rank 0's optimizer."""
    try:
        group = optimizer.inner("optimizer_state_dict").inner("state").fields.get(0)
        step = require_shallow_dict(group).get(STEP)
    except Barred as error:
        step = error.refusal
    if step is not None and not any(n.startswith("step.") for n in contents.leaves.get(0, {})):
        for name in names:
            contents.add_leaf((STEP, name), optimizer.vector(step) or step, 0)


def _list_state_files(source: Source, folder: str) -> list[tuple[str, str, str]]:
    """Return parameter, kind and path of each state below ``zero``.

    A file that only one of several parameters has does not count, unless it has the name of an
    optimizer state.
    """
    files = []
    head = f"{folder}zero/"
    for path in source.files:
        name, slash, file = path.removeprefix(head).rpartition("/")
        if path.startswith(head) and slash and file.endswith(_SUFFIX):
            files.append((name, file.removesuffix(_SUFFIX), path))
    counts = Counter(kind for _, kind, _ in files)
    several = len({name for name, _, _ in files}) > 1
    return [file for file in files if not several or file[1] in STATES or counts[file[1]] > 1]


def _add_states(
    contents: RankContents,
    source: Source,
    folder: str,
    shapes: Mapping[str, tuple[int, ...]],
    rounded: Collection[str],
) -> list[str]:
    """Add all states except those of ``rounded`` parameters; return which of these exist.

    A state that cannot or must not be read is refused by its name. ``shapes`` are those of the
    parameters, for vectors without one.
    """
    left_out = []
    files = _list_state_files(source, folder)
    with_moments = {name for name, kind, _ in files if kind != MASTER}
    for name, kind, path in files:
        if name in rounded and name not in with_moments:
            left_out.append(name)
            continue
        try:
            with naming(path):
                _add_state(contents, source, (kind, name), path, shapes.get(name))
        except SourceError as error:
            part = None if kind == MASTER else "optimizer"
            why = make_refusal(error, f"{kind}.{name}", part)
            contents.add_leaves({f"{kind}.{name}": Leaf((kind, name), why)}, 0)
    return left_out


def _add_state(
    contents: RankContents,
    source: Source,
    name: tuple[str, str],
    path: str,
    shape: tuple[int, ...] | None,
) -> None:
    opened = read_torch_file(source, path)
    value = opened.value
    if isinstance(value, dict):
        contents.notes += note_stray_keys(path, value.keys() - _FIELDS)
        value = value.get("param")
    vector = State(opened, {}, {}, {}).vector(value)
    if name[0] == STEP and (vector is None or not vector.shape):
        contents.add_leaf(name, vector or value, 0)
        return
    if vector is None:
        raise Damaged(f"{path}: holds {describe(value)}, expected a tensor", "tensor-record")
    if isinstance(opened.value, dict) or shape is None or len(shape) == 1:
        contents.add_whole(name, vector, 0)
        return
    numel = math.prod(shape)
    if not is_flat(vector) or vector.shape != (numel,):
        raise Damaged(
            f"{path}: {list(vector.shape)} for a parameter of shape {list(shape)}", "tensor-record"
        )
    contents.add_run(name, FlatRun(name[1], 0, numel, 0, 0), shape, vector, 0)
