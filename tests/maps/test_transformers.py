"""Models of transformers, converted to a trainer's layout and back: bit-equal, and loadable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import convert_to

from ckptool.commands.options.rewrite import MapOptions

transformers = pytest.importorskip("transformers")
import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from bridge_states import on_the_hub  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: E402

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 103,
    "max_position_embeddings": 64,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
DELTA = {
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
SEEING = {"hidden_size": 16, "intermediate_size": 20, "patch_size": 4}
SIGLIP = {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16}
QWEN_SEES = {"depth": 2, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16}
MOONVIT = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pos_emb_height": 3,
    "pos_emb_width": 5,
    "merge_kernel_size": [2, 2],
}
MAMBA = {
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "attention", "mlp", "moe"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 10,
    "n_groups": 2,
    "ssm_state_size": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "moe_latent_size": 12,
}
GLM = MOE | {
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "use_qk_norm": True,
    "attention_bias": True,
    "head_dim": 12,
}
V4 = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_many_heads": ("Llama", {"num_key_value_heads": 4, "head_dim": 16}),
    "mistral": ("Mistral", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_tied": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", MOE),
    "qwen3_moe_and_dense": ("Qwen3Moe", MOE | {"mlp_only_layers": [1]}),
    "qwen2_moe": ("Qwen2Moe", MOE | {"shared_expert_intermediate_size": 40}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK | {"q_lora_rank": 24}),
    "deepseek_v3_plain": ("DeepseekV3", DEEPSEEK | {"q_lora_rank": None}),
    "deepseek_v3_of_experts": ("DeepseekV3", DEEPSEEK | {"first_k_dense_replace": 0}),
    "deepseek_v4": ("DeepseekV4", V4),
    "gemma3_vl": ("Gemma3", {"head_dim": 12, "vision_config": SEEING | SIGLIP}),
    "glm4_moe": ("Glm4Moe", GLM),
    "kimi_k25": ("Kimi_K25", DEEPSEEK | {"q_lora_rank": 24, "vision_config": SEEING | MOONVIT}),
    "minimax_m2": ("MiniMaxM2", MOE | {"num_local_experts": 4, "head_dim": 12}),
    "nemotron_h": ("NemotronH", MAMBA),
    "qwen3_5": ("Qwen3_5", DELTA | {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3_5_moe": ("Qwen3_5Moe", DELTA | MOE | {"shared_expert_intermediate_size": 40}),
    "qwen3_5_vl": ("Qwen3_5", DELTA | {"vision_config": SEEING | QWEN_SEES}),
}
CASES = [
    ("torchtitan-llama3", "llama"),
    ("torchtitan-llama3", "llama_tied"),
    ("torchtitan-llama3", "llama_many_heads"),
    ("torchtitan-qwen3", "qwen3"),
    ("torchtitan-qwen3", "qwen3_tied"),
    ("torchtitan-qwen3", "qwen3_moe"),
    ("torchtitan-deepseek-v3", "deepseek_v3"),
    ("torchtitan-deepseek-v3", "deepseek_v3_plain"),
    ("meta-llama", "llama"),
    ("megatron-gpt", "llama"),
    ("megatron-gpt", "llama_tied"),
    ("megatron-gpt", "mistral"),
    ("megatron-gpt", "qwen2"),
    ("megatron-gpt", "qwen3"),
    ("megatron-moe", "qwen3_moe"),
    ("megatron-moe", "qwen3_moe_and_dense"),
    ("megatron-moe", "qwen2_moe"),
    ("megatron-mixtral", "mixtral"),
    ("megatron-deepseek-v3", "deepseek_v3"),
    ("megatron-deepseek-v3", "deepseek_v3_plain"),
    ("megatron-deepseek-v3", "deepseek_v3_of_experts"),
    ("transformers-deepseek-v4", "deepseek_v4"),
    ("megatron-gemma3-vl", "gemma3_vl"),
    ("megatron-glm4-moe", "glm4_moe"),
    ("megatron-kimi-k2.5", "kimi_k25"),
    ("megatron-minimax-m2", "minimax_m2"),
    ("megatron-nemotron-h", "nemotron_h"),
    ("megatron-qwen3.5", "qwen3_5"),
    ("megatron-qwen3.5", "qwen3_5_moe"),
    ("megatron-qwen3.5-vl", "qwen3_5_vl"),
]


def _kind(more: dict[str, Any]) -> str:
    """The end of the name of the class: a model that sees is not for text alone."""
    return "ForConditionalGeneration" if "vision_config" in more else "ForCausalLM"


def _config(name: str, given: dict[str, Any]) -> Any:
    """The configuration of a model of text, or of one that sees."""
    if "vision_config" not in given:
        has_text = hasattr(transformers, f"{name}TextConfig")
        return getattr(transformers, f"{name}{'Text' * has_text}Config")(**given)
    text = {key: value for key, value in given.items() if key != "vision_config"}
    config = getattr(transformers, f"{name}Config")
    return config(text_config=text, vision_config=given["vision_config"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny random model of each family, as save_pretrained leaves it."""
    found = {}
    for family, (name, more) in FAMILIES.items():
        torch.manual_seed(3)
        model = getattr(transformers, f"{name}{_kind(more)}")(_config(name, SMALL | more))
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.data.normal_(std=0.2)
        for tensor_name, tensor in model.named_parameters():
            if "linear_attn.norm" in tensor_name:  # from which Megatron takes one: of few digits
                tensor.data.mul_(64).round_().div_(64)
        found[family] = tmp_path_factory.mktemp(family)
        model.save_pretrained(found[family])
        if family == "kimi_k25":
            file = found[family] / "model.safetensors"
            save_file({on_the_hub(n): t for n, t in load_file(file).items()}, file)
    return found


def logits(folder: Path) -> torch.Tensor:
    """What the model in a folder says to a fixed text; every key is there, and none too many."""
    sees = "vision_config" in (folder / "config.json").read_text()
    kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    model, loading = kind.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert not loading["mismatched_keys"]
    with torch.no_grad():
        return model.eval()(torch.arange(24).reshape(2, 12) * 4).logits


@pytest.mark.parametrize(("name", "family"), CASES)
def test_to_the_trainer_and_back(name: str, family: str, saved: dict[str, Path], out: Path) -> None:
    source = saved[family]
    padding = {"extra": 9} if name.startswith("megatron") else {}
    there = convert_to("dcp", source, out / "trainer", map=MapOptions(name, padding))
    assert there.map is not None
    options = MapOptions("auto" if name != "meta-llama" else name, assets=source)
    back = convert_to("safetensors", out / "trainer", out / "back", map=options)
    assert back.map is not None
    assert (back.map.name, back.map.target) == (name, "Hugging Face")
    wanted, found = (load_file(folder / "model.safetensors") for folder in (source, out / "back"))
    if family != "deepseek_v4":  # whose names are the Hub's then, which save_pretrained changes
        assert found.keys() == wanted.keys()
        assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []
    assert torch.equal(logits(out / "back"), logits(source))


class HFTransformerModel(torch.nn.Module):
    """Holds a model as torchtitan's (0.3.0) backend for models of transformers does."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        layers = {str(n): layer for n, layer in enumerate(model.model.layers)}
        model.model.layers = torch.nn.ModuleDict(layers)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"strip_prefix": "model.", "drop": ("optimizer.*",)}),
        ("qwen3_tied", {"model_only": True}),
    ],
)
def test_what_torchtitans_backend_for_transformers_saves(
    family: str, options: dict[str, Any], saved: dict[str, Path], out: Path
) -> None:
    """Every name has ``model.`` before it, those of the optimizer too."""
    source = saved[family]
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    trained = HFTransformerModel(model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.0)
    for parameter in trained.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state, moments = get_state_dict(trained, optimizer)
    assert "model.model.norm.weight" in state
    dcp.save({**state, "optimizer": moments}, checkpoint_id=out / "step-5", no_dist=True)
    convert_to("hf", out / "step-5", out / "hf", map=MapOptions(assets=source), **options)
    wanted, found = (load_file(folder / "model.safetensors") for folder in (source, out / "hf"))
    tied = {"lm_head.weight"} if family.endswith("tied") else set()
    assert found.keys() - tied == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert torch.equal(logits(out / "hf"), logits(source))
