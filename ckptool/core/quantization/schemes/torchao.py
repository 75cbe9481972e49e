"""torchao's tensor subclasses, as files store them: the tensors inside, and plain values.

torchao 0.18: ``Int8Tensor``, ``Float8Tensor``, ``IntxUnpackedToInt8Tensor``; before (0.13):
``AffineQuantizedTensor`` in the plain and the float8 layout, also where activations are quantized.
In safetensors, as transformers 5 writes them, the class and the size of blocks are in the header's
metadata alone; there a block is what the scales divide a tensor into.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.quantization.model import Kind, Quantized, Scheme, Surroundings
from ckptool.core.quantization.schemes.scaled import compute_scaled
from ckptool.core.views import insert_dim

_KIND = Kind("torchao", "torchao")
_FLAT = re.compile(r"(.*)\._(\w+)_qdata")
_INNER = ".original_weight_tensor"
_VALUES = {
    ".qdata": "",
    ".tensor_impl.int_data": ".tensor_impl",
    ".tensor_impl.float8_data": ".tensor_impl",
}
"""The names of the integers or floats, and of their scales."""
_PLAIN = ("PlainLayout", "QDQLayout", "Float8Layout")
_INTEGER_ZEROS, _NO_ZEROS = 1, 3
"""``ZeroPointDomain.INT`` and ``NONE``: a floating-point zero point is added, not subtracted."""


def find(catalog: Catalog, names: Iterable[str]) -> Iterator[Quantized]:
    """Yield tensors with scales, and a block size among their plain values.

    In safetensors ``X.weight`` is ``X._weight_qdata``,
    ``X._weight_scale`` and so on.
    """
    for name in names:
        values = catalog.tensors[name]
        for suffix, inner in _VALUES.items():
            base = name.removesuffix(suffix)
            if base != name and f"{base}.block_size" in catalog.objects:
                outer = base.removesuffix(_INNER)
                yield from _find_in_parts(catalog, values, outer, f"{base}{inner}.", f"{outer}.")
        if match := _FLAT.fullmatch(name):
            head = f"{match[1]}._{match[2]}_"
            yield from _find_in_parts(catalog, values, f"{match[1]}.{match[2]}", head, head)


def _find_in_parts(
    catalog: Catalog, values: TensorEntry, name: str, head: str, whole: str
) -> Iterator[Quantized]:
    """Yield the tensor with scales and zero points ``head...``; all its parts are ``whole...``."""
    tensors = catalog.tensors
    scales, zeros = tensors.get(f"{head}scale"), tensors.get(f"{head}zero_point")
    if scales is None:
        return
    extras = () if zeros is None else (zeros,)
    names = {values.name, scales.name, *(entry.name for entry in extras)}
    objects = {n: o.value for n, o in catalog.objects.items() if n.startswith(whole)}
    inside = {n.removeprefix(whole).removeprefix(f"{_INNER[1:]}."): v for n, v in objects.items()}
    yield Quantized(
        _KIND,
        name,
        values,
        scales,
        _lay_out,
        extras,
        about=tuple(e for n, e in tensors.items() if n.startswith(whole) and n not in names),
        values_beside=inside,
        objects=tuple(objects),
    )


def _lay_out(pair: Quantized, around: Surroundings) -> TensorEntry:
    """Lay out numbers in blocks of the recorded size, each with a scale, and maybe a zero point."""
    if pair.about:
        raise pair.unfit(f"{pair.about[0].name} is not supported by --dequantize")
    settings, shape = pair.values_beside, pair.values.shape
    layout = getattr(settings.get("tensor_impl._layout"), "name", None)
    kind = None if layout is None else str(layout).rpartition(".")[2]
    if kind is not None and kind not in _PLAIN:
        raise pair.unfit(f"torchao's {kind} is not supported, only {', '.join(_PLAIN)}")
    if settings.get("tensor_impl.transposed"):
        raise pair.unfit("it is stored transposed, which is not supported")
    domain = getattr(settings.get("zero_point_domain"), "args", (_INTEGER_ZEROS,))
    if domain not in ((_INTEGER_ZEROS,), (_NO_ZEROS,)):
        raise pair.unfit("floating-point zero points are not supported")
    integers = ("int8", "uint8") if settings else ("int8",)
    if not (pair.values.dtype.is_float8 or pair.values.dtype.name in integers):
        raise pair.unfit(f"torchao's {pair.values.dtype} is not supported, only int8 and float8")
    block = _block(settings.get("block_size")) if settings else _divide(shape, pair.scales.shape)
    if len(block) != len(shape) or any(
        n < 1 or size % n for n, size in zip(block, shape, strict=False)
    ):
        raise pair.unfit("its block_size does not divide it")
    grid = tuple(size // n for size, n in zip(shape, block, strict=True))
    pair.require_type(pair.scales, "float")
    has_domain = "zero_point_domain" in settings
    if not has_domain and any(entry.dtype.kind != "int" for entry in pair.extras):
        raise pair.unfit("non-integer zero points are not supported")
    scales = _as_grid(pair, pair.scales, grid)
    zeros = tuple(_as_grid(pair, entry, grid) for entry in pair.extras)
    return replace(pair, scales=scales, extras=zeros).numbers(
        compute_scaled, around.dtype, shape, block
    )


def _block(value: Any) -> tuple[int, ...]:
    """Return a block size; () if it is none."""
    is_block = isinstance(value, list | tuple) and all(type(n) is int for n in value)
    return tuple(value) if is_block else ()


def _divide(shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, ...]:
    """Return the size of blocks that divide a tensor into a grid; () if none does."""
    if len(shape) != len(grid) or any(n < 1 or s % n for s, n in zip(shape, grid, strict=True)):
        return ()
    return tuple(size // count for size, count in zip(shape, grid, strict=True))


def _as_grid(pair: Quantized, entry: TensorEntry, grid: tuple[int, ...]) -> TensorEntry:
    """Return a view of scales with as many dims as the tensor, adding dims of one index."""
    if entry.shape == grid:
        return entry
    if entry.shape != tuple(n for n in grid if n != 1):
        raise pair.unfit()
    for dim, size in enumerate(grid):
        if size == 1:
            entry = insert_dim(entry, dim)
    return entry


SCHEME = Scheme(
    find,
    (*_VALUES, "_qdata"),
    (_KIND,),
    {"torchao": r"qdata|_\w+_qdata|tensor_impl\..+"},
)
