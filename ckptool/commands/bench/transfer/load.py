"""One rank of a load through ``torch.distributed.checkpoint.load``, by torch's reader or ckptool's.

``torchrun ... -m ckptool.commands.bench.transfer.load READER SOURCE DIM TOLD``: DTensors cut along
tensor dim DIM over all ranks are made, then filled. Rank 0 writes to the file TOLD, as JSON, the
seconds from when all ranks begin until the last is done, and the bytes that all of them read from
files.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any


def measure_load(reader: str, source: str, dim: int, told: Path) -> None:
    """``reader`` is ``torch`` or ``ckptool``; every tensor of the checkpoint is loaded."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_loader import load

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    state = _empty_state(source, dim)
    storage = _reader(reader, source)
    gc.collect()
    dist.barrier()
    before, begin = _bytes_read(), time.perf_counter()
    load(state, storage_reader=storage)
    dist.barrier()
    seconds = time.perf_counter() - begin
    nbytes = torch.tensor(_bytes_read() - before)
    dist.all_reduce(nbytes)
    if dist.get_rank() == 0:
        told.write_text(json.dumps({"seconds": seconds, "nbytes": int(nbytes)}))
    dist.destroy_process_group()


def _reader(name: str, source: str) -> Any:
    """Not opened yet: what the load costs begins with the metadata.

    Its modules are loaded, as torch's are by then: the metadata was read once before.
    """
    if name == "ckptool":
        from ckptool.dcp import CheckpointReader

        CheckpointReader(source).read_metadata()
        return CheckpointReader(source)
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return FileSystemReader(source)


def _empty_state(source: str, dim: int) -> dict[str, Any]:
    """A DTensor for each tensor, its memory touched; one without the dim is on every rank."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, zeros

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    described = FileSystemReader(source).read_metadata().state_dict_metadata
    state = {}
    for name, entry in described.items():
        if isinstance(entry, TensorStorageMetadata):
            placement = Shard(dim) if len(entry.size) > dim else Replicate()
            kind = entry.properties.dtype
            state[name] = zeros(entry.size, dtype=kind, device_mesh=mesh, placements=[placement])
    return state


def _bytes_read() -> int:
    """Bytes that this process has read from files so far, as Linux counts them; 0 elsewhere."""
    try:
        words = Path("/proc/self/io").read_text().split()
    except OSError:
        return 0
    return int(words[words.index("rchar:") + 1])


if __name__ == "__main__":
    measure_load(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
