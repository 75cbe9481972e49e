"""What the hardware can do: the same bytes copied and written without any checkpoint library.

Whether disk and memory will hold a run, asked before it starts.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ckptool.commands.bench.store import remove_uploaded, upload
from ckptool.commands.bench.worker.device import Accelerators, Device
from ckptool.errors import Unsupported
from ckptool.storage.url import Location

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
    measured = [(seconds, nbytes)] * dist.get_world_size()
    dist.all_gather_object(measured, (seconds, nbytes))
    return float(sum(size for _, size in measured) / max(took for took, _ in measured))


_RANK_BYTES = 400 << 20
_DEVICE_BYTES = 1 << 30
"""Of a device: for the runtime's own, the communicator, and the matrices of a step."""

_HOST_COPIES = {"cpu": 5, "accelerator": 4}
"""How often the state lies in host memory at most: itself on CPU ranks, staged, staged once more
for another process, and for the check a snapshot and what was loaded."""

_DEVICE_COPIES = 3
"""How often a rank's share lies on its device at most: itself, what is loaded into, and what is
loaded."""


def require_room(out: Location, nbytes: int, ranks: int, here: Accelerators) -> None:
    """Unsupported, with the numbers, where a run with ``nbytes`` of state would not fit.

    One checkpoint at a time lies on disk, or the raw file that is as large. A store is not asked.
    """
    if isinstance(out, Path):
        _require_disk(out, nbytes)
    copies = _HOST_COPIES["accelerator" if here.count else "cpu"]
    memory, available = nbytes * copies + ranks * _RANK_BYTES, memory_available()
    if memory > available:
        raise Unsupported(
            f"{memory:,} bytes of memory are needed ({copies} times the state, and {ranks} ranks),"
            f" {available:,} are available",
            hint="a smaller --size",
        )
    _require_device_room(-(-nbytes // ranks), here)


def _require_disk(out: Path, nbytes: int) -> None:
    if not out.is_dir():
        raise Unsupported(f"{out}: no such folder to work in", hint=f"mkdir -p {out}")
    needed, free = nbytes * 21 // 20 + (64 << 20), shutil.disk_usage(out).free
    if needed > free:
        raise Unsupported(
            f"{out}: {needed:,} bytes of disk are needed, {free:,} are free",
            hint="a smaller --size, or another --out",
        )


def _require_device_room(share: int, here: Accelerators) -> None:
    needed = share * _DEVICE_COPIES + _DEVICE_BYTES
    if here.free is not None and needed > here.free:
        raise Unsupported(
            f"{needed:,} bytes of memory are needed on each {here.type} device ({_DEVICE_COPIES}"
            f" times a rank's share), {here.free:,} are free",
            hint="a smaller --size, or more --ranks",
        )


def memory_available() -> int:
    """Bytes of memory that the system can still give, by ``/proc/meminfo``."""
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
