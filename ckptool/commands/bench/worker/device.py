"""The device that a rank trains on, through torch's device API, and what all ranks gather."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

_Value = TypeVar("_Value")


class Accelerators(Struct, frozen=True):
    """What this machine can train on. ``type`` is ``cpu`` where ``count`` is 0.

    ``free``: bytes of memory free on the fullest of them; None where torch cannot tell.
    """

    type: str = "cpu"
    count: int = 0
    free: int | None = None

    @staticmethod
    def here() -> Accelerators:
        """Ask torch. It may start the accelerator's runtime, which does not survive a fork."""
        import torch

        device = torch.accelerator.current_accelerator()
        if device is None or not torch.accelerator.is_available():
            return Accelerators()
        count = torch.accelerator.device_count()
        ask = getattr(torch.get_device_module(device), "mem_get_info", None)
        free = min(int(ask(index)[0]) for index in range(count)) if ask else None
        return Accelerators(device.type, count, free)


class Memory(Struct, frozen=True):
    """Bytes of memory that a rank uses of its device and pins of the host's.

    ``allocated``: on the device, by the rank's own process and torch's allocator; ``used``: by all
    processes, with their contexts. ``pinned``: by torch's allocator in the rank's own process;
    memory that is registered, as stagers do with shared memory, is host memory and counted there.
    None where torch cannot tell.
    """

    allocated: int = 0
    used: int | None = None
    pinned: int | None = None

    def above(self, base: Memory) -> Memory:
        """Return what is more than in ``base``."""
        return Memory(
            max(0, self.allocated - base.allocated),
            _difference(self.used, base.used),
            _difference(self.pinned, base.pinned),
        )


def _difference(nbytes: int | None, base: int | None) -> int | None:
    return None if nbytes is None or base is None else max(0, nbytes - base)


class Device(Struct, frozen=True):
    """One rank's device. Without an accelerator every call is one that costs nothing."""

    type: str
    index: int

    @staticmethod
    def of_rank(device_type: str) -> Device:
        """Return the device of this rank, made the current one."""
        import torch

        index = int(os.environ.get("LOCAL_RANK", "0"))
        if device_type != "cpu":
            torch.accelerator.set_device_index(index)
        return Device(device_type, index if device_type != "cpu" else 0)

    @property
    def is_accelerator(self) -> bool:
        return self.type != "cpu"

    @property
    def pins(self) -> bool:
        """Whether torch's stagers can pin memory: they call CUDA's runtime."""
        return self.type == "cuda"

    @property
    def torch_device(self) -> Any:
        import torch

        return torch.device(self.type, self.index) if self.is_accelerator else torch.device("cpu")

    @property
    def backend(self) -> str:
        """What the process group of the ranks speaks: gloo, and the device's own beside it."""
        if not self.is_accelerator:
            return "gloo"
        import torch.distributed as dist

        return f"cpu:gloo,{self.type}:{dist.get_default_backend_for_device(self.type)}"

    def synchronize(self) -> None:
        """Wait for everything on the device."""
        if self.is_accelerator:
            import torch

            torch.accelerator.synchronize()

    def synchronize_stream(self) -> None:
        """Wait for the stream that trains, not for copies beside it."""
        if self.is_accelerator:
            import torch

            torch.accelerator.current_stream().synchronize()

    @contextmanager
    def another_stream(self) -> Iterator[None]:
        """Run what is within beside the stream that trains, and wait for that alone."""
        if not self.is_accelerator:
            yield
            return
        import torch

        stream = torch.Stream(self.torch_device)
        with stream:
            yield
        stream.synchronize()

    def peak_memory(self, *, reset: bool = False) -> Memory:
        """Return the most memory that was used since it was last asked to ``reset``."""
        if not self.is_accelerator:
            return Memory()
        import torch

        module = torch.get_device_module(self.type)
        allocated = int(torch.accelerator.max_memory_allocated())
        pinned = None
        if hasattr(module, "host_memory_stats"):
            pinned = int(module.host_memory_stats().get("allocated_bytes.peak", 0))
        if reset:
            torch.accelerator.reset_peak_memory_stats()
            if pinned is not None:
                module.reset_peak_host_memory_stats()
        return Memory(allocated, self.used_memory(), pinned)

    def used_memory(self) -> int | None:
        """Return the bytes used on the device now, by whatever process; None if nobody can tell."""
        if not self.is_accelerator:
            return None
        import torch

        ask = getattr(torch.get_device_module(self.type), "mem_get_info", None)
        if ask is None:
            return None
        free, everything = ask(self.index)
        return int(everything - free)

    @contextmanager
    def registered_memory(self, nbytes: int) -> Iterator[Any]:
        """Yield shared memory that CUDA has registered, as stagers do; None where it cannot be."""
        if not self.pins:
            yield None
            return
        import torch

        shared: Any = torch.UntypedStorage
        cuda: Any = torch.cuda
        storage, runtime = shared._new_shared(nbytes, device="cpu"), cuda.cudart()
        if int(runtime.cudaHostRegister(storage.data_ptr(), nbytes, 1)):  # 1: of any context
            yield None
            return
        try:
            yield torch.empty(0, dtype=torch.uint8).set_(storage)
        finally:
            runtime.cudaHostUnregister(storage.data_ptr())


def gather(value: _Value) -> list[_Value]:
    """Return what every rank of the process group passed, in the order of ranks.

    It goes as JSON: what comes from other ranks is of the type of ``value``, and names no code.
    """
    import torch
    import torch.distributed as dist

    content = torch.frombuffer(bytearray(msgspec.json.encode(value)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(content)]))
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
    padded[: len(content)] = content
    rows = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(rows, padded)
    kind = type(value)
    return [
        msgspec.json.decode(bytes(row[:size].tolist()), type=kind)
        for row, size in zip(rows, map(int, sizes), strict=True)
    ]


def main() -> None:
    """Print what this machine can train on."""
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)  # for what torch and its backends print
        answer.write(msgspec.json.encode(Accelerators.here()))
