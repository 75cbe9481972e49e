"""Small models of every family whose experts transformers packs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import convert_to

from ckptool.commands.options.rewrite import MapOptions

transformers = pytest.importorskip("transformers")


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


UNTIED = {"tie_word_embeddings": False}


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


KIMI = {
    "pad_token_id": 0,
    "num_experts": 3,
    "num_experts_per_token": 2,
    "linear_num_heads": 2,
    "linear_head_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
}


SPARSE = {"mlp_layer_types": ["dense", "sparse"], "layer_types": ["full_attention"] * 2}


INDEXED = {"index_head_dim": 4, "index_n_heads": 2, "mlp_layer_types": ["dense", "sparse"]}


LAYERS = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
"""Of vision that has its sizes under the names of text."""


SAM = LAYERS | {
    "hidden_size": 8,
    "mlp_dim": 12,
    "output_channels": 6,
    "global_attn_indexes": (0,),
    "window_size": 2,
    "downsample_channels": [6, 16],
}


OCR = ROUTED | {
    "num_key_value_heads": 4,
    "mlp_layer_types": ["dense", "sparse"],
    "n_group": 1,
    "topk_group": 1,
}


SOUND = (
    LAYERS
    | {"feature_size": 16, "downsample_hidden_size": 8}
    | dict.fromkeys(("adapter_input_size", "adapter_out_dim"), 16)
)


QWEN_LINEAR = {
    "shared_expert_intermediate_size": 8,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}


VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "out_hidden_size": 16,
    "patch_size": 4,
}


WITH_VISION: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Glm4vMoe": (
        ROUTED | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        VISION | {"image_size": 16, "spatial_merge_size": 2},
    ),
    "Qwen3_5Moe": (
        MOE | QWEN_LINEAR,
        VISION | {"num_position_embeddings": 16},
    ),
    "Qwen3VLMoe": (
        MOE,
        VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    ),
    "Ernie4_5_VLMoe": (
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": None,
            "rope_parameters": {
                "rope_theta": 1e4,
                "rope_type": "default",
                "mrope_section": [1, 1, 2],
            },
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": [12, 6],
            "mlp_layer_types": ["dense", "sparse"],
        },
        VISION,
    ),
    "Glm5Next": (
        DEEPSEEK
        | INDEXED
        | {"qk_rope_head_dim": 0, "n_group": 1, "hc_mult": 2, "pad_token_id": 0}
        | {"layer_types": ["linear_attention", "indexed_attention"]}
        | {"indexer_types": ["full"] * 2, "linear_head_dim": 4, "linear_num_heads": 2},
        VISION | {"image_size": 16, "projection_intermediate_size": 18},
    ),
    "Qwen4Exp": (
        MOE
        | QWEN_LINEAR
        | {"layer_types": ["linear_attention", "full_attention"], "hc_count": 2, "hc_lowrank": 3}
        | {"ple_embed_dim": 32, "ngram_vocab_size_base": 64, "split_ngram_parts": 2}
        | {"make_ngram_vocab_size_divisible_by": 2, "ple_layer_ids": [1], "eos_token_id": 1}
        | {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 4}
        | {"indexer_budget": 4, "indexer_compress_ratio": 2},
        VISION | {"num_position_embeddings": 16},
    ),
    "DeepseekOcr2": (OCR, {"sam_config": SAM, "encoder_config": SMALL}),
    "UnlimitedOcr": (
        OCR | {"layer_types": ["reference_sliding_attention"] * 2},
        {"sam_config": SAM, "encoder_config": LAYERS},
    ),
    "MistralLarge4": (
        DEEPSEEK
        | INDEXED
        | {"n_group": 1, "indexer_types": ["full"] * 2, "no_rope_layers": [1, 1]}
        | {"layer_types": ["indexed_attention"] * 2, "kv_source_layers": [0, 1]},
        LAYERS | {"head_dim": 8},
    ),
    "MiniMaxM3VL": (
        {"num_local_experts": 3, "num_experts_per_tok": 2, "dense_intermediate_size": 24}
        | {"shared_intermediate_size": 12, "rotary_dim": 2}
        | {"mlp_layer_types": ["dense", "sparse"], "index_n_heads": 2, "index_head_dim": 4}
        | {"layer_types": ["full_attention", "minimax_m3_sparse"]},
        LAYERS,
    ),
    "Dots3Note": (
        DEEPSEEK
        | INDEXED
        | {f"swa_{key}": size for key, size in DEEPSEEK.items() if "lora" in key or "head" in key}
        | {"swa_num_attention_heads": 4, "swa_head_dim": 8, "head_dim": 8, "n_group": 1}
        | {"layer_types": ["sliding_attention", "indexed_attention"]}
        | {"shared_experts_intermediate_size": 8}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        LAYERS
        | {"num_hidden_layers": 3, "pyramid_num_routed": [-1, 5, 3], "moe_intermediate_size": 6}
        | {"adapter_in_dim": 16, "adapter_out_dim": 16},
    ),
    "InternVL": (
        MOE | {"model_type": "qwen3_moe"},
        LAYERS | {"image_size": [16, 16], "patch_size": [4, 4]},
    ),
    "LlavaNext": (
        MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 8},
        LAYERS | {"model_type": "clip_vision_model"},
    ),
    "Kimi_K25": (
        DEEPSEEK | {"model_type": "deepseek_v3", "n_group": 1},
        LAYERS
        | {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2}
        | {f"pos_emb_{dim}": 4 for dim in ("height", "width")},
    ),
}
"""Families inside a model of images: the sizes of text, and of vision."""


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
    "MiniMax": {"num_local_experts": 3},
    "DeepseekV2": DEEPSEEK,
    "DeepseekV32": DEEPSEEK,
    "Glm4MoeLite": DEEPSEEK,
    "GlmMoeDsa": DEEPSEEK,
    "Dots1": ROUTED | {"n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "SolarOpen": ROUTED | {"n_group": 1, "topk_group": 1},
    "Afmoe": MOE,
    "Cohere2Moe": MOE | UNTIED,
    "FlexOlmo": {"num_experts": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "LongcatFlash": DEEPSEEK
    | {"zero_expert_num": 0, "expert_ffn_hidden_size": 12, "ffn_hidden_size": 20, "num_layers": 1},
    "Qwen3_5MoeText": MOE | {"shared_expert_intermediate_size": 8},
    "Phimoe": {"num_local_experts": 3},
    "Ernie4_5_Moe": UNTIED | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 12},
    "Jamba": {"num_experts": 3},
    "Lfm2Moe": MOE | UNTIED | {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
    "ExaoneMoe": MOE | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1} | SPARSE,
    "HYV3": MOE | {"first_k_dense_replace": 1},
    "Mellum": MOE | UNTIED,
    "MiMoV2Flash": ROUTED | UNTIED | {"sliding_window": 8, "v_head_dim": 4},
    "KimiLinear": DEEPSEEK | UNTIED | KIMI,
    "Laguna": MOE | UNTIED | {"shared_expert_intermediate_size": 8},
    "AXK1": DEEPSEEK | UNTIED | {"n_group": 1},
    "AXK2": DEEPSEEK | UNTIED | INDEXED | {"n_group": 1, "gated_norm_rank": 3},
    "BailingHybrid": DEEPSEEK | UNTIED | KIMI | {"num_expert_group": 1, "eos_token_id": 1},
    "Beam": MOE | UNTIED | {"mlp_layer_types": ["dense", "sparse"], "n_group": 1, "topk_group": 1},
    "Flint": MOE | UNTIED | {"shared_expert_intermediate_size": 8, "mlp_only_layers": [1]},
    "SarvamMLA": DEEPSEEK | UNTIED,
    "SarvamMoE": ROUTED | UNTIED,
    "SarvamMoE with biases": ROUTED | UNTIED | {"attention_bias": True},
    "Kolibri1": UNTIED
    | {"num_local_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    | {"shared_expert_intermediate_size": 8},
    "DeepseekV4": ROUTED
    | UNTIED
    | INDEXED
    | {"num_key_value_heads": 1, "q_lora_rank": 8, "o_groups": 2, "o_lora_rank": 4, "hc_mult": 2}
    | {"layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"]}
    | {"mlp_layer_types": ["hash_moe", "moe"]},
    "NemotronH": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 12,
        "moe_shared_expert_intermediate_size": 12,
        "hybrid_override_pattern": "ME",
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "ssm_state_size": 4,
    },
}


Saved = tuple[Path, dict[str, torch.Tensor], dict[str, torch.Tensor]]


def qwen3_omni() -> Any:
    """Thinker, talker and what makes sound of codes."""
    sound = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 12}
    sound |= {"d_model": 16, "output_dim": 16, "num_mel_bins": 16, "downsample_hidden_size": 8}
    text = SMALL | MOE | UNTIED
    talking = {key: size for key, size in text.items() if key != "num_experts"}
    talking |= {"num_local_experts": 3, "moe_intermediate_size": 10}
    talking |= {"shared_expert_intermediate_size": 8, "hidden_size": 24}
    thinker = {
        "text_config": text,
        "vision_config": VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        "audio_config": sound,
    }
    talker = {
        "text_config": talking,
        "code_predictor_config": SMALL | {"hidden_size": 24, "num_code_groups": 3},
        "thinker_hidden_size": 16,
        "spatial_merge_size": 2,
        "num_code_groups": 3,
    }
    wave: dict[str, Any] = SMALL | {"num_key_value_heads": 4, "num_hidden_layers": 1}
    wave |= {"decoder_dim": 32}
    wave |= {"upsample_rates": (2, 2), "upsampling_ratios": (2,), "codebook_size": 10}
    config = transformers.Qwen3OmniMoeConfig(
        thinker_config=thinker, talker_config=talker, code2wav_config=wave
    )
    return transformers.Qwen3OmniMoeForConditionalGeneration(config)


PARTS = {
    "Qwen3OmniMoeThinker": "Qwen3OmniMoe",
    "Qwen4ExpText": "Qwen4Exp",
    "Dots3NoteText": "Dots3Note",
}
"""Parts of larger models that are trained alone."""


def made_of(family: str) -> Any:
    """A random model of a family, tiny."""
    if family == "Qwen3OmniMoe":
        return qwen3_omni()
    if family == "Qwen3OmniMoeThinker":
        return qwen3_omni().thinker
    if family in PARTS:
        whole = PARTS[family]
        sizes = SMALL | WITH_VISION[whole][0] | UNTIED
        return getattr(transformers, f"{whole}ForCausalLM")(
            getattr(transformers, f"{family}Config")(**sizes)
        )
    configured = getattr(transformers, f"{family.partition(' ')[0]}Config")
    if family not in WITH_VISION:
        config = configured(**SMALL | (FAMILIES | OF_THEIR_OWN)[family])
        return transformers.AutoModelForCausalLM.from_config(config)
    text, vision = WITH_VISION[family]
    text = {key: size for key, size in (SMALL | text).items() if size is not None}
    beside: dict[str, dict[str, Any]] = {
        "Dots3Note": {"audio_config": SOUND},
        "Kimi_K25": {"projection_hidden_size": 24},
    }
    more = beside.get(family, {})
    config = configured(text_config=text | UNTIED, vision_config=vision, **more, **UNTIED)
    named = CALLED.get(family, f"{family}ForConditionalGeneration")
    return getattr(transformers, named)(config)


CALLED = {"MiniMaxM3VL": "MiniMaxM3SparseForConditionalGeneration"}


OF_THEIR_OWN: dict[str, dict[str, Any]] = {
    "GptOss": {"num_local_experts": 3},
    "Llama4Text": {
        "num_local_experts": 3,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 24,
    },
    "Qwen3VLMoe": {},
}
"""Those whose files are packed too."""


MOMENTS = ("optimizer.state.", ".exp_avg")


HUB = {
    "Kimi_K25": {
        r"^language_model\.model\.blocks\.": "language_model.model.layers.",
        r"^model\.mm_projector\.": "mm_projector.",
        r"^vision_tower\.encoder\.patch_embed\.": "vision_tower.patch_embed.",
    },
    "DeepseekV4": {
        r"^model\.(layers|norm)\.": r"\1.",
        r"^model\.embed_tokens\.": "embed.",
        r"^model\.hc_head\.hc_": "hc_head_",
        r"^(layers\.\d+\.attn)\.norm\.": r"\1.kv_norm.",
    },
}
"""What ``save_pretrained`` calls otherwise than the Hub's files do, and its names there."""


def on_the_hub(family: str, name: str) -> str:
    """What a tensor of ``save_pretrained`` is called in the Hub's files."""
    for own, new in HUB.get(family, {}).items():
        name = re.sub(own, new, name)
    return name


def packed(folder: Path) -> Path:
    """The same folder with its experts packed, as a DCP folder without a config."""
    convert_to("dcp", folder, folder.with_name("packed"), map=MapOptions(experts="packed"))
    (folder.with_name("packed") / "config.json").unlink(missing_ok=True)
    return folder.with_name("packed")
