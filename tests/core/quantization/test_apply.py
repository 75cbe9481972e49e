"""Which kinds a config's method and formats store."""

from __future__ import annotations

from typing import Any

import pytest

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Chunk, Extent, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.quantization.apply import DequantizeResult, dequantize
from ckptool.core.quantization.config import QuantizationConfig
from ckptool.core.quantization.model import Surroundings


def tensor(name: str, dtype: str, shape: tuple[int, ...]) -> TensorEntry:
    at = Extent("model.safetensors", 0, tuple(0 for _ in shape))
    return TensorEntry(name, (name,), BY_NAME[dtype], shape, (Chunk(Box.whole(shape), at),))


EIGHT = (tensor("a.weight", "float8_e4m3fn", (4, 32)), tensor("a.weight_scale", "float32", (4, 1)))
GROUPS = (tensor("a.weight", "float8_e4m3fn", (4, 32)), tensor("a.weight_scale", "uint8", (4, 1)))


def dequantized(entries: tuple[TensorEntry, ...], fields: dict[str, Any]) -> DequantizeResult:
    tensors = {entry.name: entry for entry in entries}
    catalog = Catalog("safetensors", tensors, {}, {"model.safetensors": 0})
    config = QuantizationConfig(fields)
    return dequantize(catalog, Surroundings(BY_NAME["bfloat16"], lambda entry: b"", config))


@pytest.mark.parametrize("method", ["hqq", "vptq", "quanto", "another", "awq", "mxfp4"])
def test_a_method_that_stores_other_kinds_is_contradicted(method: str) -> None:
    result = dequantized(EIGHT, {"quant_method": method})
    (why,) = result.unfit.values()
    assert why.message.endswith(f"quantization_config says {method}, the tensors FP8")


@pytest.mark.parametrize("fields", [{}, {"quant_method": "fp8"}, {"quant_method": "quark"}])
def test_a_method_that_stores_it_is_not(fields: dict[str, Any]) -> None:
    result = dequantized(EIGHT, fields)
    assert ([*result.kinds.values()], result.unfit) == (["FP8"], {})


@pytest.mark.parametrize(
    ("form", "fits"),
    [("mxfp8-quantized", True), ("mxfp6-pack-quantized", False), ("W4A16_AWQ", False),
     ("float-quantized", False), ("of-next-year", True)],
)  # fmt: skip
def test_only_a_format_whose_kinds_are_known_contradicts(form: str, fits: bool) -> None:
    result = dequantized(GROUPS, {"quant_method": "compressed-tensors", "format": form})
    assert [*result.kinds.values()] == (["MXFP8"] if fits else [])
    assert bool(result.unfit) is not fits
