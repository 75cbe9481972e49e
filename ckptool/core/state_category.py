"""The category of tensors and values: model, optimizer, or other."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TypeVar

from msgspec.structs import replace

from ckptool.core.catalog import Catalog, ObjectEntry, Path, TensorEntry
from ckptool.core.selection import entries_of, with_entries
from ckptool.errors import Refusal

STATE_CATEGORIES = ("model", "optimizer", "other")

_KIND = "fp32|exp_avg|exp_avg_sq|exp_inf|max_exp_avg_sq|momentum_buffer|square_avg"
_KINDS = re.compile(_KIND)
_STATE_DICT = r"(?>(?:\w*_)?optim(?:izers?)?(?:[A-Z_0-9]\w*)?(?!\w))"
"""A step that holds an optimizer's state dict, such as ``optimizer_state_dict`` and ``optimG``.

Tried once, as are others below whose end is looked for first: else a long name that a stranger made
takes the square of its length.
"""
_OPTIMIZER = re.compile(rf"{_STATE_DICT}|(opt|adam|chained)(_?\d+)?|{_KIND}")
RANDOM = r"(\w*_)?rngs?(_(tracker_)?states?(_\w+)?)?|(\w*_)?random_states?(_\w+)?"
"""A step that holds states of random number generators, as verl, Megatron-core, transformers and
accelerate call it."""
_RANDOM = re.compile(RANDOM)
_GENERATOR = re.compile(r"(\w*_)?generators?(_states?)?")
"""The last step of such a state: elsewhere it may be half of a GAN."""
_OF_DATA = re.compile(
    r"(\w*_)?(data_?(loader|set|iter(ator)?)|sampler|loader)s?(_states?(_dict)?)?|metrics?"
)
"""A step that holds positions in the data of a rank, or what came of it."""
_OTHER = re.compile(
    r"(?>(?:\w*_)?schedulers?(?:[A-Z_0-9]\w*)?(?!\w))|train_state|train|trainer|dataloader|data_loader"
    rf"|{RANDOM}|extra_state|scaler|loss_scaler|sampler|meta|callbacks"
    r"|opt_param_scheduler|rerun_state_machine|checkpoint_version|iteration|content_metadata"
    r"|loops|step|epoch|global_step|config|cfg|args|progress|stateful|metrics|client_state"
    r"|(global|skipped)_(steps|samples)|(dp|mp)_world_size|ds_\w+|checkpoint_parallel_dimensions"
    r"|universal_checkpoint_info|data_sampler|random_ltd|shared_params|num_experts"
)
_WRAPPER = re.compile(r"model|models|state_dict|model_state_dict|module|network|net|actor|ema")
_OF_AN_OPTIMIZER = re.compile(
    rf"(?s)(.+\.)?{_STATE_DICT}(\.[^.]+)?\.(state|param_groups|base_optimizer_state)(\..+)?"
    rf"|(?=.*\.(?:{_KIND}|step)\Z)(.+\.)?state\..+\.({_KIND}|step)"
    rf"|state/\d+/(?:{_KIND}|step)"
)
"""Names of an optimizer's state dict somewhere in another state dict, or by itself with slashes, as
LeRobot 0.4 saves it (optim/optimizers.py)."""
_GROUPS = ".param_groups"
_STATE = frozenset(["state", "param_groups", "base_optimizer_state"])
_OF_A_LAYER = re.compile(r".+\.(weight|bias|running_mean|running_var|num_batches_tracked)")
AVERAGE = re.compile(r"(?<![a-z])(ema|swa)(?![a-z])", re.IGNORECASE)
"""What the name of a file or folder has in which a training keeps an average of its weights. What
is averaged after it has other names, too (exports.py)."""
_UNTRAINED = re.compile(
    r"[^.]*(?<![a-zA-Z])(?:ema|swa|teacher)(?![a-zA-Z])"
    r"|(?:model|module|state_dict)\.(?:ema|swa|teacher)(?:_(?:model|state_dict|params))?\.",
    re.IGNORECASE,
)
"""The beginning of a name of an average; a teacher is one of the student, or frozen."""
_Weight = TypeVar("_Weight")


def state_category(entry: TensorEntry | ObjectEntry) -> str:
    """Return ``model``, ``optimizer`` or ``other``: the recorded part, or else by name."""
    return entry.part or state_category_of_name(entry.name, entry.path)


def state_category_of_name(name: str, path: Path) -> str:
    """Return ``model``, ``optimizer`` or ``other``, by a name alone."""
    category = _category_of_step(_head(str(path[0]) if path else name))
    return category or ("optimizer" if _is_of_optimizer(name) else "model")


def is_of_a_rank(path: Path) -> bool:
    """Return whether a name says that each rank has it for itself, so that it is no replica."""
    return is_of_data(path) or _says(path, _RANDOM) or _says(path, _GENERATOR, last=True)


def is_of_data(path: Path) -> bool:
    """Return whether a name says that it is a place in the data, of which each rank has a part."""
    return _says(path, _OF_DATA)


def _says(path: Path, words: re.Pattern[str], *, last: bool = False) -> bool:
    """Return whether a step, or the last, is such words; none of a layer, model or optimizer is."""
    steps = [step for step in path if isinstance(step, str)]
    if not any(map(words.fullmatch, steps[-1:] if last else steps)):
        return False
    is_of_part = _WRAPPER.fullmatch(steps[0]) or _category_of_step(steps[0]) == "optimizer"
    return not is_of_part and _OF_A_LAYER.fullmatch(".".join(steps)) is None


def is_state_of_optimizer(name: str) -> bool:
    """Return whether a name can only be optimizer state: no module of a model has such a name.

    ``optimizer.weight`` is a model's if that has a module ``optimizer``.
    """
    steps = name.split(".")
    return not _STATE.isdisjoint(steps) or _KINDS.fullmatch(_head(name)) is not None


def begin_with_state(names: Iterable[str]) -> bool:
    """Return whether some names begin with the state that they are, as ``exp_avg.NAME`` does."""
    return any(_KINDS.fullmatch(_head(name)) for name in names)


def _is_of_optimizer(name: str) -> bool:
    return "state" in name and _OF_AN_OPTIMIZER.fullmatch(name) is not None


@lru_cache(1 << 12)
def _category_of_step(step: str) -> str | None:
    if _OPTIMIZER.fullmatch(step):
        return "optimizer"
    return "other" if _OTHER.fullmatch(step) else None


def with_parts(catalog: Catalog) -> Catalog:
    """Set the ``part`` of a catalog's entries whose names alone are misleading."""
    return _mark(catalog, _misleading_names(catalog))


def with_every_part(catalog: Catalog) -> Catalog:
    """Set the ``part`` of each of a catalog's entries, so that it survives renaming.

    Masters are the model if they are its only weights.
    """
    parts = {entry.name: state_category(entry) for entry in entries_of(catalog)}
    return _mark(catalog, parts | dict.fromkeys(lone_masters(catalog), "model"))


def _mark(catalog: Catalog, parts: Mapping[str, str]) -> Catalog:
    if not parts:
        return catalog
    entries = entries_of(catalog)
    marked = (replace(e, part=parts[e.name]) if e.name in parts else e for e in entries)
    return with_entries(catalog, marked)


def _misleading_names(catalog: Catalog) -> dict[str, str]:
    """Return the part of each tensor and value whose name alone does not determine it."""
    parts: dict[str, str] = {}
    groups: dict[str, list[str]] = defaultdict(list)
    for entries in (catalog.tensors, catalog.objects):
        for name, entry in entries.items():
            if entry.part is None:
                groups[_head(name)].append(name)
    of_masters = groups.get(_MASTERS, [])
    if of_masters and _is_of_model(_MASTERS, of_masters, groups, catalog):
        of_masters = []
    masters = {name[len(_MASTERS) + 1 :] for name in of_masters}
    for head, names in groups.items():
        if masters and _are_beside(masters, head, names):
            parts |= dict.fromkeys(names, "optimizer")
        elif _category_of_step(head) is None:
            parts |= _parts_in_container(head, names)
        elif _is_of_model(head, names, groups, catalog):
            parts |= dict.fromkeys(names, "model")
    return parts | dict.fromkeys(_beside_param_groups(catalog), "optimizer")


def _are_beside(masters: Collection[str], head: str, names: Iterable[str]) -> bool:
    """Return whether names are those of masters, but for the head, such as Adafactor's ``row_var``.

    DeepSpeed saves the states of parameters so, and an optimizer may keep any. What has a master of
    its own is a parameter: ``b.a`` beside ``a``.
    """
    are_of_masters = (n[len(head) + 1 :] in masters and n not in masters for n in names)
    return not _is_prefix(head) and all(are_of_masters)


def _parts_in_container(head: str, names: list[str]) -> dict[str, str]:
    """Return the parts of a state dict that contains a model and an optimizer.

    Composer saves ``state.model`` and ``state.optimizers``, torch's own tutorial ``app.model`` and
    ``app.optim``.
    """
    start = len(head) + 1
    steps = {_head(name[start:]) for name in names}
    has_optimizer = any(
        _category_of_step(s) == "optimizer" and not _KINDS.fullmatch(s) for s in steps
    )
    if not has_optimizer or not any(map(_WRAPPER.fullmatch, steps)):
        return {}
    return {name: _category_of_step(_head(name[start:])) or "model" for name in names}


def _beside_param_groups(catalog: Catalog) -> Iterator[str]:
    """Yield the tensors of ``X.state`` if there is ``X.param_groups``, whatever X is."""
    names = (f".{name}" for entries in (catalog.objects, catalog.tensors) for name in entries)
    optimizers = {name.partition(_GROUPS)[0] for name in names if _GROUPS in name}
    heads = tuple(f"{optimizer}.state."[1:] for optimizer in optimizers)
    return (name for name in catalog.tensors if heads and name.startswith(heads))


def _is_of_model(
    head: str, names: list[str], groups: Mapping[str, list[str]], catalog: Catalog
) -> bool:
    """Return whether ``head``, a usual name for a part of a checkpoint, is in the model itself."""
    if not all(name in catalog.tensors for name in names):
        return False
    if _KINDS.fullmatch(head):
        return not _is_state(head, names, groups, catalog)
    if catalog.objects or any(map(_WRAPPER.fullmatch, groups)):
        return False
    if names == [head]:
        return _category_of_step(head) == "optimizer"
    return all(_OF_A_LAYER.fullmatch(n) and not _is_of_optimizer(n) for n in names)


def _is_state(
    head: str, names: list[str], groups: Mapping[str, list[str]], catalog: Catalog
) -> bool:
    """Return whether ``exp_avg.NAME`` and the like are the state of a parameter with other names.

    They are if there is nothing but such state, and what DeepSpeed saves beside it.
    """
    if names == [head]:
        return False
    if all(_category_of_step(_head(n)) or _head(n) in _OF_A_MODULE for n in catalog.tensors):
        return True
    kinds = [kind for kind in (*groups, "model.module") if kind != head and _is_prefix(kind)]
    tails = (name[len(head) + 1 :] for name in names)
    parameters = (name for tail in tails for name in (tail, *(f"{kind}.{tail}" for kind in kinds)))
    return any(name in catalog.tensors for name in parameters)


def _is_prefix(step: str) -> bool:
    match = _KINDS.fullmatch(step) or _WRAPPER.fullmatch(step) or step in _OF_A_MODULE
    return bool(match) or step == "model.module"


def optimizer_names(catalog: Catalog) -> set[str]:
    """Return the names of an optimizer's state, read or not.

    A value is some if its name cannot be anything else's, or if tensors are beside it: alone it is
    a setting. Tensors by kind (``exp_avg.NAME``, as of DeepSpeed and Megatron) were taken out of
    the state dict that holds the values.
    """
    tensors = {n for n, e in catalog.tensors.items() if state_category(e) == "optimizer"}
    heads = {_head(name) for name in tensors}
    by_kind = begin_with_state(heads)
    values = {
        name
        for name, entry in catalog.objects.items()
        if state_category(entry) == "optimizer"
        and (_head(name) in heads or is_state_of_optimizer(name) or (by_kind and "." in name))
    }
    parts = {
        name: (why.part if isinstance(why, Refusal) else None) or state_category_of_name(name, ())
        for name, why in catalog.conflicts.items()
    }
    return tensors | values | {name for name, part in parts.items() if part == "optimizer"}


_MASTERS = "fp32"
_OF_A_MODULE = frozenset(["module", "frozen", "buffer"])


def weights(catalog: Catalog) -> list[str]:
    """Return the names of the model's tensors, with masters that are a parameter's only weight."""
    return [*_find_model_names(catalog), *lone_masters(catalog)]


def _find_model_names(catalog: Catalog) -> Iterator[str]:
    return (name for name, entry in catalog.tensors.items() if state_category(entry) == "model")


def lone_masters(catalog: Catalog) -> list[str]:
    """Return the names of masters that are a parameter's only weight.

    DeepSpeed's ZeRO 3 saves partitioned parameters only as masters, ``fp32.<parameter>``;
    unpartitioned ones are in ``module``.
    """
    if any(_head(name) not in _OF_A_MODULE for name in _find_model_names(catalog)):
        return []
    refused = (name for name in catalog.conflicts if _head(name) in _OF_A_MODULE)
    parameters = {name.partition(".")[2] for name in (*_find_model_names(catalog), *refused)}
    masters = filter(is_master, catalog.tensors)
    return [name for name in masters if name.partition(".")[2] not in parameters]


def masters_are_weights(catalog: Catalog) -> bool:
    """Return whether masters are the model's only weights, whether they are read or not."""
    heads = {_head(name) for name in weights(catalog)}
    return heads <= (_OF_A_MODULE - {"module"}) | {_MASTERS}


def is_master(name: str) -> bool:
    """Return whether a name is that of a master, or of all masters."""
    return _head(name) == _MASTERS


def without_averages(weights: Mapping[str, _Weight]) -> Mapping[str, _Weight]:
    """Return the weights that are no averages by the beginning of their names, or all if none is.

    An average, as in ``ema_state_dict`` or ``teacher``, is not of another save, or all zero, with
    the weights.
    """
    rest = {name: weight for name, weight in weights.items() if not _UNTRAINED.match(name)}
    return rest or weights


def model_prefixes(catalog: Catalog) -> tuple[str, ...]:
    """Return the steps that wrap the names of the model's tensors; () if nothing does."""
    names = weights(catalog)
    heads = {_head(name) for name in names}
    steps = {_head(name) for name in catalog.tensors}
    if heads <= _OF_A_MODULE | {_MASTERS} and steps & {_MASTERS, "frozen", "buffer"}:
        return tuple(sorted(heads))
    prefix = model_prefix(catalog) or _prefix_in_container(names, catalog)
    return (prefix,) if prefix else ()


def _prefix_in_container(names: Collection[str], catalog: Catalog) -> str | None:
    """Return ``app.model`` if a model is wrapped so, beside entries outside it.

    Beside values alone, both steps must be levels of the nested state dict.
    """
    wrappers = {".".join(name.split(".")[:2]) for name in names if name.count(".") > 1}
    wrapper = next(iter(wrappers)) if len(wrappers) == 1 else ""
    if not _WRAPPER.fullmatch(wrapper.rpartition(".")[2]):
        return None
    is_whole = all(name.startswith(wrapper + ".") for name in names)
    is_beside = len(names) < len(catalog.tensors)
    if is_whole and not is_beside:
        levels = tuple(wrapper.split("."))
        is_nested = all(catalog.tensors[name].path[:2] == levels for name in names)
        is_beside = is_nested and any(not n.startswith(wrapper + ".") for n in catalog.objects)
    return wrapper if is_whole and is_beside else None


def _head(name: str) -> str:
    head = name.partition(".")[0]
    return head.partition("@")[0] if "@" in head else head


def model_prefix(catalog: Catalog) -> str | None:
    """Return the step that wraps all of the model's names, or None if nothing wraps them.

    A name such as Hugging Face's ``model.layers.0`` is not wrapped: the step must be a level of its
    own in the nested state dict, or the checkpoint must contain more than a model.
    """
    entries = catalog.tensors.values()
    paths = [entry.path for entry in entries if state_category(entry) == "model"]
    if not all(paths):
        return None  # a tensor by itself is below no step
    first = {str(path[0]) for path in paths}
    if len(first) == 1 and all(len(path) > 1 for path in paths):
        wrapper = next(iter(first))
        return wrapper if _WRAPPER.fullmatch(wrapper) else None
    if len(paths) == len(catalog.tensors):
        return None
    heads = {str(path[0]).partition(".")[0] for path in paths if len(path) == 1}
    wrapper = next(iter(heads)) if len(heads) == 1 and len(paths) else ""
    is_wrapped = all("." in str(path[0]) for path in paths)
    return wrapper if _WRAPPER.fullmatch(wrapper) and is_wrapped else None
