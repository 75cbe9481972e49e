"""Rank files in a job of torch's own, and as torch_checkpointing reads them."""

from __future__ import annotations

import pickle
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import case, load_torch
from formats.rank_files.rank_writes import rank_of_a_job, reshard, saved
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from ckptool.commands.open import open_checkpoint
from ckptool.core.mesh import Placements, Replicate, Shard, StridedShard
from ckptool.errors import Unsupported
from ckptool.formats.rank_files.write import lay_out_torch_checkpointing


def load_by_library(folder: str, rank: int) -> list[dict[str, Any]]:
    """What torch's reader and its checkpointer load of a rank of four.

    torch is to remove both (pytorch/pytorch#195683); then torch_checkpointing's loader does it.
    """
    try:
        torch_s = import_module("torch.distributed.checkpoint._experimental")
    except ModuleNotFoundError:
        return [load_by_follower(folder, rank)]
    info = torch_s.RankInfo(global_world_size=4, global_rank=rank)
    state, missing = torch_s.CheckpointReader(info).read(folder)
    assert not missing
    return [state, torch_s.make_sync_checkpointer(rank_info=info).load(folder)]


def load_by_follower(folder: str, rank: int) -> dict[str, Any]:
    """The file ``checkpoint_{rank}.pt`` is that of an item of this name."""
    import torch_checkpointing as library
    from torch_checkpointing.checkpoint_manager import _DictCheckpoint
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    info, storage = library.RankInfo(rank, 4, rank, 4), LocalFileSystemStorageConfig()
    reader = library.CheckpointReader(rank_info=info, storage_config=storage)
    items = _DictCheckpoint({"checkpoint": library.CheckpointItem()})
    library.CheckpointLoader(reader=reader).load(folder, items, strict=True)
    loaded: dict[str, Any] = items.result["checkpoint"]
    return loaded


def read_in_a_job(rank: int, folder: str, port: int) -> None:
    """One rank of a 2x2 job: the reader's shards are those that torch cuts from the truth."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    truth = torch.load(Path(folder, "source.pt"), weights_only=True)["model"]
    for state in load_by_library(f"{folder}/m", rank):
        assert state["step"] == 7
        for name, whole in truth.items():
            compare(state["model"][name], whole, mesh)
    dist.barrier()  # gloo may end a rank whose peer leaves first
    dist.destroy_process_group()


def compare(found: DTensor, whole: torch.Tensor, mesh: DeviceMesh) -> None:
    assert found.device_mesh == mesh
    assert hash(found.device_mesh) == hash(mesh)
    wanted = distribute_tensor(whole, mesh, found.placements)
    assert torch.equal(found.to_local(), wanted.to_local())
    assert torch.equal(found.full_tensor(), whole)
    live: Any = torch.zeros_like(wanted)
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
    library: Any = import_module("torch_checkpointing")
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
