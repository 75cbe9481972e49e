"""Whether disk and memory will hold a run, asked before it starts."""

from __future__ import annotations

import shutil
from pathlib import Path

from ckptool.errors import CannotDo

_RANK_BYTES = 400 << 20
_HOST_COPIES = {"cpu": 5, "accelerator": 4}
"""How often the state lies in host memory at most: itself on CPU ranks, staged, staged once more
for another process, and for the check a snapshot and what was loaded."""


def require_room(out: Path, nbytes: int, ranks: int, device: str) -> None:
    """CannotDo, with the numbers, where a run with ``nbytes`` of state would not fit.

    One checkpoint at a time lies on disk, or the raw file that is as large.
    """
    if not out.is_dir():
        raise CannotDo(f"{out}: no such folder to work in", hint=f"mkdir -p {out}")
    needed, free = nbytes * 21 // 20 + (64 << 20), shutil.disk_usage(out).free
    if needed > free:
        raise _too_small(f"{out}: {needed:,} bytes of disk are needed, {free:,} are free")
    copies = _HOST_COPIES["cpu" if device == "cpu" else "accelerator"]
    memory, available = nbytes * copies + ranks * _RANK_BYTES, memory_available()
    if memory > available:
        raise _too_small(
            f"{memory:,} bytes of memory are needed ({copies} times the state, and {ranks} ranks),"
            f" {available:,} are available"
        )


def _too_small(message: str) -> CannotDo:
    return CannotDo(message, hint="a smaller --size, or another --out")


def memory_available() -> int:
    """Bytes of memory that the system can still give, by ``/proc/meminfo``."""
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
