"""Programs that the rows of the transfer bench run, each in a process of its own.

``python -m benchmarks.programs TASK ...`` does torch's side of the rows, makes
checkpoints, plans, or is one rank of a load under torchrun. A task imports what it needs: its
memory and its start are measured.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.load_programs import measure_load_onto, write_loads
from benchmarks.model_programs import write_adapter, write_model, write_names, write_sparse

if TYPE_CHECKING:
    from ckptool.commands.bench.specs import TensorSpec
    from ckptool.core.catalog import Catalog
    from ckptool.core.planning.plan import Plan

RANKS = 4
_BYTES_PER_SQUARE = 1620
"""Bytes of a generated checkpoint, as a multiple of its model dimension squared."""

_TENSORS = 8
"""Tensors of a checkpoint of large ones."""


def write_checkpoint(folder: str, size: int) -> None:
    """Save about ``size`` bytes: bf16 parameters and AdamW's two fp32 moments of each."""
    from ckptool.commands.bench.specs import specs_of_width

    dim = max(16, round((size / _BYTES_PER_SQUARE) ** 0.5 / 16) * 16)
    _save_on_ranks(folder, [spec for spec in specs_of_width(dim, "bfloat16") if spec.shape])


def write_shape(folder: str, size: int, rows: int, columns: int, dtype: str) -> None:
    """Save about ``size`` bytes of tensors of one shape, of as many rows as fit 8 where it is 0."""
    from ckptool.commands.bench.specs import TensorSpec

    tensors = _TENSORS
    row = TensorSpec(("w",), (1, columns), dtype).nbytes
    if rows:
        tensors = max(1, size // (rows * row))
    else:
        rows = RANKS * max(1, round(size / tensors / row / RANKS))
    specs = [TensorSpec((f"w{n}",), (rows, columns), dtype) for n in range(tensors)]
    _save_on_ranks(folder, specs)


def _save_on_ranks(folder: str, specs: list[TensorSpec]) -> None:
    """Save on ranks that are forked: torch is imported once for all of them."""
    import torch.distributed.checkpoint.state_dict_saver
    import torch.distributed.tensor  # noqa: F401
    from torch.multiprocessing.spawn import start_processes

    start_processes(  # type: ignore[no-untyped-call]
        _save_rank, (folder, specs), nprocs=RANKS, start_method="fork"
    )


def _save_rank(rank: int, folder: str, specs: list[TensorSpec]) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import save

    from ckptool.commands.bench.worker.device import Device
    from ckptool.commands.bench.worker.training import make_state

    torch.set_num_threads(1)
    rendezvous = f"file://{os.path.abspath(folder)}.rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    save(make_state(specs, Device("cpu", 0)), checkpoint_id=folder)
    _leave_group()


def _leave_group() -> None:
    """Leave the process group with the other ranks: gloo may end one whose peer left before it."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def write_many(folder: str, tensors: int, ranks: int) -> None:
    """Write what so many ranks save of so many tensors, a row each, by torch's own classes."""
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
    metadata = dcp.Metadata({}, {name: ("model", name[6:]) for name in names}, {})
    for number, name in enumerate(names):
        chunks = []
        for rank in range(ranks):
            place = torch.Size([rank, 0])
            chunks.append(dcp.ChunkStorageMetadata(place, torch.Size([1, 4])))
            stored = _StorageInfo(f"__{rank}_0.distcp", number * nbytes, nbytes)
            metadata.storage_data[dcp.MetadataIndex(name, place, rank)] = stored
        metadata.state_dict_metadata[name] = dcp.TensorStorageMetadata(
            dcp.TensorProperties(torch.float32), torch.Size([ranks, 4]), chunks
        )
    with open(os.path.join(folder, ".metadata"), "wb") as stream:
        pickle.dump(metadata, stream)


def torch_to_safetensors(source: str, target: str) -> None:
    """Go torch's own route: read the whole checkpoint into memory, write it for Hugging Face."""
    import torch
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    state = {name: torch.empty(size, dtype=dtype) for name, size, dtype in read_tensors(source)}
    load(state, checkpoint_id=source, no_dist=True)
    writer = HuggingFaceStorageWriter(target, fqn_to_index_mapping=dict.fromkeys(state, 1))
    save(state, storage_writer=writer, no_dist=True)


def torch_reshard(source: str, target: str) -> None:
    """Go torch's own route to a 2x4 mesh, under torchrun with 8 ranks: load DTensors, save."""
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.tensor import empty

    state = _cut_tensors(source, empty, (2, 4), (0, 1))
    load(state, checkpoint_id=source)
    save(state, checkpoint_id=target)
    _leave_group()


def _cut_tensors(
    source: str, make: Callable[..., Any], mesh: tuple[int, ...], dims: tuple[int, ...]
) -> dict[str, Any]:
    """Begin, as a rank under torchrun, and return every tensor of a checkpoint, made anew.

    Each mesh dimension shards the tensor dimension of ``dims``, where the tensor has it.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    devices = init_device_mesh("cpu", mesh)
    state = {}
    for name, size, dtype in read_tensors(source):
        placements = [Shard(dim) if dim < len(size) else Replicate() for dim in dims]
        state[name] = make(size, dtype=dtype, device_mesh=devices, placements=placements)
    return state


def torch_read_metadata(source: str) -> None:
    """Go torch's own way to see what a checkpoint holds."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    FileSystemReader(source).read_metadata()


def read_tensors(source: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, size and dtype of each tensor of a DCP checkpoint, as torch reads them."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    for name, entry in FileSystemReader(source).read_metadata().state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            yield name, entry.size, entry.properties.dtype


def measure_load(reader: str, source: str, dim: int, result: str) -> None:
    """Load every tensor by ``torch.distributed.checkpoint.load``, under torchrun.

    ``reader`` is ``torch`` or ``ckptool``. DTensors cut along tensor dim ``dim`` over all ranks are
    made, then filled. Rank 0 writes to the file ``result``, as JSON, the seconds from when all
    ranks begin until the last is done, and the bytes that all of them read from files.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.tensor import zeros

    # zeros, not empty: the memory is touched before the clock starts
    state = _cut_tensors(source, zeros, (RANKS,), (dim,))
    storage = _make_reader(reader, source)
    gc.collect()
    dist.barrier()
    before, begin = _count_read_bytes(), time.perf_counter()
    load(state, storage_reader=storage)
    dist.barrier()
    seconds = time.perf_counter() - begin
    nbytes = torch.tensor(_count_read_bytes() - before)
    dist.all_reduce(nbytes)
    if dist.get_rank() == 0:
        with open(result, "w", encoding="utf-8") as stream:
            json.dump({"load": seconds, "read_bytes": int(nbytes)}, stream)
    _leave_group()


def _make_reader(name: str, source: str) -> Any:
    """Make a reader that is not opened yet: what the load costs begins with the metadata.

    Its modules are loaded, as torch's are by then: the metadata was read once before.
    """
    if name == "ckptool":
        from ckptool.dcp import CheckpointReader

        CheckpointReader(source).read_metadata()
        return CheckpointReader(source)
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return FileSystemReader(source)


def _count_read_bytes() -> int:
    """Return the bytes this process has read from files so far, as Linux counts; 0 elsewhere."""
    import psutil

    counters = getattr(psutil.Process(), "io_counters", None)
    return int(getattr(counters(), "read_chars", 0)) if counters else 0


_COLUMNS = 4096
_ROWS_PER_CHUNK = 4
_ITEM = 70_000


def plan_large(tensors: int, chunks: int, mesh: str) -> Plan:
    """Plan the reshard of a checkpoint too large to write here; cut the tiles of one batch."""
    from ckptool.core.mesh import Shard
    from ckptool.core.planning.plan import Plan
    from ckptool.core.sharding.placement import PlacedTensors, parse_mesh
    from ckptool.formats import FORMATS
    from ckptool.formats.base import Request
    from ckptool.storage.files import TILE

    catalog = _make_catalog(tensors, chunks)
    target = parse_mesh(mesh)
    placed = PlacedTensors(target, {name: (Shard(0), Shard(1)) for name in catalog.tensors})
    plan = Plan(catalog, FORMATS["dcp"].lay_out(catalog, Request("out", placed=placed)))
    files = plan.layout.files
    parts = {number: files[number].parts for number in next(plan.batches(range(len(files))))}
    for group in plan.groups(parts, TILE):
        for _ in plan.jobs(group, TILE):
            pass
    return plan


def _make_catalog(tensors: int, chunks: int) -> Catalog:
    """Describe a DCP checkpoint of ``chunks`` ranks, each with 4 rows of each of the tensors."""
    import numpy as np

    from ckptool.core.box import BoxTable
    from ckptool.core.catalog import Catalog, TensorEntry
    from ckptool.core.chunks import ChunkTable, ItemTable
    from ckptool.core.dtype import BY_NAME

    files = [f"__{rank}_0.distcp" for rank in range(chunks)]
    numbers = np.arange(chunks)
    lows = np.stack([numbers * _ROWS_PER_CHUNK, numbers * 0], axis=1)
    boxes = BoxTable(lows, lows + np.array([_ROWS_PER_CHUNK, _COLUMNS]))
    lengths = np.full(chunks, _ITEM)
    shape = (chunks * _ROWS_PER_CHUNK, _COLUMNS)
    entries = {}
    for number in range(tensors):
        name = f"layers.{number}.weight"
        stored = ItemTable(files, numbers, lengths * number, lengths)
        table = ChunkTable(boxes, stored, range(chunks))
        path = ("layers", str(number), "weight")
        entries[name] = TensorEntry(name, path, BY_NAME["float32"], shape, table)
    return Catalog("dcp", entries, {}, dict.fromkeys(files, tensors * _ITEM), chunks)


_TASKS: dict[str, Callable[..., object]] = {
    "write": write_checkpoint,
    "write-shape": write_shape,
    "write-many": write_many,
    "write-names": write_names,
    "to-safetensors": torch_to_safetensors,
    "reshard": torch_reshard,
    "read-metadata": torch_read_metadata,
    "load": measure_load,
    "write-loads": write_loads,
    "load-onto": measure_load_onto,
    "plan": plan_large,
    "write-model": write_model,
    "write-adapter": write_adapter,
    "write-sparse": write_sparse,
}

if __name__ == "__main__":
    _task, *_words = sys.argv[1:]
    if _task == "plan":
        gc.disable()  # as the command line does
    _TASKS[_task](*(int(word) if word.isdecimal() else word for word in _words))
