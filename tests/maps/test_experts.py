"""Experts that transformers packs in memory, separated as in its own files."""

from __future__ import annotations

import json
import re
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from conftest import bits, convert_to, flat, load_dcp, read_back

from ckptool.commands.keymap.check import check_map
from ckptool.commands.keymap.choice import PACKED
from ckptool.commands.keymap.library import builtin_maps
from ckptool.commands.options.rewrite import MapOptions
from ckptool.errors import Damaged, Unsupported, UsageError

transformers = pytest.importorskip("transformers")
import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

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
    wave = SMALL | {"num_key_value_heads": 4, "num_hidden_layers": 1, "decoder_dim": 32}
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
    more: dict[str, Any] = {
        "Dots3Note": {"audio_config": SOUND},
        "Kimi_K25": {"projection_hidden_size": 24},
    }.get(family, {})
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


@pytest.fixture(
    params=[
        family
        for family in (*FAMILIES, *WITH_VISION, "Qwen3OmniMoe", *PARTS)
        if family not in OF_THEIR_OWN
    ]
)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Saved:
    """A DCP folder of a model and moments of its experts, those, and what its files hold."""
    made = made_of(request.param)
    for tensor in (*made.parameters(), *made.buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_()
    made.save_pretrained(tmp_path / "hf")
    state = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    experts = ((n, t) for n, t in made.named_parameters() if ".experts." in n)
    moments = {n.join(MOMENTS): t.detach() + 1 for n, t in experts}
    dcp.save(state := state | moments, checkpoint_id=tmp_path / "dcp", no_dist=True)
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    saved = {n: t for file in files for n, t in load_file(file).items()}
    return tmp_path, state, {on_the_hub(request.param, n): t for n, t in saved.items()}


def test_files_are_those_of_transformers_and_back(model: Saved) -> None:
    """Moments go with their experts."""
    folder, state, files = model
    options = MapOptions("auto", assets=folder / "hf")
    report = convert_to("dcp", folder / "dcp", folder / "out", map=options)
    assert any("detected from names and config.json" in note for note in report.notes)
    written = flat(load_dcp(folder / "out"))
    moments = {n: t for n, t in written.items() if n.startswith(MOMENTS[0])}
    weights = {n: bits(t) for n, t in written.items() if n not in moments}
    assert weights == {name: bits(tensor) for name, tensor in files.items()}
    assert any(".experts.1." in name for name in moments)
    for name, tensor in moments.items():
        weight = files[name.removeprefix(MOMENTS[0]).removesuffix(MOMENTS[1])]
        assert torch.equal(tensor, weight + 1)
    convert_to("dcp", folder / "out", folder / "back", map=MapOptions(experts="packed"))
    again = flat(load_dcp(folder / "back"))
    assert {n: bits(t) for n, t in again.items()} == {n: bits(t) for n, t in state.items()}


WITHIN = {
    "Dots3NoteTextModel": "dots3_note_text",
    "UnlimitedOcrTextModel": "unlimited_ocr",
    "dots3_note_vision_encoder": "dots3_note",
    "mistral_large4_text": "mistral_large4",
    "qwen3_omni_moe_text": "qwen3_omni_moe",
}
"""What transformers has steps of its own for, as a part of a model that has a map."""


def test_every_family_whose_experts_transformers_packs_has_a_map() -> None:
    """A newer transformers that packs more fails here, and names them (see pyproject.toml)."""
    from transformers.conversion_mapping import _build_checkpoint_conversion_mapping

    families = _build_checkpoint_conversion_mapping().items()
    packed = {
        name
        for name, steps in families
        if any("experts.*." in source for step in steps for source in step.source_patterns)
    }
    maps = [each for each in builtin_maps().values() if each.source == PACKED]
    known = {kind for each in maps for kind in each.model_types}
    assert packed - known == {*WITHIN}
    assert known >= {*WITHIN.values()}


@pytest.mark.parametrize("family", HUB)
def test_the_hubs_names_are_written_and_those_of_save_pretrained_read(
    family: str, tmp_path: Path
) -> None:
    """Transformers loads both; what other programs load is on the Hub."""
    made = made_of(family)
    for tensor in (*made.parameters(), *made.buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_()
    made.save_pretrained(tmp_path / "saved")
    convert_to("dcp", tmp_path / "saved", tmp_path / "packed", map=MapOptions(experts="packed"))
    state = {name: bits(tensor) for name, tensor in made.state_dict().items()}
    assert {n: bits(t) for n, t in flat(load_dcp(tmp_path / "packed")).items()} == state
    options = MapOptions(experts="separate", assets=tmp_path / "saved")
    convert_to("hf", tmp_path / "packed", tmp_path / "hub", map=options)
    assert {*load_file(tmp_path / "hub" / "model.safetensors")} == {
        on_the_hub(family, n) for n in load_file(tmp_path / "saved" / "model.safetensors")
    }
    loaded, info = type(made).from_pretrained(tmp_path / "hub", output_loading_info=True)
    assert not any(info.values())
    assert {name: bits(tensor) for name, tensor in loaded.state_dict().items()} == state


EIGHT_BITS = re.compile(
    r".*(\.attn\.(\w+\.)?w(q_a|q_b|kv|o_a|o_b)|shared_experts\.w\d|mtp\.0\.e_proj)\.weight"
)
FOUR_BITS = re.compile(r".*\.experts\.\d+\.w\d\.weight")
QUANTIZED = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}


def deepseek_of_the_hub(folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """DeepSeek V4 as released, with a layer that predicts more; its model and numbers.

    Experts have two floats of four bits in an int8, other projections are FP8 in blocks. The model
    is what transformers loads from the numbers, as ``Fp8Dequantize`` makes them.
    """
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    sizes = SMALL | FAMILIES["DeepseekV4"] | {"hidden_size": 64, "intermediate_size": 32}
    sizes |= {"q_lora_rank": 32, "o_lora_rank": 32, "moe_intermediate_size": 32}
    made = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**sizes)).bfloat16()
    made.save_pretrained(folder / "bare")
    file = load_file(folder / "bare" / "model.safetensors")
    file = {on_the_hub("DeepseekV4", name): tensor for name, tensor in file.items()}
    last = {
        name: tensor for name, tensor in file.items() if re.match(r"layers\.1\.(ffn|hc_)", name)
    }
    file |= {name.replace("layers.1.", "mtp.0."): tensor.clone() for name, tensor in last.items()}
    file |= {"mtp.0.e_proj.weight": torch.randn(64, 64), "mtp.0.enorm.weight": torch.randn(64)}
    stored, numbers = {}, {}
    for name, tensor in file.items():
        stored[name] = numbers[name] = tensor.float() if tensor.is_floating_point() else tensor
        rows, columns = tensor.shape if tensor.dim() == 2 else (0, 0)
        grid = (rows, columns // 32) if FOUR_BITS.fullmatch(name) else (1, 1)
        if FOUR_BITS.fullmatch(name):
            stored[name] = torch.randint(-128, 128, (rows, columns // 2)).to(torch.int8)
        elif EIGHT_BITS.fullmatch(name):
            stored[name] = torch.randn(rows, columns).to(torch.float8_e4m3fn)
        if stored[name].element_size() == 1:
            exponents = torch.exp2(torch.randint(-9, 9, grid).float()).to(torch.float8_e8m0fnu)
            stored[name.replace(".weight", ".scale")] = exponents
            dequantize = Fp8Dequantize(None)._dequantize_one
            numbers[name] = dequantize(stored[name], exponents, torch.bfloat16)
    config = json.loads((folder / "bare" / "config.json").read_text())
    (folder / "hub").mkdir()
    save_file(stored, folder / "hub" / "model.safetensors", {"format": "pt"})
    config |= {"quantization_config": QUANTIZED, "expert_dtype": "fp4"}
    (folder / "hub" / "config.json").write_text(json.dumps(config))
    return made, numbers


def test_deepseek_v4_of_the_hub_becomes_the_model_in_memory_and_comes_back(tmp_path: Path) -> None:
    torch.manual_seed(5)
    made, numbers = deepseek_of_the_hub(tmp_path)
    asked = MapOptions("transformers-deepseek-v4")
    assert "use --dequantize" in str(check_map(tmp_path / "hub", asked).hint)
    with pytest.raises(UsageError) as refused:
        convert_to("dcp", tmp_path / "hub", tmp_path / "dcp", map=asked)
    assert "use --dequantize" in str(refused.value.hint)
    quantized: dict[str, Any] = {"dequantize": True, "map": MapOptions(experts="packed")}
    convert_to("dcp", tmp_path / "hub", tmp_path / "dcp", **quantized)
    state = flat(load_dcp(tmp_path / "dcp"))
    config = MapOptions(experts="separate", assets=tmp_path / "hub")
    convert_to("hf", tmp_path / "dcp", tmp_path / "back", map=config)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert {n: bits(t) for n, t in back.items()} == {n: bits(t) for n, t in numbers.items()}
    loaded = type(made).from_pretrained(tmp_path / "back", dtype="auto").state_dict()
    assert {*state} - {*loaded} == {name for name in numbers if name.startswith("mtp.")}
    for name, tensor in loaded.items():
        assert bits(state[name].to(tensor.dtype)) == bits(tensor), name


@pytest.mark.parametrize("family", OF_THEIR_OWN)
def test_experts_that_files_hold_packed_are_linears_one_by_one(family: str, tmp_path: Path) -> None:
    """The model gives the same with its experts computed from the separate tensors."""
    torch.manual_seed(3)
    made = made_of(family).eval()
    for tensor in made.parameters():
        tensor.data.normal_(std=0.2)
    made.save_pretrained(tmp_path / "hf")
    asked = MapOptions(experts="separate")
    report = convert_to("hf", tmp_path / "hf", tmp_path / "out", map=asked)
    (note,) = (note for note in report.notes if "transformers does not load separate ones" in note)
    assert made.config.model_type in note.partition(" have packed experts")[0]
    separate = load_file(tmp_path / "out" / "model.safetensors")
    modules = {n: m for n, m in made.named_modules() if n.endswith(".experts")}
    assert modules
    for name, module in modules.items():
        first = f"{name}.0."
        assert {n for n in separate if n.startswith(first)} >= {
            f"{first}{part}_proj.weight" for part in ("gate", "up", "down")
        }
        assert not [n for n in separate if n.startswith(f"{name}.gate_up_proj")]
        states = torch.randn(3, 5, SMALL["hidden_size"])
        for expert in range(3):
            wanted = _packed(module, states[expert], expert)
            computed = _linears(separate, f"{name}.{expert}", states[expert], family)
            torch.testing.assert_close(computed, wanted, rtol=1e-5, atol=1e-6)  # CPUs differ
    convert_to("hf", tmp_path / "out", tmp_path / "back", map=MapOptions(experts="packed"))
    back, first = (read_back("safetensors", tmp_path / name) for name in ("back", "hf"))
    assert back == first


def _packed(module: Any, states: torch.Tensor, expert: int) -> torch.Tensor:
    """What the model's own module makes of states that all go to one expert."""
    if len(signature(module.forward).parameters) == 3:
        chosen = torch.full((len(states), 1), expert)
        return module(states, chosen, torch.ones(len(states), 1)).detach()
    others = torch.zeros(module.num_experts, *states.shape)
    others[expert] = states
    return module(others.flatten(0, 1)).view_as(others)[expert].detach()


def _linears(
    separate: dict[str, torch.Tensor], name: str, states: torch.Tensor, family: str
) -> torch.Tensor:
    """An expert as it is written down for one: a gate, an up and a down projection."""

    def project(part: str, states: torch.Tensor) -> torch.Tensor:
        bias = separate.get(f"{name}.{part}_proj.bias")
        return torch.nn.functional.linear(states, separate[f"{name}.{part}_proj.weight"], bias)

    gate, up = project("gate", states), project("up", states)
    if family == "GptOss":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return project("down", (up + 1) * gate * torch.sigmoid(gate * 1.702))
    return project("down", torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("family", OF_THEIR_OWN)
def test_experts_that_files_hold_packed_stay_so_unless_asked(family: str, tmp_path: Path) -> None:
    """As they are separate neither in memory nor in files, no model would load them."""
    made = made_of(family)
    made.save_pretrained(tmp_path / "hf")
    dcp.save(made.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    options = MapOptions("auto", assets=tmp_path / "hf")
    with pytest.raises(UsageError, match=r"--map auto: (no built-in map|\d maps|the names)"):
        convert_to("hf", tmp_path / "dcp", tmp_path / "out", map=options)


def test_a_models_folder_gets_no_names_of_a_trainer_by_chance(tmp_path: Path) -> None:
    """What a trainer saved under Hugging Face's names needs no map."""
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.Gemma3TextConfig(**SMALL, pad_token_id=0)
    )
    made.save_pretrained(tmp_path / "hf")
    dcp.save(made.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    options = MapOptions("auto", assets=tmp_path / "hf")
    with pytest.raises(UsageError, match="megatron-gemma would make Megatron's of them"):
        convert_to("hf", tmp_path / "dcp", tmp_path / "out", map=options)
    with pytest.raises(UsageError, match="no tensor of the model has `experts"):
        convert_to("hf", tmp_path / "dcp", tmp_path / "out", map=MapOptions(experts="separate"))


def test_granite_has_other_names_in_memory(tmp_path: Path) -> None:
    config = transformers.GraniteMoeConfig(**SMALL, num_local_experts=3)
    made = transformers.AutoModelForCausalLM.from_config(config)
    made.save_pretrained(tmp_path / "hf")
    dcp.save(made.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    options = MapOptions("auto", assets=tmp_path / "hf")
    convert_to("hf", tmp_path / "dcp", tmp_path / "out", map=options)
    assert read_back("safetensors", tmp_path / "out") == read_back("safetensors", tmp_path / "hf")
    with pytest.raises(UsageError, match="no built-in map matches all model tensors"):
        convert_to("hf", tmp_path / "dcp", tmp_path / "a", map=MapOptions(experts="separate"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (MapOptions(experts="separate"), "the experts are already separate"),
        (MapOptions("auto", experts="packed"), "cannot be combined"),
        (MapOptions(experts="apart"), "not packed or separate"),
    ],
)
def test_what_experts_cannot_be(options: MapOptions, words: str, tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(**SMALL, **MOE)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hf")
    with pytest.raises(UsageError, match=words):
        convert_to("hf", tmp_path / "hf", tmp_path / "out", map=options)


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


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    """A folder of Qwen3Moe with 3 experts in each of 2 layers."""
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3MoeConfig(**SMALL, **MOE)
    )
    made.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def without(folder: Path, part: str) -> dict[str, torch.Tensor]:
    """Take tensors out of a model's file; return what is left."""
    file = folder / "model.safetensors"
    left = {n: t for n, t in load_file(file).items() if part not in n}
    save_file(left, file, {"format": "pt"})
    return left


LACKING = {
    ".experts.2.": r"num_(local_)?experts 3, but found 2 in model\.layers\.0\.mlp\.experts",
    ".experts.1.": r"model\.layers\.0\.mlp\.experts\.1\.\w+_proj\.weight not found",
    ".layers.1.": "num_hidden_layers 2, but found tensors of 1 layers",
}


@pytest.mark.parametrize("part", LACKING)
@pytest.mark.parametrize("wrapped", [False, True])
def test_experts_and_layers_that_are_missing_everywhere_are_missed(
    moe: Path, part: str, wrapped: bool, tmp_path: Path
) -> None:
    state = without(moe, part)
    source, options = moe, MapOptions(experts="packed")
    if wrapped:  # as a trainer saves it, with the config in the folder above
        dcp.save({"app": state}, checkpoint_id=moe / "step-1", no_dist=True)
        source = moe / "step-1"
    with pytest.raises(Unsupported, match=LACKING[part]):
        convert_to("dcp", source, tmp_path / "out", map=options)
    assert not (tmp_path / "out").exists()


def test_the_number_of_experts_is_reported_where_names_alone_tell_it(
    moe: Path, tmp_path: Path
) -> None:
    (moe / "config.json").unlink()
    report = convert_to("dcp", moe, tmp_path / "a", map=MapOptions(experts="packed"))
    assert "3 experts per layer, counted from the names: no config records how many" in report.notes
    options = MapOptions("transformers-experts", {"expert": 4})
    with pytest.raises(Unsupported, match=r"expert is 4 .* is .*experts\.2\..*: 1 are missing"):
        convert_to("dcp", moe, tmp_path / "b", map=options)


def test_packed_experts_are_as_many_as_config_says(moe: Path, tmp_path: Path) -> None:
    convert_to("dcp", moe, tmp_path / "packed", map=MapOptions(experts="packed"))
    config = (moe / "config.json").read_text()
    (moe / "config.json").write_text(config.replace('experts": 3', 'experts": 4'))
    options = MapOptions(experts="separate", assets=moe)
    with pytest.raises(Unsupported, match=r"experts 4, but found 3 in"):
        convert_to("dcp", tmp_path / "packed", tmp_path / "out", map=options)


def test_experts_of_several_types_are_never_one_tensor(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(**SMALL, **MOE)
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    model.save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    state, odd = load_file(file), "model.layers.1.mlp.experts.2.up_proj.weight"
    save_file(state | {odd: state[odd].half()}, file, {"format": "pt"})
    with pytest.raises(Unsupported, match=rf"is bfloat16, {odd} float16: they cannot be parts"):
        convert_to("hf", tmp_path / "hf", tmp_path / "out", map=MapOptions(experts="packed"))


def test_experts_with_their_inputs_first_are_refused(tmp_path: Path) -> None:
    """As the Hub's files of Qwen3-VL have them; transformers turns those that do not fit."""
    made = made_of("Qwen3VLMoe")
    made.save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    state = {n: t.mT.contiguous() if ".experts." in n else t for n, t in load_file(file).items()}
    save_file(state, file, {"format": "pt"})
    with pytest.raises(Unsupported, match=r"experts\.\w+: shape .* does not match"):
        convert_to("hf", tmp_path / "hf", tmp_path / "out", map=MapOptions(experts="separate"))


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path: Path) -> None:
    """Its config.json names a type that transformers has not."""
    made = made_of("DeepseekV3")
    made.save_pretrained(tmp_path / "hf")
    config = (tmp_path / "hf" / "config.json").read_text()
    (tmp_path / "hf" / "config.json").write_text(config.replace("deepseek_v3", "kimi_k2"))
    convert_to("dcp", tmp_path / "hf", tmp_path / "out", map=MapOptions(experts="packed"))
    assert {*load_dcp(tmp_path / "out")} == {*made.state_dict()}


def test_a_layers_last_expert_is_missed_where_layers_have_different_numbers(tmp_path: Path) -> None:
    """Each layer's router has a row for each of its own; no other number says it."""
    made_of("Dots3Note").save_pretrained(tmp_path / "hf")
    without(tmp_path / "hf", "vision_encoder.blocks.1.mlp.experts.4.")
    with pytest.raises(Unsupported, match=r"expert is (4|5) in .*, but (5|4) in .*missing"):
        convert_to("dcp", tmp_path / "hf", tmp_path / "out", map=MapOptions(experts="packed"))


def packed(folder: Path) -> Path:
    """The same folder with its experts packed, as a DCP folder without a config."""
    convert_to("dcp", folder, folder.with_name("packed"), map=MapOptions(experts="packed"))
    (folder.with_name("packed") / "config.json").unlink(missing_ok=True)
    return folder.with_name("packed")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (".1.mlp.experts.2.", r"gate\.weight is for 3 experts, but found 2 in model\.layers\.1"),
        (".experts.2.", r"gate\.weight is for 3 experts, but found 2 in model\.layers\.0"),
        (".1.mlp.experts.2.down_proj", "expert is 3 .*, but 2 in model.layers.1.*down_proj"),
        ("down_proj", r"model\.layers\.0\.mlp\.experts\.0\.down_proj not found"),
    ],
)
def test_experts_that_are_missing_are_missed_without_a_config(
    part: str, words: str, moe: Path, tmp_path: Path
) -> None:
    without(moe, part)
    (moe / "config.json").unlink()
    with pytest.raises(Unsupported, match=words):
        convert_to("dcp", moe, tmp_path / "out", map=MapOptions("transformers-experts"))
    convert_to(
        "dcp",
        moe,
        tmp_path / "out",
        map=MapOptions("transformers-experts"),
        select=("*.layers.0.*",),
    )


def test_packed_experts_without_half_of_them_are_missed(moe: Path, tmp_path: Path) -> None:
    """With a config, too: no number in it says so."""
    options: dict[str, Any] = {"drop": ("*.1.mlp.experts.down_proj",)}
    convert_to("dcp", packed(moe), tmp_path / "half", **options)
    again = MapOptions(experts="separate", assets=moe)
    with pytest.raises(Unsupported, match=r"layers\.1\.mlp\.experts\.0\.down_proj not found"):
        convert_to("hf", tmp_path / "half", tmp_path / "out", map=again)


def test_a_name_that_no_map_of_experts_takes_is_named(moe: Path, tmp_path: Path) -> None:
    file = moe / "model.safetensors"
    state = load_file(file) | {"model.layers.0.mlp.experts.extra": torch.ones(2)}
    save_file(state, file, {"format": "pt"})
    with pytest.raises(UsageError, match=r"all but 1:\n.*mlp\.experts\.extra"):
        convert_to("hf", moe, tmp_path / "out", map=MapOptions(experts="packed"))


def test_experts_that_took_different_steps_are_never_one_tensor(moe: Path, tmp_path: Path) -> None:
    state = load_file(moe / "model.safetensors")
    steps = {f"optimizer.state.{name}.step": torch.tensor(7.0) for name in state}
    steps["optimizer.state.model.layers.0.mlp.experts.1.up_proj.weight.step"] += 1
    dcp.save(state | steps, checkpoint_id=moe / "run", no_dist=True)
    words = r"experts\.gate_up_proj\.step .*: the tensors that it is made of hold different values"
    with pytest.raises(Damaged, match=words):
        convert_to("dcp", moe / "run", tmp_path / "out", map=MapOptions(experts="packed"))
