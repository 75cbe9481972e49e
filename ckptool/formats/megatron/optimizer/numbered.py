"""The optimizer state of Megatron's own format, where it is not distributed: by number.

``state`` and ``fp32_from_fp16_params`` are numbered through the parameter groups; a group holds its
parameters in the model's order (``_get_param_groups``, megatron-core 0.5 to 0.20). Biases and 1-d
parameters have a group without weight decay; experts of several ranks, and embeddings with a
learning rate of their own, have groups of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptool.core.sharding.tensor_parallel import TpRule
from ckptool.errors import Undetermined
from ckptool.formats.megatron.names import is_expert
from ckptool.formats.megatron.parameters import Fragments, LocalParameter, StorageRun
from ckptool.serialization.archive.read import TorchFile
from ckptool.serialization.archive.tensors import place_of, plain_tensor, unwrapped
from ckptool.serialization.pickle.records import Call

MASTERS = "fp32_from_fp16_params"
_HALVES = ("bfloat16", "float16")
_MOST_BLOCKS = 100
_EMBEDDINGS = (
    "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight",
    "output_layer.weight",
)


def numbered_state(
    file: TorchFile, value: Any, held: Sequence[LocalParameter], expert_parallel: bool
) -> tuple[Fragments, dict[str, TpRule]]:
    """Return what one rank stores of its optimizer, and the rules that its masters were saved with.

    ``held`` are the rank's parameters in the model's order. Raises Undetermined.
    """
    found: Fragments = {}
    rules: dict[str, TpRule] = {}
    optimizers = value if isinstance(value, list) else [value]
    left = list(held)
    for optimizer in optimizers:
        for group, params, masters in _groups(optimizer):
            mine = _members(group, left, expert_parallel, _all_groups(optimizers))
            _match(file, group, params, masters, mine, found, rules)
            left = [one for one in left if one not in mine]
    return found, rules


def _groups(optimizer: Any) -> Iterator[tuple[dict[str, Any], dict[Any, Any], list[Any]]]:
    """Yield each group with the states of all numbers, and its masters."""
    if not isinstance(optimizer, dict):
        raise Undetermined("it is not a dict")
    inner = optimizer.get("optimizer", optimizer)
    state = inner.get("state") if isinstance(inner, dict) else None
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    masters = optimizer.get(MASTERS)
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise Undetermined("it holds no groups")
    if not isinstance(state, dict):
        raise Undetermined("it holds no state")
    lists = masters if isinstance(masters, list) else [[] for _ in groups]
    if len(lists) != len(groups):
        raise Undetermined(f"{len(lists)} lists of masters for {len(groups)} groups")
    for group, own in zip(groups, lists, strict=True):
        yield group, state, own


def _all_groups(optimizers: Sequence[Any]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group, _, _ in _groups(optimizer)]


def _key(group: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """Without weight decay, with a learning rate of its own, of experts of several ranks."""
    decay = group.get("wd_mult", group.get("weight_decay", 1.0))
    return (not decay, bool(group.get("is_decoupled_lr")), bool(group.get("is_expert_parallel")))


def _members(
    group: Mapping[str, Any],
    held: Sequence[LocalParameter],
    expert_parallel: bool,
    groups: Sequence[Mapping[str, Any]],
) -> list[LocalParameter]:
    keys = [_key(one) for one in groups]
    if len(set(keys)) != len(keys):
        raise Undetermined("two of its groups differ in nothing that names could tell")
    bare = {key[0] for key in keys}
    decoupled = any(key[1] for key in keys)
    mine = []
    for one in held:
        expert = expert_parallel and is_expert(one.name)
        plain = one.name.endswith(".bias") or len(one.local) == 1
        key = (plain if len(bare) > 1 else min(bare), decoupled and one.name in _EMBEDDINGS, expert)
        if key == _key(group):
            mine.append(one)
    return mine


def _match(
    file: TorchFile,
    group: Mapping[str, Any],
    state: Mapping[Any, Any],
    masters: Sequence[Any],
    held: Sequence[LocalParameter],
    found: Fragments,
    rules: dict[str, TpRule],
) -> None:
    numbers = group.get("params")
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise Undetermined("a group does not number its parameters")
    if len(numbers) != len(held):
        raise Undetermined(
            f"a group of {len(numbers)} parameters, where the model has {len(held)} for it"
        )
    halves = [one for one in held if one.dtype.name in _HALVES]
    if masters and len(masters) != len(halves):
        raise Undetermined(f"{len(masters)} fp32 masters for {len(halves)} 16-bit parameters")
    for one, master in zip(halves, masters, strict=False):
        _add(found, "fp32", one, _stored(file, master))
        rule = _stated(master)
        if rule is not None:
            rules[one.name] = rule
    for number, one in zip(numbers, held, strict=True):
        values = state.get(number)
        for kind, tensor in values.items() if isinstance(values, dict) else ():
            stored = _stored(file, tensor)
            if stored is not None:
                scalar = replace(one, local=()) if not stored.shape else one
                _add(found, str(kind), scalar, stored)


def _stored(file: TorchFile, value: Any) -> StorageRun | None:
    tensor = plain_tensor(value)
    return StorageRun(tensor.shape, tensor.dtype, place_of(tensor, file)) if tensor else None


def _add(found: Fragments, kind: str, held: LocalParameter, stored: StorageRun | None) -> None:
    if stored is None or stored.stop != held.numel:
        shape = list(stored.shape) if stored else "no tensor"
        raise Undetermined(f"{kind} of {held.name} is {shape}, the parameter {list(held.local)}")
    found.setdefault((kind, held.name), []).append((held, [stored]))


def _stated(value: Any) -> TpRule | None:
    """Return the rule that a master was saved with, as attributes of the tensor.

    Models built without initialization have no true attributes: what they deny is not believed.
    """
    value = unwrapped(value)
    if not isinstance(value, Call) or len(value.args) != 4 or not isinstance(value.args[3], dict):
        return None
    attributes = value.args[3]
    dim, stride = attributes.get("partition_dim"), attributes.get("partition_stride")
    if attributes.get("tensor_model_parallel") is not True:
        return None
    if type(dim) is int and type(stride) is int and 0 <= dim < 8 and 0 < stride < _MOST_BLOCKS:
        return TpRule(dim, (1,) * stride)
    return None
