"""The ``zero`` folder of a universal checkpoint: a folder a parameter, a file a state.

DeepSpeed's ``ds_to_universal`` (0.10 to 0.19) writes ``{"param": tensor, ...}``, from ZeRO 3 a bare
vector without a shape, and ``step.pt`` a bare tensor or number. It also writes masters for what has
none: frozen parameters, buffers and tied names, rounded; the model file has those as they were.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from ckptool.errors import Damaged, Problem, SourceError
from ckptool.formats._deepspeed_flat import Run, run_chunks
from ckptool.formats._deepspeed_local import MASTER, Holding
from ckptool.formats._deepspeed_read import State, Vector, refusal_of_error
from ckptool.formats._deepspeed_slots import STATES
from ckptool.formats._leaves import Leaf
from ckptool.formats._storage import shown
from ckptool.formats._torch_file import read_torch_file
from ckptool.formats._values import stray_notes
from ckptool.formats.base import Source

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
    found: Holding,
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
    found: Holding,
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
            Problem(
                f"{path}: holds {shown(value)}, a universal checkpoint a tensor", "tensor-record"
            )
        )
    if isinstance(opened.value, dict) or shape is None or len(shape) == 1:
        found.add_whole(name, vector, 0)
        return
    _add_vector(found, name, vector, shape, path)


def _add_vector(
    found: Holding, name: tuple[str, str], vector: Vector, shape: tuple[int, ...], path: str
) -> None:
    numel = math.prod(shape)
    if not vector.is_flat or vector.shape != (numel,):
        raise Damaged(
            Problem(
                f"{path}: {list(vector.shape)} for a parameter of shape {list(shape)}",
                "tensor-record",
            )
        )
    chunks = run_chunks(Run(name[1], 0, numel, 0, 0), shape, vector.at, vector.dtype.itemsize, 0)
    found.add(name, vector.dtype, shape, chunks)
