"""Lay out a universal checkpoint that DeepSpeed loads (``checkpoint.load_universal``, 0.19).

ZeRO 1 and 2 read ``mp_rank_00_model_states.pt``, ZeRO 3 reads ``zero_pp_rank_0_...``, all of them
``zero``; both model files are written, so that any stage can resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, ObjectEntry, TensorEntry
from ckptool.core.layout import FileLayout, Layout, Literal
from ckptool.errors import Unsupported
from ckptool.formats.base import Request
from ckptool.formats.deepspeed.files import LATEST_UNIVERSAL, OPTIMIZER_STATE
from ckptool.formats.deepspeed.partitions import MASTER
from ckptool.formats.deepspeed.tensor_parallel import kept_rows, tensor_parallel_layout
from ckptool.formats.deepspeed.values import CLIENT
from ckptool.formats.writing import plain_objects
from ckptool.serialization.archive.write import torch_archive
from ckptool.serialization.pickle.records import Call, Global, OrderedMapping
from ckptool.serialization.pickle.write import TensorRef
from ckptool.serialization.state_dict.tree import nest

_MODEL_KINDS = ("module", "frozen", "buffer")
_STEP = "step"
_VERSION = "0.19.8"
_MODEL_FILES = ("mp_rank_00_model_states", "zero_pp_rank_0_mp_rank_00_model_states")


@dataclass(frozen=True, slots=True)
class _Sorted:
    """The catalog's tensors: states by parameter and kind, and the module's by name."""

    states: dict[str, dict[str, TensorEntry]]
    module: dict[str, TensorEntry]
    buffers: list[str]
    client: dict[str, TensorEntry]


def lay_out(catalog: Catalog, request: Request) -> Layout:
    """Return a universal checkpoint's files; Unsupported for names that are not DeepSpeed's."""
    tensors = _sorted(catalog)
    objects, notes = plain_objects(catalog)
    values = _values(objects, tensors.client)
    tag = f"{_tag(values)}_universal"
    info = values.get("universal_checkpoint_info")
    files: list[FileLayout] = []
    for name, states in tensors.states.items():
        files += _state_files(name, states, info if isinstance(info, dict) else {}, tag, notes)
        step = values.get(_STEP, {}).get(name)
        if step is not None and _STEP not in states:
            files.append(_file(f"{tag}/zero/{name}/{_STEP}.pt", step))
    files.append(_file(f"{tag}/{OPTIMIZER_STATE}", _optimizer_state(values, tensors)))
    model = _model_state(values, tensors)
    files += [_file(f"{tag}/{name}.pt", model) for name in _MODEL_FILES]
    marker = FileLayout(LATEST_UNIVERSAL, (Literal(tag.encode()),))
    return Layout((*files, marker), folder=True, notes=tuple(notes))


def _file(path: str, value: Any) -> FileLayout:
    root = path.rpartition("/")[2].rpartition(".")[0]
    return FileLayout(path, tuple(torch_archive(value, root=root)))


def _sorted(catalog: Catalog) -> _Sorted:
    found = _Sorted({}, {}, [], {})
    pairs = [(*name.partition(".")[::2], entry) for name, entry in catalog.tensors.items()]
    found.states.update({rest: {} for kind, rest, _ in pairs if kind == MASTER and rest})
    if not found.states:
        raise Unsupported(
            "a universal checkpoint is made of masters, fp32.<parameter>, and there are none",
            hint="--rename REGEX=REPLACEMENT gives weights that name",
        )
    strange = []
    for kind, rest, entry in pairs:
        if kind in _MODEL_KINDS:
            found.module[rest] = entry
            found.buffers.extend([rest] if kind == "buffer" else [])
        elif rest in found.states:
            found.states[rest][kind] = entry
        elif kind == CLIENT:
            found.client[entry.name] = entry
        else:
            strange.append(entry.name)
    _require_known(strange)
    _require_folders(found.states)
    return found


def _require_known(strange: list[str]) -> None:
    if strange:
        raise Unsupported(
            f"a universal checkpoint has no place for {len(strange)} tensors, such as {strange[0]}",
            hint="its names are module.*, frozen.*, buffer.*, fp32.* and <state>.* of the same"
            " parameters; --drop 'GLOB' leaves others out",
        )


def _require_folders(names: Mapping[str, Any]) -> None:
    for name in names:
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            raise Unsupported(f"the parameter {name!r} cannot name a folder")


def _state_files(
    name: str,
    states: Mapping[str, TensorEntry],
    info: Mapping[str, Any],
    tag: str,
    notes: list[str],
) -> Iterator[FileLayout]:
    """One file a state; the padding of a vocabulary is cut off, as DeepSpeed does."""
    for kind, entry in states.items():
        path = f"{tag}/zero/{name}/{kind}.pt"
        if kind == _STEP or not entry.shape:
            yield _file(path, TensorRef(entry, Box.whole(entry.shape)))
            continue
        rows = kept_rows(name, entry.shape, info)
        box = Box.at((0,) * len(entry.shape), (rows, *entry.shape[1:]))
        if rows < entry.shape[0]:
            notes.append(
                f"{entry.name}: rows {rows:,} to {entry.shape[0]:,} pad the vocabulary and are left"
                " out, as DeepSpeed does"
            )
        yield _file(
            path, tensor_parallel_layout(name, box.shape, info) | {"param": TensorRef(entry, box)}
        )


# Values


def _values(objects: list[ObjectEntry], client: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Return all values as one nested dict, tensors of the training script included."""
    found: list[tuple[Any, Any]] = [(entry.path, entry.value) for entry in objects]
    found += [(e.path, TensorRef(e, Box.whole(e.shape))) for e in client.values()]
    values = nest(found) if found else {}
    return dict(values) if isinstance(values, dict) else {}


def _tag(values: Mapping[str, Any]) -> str:
    steps = values.get("global_steps")
    return f"global_step{steps}" if type(steps) is int else "checkpoint"


def _model_state(values: Mapping[str, Any], tensors: _Sorted) -> dict[str, Any]:
    """Return a model file: what the engine reads back, and the module as it was."""
    shapes = {n: s[MASTER].shape for n, s in tensors.states.items()}
    refs = {n: TensorRef(e, Box.whole(e.shape)) for n, e in tensors.module.items()}
    client = values.get(CLIENT)
    kept = {k: v for k, v in values.items() if k not in (CLIENT, "optimizer", _STEP)}
    defaults = {"lr_scheduler": None, "global_steps": 0, "global_samples": 0, "skipped_steps": 0}
    return {
        **(client if isinstance(client, dict) else {}),
        **defaults,
        "dp_world_size": 1,
        "ds_version": _VERSION,
        **kept,
        "module": OrderedMapping(refs),
        "buffer_names": tensors.buffers,
        "param_shapes": [OrderedMapping((n, _size(shape)) for n, shape in shapes.items())],
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
    }


def _size(shape: tuple[int, ...]) -> Call:
    return Call(Global("torch", "Size"), (shape,))


def _optimizer_state(values: Mapping[str, Any], tensors: _Sorted) -> dict[str, Any]:
    """``optimizer_state.pt``: ZeRO 1 and 2 read param_groups at the top, ZeRO 3 inside."""
    stored = values.get("optimizer")
    optimizer = dict(stored) if isinstance(stored, dict) else {}
    groups = optimizer.pop("param_groups", None) or []
    scaler = optimizer.get("loss_scaler")
    if isinstance(scaler, dict):
        optimizer["loss_scaler"] = _loss_scaler(scaler)
    return {
        "ds_version": _VERSION,
        **optimizer,
        "param_groups": groups,
        "optimizer_state_dict": {
            "state": {0: _step(values, tensors)},
            "param_groups": groups or [{}],
        },
    }


def _step(values: Mapping[str, Any], tensors: _Sorted) -> dict[str, Any]:
    """Return the step of the first parameter, which ZeRO 3 takes for all."""
    name, states = next(iter(tensors.states.items()))
    entry = states.get(_STEP)
    known = values.get(_STEP)
    value = known.get(name) if isinstance(known, dict) else None
    step = TensorRef(entry, Box.whole(entry.shape)) if entry else value
    return {} if step is None else {_STEP: step}


def _loss_scaler(fields: Mapping[str, Any]) -> Call:
    """DeepSpeed's loss scaler with these attributes (``runtime/fp16/loss_scaler.py``)."""
    name = "DynamicLossScaler" if fields.get("dynamic") else "LossScaler"
    scaler = Call(Global("deepspeed.runtime.fp16.loss_scaler", name), (), is_new=True)
    scaler.state = dict(fields)
    return scaler
