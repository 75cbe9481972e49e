"""Megatron-core's distributed checkpoints: ``--ckpt-format torch_dist``.

Read: megatron-core 0.7 to 0.20. A DCP folder with ``metadata.json`` (``sharded_backend``), common
state in ``common.pt`` or in the ShardedObject ``common_state``. Tensors keep their keys and shapes,
layers and experts stacked on leading dims, flattened ones are given their shape again.
"""

from __future__ import annotations

import json
from typing import Any

from ckptool.core.catalog import Catalog
from ckptool.formats.base import Format, ScanOptions, Source, read_metadata

_CONFIG, _COMMON = "metadata.json", "common.pt"
_LARGEST_CONFIG = 1 << 16


def _probe(source: Source) -> bool:
    return _config(source) is not None or {_COMMON, ".metadata"} <= source.files.keys()


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
    from ckptool.formats._megatron_torch_dist import scan

    return scan(source, _config(source), options)


def _locate(source: Source, catalog: Catalog) -> Catalog:
    from ckptool.formats._dcp_items import locate

    return locate(source, catalog)


FORMAT = Format(
    "megatron-torch_dist",
    "Megatron-core distributed checkpoint (metadata.json and .distcp files)",
    _probe,
    _scan,
    locate=_locate,
)
