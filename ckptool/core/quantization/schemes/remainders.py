"""Masters of which only the lower 16 bits are stored, as integers: bf16 weights have the others.

Transformer Engine's FusedAdam with ``store_param_remainders`` (2.1 to 2.9), which Megatron-core has
for its precision-aware optimizer (0.11 to 0.20): weights are rounded to the nearest, in the middle
away from zero. So the upper bits are the weight's, less one where the lower ones are half or more,
which as integers are negative.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import Catalog, Chunk, Computed, Gather, StridedPart, TensorEntry
from ckptool.core.dtype import BY_NAME, DType
from ckptool.core.quantization.master_names import Mastered, mastered
from ckptool.core.quantization.model import Kind, Quantized, Scheme, Surroundings
from ckptool.core.views import part_at
from ckptool.errors import Unsupported

_KIND = Kind("remainders of 16 bits")
_STORED, _WEIGHT, _MASTER = "int16", "bfloat16", "float32"
_HALF = 16


def find(catalog: Catalog, names: Iterable[str]) -> Iterator[Quantized]:
    """Yield the integers under names of masters of which one weight is there, which stays."""
    masters = {name: catalog.tensors[name] for name in names}
    by_master: dict[str, list[Mastered]] = defaultdict(list)
    for pair in mastered(masters, catalog.tensors, _STORED):
        if pair.weight.dtype.name == _WEIGHT:
            by_master[pair.master.name].append(pair)
    for name, (first, *rest) in by_master.items():
        if not rest:
            yield Quantized(
                _KIND, name, first.master, _weight_of(first), _lay_out, keeps_scales=True
            )


def _weight_of(pair: Mastered) -> TensorEntry:
    return replace(part_at(pair.weight, pair.at), name=pair.weight.name)


def _lay_out(pair: Quantized, around: Surroundings) -> TensorEntry:
    """Lay out masters of 32 bits, whatever type is requested: in fewer they are the weights."""
    shape = pair.values.shape
    part = StridedPart(shape, 0, row_major_strides(shape, 1))
    at = Computed((pair.values, pair.scales), part, _compute, reads=_reads)
    chunk = Chunk(Box.whole(shape), at)
    return replace(pair.values, dtype=BY_NAME[_MASTER], chunks=(chunk,), placements=None, mesh=None)


def _reads(at: Computed, box: Box) -> list[tuple[TensorEntry, Box]]:
    return [(entry, box) for entry in at.stored]


def _compute(gather: Gather, at: Computed, box: Box, dtype: DType) -> Any:
    """Join the upper bits of weights and the lower ones."""
    import numpy as np

    if dtype.name != _MASTER:
        raise Unsupported(f"{at.values.name}: masters are of 32 bits, not {dtype}")
    lower, weights = (np.asarray(gather(entry, box)).view(np.uint16) for entry in at.stored)
    upper = weights - (lower >> (_HALF - 1))
    return upper.astype(np.uint32) << np.uint32(_HALF) | lower


SCHEME = Scheme(find, (), (_KIND,), dtype=_STORED)
