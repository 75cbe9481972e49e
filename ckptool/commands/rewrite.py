"""A checkpoint as it is asked for: what is selected of it, under other names, as other numbers.

Other numbers than those that are stored: quantised tensors as numbers, and casts.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from ckptool.commands.keymap.assets import mapped
from ckptool.commands.keymap.report import MapReport
from ckptool.commands.keymap.written_config import block_size
from ckptool.commands.open import Opened, require_readable
from ckptool.commands.options.source import RewriteOptions, Selection
from ckptool.commands.selection import selected
from ckptool.core.casts import NO_CASTS, Casts, cast, needs_torch
from ckptool.core.catalog import Catalog
from ckptool.core.dtype import BY_NAME, DType
from ckptool.core.quantization import dequantized, quantised_names
from ckptool.errors import Unsupported


@dataclass(frozen=True, slots=True)
class RewriteResult:
    """What a rewrite made of a checkpoint.

    ``whole`` is all there was to select from, ``kept`` what was selected, ``catalog`` the result.
    ``cast`` counts the tensors cast from each type, ``dequantized`` those of each kind that numbers
    are made of.
    """

    whole: Catalog
    kept: Catalog
    catalog: Catalog
    map: MapReport | None
    cast: dict[str, int]
    dequantized: dict[str, int]


def rewrite(
    opened: Opened,
    options: RewriteOptions,
    *,
    locate: bool = False,
    check: Callable[[Catalog], None] = lambda kept: None,
) -> RewriteResult:
    """Select, rename, map and cast what a checkpoint holds. No tensor byte is read.

    ``check`` is shown what was selected and raises where that will not do. With ``locate`` every
    container is opened; a map needs that in any case. Raises UsageError or Unsupported where it
    cannot be done as asked, Damaged where what was selected cannot be read, Hostile where it must
    not be.
    """
    casts = options.casts or NO_CASTS
    found = select_tensors(opened, options.selection, casts.model, dequantize=options.dequantize)
    require_readable(found.kept, opened.source, "what was selected")
    check(found.kept)
    catalog = found.kept
    if locate or options.map.name is not None:
        catalog = opened.located(catalog)
    catalog, report = mapped(opened, catalog, options.map)
    catalog, cast = with_casts(catalog, casts)
    return RewriteResult(found.whole, found.kept, catalog, report, cast, found.dequantized)


@dataclass(frozen=True, slots=True)
class SelectionResult:
    """What is ``kept`` of the ``whole``, and how many tensors of each kind numbers are made of."""

    whole: Catalog
    kept: Catalog
    dequantized: dict[str, int]


def select_tensors(
    opened: Opened, selection: Selection, dtype: DType | None, *, dequantize: bool
) -> SelectionResult:
    """What is selected of a checkpoint, with numbers for its quantised tensors if wanted.

    They are of ``dtype``, bf16 unless told. Raises Unsupported without torch, where no tensor is
    quantised in a known way, and where scales do not fit a tensor that is kept.
    """
    if not dequantize:
        return SelectionResult(opened.catalog, selected(opened.catalog, selection), {})
    _require_torch("--dequantize")
    names = quantised_names(opened.catalog)
    inner = {name: entry for name, entry in opened.catalog.tensors.items() if name in names}
    located = opened.located(opened.catalog.with_tensors(inner)).tensors
    catalog = opened.catalog.with_tensors(opened.catalog.tensors | located)
    made = dequantized(catalog, dtype or BY_NAME["bfloat16"], block_size(opened))
    kept = selected(made.catalog, selection)
    return SelectionResult(made.catalog, kept, made.counts(kept))


def with_casts(catalog: Catalog, casts: Casts) -> tuple[Catalog, dict[str, int]]:
    """The catalog with its casts and notes on them, and how many were cast from each type.

    Unsupported where a cast needs torch and it is not there.
    """
    done = cast(catalog, casts)
    for entry in done.changed:
        wanted = done.catalog.tensors[entry.name].dtype
        if needs_torch(entry.source_dtype, wanted):
            _require_torch(f"--dtype {wanted} of {entry.source_dtype}")
    noted = replace(done.catalog, notes=(*done.catalog.notes, *done.notes))
    return noted, dict(Counter(entry.dtype.name for entry in done.changed))


def _require_torch(option: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise Unsupported(f"{option} needs torch", hint="pip install 'ckptool[torch]'")
