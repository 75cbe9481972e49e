"""The tensors of a config.json's model: names, shapes and types, without values.

Of a known architecture they follow from the config; transformers, if it is installed, makes others.
A config is known by its content, whatever its name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from ckptool.commands.model.architectures import HEAD, class_of, is_tied, shapes_of
from ckptool.commands.model.records import CONFIG, DTYPE_KEYS, Record, object_in
from ckptool.commands.open import OpenedCheckpoint, open_checkpoint
from ckptool.commands.options.read import ReadOptions
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.dtype import BY_NAME, DType
from ckptool.errors import CkptoolError, Damaged, Unrecognized, Unsupported
from ckptool.formats import FORMATS
from ckptool.storage.local import LocalSource
from ckptool.storage.place import on_disk
from ckptool.storage.url import Location


def open_other(path: Location, options: ReadOptions, names: Collection[str]) -> OpenedCheckpoint:
    """Open a checkpoint, or the model of a config.json: a file like it, or a folder with no other.

    ``names`` are those to compare it with. Raises as ``open_checkpoint`` and ``open_model`` do.
    """
    disk = on_disk(path)
    if disk is not None and _is_config(disk):
        return open_model(disk, names)
    try:
        return open_checkpoint(path, options, whole=False, placements=False)
    except Unrecognized:
        if disk is not None and (disk / CONFIG).is_file():
            return open_model(disk / CONFIG, names)
        raise


def _is_config(file: Path) -> bool:
    """Return whether a file is a model's config, whatever its name: JSON that states its kind."""
    if file.suffix != ".json" or not file.is_file():
        return False
    if file.name == CONFIG:
        return True
    try:
        recorded = _read(file)
    except Damaged:
        return False
    return not {"model_type", "architectures"}.isdisjoint(recorded)


def is_model(opened: OpenedCheckpoint) -> bool:
    """Return whether it is the model of a config.json, which has no values."""
    return _OF_CONFIG in opened.catalog.info


def open_model(config: Path, names: Collection[str]) -> OpenedCheckpoint:
    """Return the state dict of a config.json's model as a checkpoint without values.

    A tied weight, which need not be saved, is included only if it ends one of ``names``. Raises
    Damaged if the config is no JSON object. If the architecture is not known, or ``names`` are
    those of experts packed in memory, Unsupported without transformers, or if it knows no such
    model.
    """
    name, tensors, tied = _known(_read(config)) if not _has_packed(names) else ("", {}, ())
    if not tensors:
        name, tensors, tied = _made_by_transformers(config)
    tied = {weight for weight in tied if not any(f".{n}".endswith(f".{weight}") for n in names)}
    tensors = {weight: entry for weight, entry in tensors.items() if weight not in tied}
    catalog = Catalog("hf", tensors, {}, {}, info={"framework": name, _OF_CONFIG: config.name})
    return OpenedCheckpoint(config, LocalSource.file(config), FORMATS["hf"], catalog)


def _read(config: Path) -> Record:
    """Return the content of a config; Damaged if it is no JSON object."""
    return object_in(LocalSource.file(config), config.name)


_OF_CONFIG = "config"
"""The fact about a catalog that is made of a config: the name of that file."""
_Model = tuple[str, dict[str, TensorEntry], Collection[str]]
"""The class of a model, its tensors, and the names of those that are tied to others."""


def _has_packed(names: Iterable[str]) -> bool:
    """Return whether experts have names that transformers 5 gives them in memory only."""
    return any(name.endswith(".experts.gate_up_proj") for name in names)


def _known(config: Record) -> _Model:
    """Return the model of a known architecture, without tensors if it is another one."""
    stated = next((config[key] for key in DTYPE_KEYS if config.get(key)), "float32")
    dtype = BY_NAME.get(str(stated).removeprefix("torch."))
    shapes = shapes_of(config)
    if shapes is None or dtype is None:
        return "", {}, ()
    tensors = {name: _tensor(name, dtype, shape) for name, shape in shapes.items()}
    return str(class_of(config)), tensors, (HEAD,) if is_tied(config) else ()


def _tensor(name: str, dtype: DType, shape: tuple[int, ...]) -> TensorEntry:
    return TensorEntry(name, (name,), dtype, shape, (), part="model")


def _made_by_transformers(config: Path) -> _Model:
    """Create a model without memory. Nothing is downloaded, no code that comes with one is run."""
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
        state, tied = model.state_dict(), _tied(model)
    except CkptoolError:
        raise
    except Exception as error:  # noqa: BLE001 (transformers raises whatever a config leads to)
        what = " ".join(str(error).split())[:300]
        message = f"{config}: transformers {transformers.__version__} cannot make its model: {what}"
        raise Unsupported(message) from None
    tensors = {
        name: _tensor(name, BY_NAME[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape))
        for name, tensor in state.items()
    }
    return type(model).__name__, tensors, tied


def _tied(model: Any) -> Collection[str]:
    """Return the names of weights that are tied to others (transformers 4 and 5)."""
    if hasattr(model, "all_tied_weights_keys"):
        return tuple(model.all_tied_weights_keys)
    return tuple(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else ()


def _make(transformers: Any, config: Path) -> Any:
    """Return the model that ``architectures`` names, or else the causal one of its type."""
    settings = transformers.AutoConfig.from_pretrained(
        str(config.parent if config.name == CONFIG else config),
        local_files_only=True,
        trust_remote_code=False,
    )
    names = settings.architectures or ()
    kind = getattr(transformers, names[0], None) if names else None
    dtype = getattr(settings, "dtype", None) or getattr(settings, "torch_dtype", None)
    types = {} if dtype is None else {"dtype": dtype}
    if kind is not None:
        return kind._from_config(settings, **types)
    return transformers.AutoModelForCausalLM.from_config(settings, trust_remote_code=False, **types)
