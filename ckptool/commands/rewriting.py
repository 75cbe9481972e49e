"""A checkpoint as it is asked for: what is selected of it, under other names, as other numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ckptool.commands.assets import mapped
from ckptool.commands.casting import taken, with_casts
from ckptool.commands.map_report import MapOptions, MapReport
from ckptool.commands.open import Opened, require_readable
from ckptool.commands.selection import EVERYTHING, Selection
from ckptool.core.casts import Casts
from ckptool.core.catalog import Catalog
from ckptool.core.dtype import DType


@dataclass(frozen=True, slots=True)
class RewriteOptions:
    """What to take of a checkpoint, how to call it, and as which numbers, in this order.

    ``dtype`` is what the model's weights are cast to; ``dtype_rules`` are globs of the names that
    come of it all, and the type of whatever matches, the first that does.
    """

    selection: Selection = EVERYTHING
    map: MapOptions = field(default_factory=MapOptions)
    dtype: DType | None = None
    dtype_rules: tuple[tuple[str, DType], ...] = ()
    dequantize: bool = False


@dataclass(frozen=True, slots=True)
class Rewritten:
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
) -> Rewritten:
    """Select, rename, map and cast what a checkpoint holds. No tensor byte is read.

    ``check`` is shown what was selected and raises where that will not do. With ``locate`` every
    container is opened; a map needs that in any case. Raises UsageError or CannotDo where it
    cannot be done as asked, Damaged where what was selected cannot be read, Hostile where it must
    not be.
    """
    found = taken(opened, options.selection, options.dtype, dequantize=options.dequantize)
    require_readable(found.kept, "what was selected")
    check(found.kept)
    catalog = found.kept
    if locate or options.map.name is not None:
        catalog = opened.located(catalog)
    catalog, report = mapped(opened, catalog, options.map)
    catalog, cast = with_casts(catalog, Casts(options.dtype, options.dtype_rules))
    return Rewritten(found.whole, found.kept, catalog, report, cast, found.dequantized)
