"""Whether disk and memory will hold a run, asked before it starts."""

from __future__ import annotations

import shutil
from pathlib import Path

from ckptool.commands.bench.device import Accelerators
from ckptool.engine.remote_path import Location
from ckptool.errors import CannotDo

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
    """CannotDo, with the numbers, where a run with ``nbytes`` of state would not fit.

    One checkpoint at a time lies on disk, or the raw file that is as large. A store is not asked.
    """
    if isinstance(out, Path):
        _require_disk(out, nbytes)
    copies = _HOST_COPIES["accelerator" if here.count else "cpu"]
    memory, available = nbytes * copies + ranks * _RANK_BYTES, memory_available()
    if memory > available:
        raise CannotDo(
            f"{memory:,} bytes of memory are needed ({copies} times the state, and {ranks} ranks),"
            f" {available:,} are available",
            hint="a smaller --size",
        )
    _require_device_room(-(-nbytes // ranks), here)


def _require_disk(out: Path, nbytes: int) -> None:
    if not out.is_dir():
        raise CannotDo(f"{out}: no such folder to work in", hint=f"mkdir -p {out}")
    needed, free = nbytes * 21 // 20 + (64 << 20), shutil.disk_usage(out).free
    if needed > free:
        raise CannotDo(
            f"{out}: {needed:,} bytes of disk are needed, {free:,} are free",
            hint="a smaller --size, or another --out",
        )


def _require_device_room(share: int, here: Accelerators) -> None:
    needed = share * _DEVICE_COPIES + _DEVICE_BYTES
    if here.free is not None and needed > here.free:
        raise CannotDo(
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
