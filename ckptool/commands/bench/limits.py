"""What the hardware can do: the same bytes copied and written without any checkpoint library."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ckptool.commands.bench.device import Device
from ckptool.commands.bench.uploads import remove_uploaded, upload
from ckptool.engine.remote_path import Location

_ROUNDS = 3
_WRITE = 16 << 20
_MOST = 4 << 30

Probe = Callable[[], object]


def limits(nbytes: int, device: Device, folder: Location) -> dict[str, float | None]:
    """Bytes a second of all ranks together, the best of three rounds; None where there is no such.

    ``nbytes`` is one rank's share, of which at most 4 GiB are moved. Ranks work at the same time.
    ``write`` is sequential into a file a rank, fsync included; ``upload``, where a store is written
    to, by fsspec alone, until the file is closed.
    """
    import torch

    nbytes = max(1, min(nbytes, _MOST))
    host = torch.ones(nbytes, dtype=torch.uint8)
    copied = torch.empty_like(host)
    found: dict[str, float | None] = {
        "memory_copy": _rate(nbytes, lambda: copied.copy_(host)),
        "write": None,
        "upload": None,
        "device_to_host_pageable": None,
        "device_to_host_pinned": None,
    }
    data, file = memoryview(host.numpy().data), folder / f"raw-{os.environ['RANK']}"
    if isinstance(file, Path):
        found["write"] = _rate(nbytes, partial(_write, data, file))
    else:
        found["upload"] = _rate(nbytes, partial(upload, data, file))
        remove_uploaded(file)
    if device.is_accelerator:
        there = host.to(device.torch_device)
        found["device_to_host_pageable"] = _rate(nbytes, _copy(there, copied, device))
        found["device_to_host_pinned"] = _rate(nbytes, _copy(there, host.pin_memory(), device))
    return found


def _copy(source: Any, target: Any, device: Device) -> Probe:
    def copy() -> None:
        target.copy_(source, non_blocking=True)
        device.synchronize()

    return copy


def _write(view: memoryview, path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for start in range(0, len(view), _WRITE):
            part = view[start : start + _WRITE]
            while len(part):
                part = part[os.write(descriptor, part) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        path.unlink()


def _rate(nbytes: int, work: Probe) -> float:
    """Bytes a second of all ranks, by the slowest rank of the best round."""
    return max(_round(nbytes, work) for _ in range(_ROUNDS))


def _round(nbytes: int, work: Probe) -> float:
    import torch.distributed as dist

    dist.barrier()
    begin = time.perf_counter()
    work()
    seconds = time.perf_counter() - begin
    told = [(seconds, nbytes)] * dist.get_world_size()
    dist.all_gather_object(told, (seconds, nbytes))
    return float(sum(size for _, size in told) / max(took for took, _ in told))
