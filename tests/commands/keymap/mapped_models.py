"""Small models and optimizers, and what key maps make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import Bits, bits, convert_to, flat, load_dcp
from torchtitan_states import recorded

from ckptool.commands.options.rewrite import MapOptions
from ckptool.errors import CkptoolError

HEADS = {"head": 4, "kv": 2}


LLAMA = MapOptions("torchtitan-llama3", HEADS)


def state(family: str = "llama3", side: str = "trainer") -> dict[str, torch.Tensor]:
    return {n: torch.from_numpy(a).float() for n, a in sorted(recorded(family)[side].items())}


def save(folder: Path, content: dict[str, Any]) -> Path:
    dcp.save(content, checkpoint_id=folder, no_dist=True)
    return folder


def mapped(source: Path, target: Path, options: MapOptions = LLAMA, **more: Any) -> dict[str, Bits]:
    convert_to(more.pop("to", "dcp"), source, target, map=options, **more)
    return {name: bits(tensor) for name, tensor in flat(load_dcp(target)).items()}


def all_bits(tensors: dict[str, torch.Tensor]) -> dict[str, Bits]:
    return {name: bits(tensor) for name, tensor in tensors.items()}


MEGATRON = {
    "embedding.word_embeddings.weight": torch.arange(24.0).reshape(6, 4),
    "decoder.final_layernorm.weight": torch.arange(4.0),
}


def refusal(what: Any, *arguments: Any, **options: Any) -> CkptoolError:
    with pytest.raises(CkptoolError) as caught:
        what(*arguments, **options)
    return caught.value


def assets(folder: Path, model_type: str, **more: Any) -> Path:
    folder.mkdir()
    config = {"model_type": model_type, "num_attention_heads": 4, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(config | more))
    return folder
