"""Weights in the training type, frozen parameters and buffers, from DeepSpeed's model files.

``save_checkpoint(exclude_frozen_parameters=True)`` omits frozen parameters from all files. From
ZeRO 2 on, ``frozen_param_shapes`` is None then, and a dict otherwise, empty if nothing was frozen
(DeepSpeed 0.9 to 0.19, ``runtime/engine.py``). Below that, and in pipelines, it is always None:
there only torch's list of modules beside a state dict shows that some have no tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ckptool.core.text import MOST_STEPS, list_some
from ckptool.errors import Damaged, Problem, Refusal
from ckptool.formats.deepspeed.checkpoint import DeepSpeedCheckpoint, RankState
from ckptool.formats.deepspeed.flat_runs import (
    FlatRun,
    RankContents,
    Shapes,
    add_partition_run,
    cut_evenly,
    is_flat,
)
from ckptool.formats.deepspeed.states import (
    State,
    find_zero_stage,
    list_refused_leaves,
    read_trained_shapes,
)
from ckptool.serialization.archive.tensors import read_sizes
from ckptool.serialization.pickle.records import OrderedMapping
from ckptool.serialization.state_dict.leaves import Assembled, Barred, PlainLeaf

FROZEN = "frozen"
EXCLUDED = "frozen-excluded"
UNRECORDED = "frozen-unrecorded"
_KEY = "frozen_param_shapes"
_GRADIENTS = 2
"""The first stage of ZeRO that records which parameters were frozen."""
_SHOWN = 8
_WRAPPED = frozenset(["base_layer", "original_module"])
"""PEFT's name of the module that an adapter was put on, which always has parameters."""
_WITHOUT_PARAMETERS = re.compile(
    r".*(act|activation|dropout|drop|drop_path|relu|gelu|silu|tanh|sigmoid|softmax|identity|pool"
    r"|pooling|flatten|rotary|rotary_emb|rope|loss|loss_fn|criterion|attn_drop|proj_drop)(_fn|_func)?\d*"
)


def add_module(
    contents: RankContents,
    state: State,
    aliases: Mapping[str, str],
    trained: Collection[str] | None,
    rank: int,
) -> None:
    """Add ``module`` of ZeRO 0, 1 or 2.

    Tensors that are neither trained, nor buffers, nor aliases of other parameters, were frozen; if
    ``trained`` is None, the trained ones are unknown. The optimizer omits empty ones.
    """
    buffers = set(state.names("buffer_names"))
    vectors = state.inner("frozen_param_fragments").tensors | state.inner("module").tensors
    ties = _find_tied({name: v for name, v in vectors.items() if name not in buffers})
    for name, vector in vectors.items():
        names = {name, aliases.get(name), ties.get(name)}
        if name in buffers:
            contents.add_leaf(("buffer", name), vector, rank)
        elif trained is None or not names.isdisjoint(trained) or not math.prod(vector.shape):
            contents.add_whole(("module", name), vector, rank)
        else:
            contents.add_whole((FROZEN, name), vector, rank)


def classify_refused(
    state: State, aliases: Mapping[str, str], trained: Collection[str] | None
) -> dict[str, str]:
    """Return the kind of each refused name in ``module``: ``module``, ``buffer``, ``frozen``.

    As decided by ``add_module``: trained names and buffers are tensors, whatever they are now; a
    name that is neither, and no tensor, is not frozen.
    """
    buffers = set(state.names("buffer_names"))
    kinds = {}
    for name, why in state.inner("module").refusals.items():
        is_trained = not {name, aliases.get(name)}.isdisjoint(trained or ())
        why.may_be_tensor = why.may_be_tensor or is_trained or name in buffers
        is_frozen = trained is not None and not is_trained and why.may_be_tensor
        kinds[name] = "buffer" if name in buffers else FROZEN if is_frozen else "module"
    return kinds


def select_weights(state: State) -> dict[str, PlainLeaf]:
    """Return the parameters in ``module``, each once, in the order of the module."""
    buffers = set(state.names("buffer_names"))
    vectors = {n: v for n, v in state.inner("module").tensors.items() if n not in buffers}
    ties = _find_tied(vectors)
    return {name: vector for name, vector in vectors.items() if name not in ties}


def _find_tied(vectors: Mapping[str, PlainLeaf]) -> dict[str, str]:
    """Return the names of tied parameters, each with the first name of the same bytes."""
    first: dict[object, str] = {}
    ties = {}
    for name, vector in vectors.items():
        key = (vector.place, vector.dtype, vector.shape)
        if math.prod(vector.shape) and first.setdefault(key, name) != name:
            ties[name] = first[key]
    return ties


def add_placeholders(contents: RankContents, states: Iterable[RankState]) -> None:
    """Add what ZeRO 3 keeps whole in ``module``; its partitioned parameters are empty there."""
    for partition in states:
        buffers = set(partition.state.names("buffer_names"))
        for name, vector in partition.state.inner("module").tensors.items():
            if name in buffers:
                contents.add_leaf(("buffer", name), vector, partition.rank)
            elif math.prod(vector.shape):
                contents.add_leaf(("module", name), vector, partition.rank)


def add_frozen_pieces(contents: RankContents, states: Sequence[RankState]) -> None:
    """Add the frozen parameters of ZeRO 3, of which each rank holds one piece."""
    for partition in states:
        file = partition.state.file.what
        stored = partition.state.mapping(_KEY)
        shapes = {str(name): read_sizes(shape) for name, shape in stored.items()}
        fragments = partition.state.inner("frozen_param_fragments")
        pieces, refused = fragments.tensors, fragments.refusals
        for name in shapes.keys() & refused.keys():
            contents.add_leaf((FROZEN, name), refused[name], partition.rank)
            del shapes[name]
        if shapes.keys() - pieces.keys():
            missing = ", ".join(sorted(shapes.keys() - pieces.keys())[:3])
            raise Damaged(f"{file}: no fragment of the frozen parameters {missing}", "data-missing")
        for name, shape in shapes.items():
            vector, (start, stop) = pieces[name], cut_evenly(shape, partition.dp, len(states))
            if not is_flat(vector):
                message = f"{file}: the fragment of the frozen parameter {name} is not flat, but"
                message += f" has the shape {list(vector.shape)}"
                raise Damaged(message, "storage-mismatch")
            run = FlatRun(name, start, stop, partition.dp, 0)
            add_partition_run(contents, partition, vector, (FROZEN, name), run, shape)


def add_layers(contents: RankContents, checkpoint: DeepSpeedCheckpoint, tensor: int) -> None:
    """Add the layers of all stages, one file each, of one tensor-parallel rank.

    A layer's parameters are named ``<layer>.<name>``; those of a tied one
    ``tied_modules.<key>.<name>``, and only their names and shapes show which layer that is.
    """
    grid = checkpoint.grid
    trained: Shapes = {}
    buffers: set[str] = set()
    writers: dict[str, int] = {}
    for mp in range(tensor, grid.model, grid.tensor):
        model = checkpoint.models[0, mp]
        shapes = read_trained_shapes(model)
        trained = {**shapes, **trained}
        buffers.update(model.names("buffer_names"))
        writers |= dict.fromkeys((name.partition(".")[0] for name in shapes), grid.rank(0, mp))
    tied = _group_tied_modules(trained)
    for (layer, layer_rank), file in sorted(checkpoint.files.layers.items()):
        if layer_rank != tensor:
            continue
        state, rank = checkpoint.read_file(file), writers.get(str(layer), grid.rank(0, tensor))
        vectors, refused = state.tensors, state.refusals
        for name, why in refused.items():
            full = f"{layer}.{name}"
            why.may_be_tensor = why.may_be_tensor or full in trained or full in buffers
        contents.add_leaves(list_refused_leaves(state, ("module", str(layer))), rank)
        contents.add_stray(state.file.what, state.values, rank, ("module", str(layer)))
        head = _find_head(layer, vectors, refused, trained, tied)
        for name, vector in vectors.items():
            full = f"{head}.{name}"
            if full in buffers or f"{layer}.{name}" in buffers:
                contents.add_leaf(("buffer", full), vector, rank)
            else:
                kind = FROZEN if trained and full not in trained else "module"
                contents.add_whole((kind, full), vector, rank)


def _group_tied_modules(trained: Shapes) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of the tied modules' parameters, by module."""
    modules: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in trained.items():
        first, _, rest = name.partition(".")
        key, _, inner = rest.partition(".")
        if first == "tied_modules" and inner:
            modules.setdefault(key, {})[inner] = shape
    return modules


def _find_head(
    layer: int,
    vectors: Mapping[str, PlainLeaf],
    refused: Mapping[str, Refusal],
    trained: Shapes,
    tied: Mapping[str, Shapes],
) -> str:
    """Return the prefix of the names of a layer's parameters.

    Raises Barred if a tied layer's cannot be determined because a parameter is refused.
    """
    if any(f"{layer}.{name}" in trained for name in (*vectors, *refused)):
        return str(layer)
    fitting = [
        key
        for key, shapes in tied.items()
        if all(name in vectors and vectors[name].shape == shapes[name] for name in shapes)
    ]
    if len(fitting) > 1:
        raise Damaged(
            f"layer {layer}: is one of the tied modules {', '.join(fitting)}, which look the same;"
            " the files do not say which",
            "sharding-unknown",
        )
    if fitting:
        return f"tied_modules.{fitting[0]}"
    for name, why in refused.items():
        if any(name in shapes for shapes in tied.values()):
            raise Barred(why)
    return str(layer)


# Frozen parameters that are in no file


def note_excluded(checkpoint: DeepSpeedCheckpoint, assembled: Assembled) -> None:
    """Note evidence that frozen parameters are in no file; as a conflict if it is certain."""
    problems = (_find_certain(checkpoint, state) for state in checkpoint.models.values())
    problem = next(filter(None, problems), None)
    if problem is not None:
        assembled.conflicts[FROZEN] = problem
    elif checkpoint.files.layers:
        problem = _compare_layers(checkpoint)
    else:
        problem = _find_likely(checkpoint.model)
    checkpoint.notes += [problem] if problem is not None else []


def _find_certain(checkpoint: DeepSpeedCheckpoint, state: State) -> Problem | None:
    """Return certain evidence that parameters are missing."""
    bare = _find_bare_modules(state)
    stage = (
        3 if checkpoint.files.stage_3 else find_zero_stage(state, checkpoint.first_optimizer) or 0
    )
    recorded = state.get(_KEY, {})
    wrappers = [module for module in bare if module.rpartition(".")[2] in _WRAPPED]
    if not (stage >= _GRADIENTS and recorded is None) and not wrappers:
        return None
    message = (
        f"{state.file.what}: saved without its frozen parameters (exclude_frozen_parameters=True):"
        " neither their values nor their names are in any file"
    )
    message += f"; modules without a tensor: {list_some(bare, _SHOWN)}" if bare else ""
    return Problem(message, EXCLUDED, file=state.file.what)


def _find_likely(state: State) -> Problem | None:
    """Return a remark if modules have no tensor, and may have parameters."""
    stored, modules = _list_stored(state), _list_modules(state)
    trained = read_trained_shapes(state).keys()
    buffers, tied = set(state.names("buffer_names")), set(map(str, state.mapping("shared_params")))
    if not modules or (trained and stored - trained - buffers - tied):
        return None  # something frozen is present: nothing was excluded
    bare = _find_bare_modules(state)
    owners = {_drop_numbers(name.rpartition(".")[0]) for name in stored}
    named_modules = [module for module in bare if not module.rpartition(".")[2].isdigit()]
    siblings = [module for module in named_modules if _drop_numbers(module) in owners]
    if siblings:
        message = f"{state.file.what}: no tensor of {list_some(siblings, _SHOWN)}, while modules"
        message += (
            " with similar names have some: frozen parameters were excluded"
            " (exclude_frozen_parameters=True)?"
        )
        return Problem(message, EXCLUDED, file=state.file.what)
    candidates = [name for name in bare if not _WITHOUT_PARAMETERS.fullmatch(name.lower())]
    if not candidates:
        return None
    message = (
        f"{state.file.what}: no tensor of the modules {list_some(candidates, _SHOWN)}: they have no"
    )
    message += " parameters, or frozen ones that were excluded (exclude_frozen_parameters=True)"
    return Problem(message, UNRECORDED, file=state.file.what)


def _compare_layers(checkpoint: DeepSpeedCheckpoint) -> Problem | None:
    """Return a remark if layers of a pipeline have fewer tensors than similar layers, or none."""
    layers = {
        file: set(map(str, checkpoint.read_file(file).fields))
        for (_, tensor), file in sorted(checkpoint.files.layers.items())
        if tensor == 0
    }
    trained = {n for state in checkpoint.models.values() for n in read_trained_shapes(state)}
    endings = {name.partition(".")[2] for name in trained} | {
        name.split(".", 2)[2] for name in trained if name.startswith("tied_modules.")
    }
    if any(names - endings for names in layers.values()):
        return None  # something frozen, or a buffer, is present
    smaller = [file for file, names in layers.items() if _is_less(names, layers.values())]
    if not smaller:
        return None
    message = (
        f"{list_some(smaller, _SHOWN)}: no tensor, or fewer than layers like it: no parameters, or"
    )
    message += " frozen ones that were excluded (exclude_frozen_parameters=True)"
    return Problem(message, UNRECORDED, file=smaller[0])


def _is_less(names: set[str], layers: Collection[set[str]]) -> bool:
    """Return whether a layer is empty, or another has the tensors of its modules and more."""
    nested = any("." in name for name in names)
    return not names or (nested and any(names < other for other in layers))


def _list_modules(state: State) -> list[str]:
    """Return the modules that torch lists beside a state dict; empty if it does not."""
    module = state.fields.get("module")
    attributes = getattr(module, "state", None) if isinstance(module, OrderedMapping) else None
    listed = attributes.get("_metadata") if isinstance(attributes, dict) else None
    return [name for name in map(str, listed) if name] if isinstance(listed, Mapping) else []


def _list_stored(state: State) -> set[str]:
    return set(map(str, state.inner("module").fields))


def _find_bare_modules(state: State) -> list[str]:
    """Return the innermost modules without a tensor in the file."""
    modules, stored = _list_modules(state), _list_stored(state)
    parents = {parent for name in (*modules, *stored) for parent in _list_parents(name)}
    return [module for module in modules if module not in parents]


def _list_parents(name: str) -> Iterator[str]:
    steps = name.split(".")
    return (".".join(steps[:count]) for count in range(1, len(steps))[-MOST_STEPS:])


def _drop_numbers(module: str) -> str:
    """Return a module's name without its layers' numbers."""
    return re.sub(r"(?<![^.])[0-9]+(?=\.)", "*", module)
