"""The machine: its description, its raw speed without any checkpoint library, its free space."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from ckptool.commands.bench.save_folders import SaveFolder
from ckptool.commands.bench.shared_memory import free_shared_memory
from ckptool.commands.bench.worker.device import Accelerators, Device, gather
from ckptool.errors import Unsupported
from ckptool.storage.files import count_cores
from ckptool.version import __version__

_ROUNDS = 3
_MOST = 4 << 30

_KINDS = ("pageable", "pinned", "registered")
_WAYS = ("device_to_host", "host_to_device")

Probe = Callable[[], object]


def describe_machine(folder: SaveFolder) -> dict[str, str | int]:
    """Return what a benchmark's figures depend on; it works in ``folder``."""
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor() or platform.processor(),
        "cores": count_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "filesystem": folder.filesystem,
    }


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return None
    return next((ln.partition(":")[2].strip() for ln in lines if ln.startswith("model name")), None)


def list_versions(*distributions: str) -> dict[str, str]:
    """Return the versions of ckptool, Python, and those distributions that are installed."""
    versions = {"ckptool": __version__, "python": platform.python_version()}
    installed = {name: installed_version(name) for name in distributions}
    return versions | {name: version for name, version in installed.items() if version}


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution, None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def measure_limits(nbytes: int, device: Device, folder: SaveFolder) -> dict[str, float | None]:
    """Return bytes per second of all ranks together, the best of three rounds; None where absent.

    ``nbytes`` is one rank's share, of which at most 4 GiB are moved. Ranks work at the same time.
    ``write`` is sequential into a file per rank, including fsync; ``upload``, if a store is used,
    by fsspec alone, until the file is closed. Copies between device and host are from and to
    memory of three kinds: pageable, pinned (which CUDA allocates), and registered (shared memory,
    which stagers have CUDA pin).
    """
    import torch

    nbytes = max(1, min(nbytes, _MOST))
    host = torch.ones(nbytes, dtype=torch.uint8)
    copied = torch.empty_like(host)
    limits: dict[str, float | None] = {
        "memory_copy": _rate(nbytes, lambda: copied.copy_(host)),
        "write": None,
        "upload": None,
        **dict.fromkeys(f"{way}_{kind}" for kind in _KINDS for way in _WAYS),
    }
    data, file = memoryview(host.numpy().data), folder / f"raw-{os.environ['RANK']}"
    limits["write" if file.disk else "upload"] = _rate(nbytes, partial(file.write, data))
    file.remove()
    if device.is_accelerator:
        on_device = host.to(device.torch_device)
        room = free_shared_memory() // 2 > nbytes * int(os.environ["WORLD_SIZE"])
        with device.registered_memory(nbytes) if room else nullcontext() as registered:
            for kind, memory in zip(_KINDS, (copied, host.pin_memory(), registered), strict=True):
                if memory is not None:
                    to_host, to_device = (f"{way}_{kind}" for way in _WAYS)
                    limits[to_host] = _rate(nbytes, _copy(on_device, memory, device))
                    limits[to_device] = _rate(nbytes, _copy(memory, on_device, device))
    return limits


def _copy(source: Any, target: Any, device: Device) -> Probe:
    def copy() -> None:
        target.copy_(source, non_blocking=True)
        device.synchronize()

    return copy


def _rate(nbytes: int, work: Probe) -> float:
    """Return bytes a second of all ranks, by the slowest rank of the best round."""
    import torch.distributed as dist

    rates = []
    for _ in range(_ROUNDS):
        dist.barrier()
        begin = time.perf_counter()
        work()
        ranks = gather((time.perf_counter() - begin, nbytes))
        rates.append(sum(nbytes for _, nbytes in ranks) / max(seconds for seconds, _ in ranks))
    return max(rates)


_RANK_BYTES = 400 << 20
_DEVICE_BYTES = 1 << 30
"""Memory of a device for the runtime, the communicator, and the matrices of a step."""

_HOST_COPIES = {"cpu": 5, "accelerator": 4}
"""The most copies of the state in host memory: itself on CPU ranks, staged, staged again for
another process, and for the check a snapshot and what was loaded.
"""

_DEVICE_COPIES = 3
"""The most copies of a rank's share on its device: itself, the load's target, and its result."""


def require_room(out: SaveFolder, nbytes: int, ranks: int, devices: Accelerators) -> None:
    """Raise Unsupported, with the numbers, if a run with ``nbytes`` of state would not fit.

    One checkpoint at a time is on disk, or the raw file of the same size. A store is not asked.
    """
    if out.disk:
        require_disk(out.disk, nbytes * 21 // 20 + (64 << 20))
    copies = _HOST_COPIES["accelerator" if devices.count else "cpu"]
    memory = nbytes * copies + ranks * _RANK_BYTES
    available = psutil.virtual_memory().available
    if memory > available:
        raise Unsupported(
            f"{memory:,} bytes of memory are needed ({copies} times the state, and {ranks} ranks),"
            f" {available:,} are available",
            hint="a smaller --size",
        )
    _require_device_room(-(-nbytes // ranks), devices)


def require_disk(out: Path, nbytes: int) -> None:
    """Raise Unsupported if ``out`` is not a folder, or its disk has too few bytes free."""
    if not out.is_dir():
        raise Unsupported(f"{out}: no such folder", hint=f"mkdir -p {out}")
    free = shutil.disk_usage(out).free
    if nbytes > free:
        raise Unsupported(
            f"{out}: {nbytes:,} bytes of disk are needed, {free:,} are free",
            hint="a smaller --size, or another --out",
        )


def _require_device_room(share: int, devices: Accelerators) -> None:
    nbytes = share * _DEVICE_COPIES + _DEVICE_BYTES
    if devices.free is not None and nbytes > devices.free:
        raise Unsupported(
            f"{nbytes:,} bytes of memory are needed on each {devices.type} device ({_DEVICE_COPIES}"
            f" times a rank's share), {devices.free:,} are free",
            hint="a smaller --size, or more --ranks",
        )
