"""Every writer, read back by its framework's own loader, or as the framework lays its files out.

Where the framework cannot be installed beside the tests, the reader here is independent of ckptool:
torch.load and safetensors, and the rules that the framework documents.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import GOOD, Bits, bits, case, convert_to, flat, load_dcp, load_torch, read_back
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ReshardOptions, TransferOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.core.sharding.placement import parse_mesh
from ckptool.formats import targets

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Written:
    """Fixtures that a writer takes, the target's name, and what reads it back."""

    sources: tuple[str, ...]
    target: str
    read: Callable[[Path], dict[str, Bits]]
    model_only: bool = False


def as_bits(tensors: Tensors) -> dict[str, Bits]:
    return {name: bits(tensor) for name, tensor in tensors.items()}


# Converted


def by_index(folder: Path) -> dict[str, Bits]:
    """As transformers finds them: the index says which file holds each tensor."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return as_bits(load_file(folder / "model.safetensors"))
    named = json.loads(index.read_text())["weight_map"]
    files = {file: load_file(folder / file) for file in set(named.values())}
    return {name: bits(files[file][name]) for name, file in named.items()}


def by_universal(folder: Path) -> dict[str, Bits]:
    """As DeepSpeed's ``load_universal`` finds them: a folder a parameter, and the model file."""
    scaler = type("LossScaler", (), {"__module__": "deepspeed.runtime.fp16.loss_scaler"})
    tag = folder / (folder / "latest_universal").read_text()
    found: Tensors = {}
    for file in (tag / "zero").glob("*/*.pt"):
        value = load_torch(file)
        tensor = value["param"] if isinstance(value, dict) else torch.as_tensor(value)
        found[f"{file.stem}.{file.parent.name}"] = tensor
    with torch.serialization.safe_globals([scaler]):
        model = load_torch(tag / "mp_rank_00_model_states.pt")
    shapes = {n: shape for group in model["param_shapes"] for n, shape in group.items()}
    assert {name: found[f"fp32.{name}"].shape for name in shapes} == shapes
    for name, tensor in model["module"].items():
        if name in model["buffer_names"]:
            found[f"buffer.{name}"] = tensor
        elif f"fp32.{name}" in found or name in model.get("shared_params", {}):
            found[f"module.{name}"] = tensor
        else:
            found[f"frozen.{name}"] = tensor
    return as_bits(found)


def by_release(folder: Path) -> dict[str, Bits]:
    """As megatron-core's ``torch_dist`` finds them: DCP, in the folder that the tracker names."""
    release = folder / (folder / "latest_checkpointed_iteration.txt").read_text()
    assert json.loads((release / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    return as_bits({n: t for n, t in flat(load_dcp(release)).items() if "_extra_state" not in n})


ANY = ("dcp_fsdp2_tp", "rank_base", "hf_shards")
ZERO = ("deepspeed_zero_2", "deepspeed_zero_3", "deepspeed_universal")
CONVERTED = {
    "safetensors": Written(ANY, "m.safetensors", lambda path: as_bits(load_file(path))),
    "hf": Written(ANY, "m", by_index),
    "torch-save": Written(ANY, "m.pt", lambda path: read_back("torch-save", path)),
    "dcp": Written(ANY, "m", lambda path: read_back("dcp", path)),
    "dcp-safetensors": Written(ANY, "m", lambda path: read_back("dcp-safetensors", path)),
    "deepspeed-universal": Written(ZERO, "m", by_universal),
    "megatron-torch_dist": Written(("megatron_torch_dist",), "m", by_release, model_only=True),
}


def pairs(rows: dict[str, Written]) -> Iterable[tuple[str, str]]:
    return [(name, source) for name, row in rows.items() for source in row.sources]


@pytest.mark.parametrize(("name", "source"), pairs(CONVERTED))
def test_what_is_converted_is_what_the_framework_finds(name: str, source: str, out: Path) -> None:
    row, truth = CONVERTED[name], case(source).truth
    target = "safetensors" if name == "hf" else name
    convert_to(target, case(source).path, out / row.target, model_only=row.model_only)
    found = row.read(out / row.target)
    if row.model_only:
        truth = {
            n: t for n, t in truth.items() if n.startswith(("decoder.", "embedding.", "output"))
        }
    assert found == truth


# Resharded


def joined(parts: Iterable[Any]) -> torch.Tensor:
    """A tensor of all ranks' DTensors, each put where torch says that its rank's shard lies."""
    parts = list(parts)
    if not isinstance(parts[0], DTensor):
        assert all(bits(part) == bits(parts[0]) for part in parts)
        return parts[0]
    whole = torch.zeros(parts[0].shape, dtype=parts[0].dtype)
    mesh = tuple(parts[0].device_mesh.mesh.shape)
    for coordinate, part in zip(itertools.product(*map(range, mesh)), parts, strict=True):
        size, offset = _compute_local_shape_and_global_offset(
            whole.shape, mesh, coordinate.__getitem__, part.placements
        )
        local = part.to_local()
        assert tuple(local.shape) == tuple(size)
        whole[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))] = local
    return whole


def by_rank_files(folder: Path) -> dict[str, Bits]:
    ranks = [flat(load_torch(folder / f"checkpoint_{rank}.pt")) for rank in range(RANKS)]
    return as_bits({name: joined(rank[name] for rank in ranks) for name in ranks[0]})


def by_items(folder: Path) -> dict[str, Bits]:
    """As torch_checkpointing finds them: a file an item and rank."""
    found: Tensors = {}
    for item in sorted({path.stem.rpartition("_")[0] for path in folder.glob("*_0.pt")}):
        ranks = [flat(load_torch(folder / f"{item}_{rank}.pt"), item) for rank in range(RANKS)]
        found |= {name: joined(rank[name] for rank in ranks) for name in ranks[0]}
    return as_bits(found)


def by_verl(folder: Path) -> dict[str, Bits]:
    """As each rank of verl finds them; not its own random states."""
    found: Tensors = {}
    for family in ("model", "optim"):
        files = [folder / f"{family}_world_size_{RANKS}_rank_{rank}.pt" for rank in range(RANKS)]
        ranks = [flat(load_torch(file), family) for file in files]
        found |= {name: joined(rank[name] for rank in ranks) for name in ranks[0]}
    return as_bits(found)


def by_folders(folder: Path) -> dict[str, Bits]:
    """As accelerate finds them: the model in one DCP folder, the optimizer in another."""
    parts = ("pytorch_model_fsdp_0", "optimizer_0")
    return {n: tensor for part in parts for n, tensor in read_back("dcp", folder / part).items()}


def by_vllm(folder: Path) -> dict[str, Bits]:
    """As vLLM's layers hold them: columns and rows cut, key-value heads copied, words padded."""
    config = json.loads((folder / "config.json").read_text())
    ranks = [parts(folder, rank) for rank in range(RANKS)]
    found: Tensors = {}
    for name in ranks[0]:
        shards = [rank[name] for rank in ranks]
        head, _, last = name.removesuffix(".weight").rpartition(".")
        if last in ("o_proj", "down_proj"):
            found[name] = torch.cat(shards, 1)
        elif last in ("embed_tokens", "lm_head"):
            found[name] = torch.cat(shards)[: config["vocab_size"]]
        elif last == "gate_up_proj":
            halves = [shard.chunk(2) for shard in shards]
            for at, own in enumerate(("gate_proj", "up_proj")):
                found[f"{head}.{own}.weight"] = torch.cat([half[at] for half in halves])
        elif last == "qkv_proj":
            heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
            size = config["hidden_size"] // heads
            each, copies = max(1, groups // RANKS), max(1, RANKS // groups)
            rows = [heads // RANKS * size, each * size, each * size]
            cut = [shard.split(rows) for shard in shards]
            found[f"{head}.q_proj.weight"] = torch.cat([part[0] for part in cut])
            for at, own in ((1, "k_proj"), (2, "v_proj")):
                found[f"{head}.{own}.weight"] = torch.cat([part[at] for part in cut[::copies]])
        else:
            found[name] = joined(shards)
    return as_bits(found)


def parts(folder: Path, rank: int) -> Tensors:
    files = sorted(folder.glob(f"model-rank-{rank}-part-*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


COLUMNS = ("wq", "wk", "wv", "w1", "w3", "output", "tok_embeddings")


def by_meta(folder: Path) -> dict[str, Bits]:
    """As fairscale's layers of Llama 3 hold them."""
    ranks = [load_torch(folder / f"consolidated.{rank:02d}.pth") for rank in range(RANKS)]
    found: Tensors = {}
    for name in ranks[0]:
        shards, last = [rank[name] for rank in ranks], name.split(".")[-2]
        if last in COLUMNS or last in ("wo", "w2"):
            found[name] = torch.cat(shards, 0 if last in COLUMNS else 1)
        else:
            found[name] = joined(shards)
    return as_bits(found)


RANKS = 2
FSDP = ("dcp_fsdp2", "dcp_fsdp2_tp")
RESHARDED = {
    "dcp": Written(FSDP, "m", lambda path: read_back("dcp", path)),
    "rank-local": Written(FSDP, "m", by_rank_files),
    "torch-checkpointing": Written(FSDP, "m", by_items),
    "accelerate": Written(("accelerate_folders",), "m", by_folders),
    "verl": Written(("rank_verl",), "m", by_verl),
    "dcp-safetensors": Written(FSDP, "m", lambda path: read_back("dcp-safetensors", path)),
    "sharded-state": Written(("vllm_sharded_state",), "m", by_vllm),
    "llama": Written(("llama_consolidated",), "m", by_meta),
}


@pytest.mark.parametrize(("name", "source"), pairs(RESHARDED))
def test_what_is_resharded_is_what_the_framework_finds(name: str, source: str, out: Path) -> None:
    transfer = TransferOptions(run=RunOptions(workers=2, fsync=False))
    options = ReshardOptions(mesh=parse_mesh(str(RANKS)), to=name, transfer=transfer)
    prepare_reshard(case(source).path, out / "m", options).run()
    assert RESHARDED[name].read(out / "m") == case(source).truth


def test_every_writer_is_read_back() -> None:
    """Here, or at least by ``ckptool.conformance``, which takes every format that has a fixture."""
    checked = {one.facts["format"] for one in GOOD}
    assert set(CONVERTED) <= targets().keys() <= set(CONVERTED) | checked
    assert set(RESHARDED) <= targets(mesh=True).keys() <= set(RESHARDED) | checked
