"""vLLM's sharded state: what its loader finds, part by part."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import attack_build as b
import pytest
import torch
from conftest import bits, load_torch
from formats.vllm.vllm_loads import as_vllm_loads
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.run import RunOptions
from ckptool.core.layout import Layout
from ckptool.core.mesh import Placements, Replicate, Shard
from ckptool.core.planning.plan import Plan
from ckptool.core.sharding.placement import PlacedTensors, parse_mesh
from ckptool.engine.write.run import run
from ckptool.engine.write.work import Work
from ckptool.errors import Damaged, Unsupported
from ckptool.formats.base import Request
from ckptool.formats.vllm import lay_out


def write(
    state: Any, folder: Path, mesh: str, placements: dict[str, Placements], limit: int = 1 << 30
) -> Layout:
    """Lay the state out below ``folder/m``; what is not placed is replicated."""
    torch.save(state, folder / "source.pt")
    opened = open_checkpoint(folder / "source.pt")
    parsed = parse_mesh(mesh)
    whole = (Replicate(),) * len(parsed.shape)
    chosen = {name: placements.get(name, whole) for name in opened.catalog.tensors}
    request = Request("m", max_shard_size=limit, placed=PlacedTensors(parsed, chosen))
    layout = lay_out(opened.catalog, request)
    (folder / "m").mkdir()
    options = RunOptions(workers=1, fsync=False)
    plan, numbers = Plan(opened.catalog, layout), range(len(layout.files))
    run(Work(plan, opened.source, options, numbers), folder / "m")
    return layout


@settings(max_examples=40)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    world=st.integers(1, 5),
    data=st.data(),
)
def test_local_tensors_are_torchs_chunks(
    shape: list[int], world: int, data: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("state")
    dim = data.draw(st.integers(0, len(shape) - 1))
    whole = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    write({"w": whole, "norm": whole.clone()}, folder, str(world), {"w": (Shard(dim),)})
    chunks = torch.chunk(whole, world, dim)
    for rank in range(world):
        found = as_vllm_loads(folder / "m", rank)
        assert torch.equal(found.pop("norm"), whole)
        assert [bits(t) for t in found.values()] == [bits(t) for t in chunks[rank : rank + 1]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "bool", "complex64", "int64"])
def test_element_types(dtype: str, out: Path) -> None:
    whole = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1]).to(getattr(torch, dtype))
    write({"w": whole}, out, "2", {"w": (Shard(0),)})
    assert bits(as_vllm_loads(out / "m", 1)["w"]) == bits(whole[4:])


def test_a_file_is_what_safetensors_writes(out: Path) -> None:
    tensors = {"b.weight": torch.randn(4, 6), "a.weight": torch.randn(3).bfloat16()}
    write(tensors, out, "1", {})
    save_file(tensors, out / "theirs.safetensors")
    ours = (out / "m/model-rank-0-part-0.safetensors").read_bytes()
    assert ours == (out / "theirs.safetensors").read_bytes()


LIMITS = [(1 << 30, 1), (300, 2), (256, 2), (128, 4), (1, 4)]


@pytest.mark.parametrize(("limit", "parts"), LIMITS)
def test_parts_hold_at_most_the_limit_of_a_rank(limit: int, parts: int, out: Path) -> None:
    state = {f"w{i}": torch.randn(16, 4) for i in range(4)}
    layout = write(state, out, "2", dict.fromkeys(state, (Shard(0),)), limit)
    names = [f"model-rank-{r}-part-{p}.safetensors" for r in range(2) for p in range(parts)]
    assert [file.path for file in layout.files] == names
    assert [file.rank for file in layout.files] == [0] * parts + [1] * parts
    found = as_vllm_loads(out / "m", 1)
    assert {n: bits(t) for n, t in found.items()} == {n: bits(t[8:]) for n, t in state.items()}


def test_what_safetensors_cannot_hold_lies_beside(out: Path) -> None:
    state = {"w": torch.randn(4), "z": torch.zeros(2, dtype=torch.complex128), "epoch": 3}
    layout = write(state, out, "2", {"w": (Shard(0),)})
    assert list(as_vllm_loads(out / "m", 0)) == ["w"]
    extra = load_torch(out / "m/model.extra.pt")
    assert (bits(extra["z"]), extra["epoch"]) == (bits(state["z"]), 3)
    assert len(layout.notes) == 3


NOTES = [
    ({"b.weight": "x", "a.weight": "x"}, "tied to another tensor, so not written: b.weight"),
    ({"layers.0.self_attn.q_proj.weight": "x"}, "vLLM expects qkv_proj and gate_up_proj; 1"),
    ({"one": "short"}, "empty on some ranks, so not in their files: one"),
    ({"conv.weight": "x"}, "nothing says how vLLM cuts conv.weight: reading"),
]


@pytest.mark.parametrize(("names", "note"), NOTES)
def test_what_the_loader_would_not_find_is_named(
    names: dict[str, str], note: str, out: Path
) -> None:
    tensors = {"x": torch.randn(4), "short": torch.randn(1)}
    state = {name: tensors[kind] for name, kind in names.items()}
    layout = write(state, out, "2", dict.fromkeys(state, (Shard(0),)))
    assert [said for said in layout.notes if note in said]
    assert len(as_vllm_loads(out / "m", 0)) == 1


def test_a_rank_of_empty_shards_has_a_file(out: Path) -> None:
    write({"w": torch.randn(2)}, out, "3", {"w": (Shard(0),)})
    assert as_vllm_loads(out / "m", 2) == {}


def test_config_and_tokenizer_come_along(out: Path) -> None:
    source = out / "hf"
    source.mkdir()
    save_file({"w": torch.randn(4)}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": "llama"}))
    catalog = open_checkpoint(source).catalog
    placed = PlacedTensors(parse_mesh("2"), {"w": (Shard(0),)})
    layout = lay_out(catalog, Request("m", placed=placed))
    assert layout.files[0].path == "config.json"


@pytest.mark.parametrize("mesh", ["2x2", "1x4", "dp=2,tp=2"])
def test_meshes_of_several_dims_are_refused(mesh: str, out: Path) -> None:
    with pytest.raises(Unsupported, match="has 2 dims"):
        write({"w": torch.randn(4)}, out, mesh, {})


def test_no_mesh_is_refused(out: Path) -> None:
    torch.save({"w": torch.randn(4)}, out / "s.pt")
    with pytest.raises(Unsupported, match="needs a device mesh"):
        lay_out(open_checkpoint(out / "s.pt").catalog, Request("m"))


def refuse(folder: Path, words: str, *ranks: dict[str, torch.Tensor]) -> None:
    """Require that a folder with these ranks' tensors is refused in these words."""
    for rank, tensors in enumerate(ranks):
        save_file(tensors, folder / f"model-rank-{rank}-part-0.safetensors")
    (folder / "config.json").write_text(json.dumps({"vocab_size": 7}))
    with pytest.raises(Damaged, match=words):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["a.qkv_proj.weight", "embed_tokens.weight"])
def test_a_scalar_has_no_rows(name: str, out: Path) -> None:
    refuse(out, f"{name}: a scalar", {name: torch.tensor(1.0)})


def test_a_projection_is_not_both_fused_and_by_itself(out: Path) -> None:
    tensors = {"a.qkv_proj.weight": torch.ones(6, 2), "a.o_proj.weight": torch.ones(2, 2)}
    refuse(
        out, r"a\.q_proj\.weight: both by itself", {"a.q_proj.weight": torch.ones(2, 2)} | tensors
    )


def test_experts_of_no_size_are_not_counted(out: Path) -> None:
    header = {"experts.w2_weight": b.entry("F32", [10**12, 0, 4], [0, 0])}
    for rank in (0, 1):
        (out / f"model-rank-{rank}-part-0.safetensors").write_bytes(b.safetensors(header, b""))
    with pytest.raises(Damaged, match=r"not the fused experts of 2 ranks: \[1000000000000, 0, 4\]"):
        open_checkpoint(out)
