"""The device that the ranks train on, through torch's device API."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any


def accelerator() -> tuple[str, int]:
    """The type of the accelerators that are here and their number; ``cpu`` and 0 without one.

    It may start the accelerator's runtime, which does not survive a fork.
    """
    import torch

    if not torch.accelerator.is_available():
        return "cpu", 0
    found = torch.accelerator.current_accelerator()
    return (found.type, torch.accelerator.device_count()) if found else ("cpu", 0)


@dataclass(frozen=True, slots=True)
class Device:
    """One rank's device. Without an accelerator every call is one that costs nothing."""

    type: str
    index: int

    @staticmethod
    def of_rank(device_type: str) -> Device:
        """The device of this rank, made the current one."""
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

    def allocated(self) -> int:
        """Bytes allocated on the device now; the peak counts from here."""
        if not self.is_accelerator:
            return 0
        import torch

        torch.accelerator.reset_peak_memory_stats()
        return int(torch.accelerator.memory_allocated())

    def peak(self) -> int:
        """The most bytes allocated on the device since ``allocated`` was asked."""
        if not self.is_accelerator:
            return 0
        import torch

        return int(torch.accelerator.max_memory_allocated())
