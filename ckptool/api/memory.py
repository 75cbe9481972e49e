"""torch tensors as memory to fill: in place on the CPU, through pinned staging on a device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptool.core.box import Box
from ckptool.engine.boxes import ArrayMemory, Memory
from ckptool.engine.gather import Array, unit
from ckptool.errors import CannotDo

if TYPE_CHECKING:
    import torch


def why_not_filled(tensor: torch.Tensor) -> str | None:
    """Why bits cannot be written into a tensor; None where they can."""
    import torch

    if type(tensor.detach()) is not torch.Tensor:
        return f"a {type(tensor).__name__}, whose memory is its own business"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.layout != torch.strided:
        return f"a {tensor.layout} tensor"
    if tensor.is_meta:
        return "on the meta device: it has no memory yet (to_empty gives it some)"
    if tensor.is_conj() or tensor.is_neg():
        return "a conjugate or negative view"
    if any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
        return "an expanded view: several of its elements share their memory"
    return None


def bits_of(tensor: torch.Tensor) -> Array:
    """The elements of a CPU tensor as bits, strides and all, without a copy."""
    import torch

    itemsize = tensor.element_size()
    shape, strides = tuple(tensor.shape), tuple(s * itemsize for s in tensor.stride())
    if not tensor.numel():
        return np.empty(shape, unit(itemsize))
    data = tensor.detach().untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8).set_(data).numpy()
    offset = tensor.storage_offset() * itemsize
    return np.ndarray(shape, unit(itemsize), whole, offset, strides)


class Staging:
    """Pinned buffers between files and devices: two a thread and device, so that reads overlap.

    Where a device has no streams of its own, every copy is waited for.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._lanes: list[_Lane] = []

    def memory(self, tensor: torch.Tensor) -> Memory:
        """Where to write the elements of a tensor that can be filled."""
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            return ArrayMemory(bits_of(tensor))
        return _DeviceMemory(tensor, self)

    def lane(self, device: torch.device) -> _Lane:
        """The buffers of this thread for a device."""
        lanes: dict[Any, _Lane] = self._local.__dict__.setdefault("lanes", {})
        if device not in lanes:
            lanes[device] = _Lane(device)
            self._lanes.append(lanes[device])
        return lanes[device]

    def finish(self) -> None:
        """Wait until all that was staged has arrived."""
        for lane in self._lanes:
            lane.finish()


class _DeviceMemory:
    """A tensor on a device, filled a part at a time."""

    def __init__(self, tensor: torch.Tensor, staging: Staging) -> None:
        self._tensor = tensor
        self._staging = staging

    def part(self, where: Box) -> AbstractContextManager[Array]:
        """A pinned array whose elements are copied to the device at the end."""
        return self._staged(where)

    @contextmanager
    def _staged(self, where: Box) -> Iterator[Array]:
        lane = self._staging.lane(self._tensor.device)
        part = self._tensor[tuple(map(slice, where.lo, where.hi))]
        staged = lane.buffer(part)
        yield bits_of(staged)
        lane.send(staged, part)


class _Lane:
    """One thread's way to one device."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._module = torch.get_device_module(device)
        self._streams = hasattr(self._module, "Stream")
        self._stream = self._module.Stream(device) if self._streams else None
        if self._stream is not None:
            self._stream.wait_stream(self._module.current_stream(device))
        self._buffers: list[Any] = [None, None]
        self._sent: list[Any] = [None, None]
        self._turn = 0

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        """A contiguous CPU tensor of this shape and type, once what it held has been sent."""
        self._turn = 1 - self._turn
        if self._sent[self._turn] is not None:
            self._sent[self._turn].synchronize()
        nbytes = like.numel() * like.element_size()
        held = self._buffers[self._turn]
        if held is None or held.numel() < nbytes:
            held = _buffer(nbytes, self._streams)
            self._buffers[self._turn] = held
        staged: torch.Tensor = held[:nbytes].view(like.dtype).view(like.shape)
        return staged

    def send(self, staged: torch.Tensor, part: torch.Tensor) -> None:
        """Begin to copy what was staged last to the device."""
        if self._stream is None:
            part.copy_(staged)
            return
        with self._module.stream(self._stream):
            part.copy_(staged, non_blocking=True)
            event = self._module.Event()
            event.record(self._stream)
        self._sent[self._turn] = event

    def finish(self) -> None:
        """Wait until all has arrived."""
        if self._stream is not None:
            self._stream.synchronize()


def _buffer(nbytes: int, pinned: bool) -> torch.Tensor:
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)


def torch_dtype(name: str) -> torch.dtype:
    """torch's type of a name; CannotDo where this torch has none."""
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CannotDo(f"torch {torch.__version__} has no element type {name}")
    return found
