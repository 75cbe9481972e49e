"""The tensors of a config.json's transformers model: names, shapes and types, without values."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import Any

from ckptool.commands.open import OpenedCheckpoint, open_checkpoint
from ckptool.commands.options.read import ReadOptions
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.errors import CkptoolError, Unrecognized, Unsupported
from ckptool.formats import FORMATS
from ckptool.storage.local import LocalSource
from ckptool.storage.place import on_disk
from ckptool.storage.url import Location

CONFIG = "config.json"


def open_other(path: Location, options: ReadOptions, names: Collection[str]) -> OpenedCheckpoint:
    """Open a checkpoint, or the model of a config.json: that file, or a folder with nothing else.

    ``names`` are those to compare it with. Raises as ``open_checkpoint`` does, Unsupported if
    transformers cannot create the model.
    """
    disk = on_disk(path)
    if disk is not None and disk.name == CONFIG and disk.is_file():
        return open_model(disk, names)
    try:
        return open_checkpoint(path, options, whole=False, placements=False)
    except Unrecognized:
        if disk is not None and (disk / CONFIG).is_file():
            return open_model(disk / CONFIG, names)
        raise


def is_model(opened: OpenedCheckpoint) -> bool:
    """Return whether it is the model of a config.json, which has no values."""
    return opened.path.name == CONFIG


def open_model(config: Path, names: Collection[str]) -> OpenedCheckpoint:
    """Create the model of a config.json without memory, and return its state dict as a checkpoint.

    Nothing is downloaded, and no code that comes with a model is run. A tied weight, which need not
    be saved, is included only if it ends one of ``names``. Raises Unsupported without transformers,
    or if it does not know the model.
    """
    try:
        import torch

        transformers: Any = import_module("transformers")
    except ImportError:
        raise Unsupported(
            f"{config}: needs transformers and torch, for the names and shapes of its model",
            hint="pip install transformers torch, or compare with a checkpoint of that model",
        ) from None
    transformers.logging.set_verbosity_error()
    try:
        with torch.device("meta"):
            model = _make(transformers, config)
        state = model.state_dict()
        tied = {
            name for name in _tied(model) if not any(f".{n}".endswith(f".{name}") for n in names)
        }
    except CkptoolError:
        raise
    except Exception as error:  # noqa: BLE001 (transformers raises whatever a config leads to)
        what = " ".join(str(error).split())[:300]
        message = f"{config}: transformers {transformers.__version__} cannot make its model: {what}"
        raise Unsupported(message) from None
    tensors = {
        name: TensorEntry(
            name,
            (name,),
            BY_NAME[str(tensor.dtype).removeprefix("torch.")],
            tuple(tensor.shape),
            (),
            part="model",
        )
        for name, tensor in state.items()
        if name not in tied
    }
    info = {"framework": type(model).__name__}
    source = LocalSource.file(config)
    return OpenedCheckpoint(
        config, source, FORMATS["hf"], Catalog("hf", tensors, {}, {}, info=info)
    )


def _tied(model: Any) -> Collection[str]:
    """Return the names of weights that are tied to others (transformers 4 and 5)."""
    if hasattr(model, "all_tied_weights_keys"):
        return tuple(model.all_tied_weights_keys)
    return tuple(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else ()


def _make(transformers: Any, config: Path) -> Any:
    """Return the model that ``architectures`` names, or else the causal one of its type."""
    made = transformers.AutoConfig.from_pretrained(
        str(config.parent), local_files_only=True, trust_remote_code=False
    )
    names = made.architectures or ()
    kind = getattr(transformers, names[0], None) if names else None
    dtype = getattr(made, "dtype", None) or getattr(made, "torch_dtype", None)
    more = {} if dtype is None else {"dtype": dtype}
    if kind is not None:
        return kind._from_config(made, **more)
    return transformers.AutoModelForCausalLM.from_config(made, trust_remote_code=False, **more)
