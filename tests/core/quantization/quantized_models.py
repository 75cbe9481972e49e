"""Small quantized models, and the numbers that torch makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from conftest import convert_to, load_torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

from ckptool.core.casts import Casts
from ckptool.core.dtype import BY_NAME


def fp8(rows: int, columns: int, block: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Any bits, NaN among them, and scales."""
    weight = torch.randint(0, 256, (rows, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return weight, torch.rand(-(-rows // block), -(-columns // block)) * 3 + 1e-6


def mxfp4(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of 32 numbers; the last dim of ``shape`` counts blocks."""
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
    return blocks, torch.randint(100, 150, shape, dtype=torch.uint8)


def deepseek(rows: int = 300, columns: int = 200) -> dict[str, torch.Tensor]:
    weight, scale = fp8(rows, columns)
    return {
        "mlp.up_proj.weight": weight,
        "mlp.up_proj.weight_scale_inv": scale,
        "norm.weight": torch.randn(5).bfloat16(),
    }


def gpt_oss(*shape: int) -> dict[str, torch.Tensor]:
    blocks, scales = mxfp4(*shape)
    return {"mlp.experts.down_proj_blocks": blocks, "mlp.experts.down_proj_scales": scales}


def saved(state: dict[str, torch.Tensor], folder: Path, config: Any = None) -> Path:
    """A Hugging Face folder with an index, which torch's reader wants."""
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(state, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def as_torch_reads(folder: Path, name: str, dtype: torch.dtype) -> torch.Tensor:
    reader = QuantizedHuggingFaceStorageReader(str(folder), target_dtype=dtype)
    shape = reader.read_metadata().state_dict_metadata[name].size
    state = {name: torch.empty(shape, dtype=dtype)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state[name]


def as_torch_computes(state: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """torch 2.13's reader has the formula of MXFP4, but reads only a corner of such a tensor.

    Its rows are outputs, which transformers turns.
    """
    reader = QuantizedHuggingFaceStorageReader("", target_dtype=dtype)
    blocks, scales = state.values()
    *rows, groups, size = blocks.shape
    wanted: Any = SimpleNamespace(storage_offsets=(0, 0, 0), lengths=(*rows, groups * size * 2))
    return reader._dequantize_tensor_mxfp4(blocks, scales, wanted, 0, 0).mT.contiguous()


def numbers(source: Path, out: Path, dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    kind = BY_NAME[str(dtype).removeprefix("torch.")]
    convert_to("torch-save", source, out / "m.pt", dequantize=True, casts=Casts(kind), **options)
    return _flat(load_torch(out / "m.pt"))


def _flat(tree: Any, head: str = "") -> dict[str, torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return {head: tree}
    steps = {f"{head}.{key}" if head else key: value for key, value in tree.items()}
    return {n: t for name, value in steps.items() for n, t in _flat(value, name).items()}
