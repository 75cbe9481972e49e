"""What torchtitan's own state-dict adapters make of small state dicts, and a record of it.

``python tests/maps/torchtitan_states.py`` writes the record anew, with torchtitan 0.3.0. Names come
from torchtitan's models; the shapes are made small, and every element has a value of its own.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

RECORD = Path(__file__).parent / "torchtitan_0_3_0.safetensors.gz"
JOBS = Path(__file__).parent / "torchtitan_0_3_0_jobs.json"
"""By family, of the job config that torchtitan's Trainer writes what it has of the model."""
CONFIGS: dict[str, dict[str, Any]] = {
    "llama3": {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2},
    "llama3_tied": {
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", "num_attention_heads": 4, "tie_word_embeddings": True},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_attention_heads": 4},
    "deepseek_v3": {"model_type": "deepseek_v3", "num_hidden_layers": 2},
    "deepseek_v3_predicting": {"model_type": "deepseek_v3", "num_hidden_layers": 2},
}
VISION = {"in_channels": 3, "temporal_patch_size": 2, "patch_size": 2}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 3,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 4,
}
CONFIGS |= {
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": DELTA | {"model_type": "qwen3_5_text"},
        "vision_config": VISION,
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "text_config": DELTA,
        "vision_config": VISION,
    },
    "kimi_k2_5": {
        "model_type": "kimi_k25",
        "text_config": {"model_type": "kimi_k2", "num_hidden_layers": 2},
        "vision_config": {"patch_size": 2},
    },
}
FAMILIES = list(CONFIGS)
States = dict[str, dict[str, np.ndarray[Any, Any]]]
"""``trainer``, ``hf`` and ``back``: a state dict, what ``to_hf`` makes of it, and ``from_hf``."""


def _small(config: Any, layer: int = 0) -> None:
    """Heads as the small shapes have them."""
    attention = config.layers[layer].attention
    config.dim, attention.n_heads, attention.n_kv_heads, attention.head_dim = 16, 4, 2, 4


def _shape(shape: tuple[int, ...], sizes: dict[int, int]) -> tuple[int, ...]:
    return tuple(sizes.get(n, n if n < 8 else 4 + n % 3) for n in shape)


def _made(
    spec: Any, layers: slice, sizes: dict[int, int], *, heads: bool = False, config: Any = None
) -> States:
    import torch

    config = config or spec.model
    config.layers = config.layers[layers]
    for layer in (*config.layers, *getattr(config, "mtp_layers", ())):
        if getattr(layer, "moe", None) is not None:
            _few_experts(layer.moe)
    with torch.device("meta"):
        names = {n: tuple(t.shape) for n, t in config.build().state_dict().items()}
    sizes = {**sizes, config.vocab_size: 10}
    if heads:
        _small(config)
    trainer = _counted({name: _shape(shape, sizes) for name, shape in names.items()})
    if config.enable_weight_tying:
        trainer["lm_head.weight"] = trainer["tok_embeddings.weight"]
    adapter = spec.state_dict_adapter(config, None)
    there = adapter.to_hf({_LETTERS.sub(r"\1", name): t for name, t in trainer.items()})
    back = adapter.from_hf(dict(there))
    there = dict(_as_transformers_has(name, tensor) for name, tensor in there.items())
    letters = {_LETTERS.sub(r"\1", name): name for name in trainer}
    back = {letters[name]: tensor for name, tensor in back.items()}
    return {
        side: {n: t.contiguous().numpy().astype("i2") for n, t in state.items()}
        for side, state in (("trainer", trainer), ("hf", there), ("back", back))
    }


_LETTERS = re.compile(r"(mlp\d_(?:weight|bias))_[A-Z]+")
"""What the model of gpt-oss has at the end of names, and its adapter does not know of."""
_EXPERTS = re.compile(r"(.*\.experts\.(?:gate_up|down)_proj)(?:_blocks)?")


def _as_transformers_has(name: str, tensor: Any) -> tuple[str, Any]:
    """Experts that are packed as transformers 5.23 has them.

    The adapters have those of gpt-oss under the names and in the order of MXFP4, the outputs first,
    and those of Qwen3.5 with the inputs first; transformers has either the other way.
    """
    match = _EXPERTS.fullmatch(name)
    return (match[1], tensor.transpose(-2, -1).contiguous()) if match else (name, tensor)


def _of_qwen3_5(flavor: str) -> States:
    """A layer of DeltaNet and one of attention, and the vision model."""
    from torchtitan.models.qwen3_5 import model_registry

    spec = model_registry(flavor)
    delta, vision = spec.model.layers[2].delta_net, spec.model.vision_encoder
    delta.in_proj_q.out_features, delta.in_proj_v.out_features = 6, 16
    vision.patch_size, vision.num_layers = 2, 2
    return _made(spec, slice(2, 4), {256: 16, 16: 16, 1536: 24})


def _of_kimi() -> States:
    """A dense layer and one with experts, and the vision model."""
    from torchtitan.models.kimi_k2_7 import model_registry

    spec = model_registry("debugmodel")
    spec.model.vision_encoder.patch_size = spec.model.vision_encoder.num_layers = 2
    return _made(spec, slice(0, 2), {588: 12})


def _counted(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Tensors of these shapes, no two elements of which are equal."""
    import torch

    found: dict[str, Any] = {}
    count = 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        found[name] = torch.arange(count, count + size).reshape(shape)
        count += size
    return found


def _few_experts(moe: Any) -> None:
    moe.num_experts = 3
    moe.router.num_experts = moe.router.gate.out_features = 3
    moe.routed_experts.inner_experts.num_experts = 3


def _families() -> dict[str, Callable[[], States]]:
    from torchtitan.models.deepseek_v3 import deepseekv3_configs
    from torchtitan.models.deepseek_v3 import model_registry as deepseek
    from torchtitan.models.gpt_oss import model_registry as gpt_oss
    from torchtitan.models.llama3 import model_registry as llama
    from torchtitan.models.qwen3 import model_registry as qwen

    two = slice(0, 2)
    return {
        "llama3": lambda: _made(llama("8B"), two, {4096: 16, 1024: 8, 14336: 6}, heads=True),
        "llama3_tied": lambda: _made(llama("1B"), two, {2048: 16, 512: 8, 8192: 6}, heads=True),
        "qwen3": lambda: _made(qwen("0.6B"), two, {1024: 8, 2048: 16, 3072: 6}),
        "qwen3_moe": lambda: _made(qwen("30B-A3B"), two, {2048: 8, 4096: 16, 512: 4}),
        "deepseek_v3": lambda: _made(deepseek("671B"), slice(2, 4), {}),
        "deepseek_v3_predicting": lambda: _made(
            deepseek("671B"),
            slice(2, 4),
            {},
            config=deepseekv3_configs["671B"]("flex", "standard", num_mtp_layers=1),
        ),
        "gpt_oss": lambda: _made(
            gpt_oss("debugmodel"), two, {256: 8, 4096: 16, 512: 8, 5760: 8, 2880: 4}
        ),
        "qwen3_5": lambda: _of_qwen3_5("debugmodel"),
        "qwen3_5_moe": lambda: _of_qwen3_5("debugmodel_moe"),
        "kimi_k2_5": _of_kimi,
    }


def jobs() -> dict[str, dict[str, Any]]:
    """What ``Trainer.Config.to_dict`` says of the models, made as small as their states."""
    from torchtitan.models.deepseek_v3 import model_registry as deepseek
    from torchtitan.models.llama3 import model_registry as llama

    found = {}
    for family, spec, layers in (
        ("llama3", llama("8B"), slice(0, 2)),
        ("llama3_tied", llama("1B"), slice(0, 2)),
        ("deepseek_v3", deepseek("671B"), slice(2, 4)),
    ):
        spec.model.layers = spec.model.layers[layers]
        if family == "deepseek_v3":
            (spec.model.dim,) = _shape((spec.model.dim,), {})
        else:
            for layer in range(2):
                _small(spec.model, layer)
        model = {"name": spec.name, "flavor": spec.flavor, "model": spec.model.to_dict()}
        found[family] = {"model_spec": model}
    return found


def states(family: str) -> States:
    """What the adapter that is installed makes of a family's state dict."""
    return _families()[family]()


def record() -> None:
    """Write what all adapters make into the record, and the job configs.

    Qwen3.5's needs ``fla``, whose kernels are for GPUs: an empty module will do.
    """
    arrays = {
        f"{family}|{side}|{name}": values
        for family in _families()
        for side, state in states(family).items()
        for name, values in state.items()
    }
    RECORD.write_bytes(gzip.compress(save(arrays), mtime=0))
    JOBS.write_text(json.dumps(jobs(), indent=1) + "\n")


def recorded(family: str) -> States:
    """What torchtitan's adapter made of a family's state dict when the record was written."""
    found: States = {"trainer": {}, "hf": {}, "back": {}}
    for key, values in load(gzip.decompress(RECORD.read_bytes())).items():
        name, side, tensor = key.split("|")
        if name == family:
            found[side][tensor] = values
    return found


def write_config(family: str, folder: Path) -> Path:
    """A folder with the config.json of a family."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[family]))
    return folder


if __name__ == "__main__":
    record()
