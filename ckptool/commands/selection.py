"""What to take of a catalog, and how to call it."""

from __future__ import annotations

from dataclasses import replace

from ckptool.commands.options.source import Selection
from ckptool.core.catalog import Catalog
from ckptool.core.rewrite import drop, rename, select, strip_prefix, strip_prefixes, substitution
from ckptool.core.state_category import (
    is_master,
    masters_are_weights,
    model_prefixes,
    state_category_of_name,
    weights,
    with_every_part,
)
from ckptool.errors import Refusal, Unsupported


def selected(catalog: Catalog, selection: Selection) -> Catalog:
    """What is selected of a catalog, renamed as asked. UsageError where that makes no sense.

    Every entry keeps the ``part`` that it had under its own name.
    """
    catalog = with_every_part(catalog)
    if selection.select:
        catalog = select(catalog, selection.select)
    if selection.drop:
        catalog = drop(catalog, selection.drop)
    if selection.model_only:
        catalog = only_model(catalog)
    if selection.strip_prefix is not None:
        catalog = strip_prefix(catalog, selection.strip_prefix)
    for rule in selection.rename:
        catalog = rename(catalog, substitution(rule))
    return catalog


def _may_be_of_model(name: str, why: str) -> bool:
    """Return whether what cannot be read may be a tensor of the model: its values are left out."""
    if not isinstance(why, Refusal):
        return state_category_of_name(name, ()) == "model"
    return why.may_be_tensor and (why.part or state_category_of_name(name, ())) == "model"


def only_model(catalog: Catalog) -> Catalog:
    """The model's tensors, under the names the model itself gives them."""
    prefixes = model_prefixes(catalog)
    names = weights(catalog)
    masters = masters_are_weights(catalog)
    conflicts = {
        name: why
        for name, why in catalog.conflicts.items()
        if _may_be_of_model(name, why) or (masters and is_master(name))
    }
    if not names and not any(isinstance(why, Refusal) for why in conflicts.values()):
        raise Unsupported("--model-only: no model tensors found")
    model = replace(
        catalog,
        tensors={name: replace(catalog.tensors[name], part="model") for name in names},
        objects={},
        conflicts=conflicts,
    )
    return strip_prefixes(model, prefixes) if prefixes else model
