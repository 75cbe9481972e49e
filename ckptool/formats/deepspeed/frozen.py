"""Frozen parameters that ``save_checkpoint(exclude_frozen_parameters=True)`` left out of all files.

From ZeRO 2 on, ``frozen_param_shapes`` is None then, and a dict otherwise, empty where nothing was
frozen (DeepSpeed 0.9 to 0.19, ``runtime/engine.py``). Below that, and in pipelines, it is always
None: there only the modules that torch lists beside a state dict show that some have no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from ckptool.errors import Problem
from ckptool.formats.deepspeed.checkpoint import Checkpoint
from ckptool.formats.deepspeed.states import State, read_state
from ckptool.formats.deepspeed.values import zero_stage
from ckptool.formats.deepspeed.weights import trained_shapes
from ckptool.serialization.pickle.records import OrderedMapping
from ckptool.serialization.state_dict.leaves import Assembled

FROZEN = "frozen"
EXCLUDED = "frozen-excluded"
UNRECORDED = "frozen-unrecorded"
_KEY = "frozen_param_shapes"
_GRADIENTS = 2
"""The first stage of ZeRO that records what was frozen."""
_SHOWN = 8
_WRAPPED = frozenset(["base_layer", "original_module"])
"""What PEFT calls the module that an adapter was put on: it has parameters, always."""
_WITHOUT_PARAMETERS = re.compile(
    r".*(act|activation|dropout|drop|drop_path|relu|gelu|silu|tanh|sigmoid|softmax|identity|pool"
    r"|pooling|flatten|rotary|rotary_emb|rope|loss|loss_fn|criterion|attn_drop|proj_drop)(_fn|_func)?\d*"
)


def note_excluded(checkpoint: Checkpoint, found: Assembled) -> None:
    """Note what shows that frozen parameters are in no file; a conflict where that is certain."""
    for state in checkpoint.models.values():
        problem = _certain(checkpoint, state)
        if problem is not None:
            found.conflicts[FROZEN] = problem
            checkpoint.notes.append(problem)
            return
    problem = _of_layers(checkpoint) if checkpoint.files.layers else _likely(checkpoint.model)
    if problem is not None:
        checkpoint.notes.append(problem)


def _certain(checkpoint: Checkpoint, state: State) -> Problem | None:
    """Return what says for certain that parameters are missing."""
    bare = _bare_modules(state)
    optimizer = checkpoint.partitions(0)[0].state if checkpoint.optimizers else None
    stage = 3 if checkpoint.files.stage_3 else zero_stage(state, optimizer) or 0
    recorded = state.get(_KEY, {})
    wrapped = [module for module in bare if module.rpartition(".")[2] in _WRAPPED]
    if not (stage >= _GRADIENTS and recorded is None) and not wrapped:
        return None
    message = (
        f"{state.file.what}: saved without its frozen parameters (exclude_frozen_parameters=True):"
        " no file has them or their names"
    )
    message += f"; modules without a tensor: {_listed(bare)}" if bare else ""
    return Problem(message, EXCLUDED, file=state.file.what)


def _likely(state: State) -> Problem | None:
    """A remark where modules have no tensor, and nothing says whether they have parameters."""
    stored, modules = _stored(state), _modules(state)
    trained = trained_shapes(state).keys()
    buffers = set(state.names("buffer_names"))
    if not modules or (trained and stored - trained - buffers - _tied(state)):
        return None  # something frozen is there: nothing was left out
    bare = _bare_modules(state)
    owners = {_alike(owner) for owner in {name.rpartition(".")[0] for name in stored}}
    certain = [
        one for one in bare if not one.rpartition(".")[2].isdigit() and _alike(one) in owners
    ]
    if certain:
        message = f"{state.file.what}: no tensor of {_listed(certain)}, while modules called alike"
        message += " have some: frozen parameters were left out (exclude_frozen_parameters=True)?"
        return Problem(message, EXCLUDED, file=state.file.what)
    unclear = [one for one in bare if not _WITHOUT_PARAMETERS.fullmatch(one.lower())]
    if not unclear:
        return None
    message = f"{state.file.what}: no tensor of the modules {_listed(unclear)}: they have no"
    message += " parameters, or frozen ones that were left out (exclude_frozen_parameters=True)"
    return Problem(message, UNRECORDED, file=state.file.what)


def _of_layers(checkpoint: Checkpoint) -> Problem | None:
    """Return a remark where layers of a pipeline hold less than layers like them, or nothing."""
    layers = {
        file: set(map(str, read_state(checkpoint.source, file).fields))
        for (_, tensor), file in sorted(checkpoint.files.layers.items())
        if tensor == 0
    }
    trained = {n for state in checkpoint.models.values() for n in trained_shapes(state)}
    endings = {name.partition(".")[2] for name in trained} | {
        name.split(".", 2)[2] for name in trained if name.startswith("tied_modules.")
    }
    if any(names - endings for names in layers.values()):
        return None  # something frozen, or a buffer, is there
    smaller = [file for file, names in layers.items() if _is_less(names, layers.values())]
    if not smaller:
        return None
    message = f"{_listed(smaller)}: no tensor, or fewer than layers like it: no parameters, or"
    message += " frozen ones that were left out (exclude_frozen_parameters=True)"
    return Problem(message, UNRECORDED, file=smaller[0])


def _is_less(names: set[str], layers: Collection[set[str]]) -> bool:
    """Whether a layer is empty, or one of modules that another has too, with more of them."""
    nested = any("." in name for name in names)
    return not names or (nested and any(names < other for other in layers))


def _modules(state: State) -> list[str]:
    """Return the modules that torch lists beside a state dict; empty where it does not."""
    module = state.fields.get("module")
    attributes = getattr(module, "state", None) if isinstance(module, OrderedMapping) else None
    listed = attributes.get("_metadata") if isinstance(attributes, dict) else None
    return [name for name in map(str, listed) if name] if isinstance(listed, Mapping) else []


def _stored(state: State) -> set[str]:
    return set(map(str, state.inner("module").fields))


def _bare_modules(state: State) -> list[str]:
    """Modules without modules in them, of which no tensor is in the file."""
    modules, stored = _modules(state), _stored(state)
    parents = {parent for one in (*modules, *stored) for parent in _parents(one)}
    return [module for module in modules if module not in parents]


def _parents(name: str) -> Iterator[str]:
    steps = name.split(".")
    return (".".join(steps[:count]) for count in range(1, len(steps)))


def _tied(state: State) -> set[str]:
    return set(map(str, state.mapping("shared_params")))


def _alike(module: str) -> str:
    """Return a module's name without the numbers that count its layers."""
    return re.sub(r"(?<![^.])[0-9]+(?=\.)", "*", module)


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else shown
