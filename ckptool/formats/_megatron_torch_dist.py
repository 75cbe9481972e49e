"""From the DCP folder that Megatron-core writes to the tensors and values it holds."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

from ckptool.core.catalog import Catalog
from ckptool.errors import Damaged, Problem, Unrecognised
from ckptool.formats import dcp
from ckptool.formats._dcp_metadata import DcpMetadata
from ckptool.formats._infer import with_inferred_mesh
from ckptool.formats._megatron_args import arguments_among
from ckptool.formats._megatron_flat import unflattened
from ckptool.formats._megatron_named import with_named_state
from ckptool.formats._megatron_objects import require_common, with_common, with_plain_names
from ckptool.formats.base import ScanOptions, Source

FORMAT_NAME = "megatron-torch_dist"
CONFIG = "metadata.json"


def scan(source: Source, config: dict[str, Any] | None, options: ScanOptions) -> Catalog:
    """The catalog of a ``torch_dist`` folder; ``config`` is its ``metadata.json``, if any."""
    backend = (config or {}).get("sharded_backend", "torch_dist")
    if backend != "torch_dist":
        raise Unrecognised(
            f"{source.root}: a Megatron-core checkpoint of the backend {str(backend)[:80]!r};"
            " ckptool reads torch_dist",
            hint="Megatron-core up to 0.13 loads it and saves it with --ckpt-format torch_dist",
        )
    catalog, parsed = dcp.read_folder(source, options)
    require_common(source, catalog, options)
    catalog = with_common(source, with_plain_names(_reshaped(catalog, parsed)))
    plans = [plan for metadata in parsed.values() for plan in metadata.plans or ()]
    catalog = _described(source, with_named_state(source, catalog, plans))
    return with_inferred_mesh(
        catalog if config is not None else _unfinished(source, catalog, options)
    )


def _reshaped(catalog: Catalog, parsed: dict[str, DcpMetadata]) -> Catalog:
    """With the shapes that tensors had before they were reformulated."""
    tensors = dict(catalog.tensors)
    for name, shape in chain(*(metadata.reformulated.items() for metadata in parsed.values())):
        if name not in tensors:
            raise Damaged(
                Problem(
                    f"{name}: mcore_data gives it the shape {list(shape)}, nothing stores it",
                    "data-missing",
                )
            )
        tensors[name] = unflattened(tensors[name], shape)
    return catalog.with_tensors(tensors)


def _described(source: Source, catalog: Catalog) -> Catalog:
    info = catalog.info | {"writer": "Megatron-core torch_dist"}
    info |= arguments_among(catalog.objects.values()).info()
    files = catalog.files | {n: source.files[n] for n in (CONFIG,) if n in source.files}
    return replace(catalog, format=FORMAT_NAME, info=info, files=files)


def _unfinished(source: Source, catalog: Catalog, options: ScanOptions) -> Catalog:
    """A save whose last file is not there: a note where all else can be read, damage to verify."""
    if CONFIG in source.files:
        message = f"{CONFIG} names no backend, as Megatron's does: it is damaged"
        raise Damaged(Problem(message, "metadata-unreadable", file=CONFIG))
    message = f"{CONFIG} is missing, which Megatron writes last: the save never finished"
    if options.found is not None:
        options.report([Problem(message, "save-unfinished", file=CONFIG)], subject=source.root)
    return replace(catalog, notes=(*catalog.notes, message))
