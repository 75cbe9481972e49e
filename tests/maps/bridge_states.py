"""What Megatron-Bridge makes of small models of transformers, and a record of it.

``python tests/maps/bridge_states.py`` writes the record anew: with Megatron-Bridge 0.7.0 (commit
067f987df of its repository), Megatron-core 0.20.0 and transformers 5.23, on a CPU, where
``transformer_engine`` and ``triton`` are empty modules. Each parameter goes through Bridge's own
mapping, in one process; where a name of Hugging Face has several in Megatron (norms that are fused
into what follows), it is the one that Transformer Engine's layers have. Names and shapes are those
that ``save_pretrained`` writes, every element is random.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import re
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from bridge_models import MODELS, SIGLIP, SMALL

RECORD = Path(__file__).parent / "megatron_bridge_0_7_0.json.gz"


def values(name: str, shape: list[int]) -> np.ndarray[Any, Any]:
    """Random numbers that a tensor's name decides."""
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype("f4")


def digest(array: np.ndarray[Any, Any]) -> str:
    """The beginning of the SHA-256 of its bytes."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def recorded() -> dict[str, Any]:
    """For each model: ``config``, shapes under ``hf``, shapes and digests under ``megatron``."""
    return json.loads(gzip.decompress(RECORD.read_bytes()))


def _bridge(architecture: str, config: Any, shapes: dict[str, list[int]]) -> Any:
    from fnmatch import fnmatchcase

    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge

    def kinds(kind: Any) -> Iterator[Any]:
        for one in kind.__subclasses__():
            yield one
            yield from kinds(one)

    named = (b for b in kinds(MegatronModelBridge) if getattr(b, "SOURCE_NAME", "") == architecture)
    bridge = next(named)()
    source = SimpleNamespace(
        get_all_keys=lambda: list(shapes),
        has_glob=lambda glob: any(fnmatchcase(name, glob) for name in shapes),
    )
    bridge.hf_config = bridge._hf_config = config
    if architecture.startswith("Glm4v"):  # which transformers 5 keeps elsewhere
        config.text_config.partial_rotary_factor = 0.5
    state = SimpleNamespace(source=source)
    bridge.hf_pretrained = SimpleNamespace(
        config=config, generation_config=None, state=state, model_name_or_path=""
    )
    return bridge


def _is_there(name: str, layer: list[str]) -> bool:
    """Whether Megatron's layer has the parameter, by what the layer of Hugging Face has."""

    def has(*words: str) -> bool:
        return any(word in other for other in layer for word in words)

    if re.search(
        r"local_experts|transformer_layer|conv1d_|mtp\.final|\.kv_layernorm|\d\.norm\.", name
    ):
        return False
    moe = has("experts.", "experts.gate_up_proj")
    for part, there in {
        ".input_layernorm": has("kv_a_proj"),
        ".q_layernorm": not has("kv_a_proj"),
        "pre_mlp_layernorm": moe,
        "linear_fc1.layer_norm": has("up_proj", "w1", "linear_fc1") and not moe,
        "self_attention.in_proj.layer_norm": has("linear_attn"),
        "mixer.in_proj.layer_norm": has("A_log"),
        "linear_qkv.layer_norm": has("q_proj", "attn.qkv") and not has("kv_a_proj"),
    }.items():
        if part in name:
            return there
    return True


def _further(shapes: dict[str, list[int]], kind: str, layers: int) -> dict[str, list[int]]:
    """A layer that predicts further tokens, made as the last of the others; K-EXAONE's is dense."""
    hidden, dense = SMALL["hidden_size"], kind == "ExaoneMoe"
    if kind == "NemotronH":
        return _hybrid_further(shapes)
    language = "language_model." if any("language_model" in name for name in shapes) else ""
    last = f"model.{language}layers.{0 if dense else layers - 1}."
    follows = kind in ("DeepseekV3", "Glm4Moe", "HYV3")
    first = f"model.layers.{layers}." if follows else "mtp.layers.0."
    norm = "final_layernorm" if kind == "HYV3" else "shared_head.norm"
    words = ["enorm", "hnorm", norm, "eh_proj"]
    names = (
        [first + word for word in words]
        if follows
        else [
            f"mtp.{word}" for word in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")
        ]
    )
    made = {f"{name}.weight": [hidden] for name in names[:3]}
    made[f"{names[3]}.weight"] = [hidden, 2 * hidden]
    return made | {first + n.removeprefix(last): s for n, s in shapes.items() if n.startswith(last)}


def _hybrid_further(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    """Attention and experts, the two steps of Nemotron-H's block."""
    hidden = SMALL["hidden_size"]
    made = {f"mtp.layers.0.{norm}.weight": [hidden] for norm in ("enorm", "hnorm")}
    made["mtp.layers.0.eh_proj.weight"] = [hidden, 2 * hidden]
    made["mtp.layers.1.final_layernorm.weight"] = [hidden]
    for step, layer in enumerate(("backbone.layers.1.", "backbone.layers.3.")):
        rest = {n.removeprefix(layer): s for n, s in shapes.items() if n.startswith(layer)}
        made |= {f"mtp.layers.{step}.{name}": shape for name, shape in rest.items()}
    return made


def _resolved(
    registry: Any, names: list[str], experts: int, layers: int
) -> Iterator[tuple[Any, bool]]:
    """Each parameter's mapping, and whether it is one of the experts that a tensor packs."""
    mappings = registry.get_all_mappings()
    if any(mapping.megatron_param == "decoder.final_norm.weight" for mapping in mappings):
        mappings = [m for m in mappings if m.megatron_param != "decoder.final_layernorm.weight"]
    for mapping in mappings:
        if hasattr(mapping, "_mtp_layers_per_block"):
            yield from ((one, False) for one in _of_further(mapping, names, experts))
            continue
        given = mapping.hf_param
        first = given if isinstance(given, str) else next(iter(given.values()))
        pattern = registry._convert_pattern_to_regex(first)
        stars = mapping.megatron_param.count("*")
        for match in filter(None, (re.fullmatch(pattern, name) for name in names)):
            packed = stars > len(match.groups())
            head = re.match(r".*?(layers|blocks)\.\d+\.", match[0])
            layer = [name for name in names if head and name.startswith(head[0])]
            for rest in [(str(e),) for e in range(experts)] if packed else [()]:
                if stars == len(match.groups()) + len(rest):
                    one = mapping.resolve((*match.groups(), *rest))
                    at = re.match(
                        r"(?:language_model\.)?decoder\.layers\.(\d+)", one.megatron_param
                    )
                    if at is not None and int(at[1]) >= layers:
                        continue
                    if _is_there(one.megatron_param, layer):
                        yield one, packed


def _of_further(mapping: Any, names: list[str], experts: int) -> Iterator[Any]:
    """What a mapping of Nemotron-H's block resolves to: it counts steps in Megatron's names."""
    stars = mapping.megatron_param.count("*")
    for step, expert in itertools.product(range(2 if stars > 1 else 1), range(experts)):
        one = mapping.resolve(("0", str(step), str(expert))[:stars])
        takes = {one.hf_param} if isinstance(one.hf_param, str) else {*one.hf_param.values()}
        layer = [name for name in names if name.startswith(f"mtp.layers.{step}.")]
        if takes <= {*names} and _is_there(one.megatron_param, layer):
            yield one


def _target_of(one: Any, weights: Any, *, packed: bool) -> Any:
    """A parameter of the shape that Megatron's has: what it makes by what it takes."""
    import torch

    shape = list(weights[0].shape if packed else getattr(weights, "shape", ()))
    turned = (
        packed and len(shape) == 2 and shape["fc1" in one.megatron_param] != SMALL["hidden_size"]
    )
    return torch.empty(shape[::-1] if turned else shape)


def _mapped(bridge: Any, hf: dict[str, Any], experts: int) -> dict[str, Any]:
    """What the mappings of a bridge make of a state dict; every tensor of it is used."""
    import torch

    class ColumnParallelLinear(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.config, self.weight = config, torch.nn.Parameter(torch.empty(0))

    module = ColumnParallelLinear(bridge.provider_bridge(bridge.hf_pretrained))
    vision = getattr(bridge.hf_config, "vision_config", None)
    if vision is not None:
        heads = getattr(vision, "num_heads", SIGLIP["num_attention_heads"])
        hidden = vision.hidden_size
        vision = ColumnParallelLinear(
            SimpleNamespace(
                num_attention_heads=heads,
                num_query_groups=heads,
                kv_channels=hidden // heads,
                hidden_size=hidden,
            )
        )
    text = getattr(bridge.hf_config, "text_config", bridge.hf_config)
    layers = text.num_hidden_layers
    made: dict[str, Any] = {}
    used: set[str] = set()
    for one, packed in _resolved(bridge.mapping_registry(), list(hf), experts, layers):
        weights = bridge.maybe_modify_loaded_hf_weight(one.hf_param, hf)
        found = module, _target_of(one, weights, packed=packed)
        for each in list(sys.modules.values()):
            if hasattr(each, "get_module_and_param_from_name"):
                vars(each)["get_module_and_param_from_name"] = lambda *_, found=found, **__: found
        of_vision = vision is not None and one.megatron_param.startswith("vision_model.")
        made[one.megatron_param] = one.hf_to_megatron(weights, vision if of_vision else module)
        used |= {one.hf_param} if isinstance(one.hf_param, str) else {*one.hf_param.values()}
    if hf.keys() - used:
        raise ValueError(f"not used: {hf.keys() - used}")
    return made


_SOURCES = {
    "kimi_k2": "KimiK2ForCausalLM",
    "Kimi_K25": "KimiK25ForConditionalGeneration",
}
"""What Bridge calls models that are not called so in transformers."""


def on_the_hub(name: str) -> str:
    """Return what the Hub's Kimi K2.5 calls a tensor; transformers 5.23 writes some otherwise."""
    name = name.replace("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed.")
    name = name.replace("language_model.model.blocks.", "language_model.model.layers.")
    return name.replace("model.mm_projector.", "mm_projector.")


def _record_of(model: str, name: str, more: dict[str, Any]) -> dict[str, Any]:
    import torch
    import transformers
    from safetensors.torch import load_file

    of_text = name in ("Gemma3", "Qwen3_5", "Qwen3_5Moe") and "vision_config" not in more
    kind = f"{name}Text" if of_text else name
    sizes = {key: size for key, size in SMALL.items() if key != "head_dim" or "2_5" not in name}
    own = {k: v for k, v in more.items() if k not in ("model_type", "vision_config")}
    given = SMALL | own
    if vision := more.get("vision_config"):
        tied = {k: v for k, v in own.items() if k == "tie_word_embeddings"}
        given = {"text_config": sizes | own, "vision_config": vision, **tied}
    config = getattr(transformers, f"{kind}Config")(**given)
    full = f"{name}For{'ConditionalGeneration' if 'vision_config' in more else 'CausalLM'}"
    config.architectures = [full]
    source = _SOURCES.get(more.get("model_type", name), full)
    with tempfile.TemporaryDirectory() as folder:
        getattr(transformers, full)(config).save_pretrained(folder)
        files = Path(folder).glob("*.safetensors")
        shapes = {n: list(t.shape) for file in files for n, t in load_file(file).items()}
        written = json.loads((Path(folder) / "config.json").read_text())
    shapes = {on_the_hub(name): shape for name, shape in shapes.items()}
    if model.endswith("_predicting"):
        shapes |= _further(shapes, name, (SMALL | own)["num_hidden_layers"])
    hf = {n: torch.from_numpy(values(n, shape)) for n, shape in shapes.items()}
    made = _mapped(_bridge(source, config, shapes), hf, 3)
    megatron = {n: [list(t.shape), digest(t.numpy())] for n, t in made.items()}
    return {
        "config": written | {"model_type": more.get("model_type", written["model_type"])},
        "hf": shapes,
        "megatron": megatron,
    }


def record() -> None:
    """Write what Megatron-Bridge makes of all models into the record."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        found = {model: _record_of(model, name, more) for model, (_, name, more) in MODELS.items()}
    RECORD.write_bytes(gzip.compress(json.dumps(found, sort_keys=True).encode(), mtime=0))


if __name__ == "__main__":
    record()
