"""bitsandbytes: four bits by a table of 16 numbers, and eight bits with one scale per row."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from ckptool.core.catalog import TensorEntry
from ckptool.core.quantization.model import Quantized, Surroundings, Tensors

_STATE = re.compile(r"(.*)\.quant_state\.bitsandbytes__(nf4|fp4)")
_ROWS = ".SCB"
_CODES, _NESTED_CODES = 16, 256
_ROW_MAJOR = 0


def find_bitsandbytes(tensors: Tensors, names: Iterable[str]) -> Iterator[Quantized]:
    """Yield what ``Params4bit`` and ``Int8Params`` store (bitsandbytes 0.50), of some ``names``.

    Four bits: ``X.weight`` of any type, ``X.weight.absmax``, ``X.weight.quant_map``, a JSON text in
    ``X.weight.quant_state.bitsandbytes__nf4``, and of scales that are quantized themselves
    ``X.weight.nested_absmax`` and ``X.weight.nested_quant_map``. Eight bits: ``X.weight``,
    ``X.SCB``, and ``X.weight_format``.
    """
    for name in names:
        entry = tensors[name]
        if match := _STATE.fullmatch(name):
            own = match[1]
            parts = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
            scales, codes, *nested = (tensors.get(f"{own}.{part}") for part in parts)
            values = tensors.get(own)
            if values is not None and scales is not None and codes is not None:
                others = (codes, *(part for part in nested if part is not None))
                yield Quantized(
                    f"bitsandbytes {match[2].upper()}",
                    own,
                    values,
                    scales,
                    _lay_out_codes,
                    "codes",
                    others,
                    about=(entry,),
                )
        elif name.endswith(_ROWS):
            own = f"{name.removesuffix(_ROWS)}.weight"
            values, form = tensors.get(own), tensors.get(f"{own}_format")
            if values is not None and values.dtype.name == "int8":
                about = () if form is None else (form,)
                yield Quantized(
                    "bitsandbytes INT8", own, values, entry, _lay_out_rows, "rows", about=about
                )


def find_packed_codes(tensors: Tensors, names: Iterable[str]) -> set[str]:
    """Return the tensors of packed codes, of some ``names``, whatever element type they have.

    ``bnb_4bit_quant_storage`` may be a type of floats, as FSDP needs it: it counts bytes only.
    """
    found = (match[1] for match in map(_STATE.fullmatch, names) if match)
    return {name for name in found if name in tensors}


def _lay_out_codes(pair: Quantized, around: Surroundings) -> TensorEntry:
    """Lay out codes of four bits, two per byte, in blocks of consecutive elements."""
    state = _state(around.read(pair.about[0]))
    shape, size = state.get("shape"), state.get("blocksize")
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise pair.unfit("its quant_state has no shape")
    if type(size) is not int or size < 1:
        raise pair.unfit("its quant_state has no blocksize")
    count = math.prod(shape)
    nbytes = pair.values.elements * pair.values.dtype.itemsize
    codes, *nested = pair.others
    fits = nbytes == -(-count // 2) and pair.scales.elements == -(-count // size)
    if not fits or codes.shape != (_CODES,):
        raise pair.unfit(f"its parts do not match the shape {shape} of its quant_state")
    pair.require_type(codes, "float32")
    settings: tuple[float, ...] = ()
    if nested:
        settings = _nested(pair, nested, state)
    else:
        pair.require_type(pair.scales, "float32")
    pair = replace(pair, settings=settings)
    return pair.numbers(around.dtype, tuple(shape), (size,), flat=(count,))


def _nested(
    pair: Quantized, nested: list[TensorEntry], state: dict[str, Any]
) -> tuple[float, float]:
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


def _state(text: bytes) -> dict[str, Any]:
    """Read a quant_state; {} where it is none."""
    try:
        state = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


def _lay_out_rows(pair: Quantized, around: Surroundings) -> TensorEntry:
    """Lay out integers of eight bits with the largest of each row."""
    shape = pair.values.shape
    pair.require_type(pair.scales, "float32")
    if len(shape) != 2 or pair.scales.elements != shape[0] or len(pair.scales.shape) != 1:
        raise pair.unfit()
    for form in pair.about:
        if around.read(form)[:1] != bytes([_ROW_MAJOR]):
            raise pair.unfit(f"{form.name} is not row: GPU tile layouts are not supported")
    return pair.numbers(around.dtype, shape, (1, shape[1]))
