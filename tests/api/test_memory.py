"""Staging for devices, on devices that are not: what arrives, and when a buffer is used again."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from ckptool.api import memory
from ckptool.core.box import Box


class Device:
    """A device module with streams that say what they are told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        device = self

        class Stream:
            def __init__(self, on: Any = None) -> None: ...

            def wait_stream(self, other: Any) -> None:
                device.said.append("after what came before")

            def synchronize(self) -> None:
                device.said.append("all arrived")

        class Event:
            def record(self, stream: Any) -> None:
                device.said.append("sent")

            def synchronize(self) -> None:
                device.said.append("arrived")

        self.Stream, self.Event = Stream, Event

    def current_stream(self, on: Any) -> str:
        return "current"

    def stream(self, stream: Any) -> Any:
        return nullcontext()


def filled(target: torch.Tensor) -> torch.Tensor:
    """The target, filled by rows through staging as a device's memory is."""
    staging = memory.Staging()
    device = memory._DeviceMemory(target, staging)
    for row in range(target.shape[0]):
        with device.part(Box((row, 0), (row + 1, target.shape[1]))) as part:
            part[...] = row + 1
    staging.finish()
    return target


@pytest.mark.parametrize("columns", [3, 5])
def test_a_device_without_streams(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: object())
    found = filled(torch.zeros(4, columns, dtype=torch.int32))
    assert found[:, 0].tolist() == [1, 2, 3, 4]
    assert (found == found[:, :1]).all()


def test_a_buffer_is_used_again_once_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda on: device)
    monkeypatch.setattr(memory, "_buffer", lambda nbytes, pinned: torch.empty(nbytes).byte())
    found = filled(torch.zeros(6, 3, dtype=torch.int64).t().contiguous().t())
    assert found[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert device.said == [
        "after what came before",
        *("sent", "sent"),
        *("arrived", "sent") * 4,
        "all arrived",
    ]
