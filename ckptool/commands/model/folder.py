"""Lay out a model with its other files: requested ones, those of the source and those beside it."""

from __future__ import annotations

from collections import ChainMap
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ckptool.commands.model.adapter_config import ADAPTER_CONFIG
from ckptool.commands.model.assets import (
    assets_in,
    drop_quantization_config,
    lacking_files,
    with_assets,
    with_true_configs,
)
from ckptool.commands.model.beside import with_files_beside
from ckptool.commands.model.peft import with_adapter_config
from ckptool.commands.model.records import CONFIG, records
from ckptool.commands.open import OpenedCheckpoint
from ckptool.core.catalog import Catalog
from ckptool.core.keymap.wrappers import unwrapping_rule, wrappers_of
from ckptool.core.layout import Layout
from ckptool.core.quantization.names import is_plain
from ckptool.core.state_category import state_category
from ckptool.core.text import plural
from ckptool.errors import UsageError
from ckptool.formats.base import Format, Request
from ckptool.storage.url import Location

if TYPE_CHECKING:
    from ckptool.commands.rewrite import RewriteResult


def lay_out_folder(
    opened: OpenedCheckpoint, rewritten: RewriteResult, writer: Format, request: Request
) -> Layout:
    """Lay a converted model out with its other files, and with notes for whoever loads it.

    Raises UsageError if files are requested that a single file has no room for.
    """
    options, catalog = rewritten.options, rewritten.catalog
    assets = options.map.assets
    is_adapter, is_model = options.selection.peft_adapter, writer.loading.is_model_folder
    names = frozenset() if assets is None else frozenset(assets_in(assets, catalog)[1])
    names = names - {CONFIG} | {ADAPTER_CONFIG} if is_adapter else names
    layout = writer.lay_out(catalog, replace(request, assets=names))
    if assets is not None and not layout.folder:
        raise UsageError("--hf-assets requires a target folder, not a single file")
    complete = partial(_complete, opened, rewritten, writer)
    if is_model and assets is None and not is_adapter:
        layout = with_files_beside(opened, layout, complete)
    elif layout.folder:  # a single file has no room for a model's other files
        layout = complete(layout, False)
    notes = _loading_notes(opened.path, catalog, layout) if is_model else []
    return replace(layout, notes=(*layout.notes, *notes))


def lay_out_for_mesh(
    opened: OpenedCheckpoint, rewritten: RewriteResult, writer: Format, request: Request
) -> Layout:
    """Lay a resharded model out with its other files, for the model that is recorded."""
    catalog, assets = rewritten.catalog, rewritten.options.map.assets
    configs = records(opened.source, catalog, assets) if writer.loading.is_model_folder else []
    config = ChainMap(*map(dict, configs))  # the strongest record first
    layout = writer.lay_out(catalog, replace(request, config=config))
    layout = with_assets(opened.source, layout, assets, rewritten.map, catalog, writer)
    if is_plain(catalog):
        layout = drop_quantization_config(opened, layout)
    if rewritten.cast:
        layout = with_true_configs(opened, catalog, layout, cast=True, partial=True)
    return layout


def _complete(
    opened: OpenedCheckpoint,
    rewritten: RewriteResult,
    writer: Format,
    layout: Layout,
    strict: bool,
) -> Layout:
    """Add the requested files to a layout, and make its configs describe the tensors.

    A ``strict`` layout has configs that may be another model's, which a part must fit, too.
    """
    catalog, options = rewritten.catalog, rewritten.options
    selection = options.selection
    layout = with_assets(opened.source, layout, options.map.assets, rewritten.map, catalog, writer)
    if selection.peft_adapter and writer.loading.is_model_folder:
        layout = with_adapter_config(opened, catalog, layout)
    is_part = bool(selection.select or selection.drop)
    if options.dequantize or (is_plain(catalog) and not is_part):
        layout = drop_quantization_config(opened, layout)
    cast = bool(rewritten.cast or rewritten.dequantized)
    return with_true_configs(opened, catalog, layout, cast=cast, partial=is_part and not strict)


def _loading_notes(source: Location, catalog: Catalog, layout: Layout) -> list[str]:
    return [*lacking_files(layout, source), *_optimizer_notes(catalog), *_wrapper_notes(catalog)]


def _wrapper_notes(catalog: Catalog) -> list[str]:
    """Note wrapper prefixes in names: transformers finds no tensor under such a name."""
    names = [entry.name for entry in catalog.tensors.values() if state_category(entry) == "model"]
    prefixes = wrappers_of(names)
    rule = unwrapping_rule(names, prefixes)
    if rule is None:
        return []
    wrappers = ", ".join(prefixes)
    return [f"wrapped names ({wrappers}), which no model loads; --rename '{rule}' unwraps them"]


def _optimizer_notes(catalog: Catalog) -> list[str]:
    """Note optimizer state in a model's folder, which only a trainer needs."""
    state = [e for e in catalog.tensors.values() if state_category(e) == "optimizer"]
    if not state:
        return []
    size = sum(entry.nbytes for entry in state)
    counted = f"{plural(len(state), 'tensor')}, {size:,} bytes"
    return [f"optimizer state is included ({counted}); --model-only leaves it out"]
