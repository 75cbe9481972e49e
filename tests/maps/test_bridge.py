"""The maps to Megatron-core's names agree with Megatron-Bridge's own mappings, bit for bit.

What they write fills Megatron-core's own models, without a name too few or too many.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from bridge_models import MODELS
from bridge_states import digest, recorded, values
from conftest import convert_to
from core_states import recorded_names
from safetensors.numpy import load_file, save_file

from ckptool.commands.options.rewrite import MapOptions
from ckptool.errors import UsageError

RECORDED, OF_CORE = recorded(), recorded_names()
Arrays = dict[str, np.ndarray]
PARTS = ["query", "key", "value", "z", "x", "B", "C", "dt", "beta", "alpha"]
"""In their order in DeltaNet's and Mamba's projections (Megatron-core 0.20.0, core/ssm)."""


def save(model: str, folder: Path) -> Arrays:
    """Write the model as Hugging Face has it; return its tensors."""
    truth = RECORDED[model]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(truth["config"]))
    tensors = {name: values(name, shape) for name, shape in truth["hf"].items()}
    save_file(tensors, folder / "model.safetensors")
    return tensors


def of_modules(stored: Arrays) -> Arrays:
    """What torch_dist stacks or parts, as Megatron's modules have it, whose names Bridge maps."""
    apart: Arrays = {}
    fused: dict[str, Arrays] = {}
    for name, array in stored.items():
        stacked = re.fullmatch(r"(.*decoder\.layers\.)(?!\d)(.*)", name)
        layers = list(enumerate(array)) if stacked else [(None, array)]
        for layer, part in layers:
            inner = name if stacked is None else f"{stacked[1]}{layer}.{stacked[2]}"
            # torch_dist keeps the name that the module had before core 0.17
            inner = re.sub(r"(mtp\.layers\.\d+\.)transformer_layer\.", r"\1mtp_model_layer.", inner)
            if ".experts.experts." in inner:
                plain = inner.replace(".experts.experts.", ".experts.")
                apart |= {f"{plain}{e}": np.ascontiguousarray(one) for e, one in enumerate(part)}
            elif parted := re.fullmatch(r"(.*\.(?:in_proj|conv1d)\.(?:weight|bias))\.(\w+)", inner):
                fused.setdefault(parted[1], {})[parted[2]] = part
            else:
                apart[inner] = np.ascontiguousarray(part)
    for name, parts in fused.items():
        apart[name] = np.concatenate([parts[at] for at in sorted(parts, key=PARTS.index)])
    return apart


@pytest.mark.parametrize("model", MODELS)
def test_as_megatron_bridge_maps_and_back(model: str, out: Path) -> None:
    tensors = save(model, out / "hf")
    convert_to("safetensors", out / "hf", out / "stored", map=MapOptions(MODELS[model][0]))
    stored = load_file(out / "stored" / "model.safetensors")
    hybrid = model.startswith("nemotron_h")  # which has no older name
    assert hybrid or not any("mtp_model_layer" in name for name in stored)
    asked = {name: list(array.shape) for name, array in stored.items()}
    assert OF_CORE.get(model, asked) == asked
    found = of_modules(stored)
    truth = RECORDED[model]["megatron"]
    assert found.keys() == truth.keys()
    assert {n: [list(a.shape), digest(a)] for n, a in found.items()} == truth

    save_file(found, out / "modules.safetensors")
    for at, source in enumerate((out / "stored", out / "modules.safetensors")):
        options = MapOptions("auto", assets=out / "hf")
        done = convert_to("safetensors", source, out / f"back-{at}", map=options)
        assert (done.map.name, done.map.target) == (MODELS[model][0], "Hugging Face")
        back = load_file(out / f"back-{at}" / "model.safetensors")
        assert back.keys() == tensors.keys()
        for name, array in tensors.items():
            one = np.float32("linear_attn.norm" in name)
            assert digest(back[name]) == digest(array - one + one), name


@pytest.mark.parametrize("kind", ["qwen3_5_moe_predicting", "qwen3_5_vl_moe_predicting"])
@pytest.mark.parametrize("packed", ["", "model."])
def test_experts_that_the_hubs_files_pack(kind: str, packed: str, out: Path) -> None:
    """Of all layers, as Qwen3.6 has them, or of those of the model, as Qwen3.5."""
    tensors = save(kind, out / "apart")
    together = {n: a for n, a in tensors.items() if ".experts." not in n or packed not in n}
    for layer in {n.partition(".experts.")[0] for n in tensors.keys() - together.keys()}:
        parts = [
            [tensors[f"{layer}.experts.{e}.{part}_proj.weight"] for e in range(3)]
            for part in ("gate", "up", "down")
        ]
        gate, up, down = map(np.stack, parts)
        together[f"{layer}.experts.gate_up_proj"] = np.concatenate([gate, up], 1)
        together[f"{layer}.experts.down_proj"] = down
    assert len(together) < len(tensors)
    (out / "packed").mkdir()
    (out / "packed" / "config.json").write_text((out / "apart" / "config.json").read_text())
    save_file(together, out / "packed" / "model.safetensors")
    stored = []
    for source in ("apart", "packed"):
        options = MapOptions("auto")
        done = convert_to("safetensors", out / source, out / f"{source}-stored", map=options)
        assert done.map.name == MODELS[kind][0]
        stored.append(load_file(out / f"{source}-stored" / "model.safetensors"))
    assert stored[0].keys() == stored[1].keys()
    assert all(np.array_equal(stored[1][name], array) for name, array in stored[0].items())


def test_the_hubs_gemma_3_has_its_vision_model_a_step_deeper(out: Path) -> None:
    tensors = save("gemma3_vl", out / "hf")
    old, new = "vision_tower.", "vision_tower.vision_model."
    (out / "hf" / "model.safetensors").unlink()
    hub = {n.replace(old, new): a for n, a in tensors.items()}
    save_file(hub, out / "hf" / "model.safetensors")
    convert_to("safetensors", out / "hf", out / "stored", map=MapOptions("auto"))
    found = of_modules(load_file(out / "stored" / "model.safetensors"))
    truth = RECORDED["gemma3_vl"]["megatron"]
    assert {n: [list(a.shape), digest(a)] for n, a in found.items()} == truth


def test_a_second_block_that_predicts_further_tokens_is_refused(out: Path) -> None:
    tensors = save("nemotron_h_latent_predicting", out / "hf")
    (out / "hf" / "model.safetensors").unlink()
    more = {"mtp.layers.2.eh_proj.weight": tensors["mtp.layers.0.eh_proj.weight"]}
    save_file(tensors | more, out / "hf" / "model.safetensors")
    with pytest.raises(UsageError, match=r"mtp\.layers\.2\.eh_proj"):
        convert_to("dcp", out / "hf", out / "dcp", map=MapOptions("megatron-nemotron-h"))


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_vl_moe"])
def test_a_vision_model_has_as_many_layers_as_it_likes(kind: str, out: Path) -> None:
    """As all of Qwen3-VL but the tiny: 27 blocks that see, and 36 layers in 8B."""
    tensors = save(kind, out / "whole")
    last = max(int(m[1]) for n in tensors if (m := re.search(r"visual\.blocks\.(\d+)\.", n)))
    fewer = {n: a for n, a in tensors.items() if f"visual.blocks.{last}." not in n}
    assert 0 < len(fewer) < len(tensors)
    (out / "whole" / "model.safetensors").unlink()
    save_file(fewer, out / "whole" / "model.safetensors", {"format": "pt"})
    there, back = out / "megatron", out / "back"
    name = f"megatron-{kind.replace('_', '-')}"
    convert_to("dcp", out / "whole", there, map=MapOptions(name))
    convert_to("safetensors", there, back, map=MapOptions(name, assets=out / "whole"))
    again = load_file(back / "model.safetensors")
    assert again.keys() == fewer.keys()
    assert all(np.array_equal(again[name], array) for name, array in fewer.items())
