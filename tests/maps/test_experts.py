"""Experts that transformers packs in memory, one by one: its own files say how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import bits, convert_to, flat, load_dcp, read_back

from ckptool.commands.options.rewrite import MapOptions
from ckptool.errors import Unsupported, UsageError

transformers = pytest.importorskip("transformers")
import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 51,
}
MOE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
DEEPSEEK = ROUTED | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": MOE | {"mlp_only_layers": [1]},
    "Qwen2Moe": MOE | {"shared_expert_intermediate_size": 8},
    "Qwen3Next": MOE | {"shared_expert_intermediate_size": 8},
    "Olmoe": {"num_experts": 3, "num_experts_per_tok": 2},
    "DeepseekV3": DEEPSEEK,
    "Glm4Moe": ROUTED | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "HunYuanMoEV1": {"num_experts": 3},
    "Mixtral": {"num_local_experts": 3},
    "MiniMaxM2": {"num_local_experts": 3},
}
Saved = tuple[Path, dict[str, torch.Tensor], dict[str, torch.Tensor]]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Saved:
    """A DCP folder of a model's state dict, that state dict, and what its files hold."""
    config = getattr(transformers, f"{request.param}Config")(**SMALL | FAMILIES[request.param])
    made = transformers.AutoModelForCausalLM.from_config(config)
    made.save_pretrained(tmp_path / "hf")
    state = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    moments = {f"optimizer.state.{n}.exp_avg": t.detach() + 1 for n, t in made.named_parameters()}
    dcp.save(state | moments, checkpoint_id=tmp_path / "dcp", no_dist=True)
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    return tmp_path, state, {n: t for file in files for n, t in load_file(file).items()}


def test_files_are_those_of_transformers_and_back(model: Saved) -> None:
    folder, state, files = model
    options = MapOptions("auto", assets=folder / "hf")
    convert_to("hf", folder / "dcp", folder / "out", map=options, model_only=True)
    written = read_back("safetensors", folder / "out")
    assert written == {name: bits(tensor) for name, tensor in files.items()}
    name = "mixtral" if any("block_sparse_moe" in n for n in files) else "experts"
    packing = MapOptions(f"transformers-{name}")
    convert_to("dcp", folder / "out", folder / "back", map=packing)
    again = flat(load_dcp(folder / "back"))
    assert {n: bits(t) for n, t in again.items()} == {n: bits(t) for n, t in state.items()}


def test_moments_go_with_their_experts(model: Saved) -> None:
    folder, _, files = model
    options = MapOptions("auto", assets=folder / "hf")
    convert_to("dcp", folder / "dcp", folder / "out", map=options)
    written = flat(load_dcp(folder / "out"))
    moments = {n: t for n, t in written.items() if n.startswith("optimizer.")}
    assert any(".experts.1." in name for name in moments)
    for name, tensor in moments.items():
        weight = files[name.removeprefix("optimizer.state.").removesuffix(".exp_avg")]
        assert torch.equal(tensor, weight + 1)


def test_another_way_to_pack_is_refused(tmp_path: Path) -> None:
    """gpt-oss has its columns interleaved, and biases."""
    packed = {"gate_up_proj": (3, 16, 24), "gate_up_proj_bias": (3, 24), "down_proj": (3, 12, 16)}
    state = {f"model.layers.0.mlp.experts.{n}": torch.ones(s) for n, s in packed.items()}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(UsageError, match="gate_up_proj_bias"):
        convert_to("hf", tmp_path / "dcp", tmp_path / "a", map=MapOptions("transformers-experts"))
    del state["model.layers.0.mlp.experts.gate_up_proj_bias"]
    dcp.save(state, checkpoint_id=tmp_path / "unbiased", no_dist=True)
    (tmp_path / "unbiased" / "config.json").write_text('{"hidden_size": 16}')
    with pytest.raises(Unsupported, match="does not match"):
        convert_to(
            "hf", tmp_path / "unbiased", tmp_path / "b", map=MapOptions("transformers-experts")
        )
