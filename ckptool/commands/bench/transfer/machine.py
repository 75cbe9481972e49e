"""What the figures of a benchmark depend on: the machine and the versions."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

from ckptool import __version__
from ckptool.storage.url import Location


def machine(workdir: Location) -> dict[str, str | int]:
    """What the figures depend on."""
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "filesystem": _filesystem(workdir),
    }


def _field(file: str, name: str) -> str | None:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _filesystem(path: Location) -> str:
    """The type of the file system that a folder lies on, where the system says; a URL's scheme."""
    if not isinstance(path, Path):
        return f"{path.store.scheme}://"
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    except OSError:
        return "unknown"
    there = path.resolve()
    holding = [words for words in mounts if there.is_relative_to(words[1])]
    return max(holding, key=lambda words: len(words[1]))[2] if holding else "unknown"


def versions() -> dict[str, str]:
    """The versions of everything that is measured."""
    told = subprocess.run(["cp", "--version"], capture_output=True, text=True, check=False).stdout
    found = {"ckptool": __version__, "python": platform.python_version()}
    for name in ("torch", "safetensors", "numpy"):
        if importlib.util.find_spec(name):
            found[name] = importlib.metadata.version(name)
    return found | {"cp": told.partition("\n")[0].removeprefix("cp ") or "unknown"}
