"""What DeepSpeed saves besides tensors: its own values, the script's, and the optimizer's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckptool.core.catalog import Path, flat_name
from ckptool.formats.deepspeed.states import LAYOUT, PARTITIONS, State, require_shallow
from ckptool.serialization.pickle.records import Call
from ckptool.serialization.source import Source
from ckptool.serialization.state_dict.leaves import Leaf, read_leaves

CLIENT = "client_state"
_WRAPPERS = ("base_optimizer_state", "optimizer_state_dict")
"""What DeepSpeed keeps torch's own optimizer under."""
_ENGINE = frozenset(
    "lr_scheduler data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size"
    " mp_world_size checkpoint_parallel_dimensions ds_config ds_version num_experts"
    " ds_autoep_layers csr_tensor_module_names sparse_tensor_module_names"
    " universal_checkpoint_info".split()
)
_DEGREE = re.compile(r"ep_size_([0-9]{1,6})")
_LOSS_SCALERS = "deepspeed.runtime.fp16.loss_scaler."
_ENUMS = "deepspeed.runtime.zero.config."


def engine_leaves(state: State, source: Source) -> dict[str, Leaf]:
    """Return the values of a model file. Keys that DeepSpeed does not know are the script's own."""
    found: dict[Any, Any] = {}
    client: dict[Any, Any] = {}
    for key, value in state.stored.items():
        if key not in LAYOUT:
            (found if key in _ENGINE else client)[key] = value
    if client:
        found[CLIENT] = client
    return read_leaves(state.file.narrowed(found), source, refuse=True)


def refused_leaves(
    state: State, prefix: Path = (), kinds: Mapping[str, str] | None = None
) -> dict[str, Leaf]:
    """Return what is refused of a file's tensors and of their layout, each part by its name.

    Without a ``prefix`` that is a model file's; ``kinds`` say which names in its module are those
    of a ``buffer`` or of a ``frozen`` parameter. Other values are ``engine_leaves`` and
    ``optimizer_leaves``, which refuse theirs.
    """
    found: dict[str, Leaf] = {}
    for path, why in state.refused.items():
        is_value = path[:1] == ("optimizer_state_dict",) and {*path[1:2]} - PARTITIONS
        if is_value or not (prefix or path[0] in LAYOUT):
            continue
        inner = path[1:] if path[:1] == prefix else path
        full = (*prefix, *(step for step in inner if step not in _WRAPPERS))
        if kinds and path[0] == "module":
            full = (kinds[str(path[1])], *path[1:])
        found[flat_name(full)] = Leaf(full, why.called(flat_name(full)), bool(why.part))
    return found


def optimizer_leaves(optimizer: State, source: Source) -> dict[str, Leaf]:
    """The values of an optimizer that belong to no parameter: its groups, the loss scale, ..."""
    found = {key: plain(v) for key, v in optimizer.stored.items() if key not in PARTITIONS}
    groups = param_groups(optimizer.stored)
    if groups:
        found["param_groups"] = groups
    if not found:
        return {}
    file = optimizer.file.narrowed(found)
    return read_leaves(file, source, prefix=("optimizer",), refuse=True)


def raw_leaves(optimizer: Any, state: State, source: Source) -> dict[str, Leaf]:
    """Return an optimizer's state dict as it is, for each rank."""
    file = state.file.narrowed(optimizer)
    return read_leaves(file, source, prefix=("optimizer",), rank_state=True, refuse=True)


def param_groups(optimizer: Any) -> Any:
    """torch's param_groups as they are stored, wherever the kind of optimizer keeps them."""
    stored = _mapping(optimizer)
    for key in _WRAPPERS:
        inner = stored.get(key)
        if isinstance(inner, dict):
            return inner.get("param_groups")
    return stored.get("param_groups")


def expert_degrees(groups: Any) -> set[int]:
    """The degrees of expert parallelism that an optimizer's groups of experts are called by."""
    listed = groups if isinstance(groups, list | tuple) else []
    names = (group.get("name") for group in listed if isinstance(group, dict))
    matches = (_DEGREE.match(name) for name in names if isinstance(name, str))
    return {int(match[1]) for match in matches if match}


def plain(value: Any) -> Any:
    """Return a loss scaler as the dict of its attributes, an enum's member as its value."""
    if isinstance(value, Call) and value.name.startswith(_LOSS_SCALERS):
        return dict(value.fields)
    if isinstance(value, Call) and value.name.startswith(_ENUMS) and len(value.args) == 1:
        return value.args[0]
    return value


def zero_stage(model: State, optimizer: State | None) -> int | None:
    """Return the stage of ZeRO, by the optimizer's file or the configuration; None where it is odd.

    Raises Barred where the latter is refused, and the former does not tell it.
    """
    stage = plain(optimizer.stored.get("zero_stage")) if optimizer else None
    if isinstance(stage, int):
        return stage
    config = _mapping(require_shallow(model.fields.get("ds_config")))
    zero = _mapping(require_shallow(config.get("zero_optimization")))
    stage = require_shallow(zero.get("stage", 0))
    return stage if isinstance(stage, int) else None


def training_facts(model: State, optimizer: State | None) -> dict[str, str]:
    """Return what a person wants to know of a run: version, stage, precision, offloading."""
    version = model.stored.get("ds_version")
    config = _mapping(model.stored.get("ds_config"))
    zero = _mapping(config.get("zero_optimization"))
    stage = zero_stage(model, optimizer)
    facts = {"writer": "DeepSpeed"}
    facts |= {"version": version} if isinstance(version, str) else {}
    facts["ZeRO"] = "stage unknown" if stage is None else f"stage {stage}"
    for precision in ("bf16", "bfloat16", "fp16"):
        if _mapping(config.get(precision)).get("enabled") is True:
            facts["precision"] = precision
    name = _mapping(config.get("optimizer")).get("type")
    if isinstance(name, str):
        facts["optimizer"] = name
    device = _mapping(zero.get("offload_optimizer")).get("device")
    if isinstance(device, str) and device != "none":
        facts["optimizer offloaded to"] = device
    if zero.get("round_robin_gradients") is True:
        facts["gradients"] = "round-robin"
    return facts


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
