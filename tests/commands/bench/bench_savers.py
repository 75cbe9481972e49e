"""Savers with known faults: the benchmark must find each."""

from __future__ import annotations

import mmap
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from ckptool.commands.bench.strategies.base import Handle, State
from ckptool.commands.bench.strategies.torch_savers import TorchSave


class Dirty(TorchSave):
    """Returns at once and writes later, without a copy of the parameters."""

    background = True

    def save(self, state: State, path: Path) -> Any:
        return _Later(super().save, state, path)


class _Later(Handle):
    def __init__(self, save: Any, state: State, path: Path) -> None:
        self._save, self._words = save, (state, path)

    def commit(self) -> float:
        self._save(*self._words)
        return time.perf_counter()


class HalfDirty(TorchSave):
    """Saves one tensor of rank 1 not as it is."""

    def load(self, state: State, path: Path) -> State:
        loaded = super().load(state, path)
        if os.environ["RANK"] == "1":
            loaded["model"]["norm.weight"].to_local().view(-1)[0] += 1
        return loaded


class Leaking(TorchSave):
    """Leaves a process, shared memory and temporary files where it is killed in mid-save.

    The memory is of two kinds: what it has open, and what it has mapped.
    """

    def save(self, state: State, path: Path) -> Any:
        import torch.distributed as dist

        if path.name != "save":  # what is to be aborted is called so
            return super().save(state, path)
        if os.environ["RANK"] == "0":
            subprocess.Popen(["sleep", "654"], start_new_session=True)
            with _share("mapped") as stream:
                self._held = [_share("open"), mmap.mmap(stream.fileno(), 4)]
            Path(tempfile.gettempdir(), "leaked.tmp").write_bytes(b"leak")
        path.mkdir(parents=True, exist_ok=True)
        file = path / f"checkpoint_{os.environ['RANK']}.pt"
        file.touch()
        dist.barrier()
        file.write_bytes(b"half")
        time.sleep(600)
        return Handle()


def _share(kind: str) -> Any:
    path = Path(f"/dev/shm/ckptool-leak-{kind}-{os.getpid()}")
    path.write_bytes(b"leak")
    return path.open("r+b")


class Failing(TorchSave):
    """Fails on one rank only."""

    def save(self, state: State, path: Path) -> Any:
        if os.environ["RANK"] == "1":
            raise ValueError("no such luck")
        return super().save(state, path)


class Dying(TorchSave):
    """Takes its process with it."""

    def set_up(self, device: Any) -> None:
        os.kill(os.getpid(), 9)


class Widowed(TorchSave):
    """Waits for a process that is killed before it has saved."""

    background = True

    def save(self, state: State, path: Path) -> Any:
        self._worker = subprocess.Popen(["sh", "-c", "sleep 2.5; kill -9 $$"])
        return _Never()


class _Never(Handle):
    def done(self) -> bool:
        return False


class Impossible(TorchSave):
    """Cannot run anywhere."""

    def unavailable(self, environment: Any) -> str:
        return f"not on {environment.device.type}, not with {environment.ranks} ranks"
