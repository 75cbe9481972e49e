"""Which names are the model, which the optimizer, which something else."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckptool.core.catalog import Catalog, Path

_OPTIMIZER = re.compile(r"(optim|optimizer|optimizers|optimizer_states?|opt|adam)(_?\d+)?")
_OTHER = re.compile(
    r"(lr_?)?schedulers?(_\d+)?|lr_scheduler(_\d+)?|train_state|train|trainer|dataloader|data_loader"
    r"|rng(_state)?|rng_states|extra_state|random_states|scaler|loss_scaler|sampler|meta|callbacks"
    r"|loops|step|epoch|global_step|config|cfg|args|progress|stateful|metrics|client_state"
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
