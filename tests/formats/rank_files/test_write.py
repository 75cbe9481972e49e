"""The per-rank writers, against torch's own pickles, readers and shards."""

from __future__ import annotations

import io
import json
import math
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import bits, case, convert_to, flat, load_torch, read_back
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Replicate as TorchReplicate
from torch.distributed.tensor.placement_types import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard as TorchStridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.read import ReadOptions
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.layout import Layout
from ckptool.core.mesh import Mesh, Placements, Replicate, Shard, StridedShard
from ckptool.core.plan import Plan
from ckptool.core.sharding.dtensor import local_shards
from ckptool.core.sharding.placement import PlacedTensors, Placer, parse_mesh
from ckptool.engine.run_options import RunOptions
from ckptool.engine.write.run import run
from ckptool.engine.write.work import Work
from ckptool.errors import Unsupported
from ckptool.formats.base import Request
from ckptool.formats.rank_files.write import lay_out_rank_files, lay_out_torch_checkpointing
from ckptool.serialization.archive.write import RankRecords, lay_out_archive
from ckptool.serialization.pickle.load import read_pickle
from ckptool.serialization.pickle.records import Call, Global, Persistent

Writer = Callable[[Catalog, Request], Layout]

OF_TORCH = sorted(name for name, kind in BY_NAME.items() if kind.is_of_torch)


def reshard(
    source: Path,
    target: Path,
    mesh: str,
    placements: dict[str, Placements] | None = None,
    writer: Writer = lay_out_rank_files,
) -> Layout:
    """Write a checkpoint for a mesh, as its source (or ``placements`` by name) places it."""
    opened = open_checkpoint(source, ReadOptions(per_rank=True))
    catalog = opened.open_containers(opened.catalog)
    parsed = parse_mesh(mesh)
    chosen = {name: c.placements for name, c in Placer(parsed).choose(catalog).items()}
    layout = writer(
        catalog, Request("m", placed=PlacedTensors(parsed, chosen | (placements or {})))
    )
    target.mkdir()
    plan, options = Plan(catalog, layout), RunOptions(workers=2, fsync=False)
    run(Work(plan, opened.source, options, range(len(layout.files))), target)
    return layout


def saved(state: Any, folder: Path) -> Path:
    torch.save(state, folder / "source.pt")
    return folder / "source.pt"


def as_torch(placements: Placements) -> list[Any]:
    kinds = {
        Shard: lambda p: TorchShard(p.dim),
        StridedShard: lambda p: TorchStridedShard(p.dim, split_factor=p.split_factor),
        Replicate: lambda p: TorchReplicate(),
    }
    return [kinds[type(placement)](placement) for placement in placements]


@contextmanager
def rank_of_a_job(rank: int, world: int) -> Iterator[None]:
    """A torch job of which only this rank exists; its groups are made, its transport is not."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


# The record of a DTensor


def placements_for(draw: Any, dims: int, rank: int) -> Placements:
    dim = st.integers(0, rank - 1)
    kinds: list[Any] = [st.builds(Replicate)]
    if rank:
        kinds += [st.builds(Shard, dim), st.builds(StridedShard, dim, st.integers(2, 4))]
    return tuple(draw(st.one_of(kinds)) for _ in range(dims))


@st.composite
def shares(draw: Any) -> tuple[Mesh, int, tuple[int, ...], Placements, str]:
    """A mesh, a rank of it, and shape, placements and element type of a tensor."""
    sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)
    shape = draw(sizes.filter(lambda found: math.prod(found) <= 16))
    names = draw(st.sampled_from([None, [f"dim{i}" for i in range(len(shape))]]))
    tensor = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    placements = placements_for(draw, len(shape), len(tensor))
    rank = draw(st.integers(0, math.prod(shape) - 1))
    return Mesh.of(shape, names), rank, tensor, placements, draw(st.sampled_from(OF_TORCH))


DEVICE_MESH = Global("torch.distributed.device_mesh", "DeviceMesh")


def plain(value: Any) -> Any:
    """Inert records as values that can be compared."""
    if isinstance(value, Call):
        state = value.state
        if value.function == DEVICE_MESH and isinstance(state, dict):
            state = {"_preserve_rank_order": False, **state}  # which torch writes since 2.15
        parts = (value.args, state, value.items, value.entries)
        return (str(value.function), value.is_new, *map(plain, parts))
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return plain(value.value) if isinstance(value, Persistent) else value


def pickled_by_torch(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    with zipfile.ZipFile(stream) as archive:
        return plain(read_pickle(archive.read("archive/data.pkl"), what="torch").value)


def pickled_by_us(value: Any) -> Any:
    literal: Any = lay_out_archive(value)[0]
    start = literal.data.index(b"\x80\x02")
    return plain(read_pickle(literal.data, what="ckptool", start=start).value)


@settings(max_examples=150)
@given(shares())
def test_records_are_those_of_torch(share: Any) -> None:
    mesh, rank, shape, placements, dtype = share
    entry = TensorEntry("w", ("w",), BY_NAME[dtype], shape, ())
    shard = local_shards(shape, mesh.shape, placements)[rank]
    local = torch.empty(shard.shape, dtype=getattr(torch, dtype))
    with rank_of_a_job(rank, mesh.size):
        there = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
        strides = torch.empty(shape, device="meta").stride()
        meta = TensorMeta(torch.Size(shape), strides, local.dtype)
        spec = DTensorSpec(there, tuple(as_torch(placements)), meta)
        theirs = pickled_by_torch({"w": DTensor(local, spec, requires_grad=False)})
    ours = RankRecords(mesh, rank).dtensor(entry, shard, placements)
    assert pickled_by_us({"w": ours}) == theirs


def test_a_mesh_has_what_torch_2_15_compares() -> None:
    """Its ``DeviceMesh`` has no default for it, and other versions take what they do not know."""
    mesh = RankRecords(Mesh.of((2,)), 1)._mesh
    assert mesh.state["_preserve_rank_order"] is False
    recorded = vars(init_on_one_rank()).keys() - {"_pg_registry"}
    assert recorded <= mesh.state.keys()


def init_on_one_rank() -> Any:
    with rank_of_a_job(1, 2):
        return init_device_mesh("cpu", (2,))


def test_negative_dims_count_from_the_end() -> None:
    entry = TensorEntry("w", ("w",), BY_NAME["float32"], (4, 6), ())
    shards = local_shards((4, 6), (2,), (Shard(-1),))
    record = [
        pickled_by_us(RankRecords(Mesh.of((2,)), 1).dtensor(entry, shards[1], (Shard(dim),)))
        for dim in (-1, 1)
    ]
    assert record[0] == record[1]


def test_one_mesh_record_a_file(out: Path) -> None:
    state = {f"w{i}": torch.randn(8, 4) for i in range(20)}
    reshard(saved(state, out), out / "m", "2x2")
    loaded = load_torch(out / "m/checkpoint_3.pt")
    assert len({id(t.device_mesh) for t in loaded.values()}) == 1
    with zipfile.ZipFile(out / "m/checkpoint_3.pt") as archive:
        assert archive.testzip() is None
        assert len([n for n in archive.namelist() if "/data/" in n]) == 21


# What torch.load finds


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


# DTensors and plain tensors


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


# What else a file holds


def test_values_are_the_same_in_every_file(out: Path) -> None:
    nested = {"a": [1, {"b": (2.5, None)}], "groups": [{"lr": 0.1, "params": [0, 1]}], 3: b"x"}
    state = {"model": {"w": torch.randn(4)}, "extra": nested, "shape": torch.Size([2, 3])}
    layout = reshard(saved(state, out), out / "m", "2")
    for rank in range(2):
        loaded = load_torch(out / f"m/checkpoint_{rank}.pt")
        assert (loaded["extra"], loaded["shape"]) == (nested, torch.Size([2, 3]))
    assert not layout.notes


def test_values_of_foreign_classes_are_named(out: Path) -> None:
    source = saved({"w": torch.randn(4), "path": Path("x")}, out)
    layout = reshard(source, out / "m", "2")
    assert len(layout.notes) == 1
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
        file.path: [str(part.box) for part in file.parts if hasattr(part, "box")]
        for file in layout.files
    }
    assert boxes == {
        "checkpoint_0.pt": ["[2:4]"],
        "checkpoint_1.pt": ["[0:2]"],
        "checkpoint_2.pt": ["[2:4]"],
        "checkpoint_3.pt": ["[0:2]"],
    }


# Real checkpoints, back and forth

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


# torch's own reader, in a real job


def read_in_a_job(rank: int, folder: str, port: int) -> None:
    """One rank of a 2x2 job: the reader's shards are those that torch cuts from the truth."""
    from torch.distributed.checkpoint._experimental.builder import make_sync_checkpointer
    from torch.distributed.checkpoint._experimental.checkpoint_reader import CheckpointReader
    from torch.distributed.checkpoint._experimental.types import RankInfo

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    info = RankInfo(global_world_size=4, global_rank=rank)
    truth = torch.load(Path(folder, "source.pt"), weights_only=True)["model"]
    state, missing = CheckpointReader(info).read(f"{folder}/m")
    assert not missing
    for name, whole in truth.items():
        compare(state["model"][name], whole, mesh)
    again = make_sync_checkpointer(rank_info=info).load(f"{folder}/m")
    assert again["step"] == state["step"] == 7
    for name, found in again["model"].items():
        assert torch.equal(found.to_local(), state["model"][name].to_local())
    dist.destroy_process_group()


def compare(found: DTensor, whole: torch.Tensor, mesh: DeviceMesh) -> None:
    assert found.device_mesh == mesh
    assert hash(found.device_mesh) == hash(mesh)
    wanted = distribute_tensor(whole, mesh, found.placements)
    assert torch.equal(found.to_local(), wanted.to_local())
    assert torch.equal(found.full_tensor(), whole)
    live = torch.zeros_like(wanted)
    live.copy_(found)
    assert torch.equal(live.to_local(), wanted.to_local())
    assert torch.equal((live + found).full_tensor(), whole + whole)


JOB: dict[str, tuple[tuple[int, ...], Placements]] = {
    "model.rows": ((7, 3), (Shard(0), Replicate())),
    "model.both": ((9, 5), (Shard(0), Shard(1))),
    "model.nested": ((9,), (Shard(0), Shard(0))),
    "model.strided": ((8, 3), (StridedShard(0, 2), Shard(0))),
    "model.whole": ((3,), (Replicate(), Replicate())),
    "model.empty": ((1, 2), (Shard(0), Shard(0))),
}


def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_torchs_own_reader_in_a_job_of_the_new_size(out: Path) -> None:
    tensors = {name.removeprefix("model."): torch.randn(shape) for name, (shape, _) in JOB.items()}
    source = saved({"model": tensors, "step": 7}, out)
    reshard(source, out / "m", "dp=2,tp=2", {name: placed for name, (_, placed) in JOB.items()})
    start = torch.multiprocessing.start_processes
    job = start(read_in_a_job, (str(out), free_port()), 4, join=False, start_method="fork")
    try:
        assert any(job.join(timeout=30) for _ in job.processes)
    finally:
        for process in job.processes:
            process.kill()


# torch_checkpointing


def test_metadata_is_what_the_library_wrote(out: Path) -> None:
    source = case("torch_checkpointing").path
    mesh = open_checkpoint(source).catalog.mesh
    assert mesh is not None
    text = ",".join(f"{n}={s}" for n, s in zip(mesh.names or ("x",), mesh.shape, strict=True))
    layout = reshard(source, out / "m", text, writer=lay_out_torch_checkpointing)
    assert layout.files[-1].path == "metadata.pkl"
    ours = pickle.loads((out / "m/metadata.pkl").read_bytes())
    assert ours == pickle.loads((source / "metadata.pkl").read_bytes())
    assert sorted(p.name for p in (out / "m").iterdir()) == sorted(p.name for p in source.iterdir())


def test_a_state_dict_without_levels_is_the_item_model(out: Path) -> None:
    state = {"a.w": torch.randn(4), "b": torch.tensor(2.0), "epoch": 3}
    reshard(saved(state, out), out / "m", "2", writer=lay_out_torch_checkpointing)
    names = {path.name for path in (out / "m").glob("*_0.pt")}
    assert names == {"model_0.pt", "epoch_0.pt"}
    assert load_torch(out / "m/epoch_1.pt") == 3
    assert list(load_torch(out / "m/model_1.pt")) == ["a.w", "b"]


@pytest.mark.parametrize("item", ["../up", "a/b", "", ".hidden", "a\x00b"])
def test_items_that_cannot_name_a_file(item: str, out: Path) -> None:
    with pytest.raises(Unsupported, match="names files by the top"):
        reshard(
            saved({item: {"w": torch.randn(4)}}, out),
            out / "m",
            "2",
            writer=lay_out_torch_checkpointing,
        )


def test_the_library_loads_onto_another_mesh(out: Path) -> None:
    pytest.importorskip("torch_checkpointing.schema")
    import torch_checkpointing as library
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.schema import ItemSpec

    tensors = {n.removeprefix("model."): torch.randn(shape) for n, (shape, _) in JOB.items()}
    placements = {name: placed for name, (_, placed) in JOB.items()}
    source = saved({"model": tensors, "step": 7}, out)
    reshard(source, out / "m", "dp=2,tp=2", placements, lay_out_torch_checkpointing)
    manager = library.CheckpointManager.Config(
        items={"model": ItemSpec(resharder=DefaultResharder())},
        save=library.SyncCheckpointSaverConfig(),
    ).build()
    target = {name: torch.zeros_like(whole) for name, whole in tensors.items()}
    manager.load(str(out / "m"), into={"model": target}, strict=True)
    for name, whole in tensors.items():
        assert torch.equal(target[name], whole)


def test_the_library_extracts_the_same_metadata(out: Path) -> None:
    pytest.importorskip("torch_checkpointing.schema")
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.distributed_metadata import DistributedMetadata

    source = case("rank_experimental").path
    reshard(source, out / "m", "dp=2,tp=2", writer=lay_out_torch_checkpointing)
    metadata = DistributedMetadata.from_dict(pickle.loads((out / "m/metadata.pkl").read_bytes()))
    for item, recorded in metadata.metadata.items():
        value = load_torch(out / f"m/{item}_2.pt")
        with rank_of_a_job(2, 4):
            found = DefaultResharder().extract_sharding_metadata(item, value)
        assert found == {
            path: recorded.get_metadata_for_path_and_rank(path, 2)
            for path in recorded.get_nested_paths()
        }


def test_flat_names_are_kept(out: Path) -> None:
    """A tree of lists, tuples and integer keys has the same names before and after."""
    tree = {"a": [torch.randn(4), {"b": (torch.randn(3), 1)}], 5: {"c": torch.randn(2, 2)}}
    reshard(saved(tree, out), out / "m", "2")
    assert list(flat(load_torch(out / "m/checkpoint_0.pt"))) == list(flat(tree))
