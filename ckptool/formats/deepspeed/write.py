"""Universal checkpoints, written: what DeepSpeed loads with ``checkpoint.load_universal``.

ZeRO 1 and 2 read ``mp_rank_00_model_states.pt``, ZeRO 3 reads ``zero_pp_rank_0_...``, all of them
``zero``; both model files are written, so that any stage can resume. From 0.14.5 to 0.19.0 ZeRO 3
loads only bare vectors, and ZeRO 1 and 2 only dicts; 0.19.8 loads both at ZeRO 3.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, ObjectEntry, TensorEntry
from ckptool.core.layout import FileLayout, Layout, Literal
from ckptool.errors import Unsupported
from ckptool.formats.base import Request
from ckptool.formats.deepspeed.checkpoint import LATEST_UNIVERSAL, OPTIMIZER_STATE
from ckptool.formats.deepspeed.flat_runs import MASTER, MODEL_KINDS, STEP
from ckptool.formats.deepspeed.states import CLIENT
from ckptool.formats.deepspeed.tensor_parallel import count_kept_rows, describe_cut
from ckptool.formats.writing import select_plain
from ckptool.serialization.archive.write import archive_file
from ckptool.serialization.pickle.records import Call, Global, OrderedMapping
from ckptool.serialization.pickle.write import TensorRef
from ckptool.serialization.state_dict.tree import nest

_VERSION = "0.19.8"
_LOADS_BOTH = (0, 19, 8)
"""The first version known to load either form at ZeRO 3."""
_MODEL_FILES = ("mp_rank_00_model_states", "zero_pp_rank_0_mp_rank_00_model_states")


class _Parts(Struct, frozen=True):
    """A catalog's tensors: states by parameter and kind, the module's and the script's by name."""

    states: dict[str, dict[str, TensorEntry]]
    module: dict[str, TensorEntry]
    buffers: list[str]
    client: dict[str, TensorEntry]


def lay_out(catalog: Catalog, request: Request) -> Layout:
    """Return a universal checkpoint's files; Unsupported for names that are not DeepSpeed's."""
    parts = _split_tensors(catalog)
    objects, notes = select_plain(catalog)
    values = _nest_values(objects, parts.client)
    steps = values.get("global_steps")
    step_name = f"global_step{steps}" if type(steps) is int else "checkpoint"
    tag = f"{step_name}_universal"
    info = values.get("universal_checkpoint_info")
    info = info if isinstance(info, dict) else {}
    rows: dict[str, int] = {}
    files: list[FileLayout] = []
    bare = _loads_vectors_alone(catalog)
    if bare:
        version = f"DeepSpeed {catalog.info['version']}"
        other = "for ZeRO 1 and 2, convert --to dcp first, and that to this"
        notes.append(f"written for ZeRO 3, as {version} loads it there; {other}")
    for name, states in parts.states.items():
        files += _lay_out_states(name, states, info, tag, rows, bare=bare)
        step = values.get(STEP, {}).get(name)
        if step is not None and STEP not in states:
            files.append(archive_file(f"{tag}/zero/{name}/{STEP}.pt", step))
    files.append(archive_file(f"{tag}/{OPTIMIZER_STATE}", _make_optimizer_state(values, parts)))
    model = _make_model_state(values, parts)
    files += [archive_file(f"{tag}/{name}.pt", model) for name in _MODEL_FILES]
    marker = FileLayout(LATEST_UNIVERSAL, (Literal(tag.encode()),))
    for name, count in rows.items():
        padded = f"rows {count:,} to {catalog.tensors[name].shape[0]:,} pad the vocabulary"
        notes.append(f"{name}: {padded} and are left out, as DeepSpeed does")
    return Layout((*files, marker), folder=True, notes=tuple(notes), rows=rows)


def _loads_vectors_alone(catalog: Catalog) -> bool:
    """Return whether a checkpoint is of ZeRO 3 and of a version that loads only vectors there."""
    version = re.match(r"(\d+)\.(\d+)\.(\d+)", catalog.info.get("version", ""))
    is_older = version is not None and tuple(map(int, version.groups())) < _LOADS_BOTH
    return is_older and catalog.info.get("ZeRO") == "stage 3"


def _split_tensors(catalog: Catalog) -> _Parts:
    pairs = [(*name.partition(".")[::2], entry) for name, entry in catalog.tensors.items()]
    parts = _Parts({rest: {} for kind, rest, _ in pairs if kind == MASTER and rest}, {}, [], {})
    if not parts.states:
        raise Unsupported(
            "a universal checkpoint needs masters, fp32.<parameter>, but there are none",
            hint="--rename REGEX=REPLACEMENT gives weights that name",
        )
    strange = []
    for kind, rest, entry in pairs:
        if kind in MODEL_KINDS:
            parts.module[rest] = entry
            parts.buffers.extend([rest] if kind == "buffer" else [])
        elif rest in parts.states:
            parts.states[rest][kind] = entry
        elif kind == CLIENT:
            parts.client[entry.name] = entry
        else:
            strange.append(entry.name)
    if strange:
        raise Unsupported(
            f"a universal checkpoint has no place for {len(strange):,} tensors, such as"
            f" {strange[0]}",
            hint="its names are module.*, frozen.*, buffer.*, fp32.* and <state>.* of the same"
            " parameters; --drop 'NAME' leaves others out",
        )
    for name in parts.states:
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            raise Unsupported(f"the parameter {name!r} cannot name a folder")
    return parts


def _lay_out_states(
    name: str,
    states: Mapping[str, TensorEntry],
    info: Mapping[str, Any],
    tag: str,
    rows: dict[str, int],
    *,
    bare: bool,
) -> Iterator[FileLayout]:
    """Yield one file per state; the padding of a vocabulary is cut off, as DeepSpeed does.

    ``rows`` records how many each tensor keeps that loses some. ``bare`` requests only vectors.
    """
    for kind, entry in states.items():
        path = f"{tag}/zero/{name}/{kind}.pt"
        if kind == STEP or not entry.shape:
            yield archive_file(path, TensorRef.whole(entry))
            continue
        count = count_kept_rows(name, entry.shape, info)
        box = Box.at((0,) * len(entry.shape), (count, *entry.shape[1:]))
        if count < entry.shape[0]:
            rows[entry.name] = count
        state = TensorRef.of_box(entry, box)
        if bare:
            yield archive_file(path, replace(state, shape=(box.volume,)))
        else:
            yield archive_file(path, describe_cut(name, box.shape, info) | {"param": state})


def _nest_values(objects: list[ObjectEntry], client: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Return all values as one nested dict, including tensors of the training script."""
    items: list[tuple[Any, Any]] = [(entry.path, entry.value) for entry in objects]
    items += [(entry.path, TensorRef.whole(entry)) for entry in client.values()]
    values = nest(items) if items else {}
    return dict(values) if isinstance(values, dict) else {}


def _make_model_state(values: Mapping[str, Any], parts: _Parts) -> dict[str, Any]:
    """Return a model file: what the engine reads back, and the module unchanged."""
    shapes = {n: s[MASTER].shape for n, s in parts.states.items()}
    size = Global("torch", "Size")
    refs = {name: TensorRef.whole(entry) for name, entry in parts.module.items()}
    client = values.get(CLIENT)
    rest = {k: v for k, v in values.items() if k not in (CLIENT, "optimizer", STEP)}
    defaults = {"lr_scheduler": None, "global_steps": 0, "global_samples": 0, "skipped_steps": 0}
    return {
        **(client if isinstance(client, dict) else {}),
        **defaults,
        "dp_world_size": 1,
        "ds_version": _VERSION,
        **rest,
        "module": OrderedMapping(refs),
        "buffer_names": parts.buffers,
        "param_shapes": [OrderedMapping((n, Call(size, (shape,))) for n, shape in shapes.items())],
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
    }


def _make_optimizer_state(values: Mapping[str, Any], parts: _Parts) -> dict[str, Any]:
    """Return ``optimizer_state.pt``: ZeRO 1 and 2 read param_groups at the top, ZeRO 3 inside."""
    stored = values.get("optimizer")
    optimizer = dict(stored) if isinstance(stored, dict) else {}
    groups = optimizer.pop("param_groups", None) or []
    scaler = optimizer.get("loss_scaler")
    if isinstance(scaler, dict):
        optimizer["loss_scaler"] = _make_loss_scaler(scaler)
    return {
        "ds_version": _VERSION,
        **optimizer,
        "param_groups": groups,
        "optimizer_state_dict": {
            "state": {0: _find_step(values, parts)},
            "param_groups": groups or [{}],
        },
    }


def _find_step(values: Mapping[str, Any], parts: _Parts) -> dict[str, Any]:
    """Return the step of the first parameter, which ZeRO 3 uses for all."""
    name, states = next(iter(parts.states.items()))
    entry = states.get(STEP)
    steps = values.get(STEP)
    value = steps.get(name) if isinstance(steps, dict) else None
    step = TensorRef.whole(entry) if entry else value
    return {} if step is None else {STEP: step}


def _make_loss_scaler(fields: Mapping[str, Any]) -> Call:
    """Return DeepSpeed's loss scaler with these attributes (``runtime/fp16/loss_scaler.py``)."""
    name = "DynamicLossScaler" if fields.get("dynamic") else "LossScaler"
    scaler = Call(Global("deepspeed.runtime.fp16.loss_scaler", name), (), is_new=True)
    scaler.state = dict(fields)
    return scaler
