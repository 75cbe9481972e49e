"""Megatron's checkpoints: ``torch``, ``torch_dist``, ``fsdp_dtensor``, and local ones.

``megatron-torch`` (``--ckpt-format torch``): a folder for each model-parallel rank,
``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``, ``distrib_optim.pt`` beside it, of Megatron-LM with
megatron-core 0.5 to 0.20, and its older ``language_model``. Tensor-, pipeline- and expert-parallel
ranks become whole tensors ``model.<name>``, ``fp32.<name>``, ``exp_avg.<name>``,
``exp_avg_sq.<name>``, with the layers and experts of the whole model. A gated ``linear_fc1`` is
[gate; up], a fused ``linear_qkv`` keeps its query groups.

``megatron-torch_dist`` (``--ckpt-format torch_dist``): a DCP folder with ``metadata.json``
(``sharded_backend``), of megatron-core 0.7 to 0.20. Tensors keep their keys and shapes, layers and
experts stacked on leading dims, flattened ones are given their shape again.

``megatron-fsdp_dtensor`` (``--ckpt-format fsdp_dtensor``): a DCP folder without ``metadata.json``,
of DTensors that ranks hold unevenly, of megatron-core 0.14 to 0.20. Names are those of the wrapped
modules, ``model.module.module...`` and ``optimizer.state.module...``, with the halves of a gated
``linear_fc1`` as ``weight_w`` and ``weight_v``.

``nvrx-local``: a folder a rank, on the machine that wrote it, of nvidia-resiliency-ext 0.2 to 0.7,
with replicas, of plain state dicts (``BasicTensorAwareStateDict``; what is no DTensor says nothing
of how ranks fit together) and of Megatron-core's (``MCoreTensorAwareStateDict``).
"""

from __future__ import annotations

import json
import re
from typing import Any

from msgspec.structs import replace

from ckptool.core.catalog import Catalog
from ckptool.formats.base import (
    Deferred,
    Detection,
    FileRole,
    FileRule,
    Format,
    LatestMarker,
    Reading,
    ScanOptions,
    Writing,
    by_name,
)
from ckptool.formats.companions import MEGATRON
from ckptool.serialization.source import Source, read_metadata

_LATEST = LatestMarker(MEGATRON, r"iter_[0-9]{7,}|release")
"""Megatron-LM resumes only by this file (megatron-core 0.20)."""
FOLDER = re.compile(r"mp_rank_([0-9]{2,6})(?:_([0-9]{3,6}))?(?:_([0-9]{3,6}))?/model_optim_rng\.pt")
"""A rank's state, and its tensor-, pipeline- and expert-parallel rank."""

TORCH_FORMAT = Format(
    "megatron-torch",
    "Megatron's own format, one folder per model-parallel rank (mp_rank_00/model_optim_rng.pt)",
    by_name(FOLDER, "mp_rank_TT/model_optim_rng.pt", _LATEST),
    Reading(Deferred("ckptool.formats.megatron.torch:scan"), takes_tp_rules=True),
)

CONFIG, COMMON = "metadata.json", "common.pt"
_LARGEST_CONFIG = 1 << 16
_METADATA = ".metadata"
_HEAD = 1 << 20
_SHARDED_OBJECT = re.compile(rb"/shard_[0-9]+(\.[0-9]+)*_[0-9]")
_COMMON_STATE = b"common_state/shard_"


def _probe_torch_dist(source: Source) -> bool:
    """Whether ``metadata.json`` says so, or its other files do if that is lost or damaged."""
    if _read_config(source) is not None:
        return True
    if _METADATA not in source.files:
        return False
    if COMMON in source.files:
        return True
    head = _read_head(source)
    return _COMMON_STATE in head or (
        CONFIG in source.files and _SHARDED_OBJECT.search(head) is not None
    )


def _read_head(source: Source) -> bytes:
    """Return the beginning of the DCP metadata, which has the first names."""
    return source.read(_METADATA, 0, min(source.files[_METADATA], _HEAD))


def _read_config(source: Source) -> dict[str, Any] | None:
    """Return the backend in ``metadata.json``; None if it is not one of Megatron's."""
    if not 0 < source.files.get(CONFIG, 0) <= _LARGEST_CONFIG:
        return None
    try:
        value = json.loads(read_metadata(source, CONFIG))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and "sharded_backend" in value else None


_SCAN_TORCH_DIST = Deferred("ckptool.formats.megatron.torch_dist:scan")

TORCH_DIST_FORMAT = Format(
    "megatron-torch_dist",
    "Megatron-core distributed checkpoint (metadata.json and .distcp files)",
    Detection(
        _probe_torch_dist, files=(FileRule(r"metadata\.json", FileRole.JSON),), latest=_LATEST
    ),
    Reading(
        lambda source, options: _SCAN_TORCH_DIST(source, _read_config(source), options),
        locate=Deferred("ckptool.formats.dcp:locate"),
        trim=Deferred("ckptool.formats.megatron.optimizer.buckets:drop_padding"),
    ),
    Writing(convert=Deferred("ckptool.formats.megatron.torch_dist:lay_out"), of_ranks=True),
)


_GROUPS, _MODULES = b"optimizer.param_to_group_meta.", b"model.module."
_STEP_FOLDER = re.compile(r"(.*[/\\])?(iter_[0-9]{7,}|release)[/\\]?")


def _probe_fsdp_dtensor(source: Source) -> bool:
    """Whether the first names in the metadata are Megatron's, not another DCP folder's."""
    if _METADATA not in source.files:
        return False
    head = _read_head(source)
    return _GROUPS in head or (_MODULES in head and _STEP_FOLDER.fullmatch(source.root) is not None)


def _scan_fsdp_dtensor(source: Source, options: ScanOptions) -> Catalog:
    from ckptool.formats.dcp import read_folder
    from ckptool.formats.megatron.model import find_arguments

    catalog, _ = read_folder(source, options)
    info = catalog.info | {"writer": "Megatron-core fsdp_dtensor"}
    info |= find_arguments(catalog.objects.values()).info()
    return options.with_placements(replace(catalog, format=FSDP_DTENSOR_FORMAT.name, info=info))


FSDP_DTENSOR_FORMAT = Format(
    "megatron-fsdp_dtensor",
    "Megatron-FSDP checkpoint (a DCP folder of uneven DTensors)",
    Detection(_probe_fsdp_dtensor, latest=_LATEST),
    Reading(_scan_fsdp_dtensor, locate=Deferred("ckptool.formats.dcp:locate")),
)


LOCAL_FILE = re.compile(r"([0-9]{1,9})/iter_([0-9]{7,18})_([0-9]{1,9})_local(\.dirty)?\.pt")
"""A rank's folder, the iteration, the rank that it is of, and whether it is being written."""

LOCAL_FORMAT = Format(
    "nvrx-local",
    "nvidia-resiliency-ext local checkpoint (0/iter_0000100_0_local.pt)",
    by_name(LOCAL_FILE, "R/iter_I_R_local.pt"),
    Reading(
        Deferred("ckptool.formats.megatron.nvrx:scan"), takes_tp_rules=True, takes_world_size=True
    ),
)
