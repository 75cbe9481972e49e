"""Weights in the training type, frozen parameters and buffers, from DeepSpeed's model files."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from ckptool.errors import Damaged, Refusal
from ckptool.formats.deepspeed.partitions import Partition, RankContents, Run, run_chunks
from ckptool.formats.deepspeed.states import (
    State,
    Vector,
    all_tensors,
    named_tensors,
    refused_entries,
    shape_groups,
)
from ckptool.serialization.archive.tensors import sizes
from ckptool.serialization.state_dict.leaves import Barred

_Shapes = Mapping[str, tuple[int, ...]]


def trained_shapes(state: State) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters in the optimizer's groups; empty without ZeRO."""
    return {name: shape for group in shape_groups(state) for name, shape in group.items()}


def add_module(
    found: RankContents,
    state: State,
    aliases: Mapping[str, str],
    trained: Collection[str] | None,
    rank: int,
) -> None:
    """Add ``module`` of ZeRO 0, 1 or 2.

    What is neither trained, nor a buffer, nor an alias of another parameter, was frozen; where
    ``trained`` is None, nothing says what was trained. The optimizer leaves out what is empty.
    """
    buffers = set(state.names("buffer_names"))
    vectors = named_tensors(state, "frozen_param_fragments") | named_tensors(state, "module")
    same = same_tensors({name: v for name, v in vectors.items() if name not in buffers})
    for name, vector in vectors.items():
        names = {name, aliases.get(name), same.get(name)}
        if name in buffers:
            found.add_leaf(("buffer", name), vector, rank)
        elif trained is None or not names.isdisjoint(trained) or not math.prod(vector.shape):
            found.add_whole(("module", name), vector, rank)
        else:
            found.add_whole(("frozen", name), vector, rank)


def refused_kinds(
    state: State, aliases: Mapping[str, str], trained: Collection[str] | None
) -> dict[str, str]:
    """What each name in ``module`` that is refused stands for: ``module``, ``buffer``, ``frozen``.

    As ``add_module`` decides it: a tensor is what is trained or a buffer, whatever stands for it
    now, and what is neither, and no tensor, is not frozen.
    """
    buffers = set(state.names("buffer_names"))
    found = {}
    for name, why in refused_entries(state.inner("module")).items():
        is_trained = not {name, aliases.get(name)}.isdisjoint(trained or ())
        why.may_be_tensor = why.may_be_tensor or is_trained or name in buffers
        is_frozen = trained is not None and not is_trained and why.may_be_tensor
        found[name] = "buffer" if name in buffers else "frozen" if is_frozen else "module"
    return found


def module_weights(state: State) -> dict[str, Vector]:
    """Return the parameters in ``module``, each once, in the order of the module."""
    buffers = set(state.names("buffer_names"))
    vectors = {n: v for n, v in named_tensors(state, "module").items() if n not in buffers}
    same = same_tensors(vectors)
    return {name: vector for name, vector in vectors.items() if name not in same}


def same_tensors(vectors: Mapping[str, Vector]) -> dict[str, str]:
    """Names of tied parameters to the first name of the same bytes."""
    first: dict[object, str] = {}
    same = {}
    for name, vector in vectors.items():
        key = (vector.at, vector.dtype, vector.shape)
        if math.prod(vector.shape) and first.setdefault(key, name) != name:
            same[name] = first[key]
    return same


def add_placeholders(found: RankContents, states: Iterable[Partition]) -> None:
    """Add what ZeRO 3 keeps in ``module``: buffers, and parameters that are not partitioned.

    Of partitioned parameters there are empty tensors in their place.
    """
    for partition in states:
        buffers = set(partition.state.names("buffer_names"))
        for name, vector in named_tensors(partition.state, "module").items():
            if name in buffers:
                found.add_leaf(("buffer", name), vector, partition.rank)
            elif math.prod(vector.shape):
                found.add_leaf(("module", name), vector, partition.rank)


def add_frozen_pieces(found: RankContents, states: Iterable[Partition], parts: int) -> None:
    """Add the frozen parameters of ZeRO 3, of which each rank holds one piece."""
    for partition in states:
        stored = partition.state.mapping("frozen_param_shapes")
        shapes = {str(name): sizes(shape) for name, shape in stored.items()}
        pieces = named_tensors(partition.state, "frozen_param_fragments")
        refused = refused_entries(partition.state.inner("frozen_param_fragments"))
        for name in shapes.keys() & refused.keys():
            found.add_leaf(("frozen", name), refused[name], partition.rank)
            del shapes[name]
        if shapes.keys() - pieces.keys():
            missing = ", ".join(sorted(shapes.keys() - pieces.keys())[:3])
            raise Damaged(
                f"{partition.state.file.what}: no fragment of the frozen {missing}", "data-missing"
            )
        for name, shape in shapes.items():
            _add_piece(found, partition, name, shape, pieces[name], parts)


def _add_piece(
    found: RankContents,
    partition: Partition,
    name: str,
    shape: tuple[int, ...],
    vector: Vector,
    parts: int,
) -> None:
    numel = math.prod(shape)
    piece = -(-numel // parts)
    lo, hi = min(partition.dp * piece, numel), min((partition.dp + 1) * piece, numel)
    if not vector.is_flat or vector.shape[0] < hi - lo:
        raise Damaged(
            f"{partition.state.file.what}: frozen.{name} needs {hi - lo:,} elements, its"
            f" fragment has the shape {list(vector.shape)}",
            "storage-mismatch",
        )
    run = Run(name, lo, hi, partition.dp, 0)
    chunks = run_chunks(run, shape, vector.at, vector.dtype.itemsize, partition.rank)
    found.add(("frozen", name), vector.dtype, shape, chunks)


# Pipeline layers


def add_layers(
    found: RankContents,
    layers: Mapping[int, State],
    trained: _Shapes,
    buffers: Collection[str],
    ranks: Mapping[int, int],
) -> None:
    """Add the layers of a pipeline, one file each, as the first stage's; ``ranks`` wrote them.

    A layer's parameters are called ``<layer>.<name>``; those of a tied one
    ``tied_modules.<key>.<name>``, and which layer that is only their names and shapes tell.
    ``trained`` are the shapes of all stages, empty where nothing says what was trained.
    """
    tied = _tied_modules(trained)
    for layer, state in sorted(layers.items()):
        vectors = all_tensors(state)
        refused = refused_entries(state)
        for name, why in refused.items():
            full = f"{layer}.{name}"
            why.may_be_tensor = why.may_be_tensor or full in trained or full in buffers
        head = _head(layer, vectors, refused, trained, tied)
        for name, vector in vectors.items():
            full = f"{head}.{name}"
            if full in buffers or f"{layer}.{name}" in buffers:
                found.add_leaf(("buffer", full), vector, ranks[layer])
            else:
                kind = "frozen" if trained and full not in trained else "module"
                found.add_whole((kind, full), vector, ranks[layer])


def _tied_modules(trained: _Shapes) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes of the tied modules' parameters, by module."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in trained.items():
        first, _, rest = name.partition(".")
        key, _, inner = rest.partition(".")
        if first == "tied_modules" and inner:
            found.setdefault(key, {})[inner] = shape
    return found


def _head(
    layer: int,
    vectors: Mapping[str, Vector],
    refused: Mapping[str, Refusal],
    trained: _Shapes,
    tied: Mapping[str, _Shapes],
) -> str:
    """Return what the names of a layer's parameters begin with.

    Raises Barred where that of a tied one cannot be told, as a parameter is refused.
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
            f"layer {layer}: is one of the tied modules {', '.join(fitting)}, which are alike;"
            " the files do not say which",
            "sharding-unknown",
        )
    if fitting:
        return f"tied_modules.{fitting[0]}"
    for name, why in refused.items():
        if any(name in shapes for shapes in tied.values()):
            raise Barred(why)
    return str(layer)
