"""Other numbers than those that are stored: quantised tensors as numbers, and casts."""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import dataclass

from ckptool.commands.numbers_config import block_size
from ckptool.commands.open import Opened
from ckptool.commands.selection import Selection, selected
from ckptool.core import rewrite
from ckptool.core.catalog import Catalog
from ckptool.core.dtype import BY_NAME, DType
from ckptool.core.quantised import dequantized, quantised_names
from ckptool.errors import CannotDo


@dataclass(frozen=True, slots=True)
class Taken:
    """What is ``kept`` of the ``whole``, and how many tensors of each kind numbers are made of."""

    whole: Catalog
    kept: Catalog
    dequantized: dict[str, int]


def taken(opened: Opened, selection: Selection, dtype: DType | None, *, dequantize: bool) -> Taken:
    """What is selected of a checkpoint, with numbers for its quantised tensors if wanted.

    They are of ``dtype``, bf16 unless told. Raises CannotDo without torch, where no tensor is
    quantised in a known way, and where scales do not fit a tensor that is kept.
    """
    if not dequantize:
        return Taken(opened.catalog, selected(opened.catalog, selection), {})
    _require_torch("--dequantize")
    names = quantised_names(opened.catalog)
    inner = {name: entry for name, entry in opened.catalog.tensors.items() if name in names}
    located = opened.located(opened.catalog.with_tensors(inner)).tensors
    catalog = opened.catalog.with_tensors(opened.catalog.tensors | located)
    made = dequantized(catalog, dtype or BY_NAME["bfloat16"], block_size(opened))
    kept = selected(made.catalog, selection)
    return Taken(made.catalog, kept, made.counts(kept))


def with_dtype(catalog: Catalog, dtype: DType | None) -> tuple[Catalog, dict[str, int]]:
    """The catalog with floating tensors as ``dtype``, and how many were cast from each type.

    Quantised tensors and their scales stay as they are. CannotDo without torch.
    """
    if dtype is None:
        return catalog, {}
    _require_torch("--dtype")
    catalog, changed = rewrite.cast(catalog, dtype, quantised_names(catalog))
    return catalog, dict(Counter(entry.dtype.name for entry in changed))


def _require_torch(option: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise CannotDo(f"{option} needs torch", hint="pip install 'ckptool[torch]'")
