"""The torch side of the transfer bench: run as processes of their own, never inside ckptool.

``python -m ckptool.commands.bench.transfer.torch_tools TASK ...``
"""

from __future__ import annotations

import os
import sys

RANKS = 4
LAYERS = 8
_BYTES_PER_SQUARE = 1620
"""Bytes of a generated checkpoint, as a multiple of its model dimension squared."""
_WIDE_TENSORS, _WIDE_ROW = 8, 32 << 10


def parameter_shapes(dim: int = 16) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of a llama-like model."""
    hidden, vocabulary = dim * 11 // 4, 32 * dim
    layer: dict[str, tuple[int, ...]] = {
        f"attention.{name}.weight": (dim, dim) for name in ("wq", "wk", "wv", "wo")
    }
    layer |= {f"feed_forward.{name}.weight": (hidden, dim) for name in ("w1", "w3")}
    layer |= {"feed_forward.w2.weight": (dim, hidden)}
    layer |= {"attention_norm.weight": (dim,), "ffn_norm.weight": (dim,)}
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (vocabulary, dim)}
    for number in range(LAYERS):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes | {"norm.weight": (dim,), "output.weight": (vocabulary, dim)}


def write_checkpoint(folder: str, size: int) -> None:
    """Save about ``size`` bytes: bf16 parameters and AdamW's two fp32 moments of each."""
    dim = max(16, round((size / _BYTES_PER_SQUARE) ** 0.5 / 16) * 16)
    _on_ranks(folder, dim)


def write_wide_checkpoint(folder: str, size: int) -> None:
    """Save about ``size`` bytes of fp32 tensors whose rows have 128 KiB."""
    rows = max(1, round(size / _WIDE_TENSORS / _WIDE_ROW / 4 / RANKS))
    _on_ranks(folder, rows, True)


def _on_ranks(folder: str, *words: int) -> None:
    """Save on ranks that are forked: torch is imported once for all of them."""
    import torch.distributed.checkpoint.state_dict_saver
    import torch.distributed.tensor  # noqa: F401
    from torch.multiprocessing.spawn import start_processes

    start_processes(  # type: ignore[no-untyped-call]
        _save_rank, (folder, *words), nprocs=RANKS, start_method="fork"
    )


def _save_rank(rank: int, folder: str, dim: int, wide: bool = False) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.set_num_threads(1)
    torch.manual_seed(rank)
    rendezvous = f"file://{os.path.abspath(folder)}.rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp_shard",))

    def shard(shape: tuple[int, ...], dtype: torch.dtype) -> DTensor:
        local = torch.randn((shape[0] // RANKS, *shape[1:])).to(dtype)
        return DTensor.from_local(local, mesh, [Shard(0)])

    if wide:
        whole = {f"w{n}": (dim * RANKS, _WIDE_ROW) for n in range(_WIDE_TENSORS)}
        save({n: shard(s, torch.float32) for n, s in whole.items()}, checkpoint_id=folder)
        dist.destroy_process_group()
        return
    shapes = parameter_shapes(dim)
    model = {name: shard(shape, torch.bfloat16) for name, shape in shapes.items()}
    moments = {
        name: {key: shard(shape, torch.float32) for key in ("exp_avg", "exp_avg_sq")}
        for name, shape in shapes.items()
    }
    state = {"model": model, "optimizer": {"state": moments}, "step": 100}
    save(state, checkpoint_id=folder)
    dist.destroy_process_group()


def write_many(folder: str, tensors: int = 1000, ranks: int = 64) -> None:
    """What so many ranks write of so many tensors, a row each: torch's own items and metadata."""
    import io
    import pickle

    import torch
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    os.makedirs(folder)
    item = io.BytesIO()
    torch.save(torch.arange(4.0).reshape(1, 4).clone(), item)
    names = [f"model.layers.{number}.weight" for number in range(tensors)]
    nbytes = len(item.getvalue())
    for rank in range(ranks):
        with open(os.path.join(folder, f"__{rank}_0.distcp"), "wb") as stream:
            stream.write(item.getvalue() * tensors)
    found = dcp.Metadata({}, {name: ("model", name[6:]) for name in names}, {})
    for number, name in enumerate(names):
        chunks = []
        for rank in range(ranks):
            place = torch.Size([rank, 0])
            chunks.append(dcp.ChunkStorageMetadata(place, torch.Size([1, 4])))
            stored = _StorageInfo(f"__{rank}_0.distcp", number * nbytes, nbytes)
            found.storage_data[dcp.MetadataIndex(name, place, rank)] = stored
        found.state_dict_metadata[name] = dcp.TensorStorageMetadata(
            dcp.TensorProperties(torch.float32), torch.Size([ranks, 4]), chunks
        )
    with open(os.path.join(folder, ".metadata"), "wb") as stream:
        pickle.dump(found, stream)


def torch_to_safetensors(source: str, target: str) -> None:
    """Torch's own route: read the whole checkpoint into memory, write it for Hugging Face."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    described = FileSystemReader(source).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in described.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(state, checkpoint_id=source, no_dist=True)
    writer = HuggingFaceStorageWriter(target, fqn_to_index_mapping=dict.fromkeys(state, 1))
    save(state, storage_writer=writer, no_dist=True)


def torch_reshard(source: str, target: str) -> None:
    """Torch's own route to a 2x4 mesh, under torchrun with 8 ranks: load into DTensors, save."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Placement, Replicate, Shard, empty

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    described = FileSystemReader(source).read_metadata().state_dict_metadata
    state = {}
    for name, entry in described.items():
        if isinstance(entry, TensorStorageMetadata):
            second: Placement = Shard(1) if len(entry.size) > 1 else Replicate()
            dtype = entry.properties.dtype
            state[name] = empty(
                entry.size, dtype=dtype, device_mesh=mesh, placements=[Shard(0), second]
            )
    load(state, checkpoint_id=source)
    save(state, checkpoint_id=target)
    dist.destroy_process_group()


def torch_read_metadata(source: str) -> None:
    """Torch's own way to see what a checkpoint holds."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    FileSystemReader(source).read_metadata()


def _torch_side(task: str, *words: str) -> None:
    if task == "write":
        write_checkpoint(words[0], int(words[1]))
    elif task == "write-wide":
        write_wide_checkpoint(words[0], int(words[1]))
    elif task == "write-many":
        write_many(words[0])
    elif task == "to-safetensors":
        torch_to_safetensors(words[0], words[1])
    elif task == "reshard":
        torch_reshard(words[0], words[1])
    else:
        torch_read_metadata(words[0])


if __name__ == "__main__":
    _torch_side(*sys.argv[1:])
