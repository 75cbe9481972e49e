"""A merge is mergekit's in 64 bits, and close to what mergekit computes in fewer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import FIXTURES, Case
from safetensors.torch import load_file
from test_merge import run

MODELS = FIXTURES / "mergekit"
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
MERGES = {
    "average": "--average {a} {b} {c} --weights 1,2,0.5",
    "sum": "--average {a} {b} --weights 0.3863,0.6137",
    "task": "--onto {a} --add {b} --minus {c} --scale 0.6137",
}
HALF_STEPS = 4
"""By how many roundings of the largest source mergekit's numbers may differ in the stored type."""


@pytest.mark.parametrize("name", MERGES)
@pytest.mark.parametrize("stored", FLOATS)
def test_a_merge_is_that_of_mergekit(stored: str, name: str, tmp_path: Path) -> None:
    places = {model: MODELS / stored / "ckpt" / model for model in "abc"}
    code, said = run(str(tmp_path / "out"), *MERGES[name].format(**places).split())
    assert code == 0, said
    found = load_file(tmp_path / "out" / "model.safetensors")
    sources = [load_file(place / "model.safetensors") for place in places.values()]
    dtype, truth = FLOATS[stored], Case(f"mergekit/{stored}").truth
    for wide in {str(dtype).removeprefix("torch."), "float32", "float64"}:
        for key, tensor in found.items():
            data = bytearray(truth[f"{name}/{wide}/{key}"][2])
            theirs = torch.frombuffer(data, dtype=dtype).reshape(tensor.shape)
            if wide == "float64":
                assert torch.equal(tensor, theirs), (wide, key)
            step = torch.finfo(dtype).eps / 2
            largest = torch.stack([source[key].double().abs() for source in sources]).amax(0)
            error = (tensor.double() - theirs.double()).abs() / largest
            assert error.max() <= step * HALF_STEPS, (wide, key)
            if dtype == torch.bfloat16 and (wide == "float32" or name != "task"):  # fp32 there
                apart = tensor.view(torch.int16).int() - theirs.view(torch.int16).int()
                assert apart.abs().max() <= 1, (wide, key)
