"""Memory of tensors, and staging for simulated devices: what arrives, and when."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptool.api import tensors
from ckptool.api.tensors import why_not_filled
from ckptool.core.box import Box


class Device:
    """A device module whose streams record their calls. Current streams are per thread."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.current = threading.local()
        device = self

        class Stream:
            name = "the lane"

            def __init__(self, on: Any = None) -> None: ...

            def wait_event(self, event: Any) -> None:
                device.said.append(f"after {event.on}")

        class Event:
            def record(self, stream: Any) -> None:
                self.on = stream if isinstance(stream, str) else stream.name
                device.said.append(f"event on {self.on}")

            def synchronize(self) -> None:
                device.said.append("arrived")

        self.Stream, self.Event = Stream, Event

    def current_stream(self, on: Any) -> str:
        return getattr(self.current, "name", "the default stream")

    def set_stream(self, stream: Any) -> None:
        self.current.name = stream.name


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(tensors, "_module", lambda on: device)
    monkeypatch.setattr(tensors, "_allocate", lambda nbytes, **_: np.empty(nbytes, "u1"))
    return device


def begun(target: torch.Tensor) -> tuple[tensors.Staging, tensors._DeviceMemory]:
    """Staging for a tensor that passes for one on a device."""
    made = tensors.Staging()
    made._events[target.device] = tensors._work_so_far(target.device)
    return made, tensors._DeviceMemory(target, made)


def fill(memory: tensors._DeviceMemory, target: torch.Tensor) -> None:
    """The number of each row, a row at a time."""
    for row in range(target.shape[0]):
        with memory.part(Box((row, 0), (row + 1, target.shape[1]))) as part:
            part[...] = row + 1


@pytest.mark.parametrize("columns", [3, 5])
def test_a_device_without_streams(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr(tensors, "_module", lambda device: object())
    target = torch.zeros(4, columns, dtype=torch.int32)
    made, memory = begun(target)
    fill(memory, target)
    made.finish()
    assert (target == torch.arange(1, 5)[:, None]).all()


@pytest.mark.parametrize("kind", ["float4_e2m1fn_x2", "float8_e8m0fnu", "uint16", "complex128"])
def test_parts_of_any_type(device: Device, kind: str) -> None:
    dtype = getattr(torch, kind)
    base = torch.zeros(4, 8 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    target = base[:, ::2]
    made, memory = begun(target)
    with memory.part(Box((1, 0), (3, 4))) as part:
        part[...] = np.ones(part.shape, "u1").astype(part.dtype) if part.dtype.kind == "u" else b"1"
    made.finish()
    seen = base.view(torch.uint8).reshape(4, 8, dtype.itemsize)
    assert seen[1:3, ::2].any(2).all()
    assert not seen[[0, 3]].any()
    assert not seen[:, 1::2].any()


def test_a_buffer_is_used_again_once_it_has_arrived(device: Device) -> None:
    target = torch.zeros(6, 3, dtype=torch.int64).t().contiguous().t()
    made, memory = begun(target)
    fill(memory, target)
    made.finish()
    assert target[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert device.said == [
        *("event on the default stream", "after the default stream"),
        *("arrived", "event on the lane") * 6,
        *("arrived",) * 2,
    ]


@pytest.mark.parametrize(("kind", "options"), [("cuda", {"blocking": True}), ("xpu", {})])
def test_a_thread_that_waits_for_cuda_leaves_its_core_to_others(
    kind: str, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only CUDA's events take is given to no other."""
    module = SimpleNamespace(Event=lambda **given: given)
    monkeypatch.setattr(tensors, "_module", lambda on: module)
    assert tensors._make_event(torch.device(kind)) == options


def test_copies_come_after_the_work_of_the_callers_stream_whichever_thread_makes_them(
    device: Device,
) -> None:
    target = torch.zeros(2, 3)
    device.current.name = "the caller's stream"
    _, memory = begun(target)
    thread = threading.Thread(target=fill, args=(memory, target))
    thread.start()
    thread.join()
    assert device.said[:2] == ["event on the caller's stream", "after the caller's stream"]


def test_nothing_is_sent_of_a_part_that_could_not_be_read(device: Device) -> None:
    target = torch.zeros(1, 3)
    made, memory = begun(target)

    def read() -> None:
        with memory.part(Box((0, 0), (1, 3))) as part:
            part[...] = 1
            raise OSError("lost")

    with pytest.raises(OSError, match="lost"):
        read()
    made.finish()
    assert "event on the lane" not in device.said
    assert not target.any()


def test_inference_tensors_are_written_by_threads_that_are_not_in_that_mode(
    device: Device,
) -> None:
    with torch.inference_mode():
        target = torch.zeros(2, 3, dtype=torch.int32)
        _, memory = begun(target)
        thread = threading.Thread(target=fill, args=(memory, target))
        thread.start()
        thread.join()
    assert target.tolist() == [[1, 1, 1], [2, 2, 2]]


def test_memory_of_the_host_is_found_whatever_the_default_device() -> None:
    weight = torch.zeros(3)
    with torch.device("meta"), tensors.Staging().memory(weight).part(Box((0,), (3,))) as part:
        part[...] = np.ones(3, "f4").view(part.dtype)
    assert weight.tolist() == [1, 1, 1]


def test_a_write_is_seen_by_autograd() -> None:
    weight = torch.ones(3, requires_grad=True)
    squared = (weight**2).sum()
    with tensors.Staging().memory(weight).part(Box((0,), (3,))) as part:
        part[...] = 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


small = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@given(shape=small, strides=st.lists(st.integers(0, 9), min_size=3, max_size=3))
def test_what_shares_memory_with_itself_is_not_filled(shape: list[int], strides: list[int]) -> None:
    strides = strides[: len(shape)]
    tensor = torch.zeros(100).as_strided(shape, strides)
    seen = torch.zeros(100).as_strided_(shape, strides)
    places = torch.arange(100).as_strided(shape, strides).reshape(-1)
    if len(places.unique()) < seen.numel():
        assert "share memory" in str(why_not_filled(tensor))


@given(sizes=small, data=st.data())
def test_views_of_what_is_dense_are_filled(sizes: list[int], data: Any) -> None:
    dims = data.draw(st.permutations(range(len(sizes))))
    steps = tuple(slice(None, None, data.draw(st.integers(1, 3))) for _ in sizes)
    assert why_not_filled(torch.zeros(sizes)[steps].permute(dims)) is None
