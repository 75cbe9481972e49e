"""The memory of torch tensors: filled in place on the CPU, through pinned buffers on a device."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptool.core.box import Box
from ckptool.engine.read.gather import Array, unit
from ckptool.engine.read.tensors import ArrayMemory, BoxMemory
from ckptool.errors import Unsupported

if TYPE_CHECKING:
    import torch


class Staging:
    """Pinned buffers between files and devices: two per thread and device, so that reads overlap.

    Copies wait for what the calling thread's current stream of a device had been given before;
    ``finish`` waits for them, so that any stream may use the tensors afterwards, and memory may be
    given back. Where a device has no streams of its own, every copy is waited for.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._lanes: list[_Lane] = []
        self._before: dict[torch.device, Any] = {}

    def memory(self, tensor: torch.Tensor) -> BoxMemory:
        """Return where to write the elements of a tensor that can be filled.

        To be called by the thread that the tensor's user works in: streams are a thread's own.
        """
        import torch

        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
            return ArrayMemory(bits_of(tensor))
        if tensor.device not in self._before:
            self._before[tensor.device] = _work_so_far(tensor.device)
        return _DeviceMemory(tensor, self)

    def lane(self, device: torch.device) -> _Lane:
        """Return the buffers of this thread for a device."""
        lanes: dict[Any, _Lane] = self._local.__dict__.setdefault("lanes", {})
        if device not in lanes:
            lanes[device] = _Lane(device, self._before[device])
            self._lanes.append(lanes[device])
        return lanes[device]

    def finish(self) -> None:
        """Wait until all that was staged has arrived."""
        for lane in self._lanes:
            lane.finish()


class _DeviceMemory:
    """A tensor on a device, filled a part at a time, as integers: devices copy those of any type.

    Complex numbers of 16 bytes have no integers of their size.
    """

    def __init__(self, tensor: torch.Tensor, staging: Staging) -> None:
        import torch

        integer = _INTEGERS.get(tensor.element_size())
        self._tensor = tensor.view(getattr(torch, integer)) if integer else tensor
        self._staging = staging

    @contextmanager
    def part(self, where: Box) -> Iterator[Array]:
        """Yield a pinned array whose elements are copied to the device at the end."""
        lane = self._staging.lane(self._tensor.device)
        part = self._tensor[tuple(map(slice, where.lo, where.hi))]
        staged = lane.buffer(part)
        yield bits_of(staged)
        lane.send(staged, part)


_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def _module(device: torch.device) -> Any:
    """Return torch's module for a kind of device, such as ``torch.cuda``."""
    import torch

    return getattr(torch, device.type, None)


def _has_streams(device: torch.device) -> bool:
    return hasattr(_module(device), "Stream")


def _work_so_far(device: torch.device) -> Any:
    """Record an event after all work of this thread's current stream; None without streams."""
    if not _has_streams(device):
        return None
    module = _module(device)
    event = module.Event()
    event.record(module.current_stream(device))
    return event


class _Lane:
    """One thread's way to one device, for copies that come after ``before``."""

    def __init__(self, device: torch.device, before: Any) -> None:
        self._module = _module(device)
        self._stream = self._module.Stream(device) if _has_streams(device) else None
        if self._stream is not None:
            self._stream.wait_event(before)
        self._buffers: list[Any] = [None, None]
        self._sent: list[Any] = [None, None]
        self._turn = 0

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return a contiguous CPU tensor of this shape and type, once its last content was sent."""
        self._turn = 1 - self._turn
        if self._sent[self._turn] is not None:
            self._sent[self._turn].synchronize()
        nbytes = like.numel() * like.element_size()
        buffer = self._buffers[self._turn]
        if buffer is None or buffer.numel() < nbytes:
            buffer = _allocate(nbytes, pinned=self._stream is not None)
            self._buffers[self._turn] = buffer
        staged: torch.Tensor = buffer[:nbytes].view(like.dtype).view(like.shape)
        return staged

    def send(self, staged: torch.Tensor, part: torch.Tensor) -> None:
        """Begin to copy what was staged last to the device.

        Where the part is not contiguous, torch copies through memory of the device, on the same
        stream. Tensors made for inference are written as such: the mode is a thread's own.
        """
        import torch

        with torch.inference_mode(part.is_inference()):
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


def _allocate(nbytes: int, *, pinned: bool) -> torch.Tensor:
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)


def why_not_filled(tensor: torch.Tensor) -> str | None:
    """Return why bits cannot be written into a tensor; None where they can."""
    import torch

    if type(tensor.detach()) is not torch.Tensor:
        kind = type(tensor).__name__
        return f"a {kind}, a subclass with memory of its own: load plain tensors, then make these"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.layout != torch.strided:
        return f"a {tensor.layout} tensor"
    if tensor.is_meta:
        return "on the meta device: it has no memory yet (to_empty gives it some)"
    if tensor.is_conj() or tensor.is_neg():
        return "a conjugate or negative view"
    if _overlaps(tensor.shape, tensor.stride()):
        return "an expanded view or its like: several of its elements share their memory"
    return None


def _overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether steps along a dim may land within what the dims of smaller steps span."""
    span = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride < span:
            return 0 not in shape
        span += (size - 1) * stride
    return False


def bits_of(tensor: torch.Tensor) -> Array:
    """Return the elements of a CPU tensor as bits, strides and all, without a copy."""
    import torch

    itemsize = tensor.element_size()
    shape, strides = tuple(tensor.shape), tuple(s * itemsize for s in tensor.stride())
    if not tensor.numel():
        return np.empty(shape, unit(itemsize))
    data = tensor.detach().untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8).set_(data).numpy()
    offset = tensor.storage_offset() * itemsize
    return np.ndarray(shape, unit(itemsize), whole, offset, strides)


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's type of a name; Unsupported where this torch has none."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise Unsupported(f"torch {torch.__version__} has no element type {name}")
    return dtype
