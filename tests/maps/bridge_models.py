"""Small models of transformers that Megatron-Bridge knows, by the names of their key maps."""

from __future__ import annotations

from typing import Any

SMALL = {
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "vocab_size": 37,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"moe_intermediate_size": 11, "num_experts_per_tok": 2}
LOCAL = {"num_local_experts": 3, "num_experts_per_tok": 2}
DELTA = {
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention"],
}
SHARED = {"num_experts": 3, "shared_expert_intermediate_size": 8}
GLM = {
    "n_routed_experts": 3,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "use_qk_norm": True,
    "attention_bias": True,
}
MAMBA = {
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "attention", "mlp", "moe"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 5,
    "n_groups": 2,
    "ssm_state_size": 3,
    "n_routed_experts": 3,
    "moe_shared_expert_intermediate_size": 8,
}
EXAONE = {
    "num_experts": 3,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse"],
    "layer_types": ["full_attention"] * 2,
}
VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "out_hidden_size": 24,
    "patch_size": 4,
}
SIGLIP = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
MOONVIT = {k: SIGLIP[k] for k in SIGLIP if k != "image_size"} | {
    "pos_emb_height": 3,
    "pos_emb_width": 5,
    "merge_kernel_size": [2, 2],
}
OF_25 = VISION | {"fullatt_block_indexes": [1]}
OF_3 = VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
OF_35 = VISION | {"num_position_embeddings": 16}
LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": 14,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 3,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("megatron-gpt", "Llama", {}),
    "qwen2": ("megatron-gpt", "Qwen2", {}),
    "qwen3_tied": ("megatron-gpt", "Qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("megatron-moe", "Qwen3Moe", MOE | {"num_experts": 3}),
    "gemma2": ("megatron-gemma", "Gemma2", {}),
    "gemma3": ("megatron-gemma", "Gemma3", {}),
    "glm4_moe": ("megatron-glm4-moe", "Glm4Moe", MOE | GLM),
    "gpt_oss": ("megatron-gpt-oss", "GptOss", LOCAL),
    "minimax_m2": ("megatron-minimax-m2", "MiniMaxM2", LOCAL),
    "olmoe": ("megatron-olmoe", "Olmoe", {"num_experts": 3, "num_experts_per_tok": 2}),
    "qwen3_next": ("megatron-qwen3-next", "Qwen3Next", MOE | SHARED | DELTA),
    "qwen3_5": ("megatron-qwen3.5", "Qwen3_5", DELTA),
    "qwen3_5_moe": ("megatron-qwen3.5", "Qwen3_5Moe", MOE | SHARED | DELTA),
    "qwen2_5_vl": ("megatron-qwen2.5-vl", "Qwen2_5_VL", {"vision_config": OF_25}),
    "qwen3_vl": ("megatron-qwen3-vl", "Qwen3VL", {"vision_config": OF_3}),
    "qwen3_vl_moe": (
        "megatron-qwen3-vl-moe",
        "Qwen3VLMoe",
        MOE | {"num_experts": 3, "vision_config": OF_3},
    ),
    "deepseek_v3": ("megatron-deepseek-v3", "DeepseekV3", MOE | LATENT),
    "kimi_k2": ("megatron-deepseek-v3", "DeepseekV3", MOE | LATENT | {"model_type": "kimi_k2"}),
    "kimi_k25": (
        "megatron-kimi-k2.5",
        "Kimi_K25",
        MOE | LATENT | {"vision_config": MOONVIT, "tie_word_embeddings": False},
    ),
    "gemma3_vl": ("megatron-gemma3-vl", "Gemma3", {"vision_config": SIGLIP}),
    "qwen3_5_vl": ("megatron-qwen3.5-vl", "Qwen3_5", DELTA | {"vision_config": OF_35}),
    "qwen3_5_vl_moe": (
        "megatron-qwen3.5-vl",
        "Qwen3_5Moe",
        MOE | SHARED | DELTA | {"vision_config": OF_35},
    ),
    "nemotron_h": ("megatron-nemotron-h", "NemotronH", MOE | MAMBA),
    "nemotron_h_latent": ("megatron-nemotron-h", "NemotronH", MOE | MAMBA | {"moe_latent_size": 9}),
    "exaone_moe": ("megatron-exaone-moe", "ExaoneMoe", MOE | EXAONE),
    "hy_v3": ("megatron-hy-v3", "HYV3", MOE | {"num_experts": 3, "first_k_dense_replace": 1}),
    "glm4v_moe": (
        "megatron-glm4v-moe",
        "Glm4vMoe",
        MOE | GLM | {"vision_config": VISION | {"image_size": 16, "spatial_merge_size": 2}},
    ),
}  # fmt: skip
"""The map, the class of transformers, and what its configuration has beside ``SMALL``."""
PREDICTING = [
    "deepseek_v3",
    "glm4_moe",
    "hy_v3",
    "exaone_moe",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_vl",
    "qwen3_5_vl_moe",
    "nemotron_h_latent",
]
"""Those of them that also have a layer that predicts further tokens; transformers drops these."""
MODELS |= {
    f"{model}_predicting": (
        *MODELS[model][:2],
        MODELS[model][2] | ({} if "qwen" in model else {"num_nextn_predict_layers": 1}),
    )
    for model in PREDICTING
}
