"""Megatron-core's distributed checkpoints: ``--ckpt-format torch_dist``.

Read: megatron-core 0.7 to 0.20. A DCP folder with ``metadata.json`` (``sharded_backend``), common
state in ``common.pt`` or in the ShardedObject ``common_state``. Tensors keep their keys and shapes,
layers and experts stacked on leading dims, flattened ones are given their shape again.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from typing import Any

from ckptool.core.catalog import Catalog
from ckptool.errors import Damaged, Unrecognised
from ckptool.formats import dcp
from ckptool.formats._dcp_metadata import DcpMetadata
from ckptool.formats._infer import with_inferred_mesh
from ckptool.formats._megatron_args import arguments_among
from ckptool.formats._megatron_flat import unflattened
from ckptool.formats._megatron_named import with_named_state
from ckptool.formats._megatron_objects import COMMON, with_common, with_plain_names
from ckptool.formats.base import Format, ScanOptions, Source, read_metadata

_CONFIG = "metadata.json"
_LARGEST_CONFIG = 1 << 16


def _probe(source: Source) -> bool:
    return _config(source) is not None or {COMMON, ".metadata"} <= source.files.keys()


def _config(source: Source) -> dict[str, Any] | None:
    """What ``metadata.json`` says of the backend; None where it is none of Megatron's."""
    if not 0 < source.files.get(_CONFIG, 0) <= _LARGEST_CONFIG:
        return None
    try:
        value = json.loads(read_metadata(source, _CONFIG))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and "sharded_backend" in value else None


def _scan(source: Source, options: ScanOptions) -> Catalog:
    config = _config(source)
    backend = (config or {}).get("sharded_backend", "torch_dist")
    if backend != "torch_dist":
        raise Unrecognised(
            f"{source.root}: a Megatron-core checkpoint of the backend {str(backend)[:80]!r};"
            " ckptool reads torch_dist",
            hint="Megatron-core up to 0.13 loads it and saves it with --ckpt-format torch_dist",
        )
    catalog, parsed = dcp.read_folder(source, options)
    catalog = with_common(source, with_plain_names(_reshaped(catalog, parsed)))
    plans = [plan for metadata in parsed.values() for plan in metadata.plans or ()]
    return with_inferred_mesh(_described(source, with_named_state(source, catalog, plans), config))


def _reshaped(catalog: Catalog, parsed: dict[str, DcpMetadata]) -> Catalog:
    """With the shapes that tensors had before they were reformulated."""
    tensors = dict(catalog.tensors)
    for name, shape in chain(*(metadata.reformulated.items() for metadata in parsed.values())):
        if name not in tensors:
            raise Damaged(f"{name}: mcore_data gives it the shape {list(shape)}, nothing stores it")
        tensors[name] = unflattened(tensors[name], shape)
    return catalog.with_tensors(tensors)


def _described(source: Source, catalog: Catalog, config: dict[str, Any] | None) -> Catalog:
    info = catalog.info | {"writer": "Megatron-core torch_dist"}
    info |= arguments_among(catalog.objects.values()).info()
    notes = catalog.notes
    if config is None:
        notes = (
            *notes,
            f"{_CONFIG} is missing, which Megatron writes last: the save never finished",
        )
    files = catalog.files | {n: source.files[n] for n in (_CONFIG,) if n in source.files}
    return replace(catalog, format=FORMAT.name, info=info, notes=notes, files=files)


FORMAT = Format(
    "megatron-torch_dist",
    "Megatron-core distributed checkpoint (metadata.json and .distcp files)",
    _probe,
    _scan,
    locate=dcp.FORMAT.locate,
)
