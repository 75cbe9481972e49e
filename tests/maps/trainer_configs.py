"""Configurations as trainers' own code writes them, of a Llama of two layers, and a record of them.

``python tests/maps/trainer_configs.py`` writes the record anew, where the sources of
Megatron-Bridge (commit 067f987df) and Megatron-LM (d98e8a64dd) lie on the path, with torch, PyYAML,
omegaconf and transformers; ``transformer_engine`` and ``triton`` are empty modules.
``model.yaml`` is recorded apart, by ``record_nemo`` with NeMo 2.5.3 and Megatron-core 0.14.0.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("trainer_configs.json.gz")
LLAMA = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 6,
    "ffn_hidden_size": 24,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
}
VOCABULARY = 37


def recorded() -> dict[str, str]:
    """Return the texts of the files, by their names."""
    texts: dict[str, str] = json.loads(gzip.decompress(RECORD.read_bytes()))
    return texts


def record() -> None:
    """Have each trainer's code write its file."""
    import torch
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.core.transformer import TransformerConfig
    from megatron.training.models.gpt import GPTModelConfig

    layers = LLAMA | {"activation_func": torch.nn.functional.silu}
    own = {"vocab_size": VOCABULARY, "share_embeddings_and_output_weights": False}
    transformer = TransformerConfig(**layers)
    made = recorded() | {
        "run_config.yaml": _run_config(GPTModelConfig(transformer=transformer, **own)),
        "run_config.yaml before": _run_config(GPTModelProvider(**layers, **own)),
        "transformer_config.json": _transformer_config(transformer),
    }
    RECORD.write_bytes(gzip.compress(json.dumps(made).encode(), mtime=0))


def record_nemo() -> None:
    """Have NeMo 2's own ``TrainerContext`` write a model's file, as its checkpoints have it.

    NeMo takes empty modules for what a CPU lacks, such as tensorstore, sentencepiece,
    nv_one_logger and leptonai.
    """
    import ml_dtypes  # noqa: F401  names bfloat16 for numpy, which Megatron-core takes for granted
    from nemo.collections.llm.gpt.model.llama import LlamaConfig, LlamaModel
    from nemo.lightning.io.pl import TrainerContext

    own = {"vocab_size": VOCABULARY, "share_embeddings_and_output_weights": False}
    config = LlamaConfig(**LLAMA, **own, apply_rope_fusion=False)
    context = TrainerContext(model=LlamaModel(config), trainer=None, extra={})
    with tempfile.TemporaryDirectory() as folder:
        context.io_dump(Path(folder), yaml_attrs=["model"])
        made = recorded() | {"model.yaml": (Path(folder) / "model.yaml").read_text()}
    RECORD.write_bytes(gzip.compress(json.dumps(made).encode(), mtime=0))


def _run_config(model: Any) -> str:
    """What Megatron-Bridge writes of a ``ConfigContainer``, of which only the model counts here."""
    from megatron.bridge.training.config import ConfigContainer
    from megatron.training.config.container import ConfigContainerBase

    @dataclasses.dataclass(kw_only=True)
    class Container(ConfigContainerBase):  # type: ignore[misc]
        model: Any

    Container.__qualname__, Container.__module__ = "ConfigContainer", ConfigContainer.__module__
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run_config.yaml"
        Container(model=model).to_yaml(str(path))
        return path.read_text()


def _transformer_config(config: Any) -> str:
    """What verl's (0.9) MegatronCheckpointManager writes of a ``TransformerConfig``.

    Enumerations that this Megatron-core has, and none that verl knows, as text.
    """
    from megatron.core.transformer.enums import AttnBackend
    from torch import dtype

    fields = dataclasses.asdict(config)
    texts = {k: str(v) if type(v) in (dtype, AttnBackend) else v for k, v in fields.items()}
    plain = {name: value for name, value in texts.items() if not callable(value)}
    return json.dumps(plain, indent=2, default=str)


if __name__ == "__main__":
    record()
