"""bitsandbytes: four bits by a table of 16 numbers, and eight bits with one scale per row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Computed, Gather, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.quantization.blocks import (
    blocks_of,
    read_floats,
    split_bytes,
    spread,
    view_typed,
)
from ckptool.core.quantization.model import Kind, Quantized, Scheme, Surroundings, parse_object

_KINDS = {name: Kind(f"bitsandbytes {name.upper()}", "bitsandbytes") for name in ("nf4", "fp4")}
_INT8 = Kind("bitsandbytes INT8", "bitsandbytes")
_STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_ROWS = ".SCB"
_CODES, _NESTED_CODES = 16, 256
_ROW_MAJOR = 0
_ROW_FACTOR = 7.874015718698502e-3
"""1 / 127 as bitsandbytes uses it: ``int8_vectorwise_dequant`` (0.50)."""


def find(catalog: Catalog, names: Iterable[str]) -> Iterator[Quantized]:
    """Yield what ``Params4bit`` and ``Int8Params`` store (bitsandbytes 0.50).

    Four bits: ``X.weight`` of any type, ``X.weight.absmax``, ``X.weight.quant_map``, a JSON text in
    ``X.weight.quant_state.bitsandbytes__nf4``, and of scales that are quantized themselves
    ``X.weight.nested_absmax`` and ``X.weight.nested_quant_map``. Eight bits: ``X.weight``,
    ``X.SCB``, and ``X.weight_format``.
    """
    tensors = catalog.tensors
    for name in names:
        entry = tensors[name]
        if name.endswith(_ROWS):
            weight = f"{name.removesuffix(_ROWS)}.weight"
            values, form = tensors.get(weight), tensors.get(f"{weight}_format")
            if values is not None and values.dtype.name == "int8":
                about = () if form is None else (form,)
                yield Quantized(_INT8, weight, values, entry, _lay_out_rows, about=about)
            continue
        weight, _, code = name.rpartition(".quant_state.bitsandbytes__")
        parts = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
        scales, codes, *nested = (tensors.get(f"{weight}.{part}") for part in parts)
        values = tensors.get(weight)
        if values is not None and scales is not None and codes is not None:
            extras = (codes, *(part for part in nested if part is not None))
            yield Quantized(_KINDS[code], weight, values, scales, _lay_out_codes, extras, (entry,))


def find_packed_codes(catalog: Catalog) -> set[str]:
    """Return the tensors of packed codes, whatever element type they have.

    ``bnb_4bit_quant_storage`` may be a type of floats, as FSDP needs it: it counts bytes only.
    """
    names = (
        name.rpartition(".quant_state.")[0] for name in catalog.tensors if name.endswith(_STATES)
    )
    return {name for name in names if name in catalog.tensors}


def _lay_out_codes(pair: Quantized, around: Surroundings) -> TensorEntry:
    """Lay out codes of four bits, two per byte, in blocks of consecutive elements."""
    state = parse_object(around.read(pair.about[0]))
    shape, size = state.get("shape"), state.get("blocksize")
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise pair.unfit("its quant_state has no shape")
    if type(size) is not int or size < 1:
        raise pair.unfit("its quant_state has no blocksize")
    count = math.prod(shape)
    nbytes = pair.values.elements * pair.values.dtype.itemsize
    codes, *nested = pair.extras
    fits = nbytes == -(-count // 2) and pair.scales.elements == -(-count // size)
    if not fits or codes.shape != (_CODES,):
        raise pair.unfit(f"its parts do not match the shape {shape} of its quant_state")
    pair.require_type(codes, "float32")
    if not nested:
        pair.require_type(pair.scales, "float32")
    compute = partial(_compute_codes, nested=_nesting(pair, nested, state) if nested else None)
    return pair.numbers(compute, around.dtype, tuple(shape), (size,), flat=(count,))


def _nesting(
    pair: Quantized, nested: list[TensorEntry], state: dict[str, Any]
) -> tuple[int, float]:
    """Return the block size of nested scales, and the offset added to them."""
    size, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if type(size) is not int or size < 1 or not isinstance(offset, int | float):
        raise pair.unfit("its quant_state has no nested_blocksize or nested_offset")
    fits = len(nested) == 2 and nested[0].elements == -(-pair.scales.elements // size)
    if not fits or nested[1].shape != (_NESTED_CODES,) or pair.scales.dtype.name != "uint8":
        raise pair.unfit("its nested scales do not match")
    for entry in nested:
        pair.require_type(entry, "float32")
    return size, float(offset)


def _lay_out_rows(pair: Quantized, around: Surroundings) -> TensorEntry:
    """Lay out integers of eight bits with the largest of each row."""
    shape = pair.values.shape
    pair.require_type(pair.scales, "float32")
    if len(shape) != 2 or pair.scales.elements != shape[0] or len(pair.scales.shape) != 1:
        raise pair.unfit()
    for form in pair.about:
        if around.read(form)[:1] != bytes([_ROW_MAJOR]):
            raise pair.unfit(f"{form.name} is not row: GPU tile layouts are not supported")
    return pair.numbers(_compute_rows, around.dtype, shape, (1, shape[1]))


def _compute_rows(gather: Gather, at: Computed, box: Box, dtype: Any) -> Any:
    """Multiply integers by the largest of their row and by 1 / 127, rounding each time."""
    scales = read_floats(gather, at.scales, Box(box.lo[:1], box.hi[:1])).unsqueeze(1)
    return (read_floats(gather, at.values, box) * scales * _ROW_FACTOR).to(dtype)


def _compute_codes(
    gather: Gather, at: Computed, box: Box, dtype: Any, *, nested: tuple[int, float] | None
) -> Any:
    """Look up codes of four bits, the upper half of a byte first, and multiply by their scales.

    Scales of a ``nested`` quantization are codes of eight bits, with a scale per block of its size;
    its offset is added to them.
    """
    table, *rest = at.extras
    pairs = _bytes_of(gather, at.values, box.lo[0] // 2, -(-box.hi[0] // 2))
    numbers = read_floats(gather, table)[split_bytes(pairs, box, upper_first=True)]
    grid = blocks_of(box, at.block)
    scales = _flat(gather, at.scales, grid)
    if nested is not None:
        (nested_scales, table), (size, offset) = rest, nested
        factors = _flat(gather, nested_scales, blocks_of(grid, (size,)))
        codes = read_floats(gather, table)[scales.long()]
        scales = codes * spread(factors, (size,), grid) + offset
    return (numbers * spread(scales, at.block, box)).to(dtype)


def _flat(gather: Gather, entry: TensorEntry, box: Box) -> Any:
    """Read a run of the elements of a tensor with only one dim other than 1."""
    return read_floats(gather, entry, _run(entry, box.lo[0], box.hi[0])).flatten()


def _bytes_of(gather: Gather, entry: TensorEntry, lo: int, hi: int) -> Any:
    """Read a run of the bytes of a tensor with only one dim other than 1."""
    size = entry.source_dtype.itemsize
    start = lo // size
    stored = gather(entry, _run(entry, start, -(-hi // size)))
    flat = view_typed(stored.reshape(-1).view("u1"), BY_NAME["uint8"])
    return flat[lo - start * size : hi - start * size]


def _run(entry: TensorEntry, lo: int, hi: int) -> Box:
    """Return the box of a run of elements of a tensor with only one dim other than 1."""
    longest = max(range(len(entry.shape)), key=lambda dim: entry.shape[dim])
    start = tuple(lo if dim == longest else 0 for dim in range(len(entry.shape)))
    stop = tuple(hi if dim == longest else 1 for dim in range(len(entry.shape)))
    return Box(start, stop)


SCHEME = Scheme(
    find,
    (*_STATES, _ROWS),
    (*_KINDS.values(), _INT8),
    {
        "bitsandbytes, 4 bit": r"quant_state\.bitsandbytes__\w+",
        "bitsandbytes, 8 bit": "SCB",
    },
)
