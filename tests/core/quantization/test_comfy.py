"""Markers of ComfyUI: where they are found, and which are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import bits, convert_to, read_back
from recorded_weights import recorded
from safetensors.torch import save_file

from ckptool.core.casts import Casts
from ckptool.core.dtype import BY_NAME
from ckptool.errors import Unsupported

NAME = "comfy_kitchen_0_2_40"
Tensors = dict[str, torch.Tensor]
FP32 = Casts(BY_NAME["float32"])
KINDS = ["fp8", "nvfp4", "mxfp8", "int8", "int8_rows", "int8_turned", "int4_turned"]


def one(kind: str, dtype: str = "float32") -> tuple[Tensors, torch.Tensor]:
    """What is stored of a recorded weight, as ``fc.weight`` and so on, and its numbers."""
    stored, truth = recorded(NAME)
    head = f"layer.{kind}.{dtype}."
    parts = {f"fc.{n.removeprefix(head)}": t for n, t in stored.items() if n.startswith(head)}
    return parts, truth[f"{head}weight"]


def marker(**said: Any) -> torch.Tensor:
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


def dequantized(tensors: Tensors, out: Path, metadata: dict[str, str] | None = None) -> Any:
    save_file(tensors, out / "in.safetensors", metadata)
    convert_to("safetensors", out / "in.safetensors", out / "m", dequantize=True, casts=FP32)
    return read_back("safetensors", out / "m")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", ["", "model.diffusion_model."])
def test_a_marker_in_the_header_is_one_of_the_weight(kind: str, head: str, out: Path) -> None:
    """ComfyUI's ``convert_old_quants``; some writers leave the head of the names out."""
    stored, truth = one(kind)
    said = json.loads(bytes(stored.pop("fc.comfy_quant").tolist()))
    text = {"_quantization_metadata": json.dumps({"layers": {"fc": said}})}
    named = {head + name: tensor for name, tensor in stored.items()}
    assert dequantized(named, out, text) == {f"{head}fc.weight": bits(truth)}


def test_shards_say_it_in_their_own_headers(out: Path) -> None:
    folder, truths = out / "hf", {}
    folder.mkdir()
    for at, kind in enumerate(("nvfp4", "int8_turned"), 1):
        stored, truths[f"{kind}.fc.weight"] = one(kind)
        said = json.loads(bytes(stored.pop("fc.comfy_quant").tolist()))
        text = {"_quantization_metadata": json.dumps({"layers": {f"{kind}.fc": said}})}
        named = {f"{kind}.{name}": tensor for name, tensor in stored.items()}
        save_file(named, folder / f"model-0000{at}-of-00002.safetensors", text)
    convert_to("safetensors", folder, out / "m", dequantize=True, casts=FP32)
    written = read_back("safetensors", out / "m")
    assert written == {name: bits(truth) for name, truth in truths.items()}


@pytest.mark.parametrize("head", ["", "model.diffusion_model."])
def test_scales_of_earlier_versions_are_known(head: str, out: Path) -> None:
    """ComfyUI 0.3.64: the mark of all, and the scale of inputs, go with them."""
    stored, truth = one("fp8")
    old = {
        f"{head}fc.weight": stored["fc.weight"],
        f"{head}fc.scale_weight": stored["fc.weight_scale"],
        f"{head}fc.scale_input": torch.tensor(2.0),
        f"{head}scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn),
    }
    assert dequantized(old, out) == {f"{head}fc.weight": bits(truth)}


ANOTHER = {"fc.comfy_quant": marker(format="int8_blockwise", group_size=128)}
REFUSED: list[tuple[str, Tensors, str]] = [
    ("int8", ANOTHER, "format int8_blockwise is not supported"),
    ("int8", {"fc.comfy_quant": marker(format="asym_w4a8_int8")}, "asym_w4a8_int8 is not"),
    ("int8", {"fc.comfy_quant": marker(form="int8")}, "says how it is quantized"),
    ("int8", {"fc.comfy_quant": torch.ones(4).byte()}, "says how it is quantized"),
    ("int8", {"fc.comfy_quant": marker(format="int8_tensorwise", axis=1)}, "says axis, which"),
    ("int8", {"fc.comfy_quant": marker(format="mxfp8")}, "not float8_e4m3fn"),
    ("int8", {"fc.pre_quant_scale": torch.ones(40)}, "pre_quant_scale multiplies its inputs"),
    ("int8", {"fc.weight_scale": torch.ones(6)}, "do not match"),
    ("int8", {"fc.weight_scale": torch.ones(1, 40)}, "do not match"),
    ("int8", {"fc.bias": torch.ones(5)}, "only fill a tile"),
    ("int8_turned", {"fc.comfy_quant": marker(format="int8_tensorwise", convrot=True)}, "rotation"),
    (
        "int8_turned",
        {"fc.comfy_quant": marker(format="int8_tensorwise", convrot=True, convrot_groupsize=8)},
        "rotation of 8 columns",
    ),
    ("int4_turned", {"fc.weight_scale": torch.ones(12, 2)}, "do not match"),
    ("nvfp4", {"fc.weight_scale": torch.ones(144, 3).to(torch.float8_e4m3fn)}, "do not match"),
    ("mxfp8", {"fc.weight_scale": torch.ones(160, 3).to(torch.float8_e8m0fnu)}, "do not match"),
    ("mxfp8", {"fc.comfy_quant": marker(format="nvfp4")}, "not uint8"),
    ("fp8", {"fc.comfy_quant": marker(format="float8_e5m2")}, "not float8_e5m2"),
]


@pytest.mark.parametrize(("kind", "changed", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_understood_is_refused_by_name(
    kind: str, changed: Tensors, words: str, out: Path
) -> None:
    stored, _ = one(kind)
    with pytest.raises(Unsupported, match=words) as raised:
        dequantized(stored | changed, out)
    assert "fc.weight" in str(raised.value)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"layers": {"other": {"format": "mxfp8"}}}', '{"layers": {"fc": "mxfp8"}}']
)
def test_a_header_that_does_not_say_it_leaves_nothing_to_guess(text: str, out: Path) -> None:
    """Without their tiles known, these scales would be taken for compressed-tensors'."""
    stored, _ = one("mxfp8")
    del stored["fc.comfy_quant"]
    with pytest.raises(Unsupported, match=r"fc\.weight .*says how it is quantized"):
        dequantized(stored, out, {"_quantization_metadata": text})


def test_a_marker_without_its_weight_is_refused(out: Path) -> None:
    stored, _ = one("fp8")
    with pytest.raises(Unsupported, match=r"other\.comfy_quant: ComfyUI, which"):
        dequantized(stored | {"other.comfy_quant": marker(format="mxfp8")}, out)


@pytest.mark.parametrize("kind", KINDS)
def test_without_dequantize_they_stay_as_they_are(kind: str, out: Path) -> None:
    stored, _ = one(kind)
    save_file(stored, out / "in.safetensors")
    convert_to("safetensors", out / "in.safetensors", out / "m", casts=FP32)
    assert read_back("safetensors", out / "m") == {n: bits(t) for n, t in stored.items()}
