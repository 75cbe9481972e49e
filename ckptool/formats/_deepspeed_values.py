"""What DeepSpeed saves besides tensors: its own values, the script's, and the optimizer's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckptool.core.catalog import Path
from ckptool.formats._deepspeed_read import LAYOUT, PARTITIONS, State
from ckptool.formats._leaves import Leaf, read_leaves
from ckptool.formats._pickle import Call
from ckptool.formats.base import Source

CLIENT = "client_state"
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
    """The values of a model file. Keys that DeepSpeed does not know are the script's own."""
    found: dict[Any, Any] = {}
    client: dict[Any, Any] = {}
    for key, value in state.fields.items():
        if key not in LAYOUT:
            (found if key in _ENGINE else client)[key] = value
    if client:
        found[CLIENT] = client
    leaves = read_leaves(state.file.narrowed(found), source, refuse=True)
    module = state.fields.get("module")
    return leaves | refused_leaves(state, module, source, ("module",))


def refused_leaves(state: State, module: Any, source: Source, prefix: Path) -> dict[str, Leaf]:
    """The values of a module that can run code, each refused by its name."""
    if not state.file.hostile or not isinstance(module, dict):
        return {}
    found = {key: value for key, value in module.items() if state.file.narrowed(value).hostile}
    return read_leaves(state.file.narrowed(found), source, prefix=prefix, refuse=True)


def optimizer_leaves(optimizer: State, source: Source) -> dict[str, Leaf]:
    """The values of an optimizer that belong to no parameter: its groups, the loss scale, ..."""
    found = {key: plain(v) for key, v in optimizer.fields.items() if key not in PARTITIONS}
    groups = param_groups(optimizer)
    if groups:
        found["param_groups"] = groups
    if not found:
        return {}
    file = optimizer.file.narrowed(found)
    return read_leaves(file, source, prefix=("optimizer",), refuse=True)


def raw_leaves(optimizer: Any, state: State, source: Source) -> dict[str, Leaf]:
    """An optimizer's state dict as it is, for each rank."""
    file = state.file.narrowed(optimizer)
    return read_leaves(file, source, prefix=("optimizer",), rank_state=True, refuse=True)


def param_groups(optimizer: State) -> Any:
    """torch's param_groups, wherever the kind of optimizer keeps them."""
    for key in ("base_optimizer_state", "optimizer_state_dict"):
        inner = optimizer.fields.get(key)
        if isinstance(inner, dict):
            return inner.get("param_groups")
    return optimizer.fields.get("param_groups")


def expert_degrees(groups: Any) -> set[int]:
    """The degrees of expert parallelism that an optimizer's groups of experts are called by."""
    names = (group.get("name") for group in groups or [] if isinstance(group, dict))
    matches = (_DEGREE.match(name) for name in names if isinstance(name, str))
    return {int(match[1]) for match in matches if match}


def plain(value: Any) -> Any:
    """A loss scaler as the dict of its attributes, an enum's member as its value."""
    if isinstance(value, Call) and value.name.startswith(_LOSS_SCALERS):
        return dict(value.fields)
    if isinstance(value, Call) and value.name.startswith(_ENUMS) and len(value.args) == 1:
        return value.args[0]
    return value


def zero_stage(model: State, optimizer: State | None) -> int | None:
    """The stage of ZeRO, by the optimizer's file or the configuration; None where it is odd."""
    stage = plain(optimizer.fields.get("zero_stage")) if optimizer else None
    zero = _mapping(_mapping(model.fields.get("ds_config")).get("zero_optimization"))
    stage = zero.get("stage", 0) if stage is None else stage
    return stage if isinstance(stage, int) else None


def training_facts(model: State, optimizer: State | None) -> dict[str, str]:
    """What a person wants to know of a run: version, stage, precision, offloading."""
    version = model.fields.get("ds_version")
    config = _mapping(model.fields.get("ds_config"))
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
