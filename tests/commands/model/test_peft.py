"""PEFT's adapter from trainers' saves: PEFT 0.21.2's names, and its configuration."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import FIXTURES, convert_to
from safetensors.torch import load_file

from ckptool.commands.options.rewrite import MapOptions
from ckptool.errors import Unsupported, UsageError

BASE = "base_model.model.model"
QUERY = f"{BASE}.layers.0.self_attn.q_proj"
NAMES = {
    f"{QUERY}.lora_A.default.weight": f"{QUERY}.lora_A.weight",
    f"{QUERY}.lora_B.default.weight": f"{QUERY}.lora_B.weight",
    f"{QUERY}.lora_B.default.bias": f"{QUERY}.lora_B.bias",
    f"{QUERY}.lora_magnitude_vector.default.weight": f"{QUERY}.lora_magnitude_vector",
    f"{BASE}.embed_tokens.lora_embedding_A.default": f"{BASE}.embed_tokens.lora_embedding_A",
    f"{BASE}.embed_tokens.lora_embedding_B.default": f"{BASE}.embed_tokens.lora_embedding_B",
    "base_model.model.lm_head.modules_to_save.default.weight": "base_model.model.lm_head.weight",
}
"""What a PeftModel's state dict has, and what get_peft_model_state_dict makes of it."""
OF_BASE = (
    f"{QUERY}.base_layer.weight",
    f"{BASE}.norm.weight",
    "base_model.model.lm_head.original_module.weight",
)


def trained(folder: Path, rename: Any = str, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """A trainer's checkpoint of a base model and its adapter, optimizer included."""
    torch.manual_seed(1)
    model = {name: torch.randn(3, 4) for name in (*NAMES, *OF_BASE)}
    model |= {
        n: t.T.contiguous() for n, t in model.items() if "_B.default" in n and "bias" not in n
    }
    state = {f"model.{rename(name)}": tensor for name, tensor in model.items()} | more
    state["optimizer.state.x.exp_avg"] = torch.ones(2)
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return {NAMES[name]: tensor for name, tensor in model.items() if name in NAMES}


def wrapped(name: str) -> str:
    return name.replace(".layers.0.", ".layers.0._checkpoint_wrapped_module.")


@pytest.mark.parametrize("rename", [str, wrapped, lambda name: f"module.{name}"])
def test_the_adapter_alone_as_peft_names_it(rename: Any, tmp_path: Path) -> None:
    adapter = trained(tmp_path / "a", rename)
    (tmp_path / "a" / "config.json").write_text('{"hidden_size": 7}')
    report = convert_to("hf", tmp_path / "a", tmp_path / "b", peft_adapter=True)
    found = load_file(tmp_path / "b" / "adapter_model.safetensors")
    assert found.keys() == adapter.keys()
    assert all(torch.equal(found[name], adapter[name]) for name in adapter)
    assert [file.name for file in (tmp_path / "b").iterdir()] == ["adapter_model.safetensors"]
    notes = "\n".join(report.notes)
    assert "lora_alpha is not recorded (r 3, target_modules q_proj)" in notes


@pytest.mark.parametrize("trainer", ["fsdp2", "zero_3"])
def test_the_same_bytes_as_peft_saves_itself(trainer: str, tmp_path: Path) -> None:
    """Of a real model, sharded: compiled, under FSDP2; and its frozen part apart, under ZeRO 3."""
    folder = FIXTURES / "peft" / trainer
    assets = MapOptions(assets=folder / "adapter")
    convert_to("hf", folder / "ckpt", tmp_path / "b", peft_adapter=True, map=assets)
    for file in (folder / "adapter").iterdir():
        assert (tmp_path / "b" / file.name).read_bytes() == file.read_bytes()


def test_what_verl_records_makes_the_configuration(tmp_path: Path) -> None:
    trained(tmp_path / "step" / "model")
    meta = {"r": 3, "lora_alpha": 16, "task_type": "CAUSAL_LM"}
    (tmp_path / "step" / "lora_train_meta.json").write_text(json.dumps(meta))
    convert_to("hf", tmp_path / "step" / "model", tmp_path / "b", peft_adapter=True)
    config = json.loads((tmp_path / "b" / "adapter_config.json").read_text())
    assert config.items() >= meta.items()
    assert (config["peft_type"], config["target_modules"]) == ("LORA", ["q_proj"])


@pytest.mark.parametrize("given", ["around", "assets", "beside"])
def test_a_configuration_that_there_is_goes_with_it(given: str, tmp_path: Path) -> None:
    source, assets = tmp_path / "run" / "a", tmp_path / "assets"
    trained(source)
    assets.mkdir()
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "use_dora": True}
    folder = {"around": source.parent, "assets": assets, "beside": source}[given]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"hidden_size": 7}')
    options = MapOptions(assets=assets if given == "assets" else None)
    convert_to("hf", source, tmp_path / "b", peft_adapter=True, map=options)
    written = sorted(file.name for file in (tmp_path / "b").iterdir())
    assert written == ["adapter_config.json", "adapter_model.safetensors"]
    assert json.loads((tmp_path / "b" / "adapter_config.json").read_text()) == config


def test_a_configuration_of_another_rank_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "a")
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    with pytest.raises(
        Unsupported, match=r"says r 8, but .*q_proj.lora_A.weight has rank 3 \(4 tensors"
    ):
        convert_to("hf", tmp_path / "a", tmp_path / "b", peft_adapter=True)


def test_several_adapters_and_none(tmp_path: Path) -> None:
    name = f"model.{BASE}.layers.0.self_attn.q_proj.lora_A.second.weight"
    trained(tmp_path / "a", **{name: torch.ones(2, 2)})
    with pytest.raises(UsageError, match="2 adapters: default, second") as caught:
        convert_to("hf", tmp_path / "a", tmp_path / "b", peft_adapter=True)
    assert "--select '*.second*'" in str(caught.value.hint)
    convert_to("hf", tmp_path / "a", tmp_path / "b", peft_adapter=True, select=("*.second*",))
    assert list(load_file(tmp_path / "b" / "adapter_model.safetensors")) == [
        f"{QUERY}.lora_A.weight"
    ]
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(UsageError, match="no LoRA among 1 tensor"):
        convert_to("hf", tmp_path / "c", tmp_path / "d", peft_adapter=True)


def test_the_adapters_of_two_models_are_not_one(tmp_path: Path) -> None:
    names = [name for name in NAMES if name.startswith(QUERY)]
    two = {f"{model}.{name}": torch.ones(3, 4) for model in ("policy", "value") for name in names}
    dcp.save({f"model.{name}": two[name] for name in two}, checkpoint_id=tmp_path / "a")
    with pytest.raises(Unsupported, match=r"policy\..* and .*value\..* are both base_model"):
        convert_to("hf", tmp_path / "a", tmp_path / "b", peft_adapter=True)


def test_what_is_trained_besides_is_not_lost(tmp_path: Path) -> None:
    tokens = f"{BASE}.embed_tokens.token_adapter.trainable_tokens_delta.default"
    trained(tmp_path / "a", **{f"model.{tokens}": torch.ones(2, 4)})
    with pytest.raises(Unsupported, match="trainable_token_indices") as raised:
        convert_to("hf", tmp_path / "a", tmp_path / "b", peft_adapter=True)
    assert "--drop '*.token_adapter." in str(raised.value.hint)
    assets = tmp_path / "assets"
    assets.mkdir()
    for wrong, words in (({"r": 3, "bias": "all"}, "says bias all"), ({"r": 8}, "says r 8")):
        (assets / "adapter_config.json").write_text(json.dumps(wrong))
        with pytest.raises(Unsupported, match=words):
            convert_to(
                "hf",
                tmp_path / "a",
                tmp_path / "b",
                peft_adapter=True,
                drop=("*.token_adapter.*",),
                map=MapOptions(assets=assets),
            )


def test_frozen_weights_that_were_not_saved_are_not_asked_for(tmp_path: Path) -> None:
    """As DeepSpeed 0.19.8 saves with ``exclude_frozen_parameters``, in ZeRO 3 and 2 alike."""
    folder = FIXTURES / "peft" / "zero_3" / "ckpt"
    shutil.copytree(folder, tmp_path / "run")
    for file in tmp_path.rglob("*_model_states.pt"):
        state = torch.load(file, weights_only=False)
        trained = {name for group in state["param_shapes"] for name in group}
        module = {name: t for name, t in state["module"].items() if name in trained}
        state |= {"frozen_param_shapes": None, "frozen_param_fragments": None, "module": module}
        torch.save(state, file)
    with pytest.raises(Unsupported, match="without its frozen parameters"):
        convert_to("hf", tmp_path / "run", tmp_path / "whole", model_only=True)
    for source, target in ((folder, "a"), (tmp_path / "run", "b")):
        convert_to("hf", source, tmp_path / target, peft_adapter=True)
    made = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("a", "b")]
    assert made[0] == made[1]
