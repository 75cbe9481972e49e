"""Names that tell a kind of quantized tensors, whole or not."""

from __future__ import annotations

import pytest

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Chunk, Extent, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.quantization.names import is_plain, kinds, quantized_names
from ckptool.core.quantization.schemes import SCHEMES

MARKS = {
    "a.weight.quant_state.bitsandbytes__nf4": "bitsandbytes, 4 bit",
    "a.weight.quant_state.bitsandbytes__of_next_year": "bitsandbytes, 4 bit",
    "a.b.SCB": "bitsandbytes, 8 bit",
    "a.g_idx": "GPTQ",
    "a.qweight": "AWQ",
    "a.weight_packed": "compressed-tensors, packed",
    "a.weight_g_idx": "compressed-tensors, reordered",
    "a.weight_scale_2": "NVFP4",
    "int_repr": "by torch (int_repr)",
    "a.int_repr": "by torch (int_repr)",
    "a.W_q": "HQQ",
    "a.quantized_scalers": "NF4 by torchao",
    "a.qdata": "torchao",
    "a._weight_qdata": "torchao",
    "a.tensor_impl.packed.data": "torchao",
    "a.comfy_quant": "ComfyUI",
}
PLAIN = ["SCB", "a.xSCB", "g_idx", "a.qdata.b", "a.weight_qdata", "a.quant_state", "tensor_impl.a"]


def one(name: str) -> Catalog:
    entry = TensorEntry(
        name, (name,), BY_NAME["float32"], (2,), (Chunk(Box((0,), (2,)), Extent("f", 0, (4,))),)
    )
    return Catalog("safetensors", {name: entry}, {}, {"f": 8})


@pytest.mark.parametrize(("name", "kind"), MARKS.items())
def test_a_name_tells_a_kind(name: str, kind: str) -> None:
    assert kinds(one(name)) == {kind: 1}
    assert not is_plain(one(name))


@pytest.mark.parametrize("name", PLAIN)
def test_other_names_tell_none(name: str) -> None:
    assert kinds(one(name)) == {}
    assert is_plain(one(name))


def test_all_of_a_module_belongs_to_a_kind_but_its_bias() -> None:
    """However deep below it: a marker of bitsandbytes without the scales is three steps deep."""
    parts = ["a.weight", "a.weight.quant_state.bitsandbytes__nf4", "a.bias", "b.weight"]
    tensors = {name: one(name).tensors[name] for name in parts}
    assert quantized_names(one("a").with_tensors(tensors)) == {*parts[:2]}


def test_each_kind_is_of_one_scheme() -> None:
    names = [kind.name for scheme in SCHEMES for kind in scheme.kinds]
    marks = [kind for scheme in SCHEMES for kind in scheme.marks]
    assert len(marks) == len({*marks})
    assert {name for name in names if names.count(name) > 1} == {"MXFP4"}
