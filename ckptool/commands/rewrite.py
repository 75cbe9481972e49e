"""Rewrite a checkpoint's catalog: select, dequantize, rename, map and cast its tensors."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.open import OpenedCheckpoint, Opens, require_readable
from ckptool.commands.options.rewrite import MapOptions, RewriteOptions, Selection
from ckptool.core.box import Box
from ckptool.core.casts import Casts, cast, needs_torch, require_scales
from ckptool.core.catalog import Catalog, Chunk, Container, TensorEntry
from ckptool.core.dtype import BY_NAME, DType
from ckptool.core.quantization.apply import DequantizeResult, dequantize
from ckptool.core.quantization.config import QuantizationConfig
from ckptool.core.quantization.model import Surroundings
from ckptool.core.quantization.names import pairs, quantized_names
from ckptool.core.selection import (
    drop,
    drop_names,
    names_of,
    rename_by,
    select,
    strip_prefix,
    strip_prefixes,
)
from ckptool.core.state_category import (
    is_master,
    masters_are_weights,
    model_prefixes,
    optimizer_names,
    state_category_of_name,
    weights,
    with_every_part,
)
from ckptool.core.views import reads_any_order
from ckptool.engine.read.tensors import TensorReader
from ckptool.errors import Refusal, Unsupported
from ckptool.serialization.safetensors_metadata import rewrite_texts

if TYPE_CHECKING:
    from ckptool.commands.keymap.maps import MapReport

_MOST_DESCRIBED = 1 << 16
"""Bytes of a tensor that describes others: bitsandbytes' and ComfyUI's JSON have some hundred."""


class RenamedCounts(Struct, frozen=True):
    """How many tensors and values have another name than before."""

    tensors: int = 0
    values: int = 0


class NoModel(Unsupported):
    """A selection of the model alone has nothing of one."""


class RewriteResult(Struct, frozen=True):
    """The result of rewriting a checkpoint as ``options`` say.

    ``whole`` is everything that could be selected, ``kept`` the selection, ``catalog`` the result.
    ``cast`` counts the tensors cast from each type, ``dequantized`` those of each kind of
    quantization, ``renamed`` what ``--strip-prefix`` and ``--rename`` changed. ``unwrapped`` are
    the prefixes that ``--model-only`` removed from the names.
    """

    options: RewriteOptions
    whole: Catalog
    kept: Catalog
    catalog: Catalog
    map: MapReport | None
    cast: dict[str, int]
    dequantized: dict[str, int]
    renamed: RenamedCounts
    unwrapped: tuple[str, ...]


def rewrite(
    opened: OpenedCheckpoint,
    options: RewriteOptions,
    *,
    selected: Selected | None = None,
    opens: Opens | None = None,
    check: Callable[[OpenedCheckpoint, Catalog], None] = require_readable,
) -> RewriteResult:
    """Select, rename, map and cast a checkpoint's contents. No tensor byte is read.

    ``selected`` is the selection, if it is made already. ``check`` raises if the selection is
    unsuitable. ``opens`` says when containers are; without it they stay closed, unless a key map
    needs them. Raises UsageError or Unsupported if it cannot be done as requested, and as ``check``
    does: Damaged if part of the selection cannot be read, Hostile if it must not be.
    """
    casts, selection, cast_counts = options.casts, options.selection, dict[str, int]()
    report: MapReport | None = None
    source = DequantizeResult(opened.catalog, {}, {})
    if options.dequantize:
        _require_torch("--dequantize")
        source = dequantized(opened, None if casts is None else casts.model, options.map.assets)
    try:
        selected = selected or select_entries(source.catalog, selection)
    except NoModel as error:
        raise error.within(str(opened.path)) from None
    subset, renamed = selected.catalog, RenamedCounts()
    if selection.rename or selection.strip_prefix is not None:
        subset, renamed = _rename(subset, selection)
    counts = source.counts(subset)
    check(opened, subset)
    if casts is not None:
        require_scales(source.catalog, subset, casts)
    options.map.require_asked()
    catalog, whole = subset, not (selection.select or selection.drop)
    if opens is None and options.map.is_asked:
        opens = Opens.LATE_IN_STORES
    if opens is not None:
        catalog, report = open_mapped(opened, subset, options.map, opens, whole=whole)
    if casts is not None:
        catalog, cast_counts = cast_catalog(opened, catalog, casts, options.map.assets)
    if catalog.metadata or options.drop_metadata or options.metadata:
        catalog = rewrite_texts(
            opened.catalog,
            catalog,
            dequantized=options.dequantize,
            dropped=options.drop_metadata,
            additions=options.metadata,
        )
    catalogs, unwrapped = (source.catalog, subset, catalog), selected.unwrapped
    return RewriteResult(options, *catalogs, report, cast_counts, counts, renamed, unwrapped)


def dequantized(
    opened: OpenedCheckpoint, dtype: DType | None, assets: Path | None
) -> DequantizeResult:
    """Replace quantized tensors of a checkpoint with numbers of ``dtype``, or bf16.

    Only reading these needs torch. Raises Unsupported if no tensor has a supported quantization.
    """
    from ckptool.commands.model.assets import quantization_config

    catalog = _locate(opened)
    config = QuantizationConfig(quantization_config(opened, assets))
    with closing(TensorReader(opened.source)) as reader:
        read = partial(_read_small, reader)
        return dequantize(catalog, Surroundings(dtype or BY_NAME["bfloat16"], read, config))


def _locate(opened: OpenedCheckpoint) -> Catalog:
    """Return a checkpoint's catalog with its quantized tensors opened, or all if none shows.

    A DCP item may hold a tensor subclass, which its metadata does not show; the tensors inside then
    replace it.
    """
    catalog = opened.catalog
    names = quantized_names(catalog) | {pair.scales.name for pair in pairs(catalog)}
    tensors = {n: e for n, e in catalog.tensors.items() if n in names} or catalog.tensors
    located = opened.open_containers(catalog.with_tensors(tensors))
    rest = {n: e for n, e in catalog.tensors.items() if n not in tensors or n in located.tensors}
    return located.with_tensors(rest | located.tensors)


def _read_small(reader: TensorReader, entry: TensorEntry) -> bytes:
    """Return the bytes of a tensor that describes others, such as a quantizer's state.

    None of a large one. Raises the errors of reading.
    """
    if entry.nbytes > _MOST_DESCRIBED:
        return b""
    return reader.elements.gather(entry, Box.whole(entry.shape)).tobytes()


class Selected(NamedTuple):
    """What is selected of a catalog; ``unwrapped`` are the prefixes that a model's names lost."""

    catalog: Catalog
    unwrapped: tuple[str, ...] = ()


def select_entries(catalog: Catalog, selection: Selection) -> Selected:
    """Return the selection from a catalog; UsageError for invalid requests.

    Every entry keeps the ``part`` that it had under its former name.
    """
    catalog, unwrapped = with_every_part(catalog), tuple[str, ...]()
    names = names_of(catalog) if selection.select or selection.drop else ()
    optimizer = optimizer_names(catalog) if selection.no_optimizer else ()
    if selection.select:
        catalog = select(catalog, selection.select)
    if selection.drop:
        catalog = drop(catalog, selection.drop, names)
    if selection.no_optimizer:
        catalog = drop_names(catalog, optimizer)
    if selection.model_only or selection.peft_adapter:
        unwrapped, catalog = model_prefixes(catalog), only_model(catalog)
    if selection.peft_adapter:
        from ckptool.commands.model.peft import adapter_of

        catalog = adapter_of(catalog)
    return Selected(catalog, unwrapped)


def _rename(catalog: Catalog, selection: Selection) -> tuple[Catalog, RenamedCounts]:
    """Return a catalog renamed as requested, and how much was; UsageError for invalid requests."""
    result = catalog
    if selection.strip_prefix is not None:
        result = strip_prefix(result, selection.strip_prefix)
    for rule in selection.rename:
        result = rename_by(result, rule)
    counts = (
        sum(before != after for before, after in zip(*names, strict=True))
        for names in (
            (catalog.tensors, result.tensors),
            (catalog.objects, result.objects),
        )
    )
    return result, RenamedCounts(*counts)


def _may_be_of_model(name: str, why: str) -> bool:
    """Return whether an unreadable entry may be a tensor of the model."""
    if not isinstance(why, Refusal):
        return state_category_of_name(name, ()) == "model"
    return why.may_be_tensor and (why.part or state_category_of_name(name, ())) == "model"


def only_model(catalog: Catalog) -> Catalog:
    """Return only the model's tensors, under the model's own names."""
    prefixes = model_prefixes(catalog)
    names = weights(catalog)
    masters = masters_are_weights(catalog)
    conflicts = {
        name: why
        for name, why in catalog.conflicts.items()
        if _may_be_of_model(name, why) or (masters and is_master(name))
    }
    if not names and not any(isinstance(why, Refusal) for why in conflicts.values()):
        raise NoModel(
            "no tensors of a model, which is what --model-only keeps",
            hint="`ckptool inspect CKPT` lists what there is; --select and --drop may leave it out",
        )
    model = replace(
        catalog,
        tensors={name: replace(catalog.tensors[name], part="model") for name in names},
        objects={},
        conflicts=conflicts,
    )
    return strip_prefixes(model, prefixes) if prefixes else model


def open_mapped(
    opened: OpenedCheckpoint,
    subset: Catalog,
    options: MapOptions,
    opens: Opens,
    *,
    whole: bool,
) -> tuple[Catalog, MapReport | None]:
    """Open a catalog's containers; return it under the key map, if any, and the map's report.

    Under a map only those of stores are opened late, and none of which the result depends on the
    order of its elements. ``whole`` means that the catalog should contain the entire model. Raises
    UsageError or Unsupported if that is not possible.
    """
    if not options.is_asked:
        return opened.open_containers(subset, opens), None
    from ckptool.commands.keymap.maps import map_checkpoint

    opens = Opens.AT_ONCE if opens is Opens.AT_ONCE else Opens.LATE_IN_STORES
    located = opened.open_containers(subset, opens)
    if opens is not Opens.AT_ONCE:
        with suppress(Unsupported):  # as nothing is added to an unopened tensor
            catalog, report = map_checkpoint(opened, located, options, whole=whole)
            chunks = (chunk for entry in catalog.tensors.values() for chunk in entry.chunks)
            if all(map(_may_stay_unopened, chunks)):
                return catalog, report
        located = opened.open_containers(subset)
    return map_checkpoint(opened, located, options, whole=whole)


def _may_stay_unopened(chunk: Chunk) -> bool:
    """Return whether a chunk is open, or without copies and readable in any order of elements."""
    at = chunk.at
    if not isinstance(at, Container):
        return True
    return not chunk.copies and at.part is not None and reads_any_order(at.part, chunk.box.shape)


def cast_catalog(
    opened: OpenedCheckpoint, catalog: Catalog, casts: Casts, assets: Path | None
) -> tuple[Catalog, dict[str, int]]:
    """Return the catalog with its casts and notes on them, and counts by stored type.

    Raises Unsupported if a cast needs torch and torch is missing, or for floats of 8 bits of a
    model that its config calls quantized.
    """
    result = cast(catalog, casts)
    coarse = (entry for entry in result.changed if entry.source_dtype.itemsize == 1)
    if (entry := next(coarse, None)) is not None:
        from ckptool.commands.model.assets import require_unquantized

        require_unquantized(opened, assets, entry)
    for entry in result.changed:
        dtype = result.catalog.tensors[entry.name].dtype
        if needs_torch(entry.source_dtype, dtype):
            _require_torch(f"--dtype {dtype} of {entry.source_dtype}")
    noted = replace(result.catalog, notes=(*result.catalog.notes, *result.notes))
    return noted, dict(Counter(entry.dtype.name for entry in result.changed))


def _require_torch(option: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise Unsupported(f"{option} needs torch", hint="pip install 'ckptool[torch]'")
