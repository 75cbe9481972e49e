"""Which names are the model, which the optimizer, which something else."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckptool.core.catalog import Catalog, Path

PARTS = ("model", "optimizer", "other")

_OPTIMIZER = re.compile(
    r"(optim|optimizer|optimizers|optimizer_states?|opt|adam|chained)(_?\d+)?"
    r"|fp32|exp_avg|exp_avg_sq|exp_inf|max_exp_avg_sq|momentum_buffer|square_avg"
)
_OTHER = re.compile(
    r"(lr_?)?schedulers?(_\d+)?|lr_scheduler(_\d+)?|train_state|train|trainer|dataloader|data_loader"
    r"|rng(_state)?|rng_states|extra_state|random_states|scaler|loss_scaler|sampler|meta|callbacks"
    r"|opt_param_scheduler|rerun_state_machine|checkpoint_version|iteration|content_metadata"
    r"|loops|step|epoch|global_step|config|cfg|args|progress|stateful|metrics|client_state"
    r"|(global|skipped)_(steps|samples)|(dp|mp)_world_size|ds_\w+|checkpoint_parallel_dimensions"
    r"|universal_checkpoint_info|data_sampler|random_ltd|shared_params|num_experts"
)
_WRAPPER = re.compile(r"model|models|state_dict|model_state_dict|module|network|net|actor|ema")


def part_of(name: str, path: Path) -> str:
    """``model``, ``optimizer`` or ``other``, by the first step of a name."""
    first = (str(path[0]) if path else name).partition(".")[0].partition("@")[0]
    if _OPTIMIZER.fullmatch(first):
        return "optimizer"
    if _OTHER.fullmatch(first):
        return "other"
    return "model"


_MASTERS = "fp32"
_OF_A_MODULE = frozenset(["module", "frozen", "buffer"])


def weights(catalog: Catalog) -> list[str]:
    """The names of the model's tensors: its part, or masters where those are the only weights.

    DeepSpeed's ZeRO 3 saves no weights but the masters, ``fp32.<parameter>``.
    """
    names = [n for n, e in catalog.tensors.items() if part_of(n, e.path) == "model"]
    if {_head(name) for name in names} <= _OF_A_MODULE - {"module"}:
        names += [name for name in catalog.tensors if _head(name) == _MASTERS]
    return names


def model_prefixes(catalog: Catalog) -> tuple[str, ...]:
    """The steps that wrap the names of the model's tensors; empty where nothing wraps them."""
    heads = {_head(name) for name in weights(catalog)}
    everything = {_head(name) for name in catalog.tensors}
    if heads <= _OF_A_MODULE | {_MASTERS} and everything & {_MASTERS, "frozen", "buffer"}:
        return tuple(sorted(heads))
    prefix = model_prefix(catalog)
    return (prefix,) if prefix else ()


def _head(name: str) -> str:
    return name.partition(".")[0]


def model_prefix(catalog: Catalog) -> str | None:
    """The step that wraps all of the model's names, or None where nothing wraps them.

    A name such as Hugging Face's ``model.layers.0`` is no wrapped one: the step must be a level
    of its own in the nested state dict, or the checkpoint must hold more than a model.
    """
    tensors = catalog.tensors.values()
    paths = [entry.path for entry in tensors if part_of(entry.name, entry.path) == "model"]
    first = {str(path[0]) for path in paths}
    if len(first) == 1 and all(len(path) > 1 for path in paths):
        wrapper = next(iter(first))
        return wrapper if _WRAPPER.fullmatch(wrapper) else None
    if len(paths) == len(catalog.tensors):
        return None
    heads = {str(path[0]).partition(".")[0] for path in paths if len(path) == 1}
    wrapper = next(iter(heads)) if len(heads) == 1 and len(paths) else ""
    return wrapper if _WRAPPER.fullmatch(wrapper) and not _is_flat(paths) else None


def _is_flat(paths: Iterable[Path]) -> bool:
    """Whether some name has no step inside its wrapper."""
    return any("." not in str(path[0]) for path in paths)
