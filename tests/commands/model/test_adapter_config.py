"""An adapter's tensors against its adapter_config.json, as PEFT 0.21 makes both."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptool

LAYER = "base_model.model.model.layers.0"
CONFIG = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "base_model_name_or_path": "m"}


def lora(module: str, rank: int, *, rows: int = 32, inputs: int = 16) -> dict[str, torch.Tensor]:
    return {
        f"{LAYER}.{module}.lora_A.weight": torch.ones(rank, inputs),
        f"{LAYER}.{module}.lora_B.weight": torch.ones(rows, rank),
    }


SOUND = lora("self_attn.q_proj", 8) | lora("self_attn.v_proj", 8)


def verified(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return ckptool.verify(folder)


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        ({}, SOUND),
        ({"r": 8, "rank_pattern": {"self_attn.k_proj": 2, "k_proj": 4}},
         SOUND | lora("self_attn.k_proj", 2)),
        ({"rank_pattern": {"^model.layers.0.mlp.up_proj": 3}}, SOUND | lora("mlp.up_proj", 3)),
        ({"rank_pattern": {r"layers\.\d+\.mlp\..*": 3, "(a+)+$": 4}},
         SOUND | lora("mlp.up_proj", 3)),
        ({"alpha_pattern": {"q_proj": 64}}, SOUND),
        ({"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
         SOUND | lora("mlp.experts", 32) | lora("mlp.experts.base_layer", 32)),
        ({"target_parameters": ["mlp.experts.down_proj"], "rank_pattern": {"experts": 2}},
         SOUND | lora("mlp.experts", 6)),
        ({"target_parameters": ["mlp.experts.down_proj"], "rank_pattern": {"experts": 5}},
         SOUND | lora("mlp.experts", 16)),
        ({"rank_pattern": {r"layers\.[02]\..*": 5, "v_proj": 3}}, lora("self_attn.v_proj", 5)),
        ({"use_dora": True},
         SOUND | {f"{LAYER}.self_attn.q_proj.lora_magnitude_vector": torch.ones(32)}),
        ({}, {f"{LAYER}.embed.lora_embedding_A": torch.ones(8, 50),
              f"{LAYER}.embed.lora_embedding_B": torch.ones(16, 8)}),
        ({}, {f"{LAYER}.conv.lora_A.weight": torch.ones(8, 4, 3, 3),
              f"{LAYER}.conv.lora_B.weight": torch.ones(6, 2, 1, 1)}),
        ({"lora_bias": True}, SOUND | {f"{LAYER}.self_attn.q_proj.lora_B.bias": torch.ones(32)}),
        ({"modules_to_save": ["lm_head"]},
         SOUND | {"base_model.model.lm_head.weight": torch.ones(5, 5)}),
        ({"peft_type": "LOHA"}, {f"{LAYER}.q.hada_w1_a": torch.ones(3, 5)}),
        ({"peft_type": "VERA", "r": 256}, {f"{LAYER}.q.vera_lambda_b": torch.ones(3)}),
        ({"peft_type": "ADALORA", "rank_pattern": {"q": [True]}}, lora("q", 5)),
        ({"peft_type": "ADALORA", "rank_pattern": {"q": [False]}}, lora("q", 0)),
        ({"peft_type": "PROMPT_TUNING"}, {"prompt_embeddings": torch.ones(3, 5)}),
    ],
)  # fmt: skip
def test_what_peft_saves_is_sound(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    report = verified(tmp_path, config, tensors)
    assert report.ok
    method = config.get("peft_type", "LORA")
    assert any(f"an adapter ({method}); " in finding.message for finding in report.findings)


@pytest.mark.parametrize(
    ("config", "tensors", "words"),
    [
        ({}, {name: tensor.new_empty(0) for name, tensor in SOUND.items()},
         "empty: 4 of 4 tensors, such as"),
        ({}, SOUND | {"base_model.model.lm_head.weight": torch.empty(0)}, "empty: 1 of 5"),
        ({"peft_type": "LOHA"}, {f"{LAYER}.q.hada_w1_a": torch.empty(0)}, "empty: 1 of 1"),
        ({"peft_type": "ADALORA"}, {f"{LAYER}.q.lora_A": torch.empty(0)}, "empty: 1 of 1"),
        ({"r": 16}, SOUND, "says r 16, but .*q_proj.lora_A.weight has rank 8 .4 tensors in all"),
        ({}, SOUND | lora("mlp.up_proj", 4), "says r 8, but .*up_proj.lora_A.weight has rank 4"),
        ({"rank_pattern": {"q_proj": 4}}, SOUND, "says r 4, but .*q_proj"),
        ({"rank_pattern": {"o_proj": 4}}, SOUND | lora("self_attn.o_proj", 8), "r 4, but .*o_proj"),
        ({}, SOUND | lora("mlp.experts", 32), "says r 8, but .*experts.lora_A.weight has rank 32"),
        ({"target_parameters": ["mlp.experts.w"]}, SOUND | lora("mlp.experts", 12), "has rank 12"),
        ({"target_parameters": ["mlp.experts.w"]}, SOUND | lora("mlp.up", 16), "up.* has rank 16"),
        ({}, SOUND | {f"{LAYER}.self_attn.q_proj.lora_B.weight": torch.ones(32, 4)}, "has rank 4"),
        ({"use_dora": True}, SOUND, "says use_dora, but no tensor is a magnitude"),
        ({"use_dora": False}, SOUND | {f"{LAYER}.q.lora_magnitude_vector": torch.ones(3)},
         "does not say use_dora"),
        ({"peft_type": None}, SOUND, "says peft_type null, which is no method's name"),
        ({"peft_type": 3}, SOUND, "says peft_type 3, which is no method's name"),
        ({"r": "8"}, SOUND, "says r '8', which is no rank"),
        ({"rank_pattern": {"q_proj": [1]}}, SOUND, r"says q_proj \[1\], which is no rank"),
        ({"rank_pattern": {"q.*": None}}, SOUND, r"says q\.\* None, which is no rank"),
        ({"target_parameters": 5, "r": 4}, SOUND, "says r 4, but"),
        ({"lora_alpha": math.inf}, SOUND, "says lora_alpha inf, which is no alpha"),
        ({"alpha_pattern": {"q_proj": math.nan}}, SOUND, "says q_proj nan, which is no alpha"),
        ({"lora_alpha": "16"}, SOUND, "says lora_alpha '16', which is no alpha"),
        ({"lora_alpha": 10**400}, SOUND, r"says lora_alpha 10+\.\.\.0+, which is no alpha"),
    ],
)  # fmt: skip
def test_a_config_of_another_adapter_is_an_error(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], words: str, tmp_path: Path
) -> None:
    report = verified(tmp_path, config, tensors)
    (finding,) = [finding for finding in report.findings if finding.severity.value == "error"]
    assert finding.code == "config-mismatch"
    assert re.search(words, finding.message)


@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_a_matrix_without_the_other_one_is_an_error(half: str, tmp_path: Path) -> None:
    left = {name: tensor for name, tensor in SOUND.items() if half not in name or "v_proj" in name}
    report = verified(tmp_path, {}, left)
    (finding,) = [finding for finding in report.findings if finding.severity.value == "error"]
    assert (finding.code, finding.tensor) == (
        "data-missing",
        f"{LAYER}.self_attn.q_proj.{half}.weight",
    )


def test_a_config_that_cannot_be_read(tmp_path: Path) -> None:
    assert verified(tmp_path, {}, SOUND).ok
    (tmp_path / "adapter_config.json").write_text("[")
    found = [f.code for f in ckptool.verify(tmp_path).findings if f.severity.value == "error"]
    assert found == ["metadata-unreadable"]
