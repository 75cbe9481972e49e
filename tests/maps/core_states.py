"""The names and shapes of Megatron-core's own models, that a mapped checkpoint fills, and logits.

``python tests/maps/core_states.py`` writes the record anew, in the environment of
``bridge_states.py``, where ``mamba_ssm``, ``causal_conv1d`` and ``fla`` are empty modules, too, and
TORCHDYNAMO_DISABLE is set. Megatron-Bridge 0.7.0 chooses the configuration, Megatron-core 0.20.0 is
the model; only kernels of GPUs are written here: Transformer Engine's layers, with its names of
parameters, attention, and the scan of Mamba. Each model of Hugging Face is mapped by ckptool, every
tensor goes where the model's ``sharded_state_dict`` has it, none is missing and none too many, and
the logits are those of transformers.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from bridge_models import MODELS, SMALL
from bridge_states import _SOURCES, _bridge, recorded, values
from safetensors.torch import load_file, save_file
from torch.nn import functional

RECORD = Path(__file__).parent / "megatron_core_0_20_0.json.gz"
LOADED = [
    *("llama", "qwen2", "qwen3_tied", "qwen3_moe", "minimax_m2"),
    *("deepseek_v3_predicting", "glm4_moe_predicting", "hy_v3_predicting"),
    *("exaone_moe_predicting", "qwen3_next_predicting", "qwen3_5_predicting"),
    *("qwen3_5_moe_predicting", "nemotron_h", "nemotron_h_latent_predicting"),
]
ROTARY = {"glm4_moe_predicting": 0.5, "qwen3_next_predicting": 0.25}
"""Parts of a head that rotate, which Bridge looks for where transformers 5 has them no more."""
WITHOUT_LOGITS = ("deepseek_v3_predicting",)
"""Its sizes here are odder than transformers can rotate; test_transformers.py has its logits."""
REFERENCE = """
import sys, torch, transformers
how = {"dtype": torch.float32, "experts_implementation": "eager"}
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], **how).eval()
with torch.no_grad():
    torch.save(model(torch.arange(24).reshape(2, 12)).logits, sys.argv[2])
"""


def recorded_names() -> dict[str, dict[str, list[int]]]:
    """For each model, the shapes by the names of a torch_dist checkpoint."""
    return json.loads(gzip.decompress(RECORD.read_bytes()))


class Norm(torch.nn.Module):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.zero_centered, self.eps = config.layernorm_zero_centered_gamma, eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight + 1 if self.zero_centered else self.weight
        return functional.rms_norm(x, (x.shape[-1],), weight, self.eps)


class Linear(torch.nn.Linear):
    def __init__(self, wide: int, high: int, bias: bool, **_: Any) -> None:
        super().__init__(wide, high, bias=bias)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


class Attention(torch.nn.Module):
    def __init__(self, *_: Any, softmax_scale: Any = None, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k, v))
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        weights = (q @ k.mT) * (self.scale or q.shape[-1] ** -0.5)
        later = torch.ones(weights.shape[-2:], dtype=torch.bool).triu(1)
        found = weights.masked_fill(later, float("-inf")).softmax(-1) @ v
        return found.permute(2, 0, 1, 3).flatten(2)


class Gated(torch.nn.Module):
    def __init__(self, hidden: int, eps: float, group_size: int, **_: Any) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(hidden)), eps
        self.group_size = group_size

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        groups = (x * functional.silu(z)).unflatten(-1, (-1, self.group_size))
        return functional.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * (
            self.weight
        )


def _stand_in() -> SimpleNamespace:
    """Put layers for CPUs in the place of Transformer Engine's and Mamba's; return what builds."""
    import mamba_ssm.ops.triton.layernorm_gated as gated
    import megatron.core.extensions.transformer_engine as engine
    import megatron.core.extensions.transformer_engine_spec_provider as provider
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    taken = {"config", "init_method", "bias", "gather_output", "skip_bias_add", "is_expert"}
    taken |= {"input_is_parallel", "tp_group"}

    class Column(ColumnParallelLinear):  # type: ignore[misc]
        def __init__(self, *sizes: int, **given: Any) -> None:
            super().__init__(*sizes, **{key: given[key] for key in taken & given.keys()})

    class Row(RowParallelLinear):  # type: ignore[misc]
        def __init__(self, *sizes: int, **given: Any) -> None:
            super().__init__(*sizes, **{key: given[key] for key in taken & given.keys()})

    class NormColumn(Column):
        def __init__(self, *sizes: int, **given: Any) -> None:
            super().__init__(*sizes, **given)
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(sizes[0]))

        def forward(self, x: torch.Tensor, *more: Any, **named: Any) -> Any:
            weight: torch.Tensor = self.layer_norm_weight
            config = self.config
            weight = weight + 1 if config.layernorm_zero_centered_gamma else weight
            x = functional.rms_norm(x, (x.shape[-1],), weight, config.layernorm_epsilon)
            return super().forward(x, *more, **named)

    layers: dict[str, Any] = {"TENorm": Norm, "TELinear": Linear, "TEColumnParallelLinear": Column}
    layers |= {"TERowParallelLinear": Row, "TELayerNormColumnParallelLinear": NormColumn}
    layers |= {"TEDotProductAttention": Attention, "TEColumnParallelGroupedLinear": None}
    for name, layer in layers.items():
        setattr(engine, name, layer)
        setattr(provider, name, layer)
    gated.RMSNorm = Gated
    return _patched(Linear)


def _scan(x: Any, dt: Any, a: Any, b: Any, c: Any, *_: Any, **given: Any) -> torch.Tensor:
    """Mamba 2's recurrence, a step at a time."""
    dt = functional.softplus(dt + given["dt_bias"])
    b, c = (each.repeat_interleave(x.shape[2] // each.shape[2], 2) for each in (b, c))
    state = torch.zeros(*x.shape[:1], *x.shape[2:], b.shape[-1])
    steps = []
    for at in range(x.shape[1]):
        decay = torch.exp(dt[:, at] * a)[..., None, None]
        seen = (dt[:, at, :, None] * x[:, at])[..., None] * b[:, at, :, None]
        state = state * decay + seen
        steps.append((state * c[:, at, :, None]).sum(-1) + x[:, at] * given["D"][:, None])
    return torch.stack(steps, 1)


def _patched(linear: Any) -> SimpleNamespace:
    """Take the rest of what asks for a GPU out of core's way."""
    import megatron.bridge  # noqa: F401
    import megatron.core.ssm.gated_delta_net.common as delta
    import megatron.core.ssm.mamba_mixer as mamba
    import megatron.core.tensor_parallel.random as rng
    import megatron.core.transformer.attention as attention
    import megatron.core.transformer.moe.moe_layer as moe
    import megatron.core.transformer.moe.moe_utils as routing
    import megatron.core.transformer.transformer_block as block
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    rng.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    block.get_cpu_offload_context = lambda *_, **__: (contextlib.nullcontext(), None)
    delta.l2norm = lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    attention.SplitAlongDim = mamba.causal_conv1d_fn = routing.te_general_gemm = None
    mamba.mamba_chunk_scan_combined, moe.TELinear = _scan, linear
    return SimpleNamespace(
        gpt=GPTModel, hybrid=HybridModel, stack=hybrid_stack_spec, specs=specs, variants=variants
    )


def _build(core: SimpleNamespace, model: str, folder: Path) -> torch.nn.Module:
    """The model that Megatron-Bridge's provider describes."""
    import transformers

    known = recorded()[model]
    config = transformers.AutoConfig.from_pretrained(folder)
    (config.architectures,) = [known["config"]["architectures"]]
    source = _SOURCES.get(config.model_type, config.architectures[0])
    bridge = _bridge(source, config, known["hf"])
    provider = bridge.provider_bridge(bridge.hf_pretrained)
    settings = {"params_dtype": torch.float32, "autocast_dtype": torch.float32, "bf16": False}
    settings |= {"use_cpu_initialization": True, "moe_token_dispatcher_type": "allgather"}
    settings |= {"attention_dropout": 0.0, "hidden_dropout": 0.0, "fp16": False}
    settings |= {"rotary_percent": ROTARY.get(model, provider.rotary_percent)}
    settings |= {"deterministic_mode": "qwen3_" in model}
    fused = "moe_grouped_gemm moe_permute_fusion moe_router_fusion moe_shared_expert_overlap"
    fused += " bias_activation_fusion bias_dropout_fusion masked_softmax_fusion"
    fused += " gradient_accumulation_fusion apply_rope_fusion persist_layer_norm"
    settings |= {"mtp_num_layers": 1} if "predicting" in model else {}
    for key, value in (settings | dict.fromkeys(fused.split(), False)).items():
        setattr(provider, key, value)
    provider.finalize()
    more = {
        "vocab_size": SMALL["vocab_size"],
        "max_sequence_length": 64,
        "share_embeddings_and_output_weights": provider.share_embeddings_and_output_weights,
        "parallel_output": False,
    }
    further = bool(provider.mtp_num_layers)
    if "nemotron" in model:
        provider.num_layers = 4
        pattern = "M*-E" + "/*E" * further
        return core.hybrid(provider, core.stack, hybrid_layer_pattern=pattern, **more)
    if "qwen3_5" in model or "next" in model:
        spec = core.variants.get_transformer_block_with_experimental_attention_variant_spec(
            provider
        )
        last: Any = spec.layer_specs[-1]
    elif model == "minimax_m2":
        last = spec = provider.transformer_layer_spec(provider)
    else:
        last = spec = core.specs.get_gpt_decoder_block_spec(provider, use_transformer_engine=True)
        last = spec.layer_specs[0] if "exaone" in model else last
    predicting = core.specs.get_gpt_mtp_block_spec(provider, last, use_transformer_engine=True)
    more |= {"rotary_percent": provider.rotary_percent, "rotary_base": provider.rotary_base}
    more |= {"position_embedding_type": provider.position_embedding_type}
    return core.gpt(provider, spec, mtp_block_spec=predicting if further else None, **more)


def _load(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    """Fill a model with a torch_dist checkpoint's tensors; return the shapes that it asks for."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    biases = (tensor for name, tensor in model.named_buffers() if "expert_bias" in name)
    filled = [*model.parameters(), *biases]
    for tensor in filled:
        tensor.data.fill_(float("nan"))
    state = model.sharded_state_dict()
    apply_factories(state)
    asked: dict[str, list[int]] = {}
    for part in nested_values(state):
        if isinstance(part, ShardedTensor):
            asked[part.key] = list(part.global_shape)
            sizes = (1,) * part.prepend_axis_num + tuple(part.local_shape)
            starts = zip(part.global_offset, sizes, strict=True)
            box = tuple(slice(start, start + size) for start, size in starts)
            part.data.data.copy_(tensors[part.key][box].reshape(part.data.shape))
    if asked != {name: list(tensor.shape) for name, tensor in tensors.items()}:
        raise ValueError("the model has other names or shapes")
    if any(tensor.isnan().any() for tensor in filled):
        raise ValueError("a parameter was not loaded")
    return asked


def _names_of(core: SimpleNamespace, model: str) -> dict[str, list[int]]:
    """Map, load and run a model; return the shapes it asks for."""
    import ckptool

    for key in [key for key in os.environ if key.startswith("NVTE_")]:
        del os.environ[key]
    known = recorded()[model]
    with tempfile.TemporaryDirectory() as scratch:
        (folder := Path(scratch) / "hf").mkdir()
        (folder / "config.json").write_text(json.dumps(known["config"]))
        tensors = {n: torch.from_numpy(values(n, shape)) / 4 for n, shape in known["hf"].items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        ckptool.convert(folder, f"{scratch}/core", to="safetensors", map=MODELS[model][0])
        built = _build(core, model, folder).eval()
        asked = _load(built, load_file(f"{scratch}/core/model.safetensors"))
        if model in WITHOUT_LOGITS:
            return asked
        plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        call = [sys.executable, "-c", REFERENCE, str(folder), f"{scratch}/logits.pt"]
        subprocess.run(call, check=True, env=plain, stderr=subprocess.DEVNULL)
        truth = torch.load(f"{scratch}/logits.pt")
    for part in built.modules():
        if hasattr(part, "use_mem_eff_path"):
            setattr(part, "use_mem_eff_path", False)  # noqa: B010 (no parameter or module)
    tokens = torch.arange(24).reshape(2, 12)
    places = torch.arange(12).expand(2, 12)
    with torch.no_grad():
        found = built(input_ids=tokens, position_ids=places, attention_mask=None)
    print(model, f"{len(asked)} names, logits differ by {float((found - truth).abs().max()):.1e}")
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5)
    return asked


def record() -> None:
    """Write what the models ask for into the record."""
    import torch.distributed as dist

    core = _stand_in()
    from megatron.core import parallel_state

    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        found = {model: _names_of(core, model) for model in LOADED}
    RECORD.write_bytes(gzip.compress(json.dumps(found, sort_keys=True).encode(), mtime=0))


if __name__ == "__main__":
    record()
