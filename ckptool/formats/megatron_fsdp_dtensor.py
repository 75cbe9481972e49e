"""Megatron-FSDP's checkpoints: ``--ckpt-format fsdp_dtensor``.

Read: megatron-core 0.14 to 0.20. A DCP folder without ``metadata.json``, of DTensors that ranks
hold unevenly; names are those of the wrapped modules, ``model.module.module...`` and
``optimizer.state.module...``, with the halves of a gated ``linear_fc1`` as ``weight_w`` and
``weight_v``.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ckptool.core.catalog import Catalog
from ckptool.formats.base import Format, ScanOptions, Source

_METADATA = ".metadata"
_HEAD = 1 << 20
_GROUPS, _MODULES = b"optimizer.param_to_group_meta.", b"model.module."
_FOLDER = re.compile(r"(.*[/\\])?(iter_[0-9]{7,}|release)[/\\]?")


def _probe(source: Source) -> bool:
    """Whether the first names in the metadata are Megatron's: those of another DCP are not."""
    if _METADATA not in source.files:
        return False
    head = source.read(_METADATA, 0, min(source.files[_METADATA], _HEAD))
    return _GROUPS in head or (_MODULES in head and _FOLDER.fullmatch(source.root) is not None)


def _scan(source: Source, options: ScanOptions) -> Catalog:
    from ckptool.formats._infer import with_inferred_mesh
    from ckptool.formats._megatron_args import arguments_among
    from ckptool.formats.dcp import read_folder

    catalog, _ = read_folder(source, options)
    info = catalog.info | {"writer": "Megatron-core fsdp_dtensor"}
    info |= arguments_among(catalog.objects.values()).info()
    return with_inferred_mesh(replace(catalog, format=FORMAT.name, info=info))


def _locate(source: Source, catalog: Catalog) -> Catalog:
    from ckptool.formats._dcp_items import locate

    return locate(source, catalog)


FORMAT = Format(
    "megatron-fsdp_dtensor",
    "Megatron-FSDP checkpoint (a DCP folder of uneven DTensors)",
    _probe,
    _scan,
    locate=_locate,
)
