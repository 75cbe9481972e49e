"""The per-rank writers: what torch.load finds, and real checkpoints back and forth."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import bits, case, convert_to, flat, load_torch, read_back
from formats.rank_files.rank_writes import OF_TORCH, Writer, as_torch, rank_of_a_job, reshard, saved
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from ckptool.commands.open import open_checkpoint
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.layout import Data
from ckptool.core.mesh import Mesh, Placements, Replicate, Shard, StridedShard
from ckptool.core.sharding.placement import PlacedTensors, parse_mesh
from ckptool.errors import Unsupported
from ckptool.formats.base import Request
from ckptool.formats.rank_files.write import lay_out_rank_files, lay_out_torch_checkpointing


@st.composite
def cuts(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], Placements]:
    mesh = tuple(draw(st.sampled_from([(2,), (3,), (2, 2), (2, 3), (4, 2), (2, 2, 2)])))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    dim = st.integers(0, len(shape) - 1)
    kinds = st.one_of(st.builds(Replicate), st.builds(Shard, dim))
    return mesh, shape, tuple(draw(kinds) for _ in mesh)


@settings(max_examples=25)
@given(cuts())
def test_shards_are_those_of_distribute_tensor(
    tmp_path_factory: pytest.TempPathFactory, cut: Any
) -> None:
    mesh, shape, placements = cut
    folder = tmp_path_factory.mktemp("cut")
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    text = "x".join(map(str, mesh))
    reshard(saved({"w": whole}, folder), folder / "m", text, {"w": placements})
    for rank in range(math.prod(mesh)):
        found = load_torch(folder / f"m/checkpoint_{rank}.pt")["w"]
        with rank_of_a_job(rank, math.prod(mesh)):
            there = init_device_mesh("cpu", mesh)
            wanted = distribute_tensor(whole, there, as_torch(placements), src_data_rank=None)
        assert bits(found.to_local()) == bits(wanted.to_local())
        assert (found.shape, found.placements) == (wanted.shape, wanted.placements)


# FSDP2 over tensor parallelism: a rank's rows in several pieces, uneven, some ranks empty.
STRIDED = [
    ("4x2", (9, 3), (StridedShard(0, 2), Shard(0))),
    ("4x2", (33, 2), (StridedShard(0, 2), Shard(0))),
    ("2x2", (8,), (StridedShard(0, 2), Replicate())),
    ("2x3", (17, 2), (Replicate(), StridedShard(0, 3))),
    ("2x2x2", (13, 5), (StridedShard(0, 4), StridedShard(0, 2), Shard(0))),
    ("2x2", (7, 9), (StridedShard(1, 2), Shard(1))),
]


WRITERS = [lay_out_rank_files, lay_out_torch_checkpointing]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(("mesh", "shape", "placements"), STRIDED)
def test_strided_shards_read_back(
    mesh: str, shape: tuple[int, ...], placements: Placements, writer: Writer, out: Path
) -> None:
    whole = torch.randn(shape)
    reshard(saved({"s": {"w": whole}}, out), out / "m", mesh, {"s.w": placements}, writer)
    entry = open_checkpoint(out / "m").catalog.tensors["s.w"]
    assert entry.placements == placements
    convert_to("torch-save", out / "m", out / "back.pt")
    assert read_back("torch-save", out / "back.pt") == {"s.w": bits(whole)}


def sample(name: str) -> torch.Tensor:
    """Six values of an element type, whatever they mean."""
    dtype = getattr(torch, name)
    data = torch.arange(6 * dtype.itemsize).remainder(2 if name == "bool" else 120)
    return data.to(torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", OF_TORCH)
def test_every_element_type(dtype: str, out: Path) -> None:
    whole = sample(dtype)
    reshard(saved({"w": whole}, out), out / "m", "4")
    found = [load_torch(out / f"m/checkpoint_{rank}.pt")["w"] for rank in range(4)]
    assert [t.dtype for t in found] == [whole.dtype] * 4
    assert [bits(t.to_local()) for t in found] == [
        bits(whole[2 * rank : 2 * rank + 2]) for rank in range(4)
    ]


FRESH = """
import json, sys, torch, torch.distributed.tensor
found = torch.load(sys.argv[1], weights_only=True)["w"]
assert not torch.distributed.is_initialized()
mesh = found.device_mesh
print(json.dumps([found.to_local().tolist(), str(found.placements), list(found.shape),
    mesh.mesh.tolist(), mesh.mesh_dim_names, mesh.get_coordinate()]))
"""


def test_a_fresh_process_needs_no_process_group(out: Path) -> None:
    whole = torch.arange(20).reshape(5, 4)
    placements = (StridedShard(0, 2), Shard(0))
    reshard(saved({"w": whole}, out), out / "m", "dp=2,tp=2", {"w": placements})
    command = [sys.executable, "-c", FRESH, str(out / "m/checkpoint_2.pt")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows, placed, *rest = json.loads(told)
    assert rows == [whole[2].tolist()]
    assert placed == "(_StridedShard(dim=0, sf=2), Shard(dim=0))"
    assert rest == [[5, 4], [[0, 1], [2, 3]], ["dp", "tp"], [1, 0]]


def declared(mesh: str | None, placements: Placements | None, shape: tuple[int, ...]) -> Any:
    """A catalog of one tensor that its source places so, on a mesh that its source declares."""
    entry = TensorEntry("w", ("w",), BY_NAME["float32"], shape, (), placements)
    parsed = parse_mesh(mesh) if mesh else None
    source = "declared" if mesh else None
    return Catalog("rank-local", {"w": entry}, {}, {}, mesh=parsed, mesh_source=source)


KINDS = [
    ("scalar of an unplaced source", None, None, (), False),
    ("tensor of an unplaced source", None, None, (4,), True),
    ("plain scalar beside DTensors", "2", None, (), False),
    ("plain tensor beside DTensors", "2", None, (4,), False),
    ("replicated DTensor", "2", (Replicate(),), (4,), True),
    ("scalar DTensor", "2", (Replicate(),), (), True),
    ("sharded DTensor", "2", (Shard(0),), (4,), True),
]


@pytest.mark.parametrize(("mesh", "placements", "shape", "is_dtensor"), [k[1:] for k in KINDS])
def test_what_becomes_a_dtensor(
    mesh: str | None, placements: Placements | None, shape: tuple[int, ...], is_dtensor: bool
) -> None:
    catalog = declared(mesh, placements, shape)
    placed = PlacedTensors(Mesh.of((2,)), {"w": placements or (Replicate(),)})
    first: Any = lay_out_rank_files(catalog, Request("m", placed=placed)).files[0].parts[0]
    assert (b"DTensor" in first.data) == is_dtensor


def test_plain_tensors_that_were_to_be_cut_are_named() -> None:
    placed = PlacedTensors(Mesh.of((2,)), {"w": (Shard(0),)})
    layout = lay_out_rank_files(declared("2", None, (4,)), Request("m", placed=placed))
    assert layout.notes == ("plain tensors, so whole on every rank: w",)


def test_values_are_the_same_in_every_file(out: Path) -> None:
    nested = {"a": [1, {"b": (2.5, None)}], "groups": [{"lr": 0.1, "params": [0, 1]}], 3: b"x"}
    state = {"model": {"w": torch.randn(4)}, "extra": nested, "shape": torch.Size([2, 3])}
    layout = reshard(saved(state, out), out / "m", "2")
    for rank in range(2):
        loaded = load_torch(out / f"m/checkpoint_{rank}.pt")
        assert (loaded["extra"], loaded["shape"]) == (nested, torch.Size([2, 3]))
    assert layout.notes == ("its DTensors load with torch 2.13 and later only",)


def test_values_of_foreign_classes_are_named(out: Path) -> None:
    source = saved({"w": torch.randn(4), "path": Path("x")}, out)
    layout = reshard(source, out / "m", "2")
    assert len(layout.notes) == 2
    assert "path" in layout.notes[0]
    assert list(load_torch(out / "m/checkpoint_0.pt")) == ["w"]


@pytest.mark.parametrize(
    ("placements", "shared"), [({}, True), ({"b": (Replicate(),)}, False)], ids=["alike", "unlike"]
)
def test_tied_tensors(placements: dict[str, Placements], shared: bool, out: Path) -> None:
    one = torch.randn(6, 2)
    reshard(saved({"a": one, "b": one}, out), out / "m", "2", placements)
    loaded = load_torch(out / "m/checkpoint_1.pt")
    first, second = (loaded[name].to_local() for name in "ab")
    assert (first.data_ptr() == second.data_ptr()) == shared
    assert torch.equal(first, one[3:])


def test_config_and_tokenizer_come_along(out: Path) -> None:
    source = out / "hf"
    source.mkdir()
    from safetensors.torch import save_file

    save_file({"w": torch.randn(4)}, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    reshard(source, out / "m", "2")
    assert (out / "m/config.json").read_text() == "{}"


UNFIT = [
    (None, "needs a device mesh"),
    (PlacedTensors(Mesh((2,), None, (4, 5)), {"w": (Shard(0),)}), "the ranks 0 to 1"),
]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(("placed", "reason"), UNFIT)
def test_meshes_that_cannot_be_written(
    placed: PlacedTensors | None, reason: str, writer: Writer
) -> None:
    with pytest.raises(Unsupported, match=reason):
        writer(declared(None, None, (4,)), Request("m", placed=placed))


def test_a_permuted_mesh_keeps_its_ranks() -> None:
    mesh = Mesh((2, 2), None, (3, 1, 0, 2))
    placed = PlacedTensors(mesh, {"w": (Shard(0), Replicate())})
    layout = lay_out_rank_files(declared(None, None, (4,)), Request("m", placed=placed))
    boxes = {
        file.path: [str(part.pieces[0].box) for part in file.parts if isinstance(part, Data)]
        for file in layout.files
    }
    assert boxes == {
        "checkpoint_0.pt": ["[2:4]"],
        "checkpoint_1.pt": ["[0:2]"],
        "checkpoint_2.pt": ["[2:4]"],
        "checkpoint_3.pt": ["[0:2]"],
    }


SOURCES = ["dcp_fsdp2_tp", "rank_experimental", "zip_zoo", "torch_checkpointing", "rank_mismatch"]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("mesh", ["3", "dp=2,tp=2"])
@pytest.mark.parametrize("name", SOURCES)
def test_real_checkpoints_read_back(name: str, mesh: str, writer: Writer, out: Path) -> None:
    truth = case(name).truth
    reshard(case(name).path, out / "m", mesh, writer=writer)
    found = open_checkpoint(out / "m").catalog
    assert (found.mesh, found.mesh_source) == (parse_mesh(mesh), "declared")
    convert_to("torch-save", out / "m", out / "back.pt")
    back = read_back("torch-save", out / "back.pt")
    flat_source = writer is lay_out_torch_checkpointing and not case_has_levels(name)
    assert back == {f"model.{n}" if flat_source else n: value for n, value in truth.items()}


def case_has_levels(name: str) -> bool:
    entries = open_checkpoint(case(name).path).catalog.tensors.values()
    return any(len(entry.path) > 1 for entry in entries)


def test_flat_names_are_kept(out: Path) -> None:
    """A tree of lists, tuples and integer keys has the same names before and after."""
    tree = {"a": [torch.randn(4), {"b": (torch.randn(3), 1)}], 5: {"c": torch.randn(2, 2)}}
    reshard(saved(tree, out), out / "m", "2")
    assert list(flat(load_torch(out / "m/checkpoint_0.pt"))) == list(flat(tree))
