"""Live torch tensors: which boxes of one this rank holds, and its memory.

Memory is filled in place on the CPU, through pinned buffers on a device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptool.core.box import Box, Piece
from ckptool.core.mesh import Placement, Replicate, Shard, StridedShard
from ckptool.core.sharding.dtensor import SHARD_ATTRIBUTES, declared_pieces, shard_at
from ckptool.core.sharding.overlaps import overlapping_pair
from ckptool.engine.read.gather import unit
from ckptool.engine.read.numbers import Array
from ckptool.engine.read.tensors import ArrayMemory, BoxMemory
from ckptool.errors import Unsupported

if TYPE_CHECKING:
    import torch


# What this rank holds


def find_obstacle(tensor: torch.Tensor) -> str | None:
    """Return why it is unknown which values this rank holds; None if it is known."""
    from torch.nn.parameter import is_lazy

    if is_lazy(tensor):
        return "an uninitialized parameter of a lazy module: it has no shape yet"
    if not _is_sharded(tensor) and tensor.is_nested:  # a ShardedTensor cannot be asked
        return "a nested tensor: its rows have shapes of their own"
    if _is_dtensor(tensor):
        partial = None in _placements(tensor)
        return "a partial placement: each rank holds an addend, not values" if partial else None
    return _why_not_declared(tensor) if _declares_shards(tensor) else None


def _why_not_declared(tensor: torch.Tensor) -> str | None:
    """Return why its attributes do not determine which values it holds; None if they do."""
    try:
        pieces = local_pieces(tensor)
    except (TypeError, ValueError) as error:
        return f"its attributes {', '.join(SHARD_ATTRIBUTES)} contradict one another: {error}"
    pair = overlapping_pair([piece.local for piece in pieces])
    return f"two of its shards share elements: {pair[0]} and {pair[1]}" if pair else None


def global_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the global tensor that this rank holds all or a part of."""
    return tuple(tensor.global_shape if _declares_shards(tensor) else tensor.shape)  # type: ignore[attr-defined]


def declared_boxes(tensor: torch.Tensor) -> tuple[Box, ...] | None:
    """Return the boxes of the global tensor that its attributes declare, if they declare any."""
    if not _declares_shards(tensor):
        return None
    return tuple(piece.box for piece in local_pieces(tensor))


def local_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return this rank's memory: one tensor, or those of a ShardedTensor's own shards."""
    if _is_sharded(tensor):
        return [shard.tensor.detach() for shard in tensor.local_shards()]  # type: ignore[attr-defined]
    local: torch.Tensor = tensor._local_tensor if _is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return [local.detach()]


def local_parts(tensor: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the boxes of the global tensor that this rank holds, each with its memory."""
    if _is_sharded(tensor):
        for shard in tensor.local_shards():  # type: ignore[attr-defined]
            place = shard.metadata
            yield Box.at(place.shard_offsets, place.shard_sizes), shard.tensor.detach()
        return
    (local,) = local_tensors(tensor)
    for piece in local_pieces(tensor):
        index = tuple(map(slice, piece.local.lo, piece.local.hi))
        yield piece.box, local[index] if index else local


def local_pieces(tensor: torch.Tensor) -> tuple[Piece, ...]:
    """Return which boxes of the global tensor lie where in this rank's memory.

    Returns none if the rank is not on the mesh. Strided shards are read as FSDP2 cuts them, if this
    rank's local shape fits that. Raises ValueError if the attributes declare shards that do not
    fit, Damaged if the local shape fits no interpretation.
    """
    if _declares_shards(tensor):
        whole_shape, above, inside, lengths = (getattr(tensor, n) for n in SHARD_ATTRIBUTES)
        return declared_pieces(whole_shape, above, inside, lengths, tuple(tensor.shape))
    if not _is_dtensor(tensor):
        whole = Box.whole(tuple(tensor.shape))
        return (Piece(whole, whole),)
    mesh, spec = tensor.device_mesh, tensor._spec  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    position = 0
    for at, size in zip(coordinate, mesh.shape, strict=True):
        position = position * size + at
    order = getattr(spec, "shard_order", None)
    return shard_at(
        position,
        tuple(tensor.shape),
        tuple(mesh.shape),
        [placement for placement in _placements(tensor) if placement is not None],
        local_shape=tuple(local_tensors(tensor)[0].shape),
        shard_order=[(cut.tensor_dim, tuple(cut.mesh_dims)) for cut in order] if order else None,
    ).pieces


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether it is a ``torch.distributed._shard`` tensor, as in FSDP1's state dicts."""
    return hasattr(tensor, "local_shards")


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "_local_tensor")


def _declares_shards(tensor: torch.Tensor) -> bool:
    """Return whether it is a CheckpointableTensor of torch 2.15, which declares its boxes."""
    if _is_dtensor(tensor) or _is_sharded(tensor):
        return False
    return all(hasattr(tensor, name) for name in SHARD_ATTRIBUTES)


def _placements(tensor: Any) -> list[Placement | None]:
    """Return the placements as ckptool's own; None if one is partial."""
    return [_placement(placement) for placement in tensor.placements]


def _placement(placement: Any) -> Placement | None:
    if placement.is_replicate():
        return Replicate()
    if placement.is_partial():
        return None
    factor = getattr(placement, "split_factor", None)
    return Shard(placement.dim) if factor is None else StridedShard(placement.dim, factor)


# Memory


def why_not_filled(tensor: torch.Tensor) -> str | None:
    """Return why bits cannot be written into a tensor; None if they can."""
    import torch

    if type(tensor.detach()) is not torch.Tensor:
        kind = type(tensor).__name__
        return f"a {kind}, a subclass with its own memory: load plain tensors, then rebuild it"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.layout != torch.strided:
        return f"a {tensor.layout} tensor"
    if tensor.is_meta:
        return "on the meta device: it has no memory yet (to_empty gives it some)"
    if tensor.is_conj() or tensor.is_neg():
        return "a conjugate or negative view"
    if _overlaps(tensor.shape, tensor.stride()):
        return "an expanded view or similar: several of its elements share memory"
    return None


def _overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements may overlap: a step is within the span of dims of smaller steps."""
    span = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride < span:
            return 0 not in shape
        span += (size - 1) * stride
    return False


def bits_of(tensor: torch.Tensor) -> Array:
    """Return the elements of a CPU tensor as integers of their size, with its strides, uncopied."""
    import torch

    itemsize = tensor.element_size()
    shape, strides = tuple(tensor.shape), tuple(s * itemsize for s in tensor.stride())
    if not tensor.numel():
        return np.empty(shape, unit(itemsize))
    data = tensor.detach().untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(data).numpy()
    offset = tensor.storage_offset() * itemsize
    return np.ndarray(shape, unit(itemsize), whole, offset, strides)


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name; Unsupported if this torch has none."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise Unsupported(f"torch {torch.__version__} has no element type {name}")
    return dtype


# Staging for devices


class Staging:
    """Pinned buffers between files and devices: two per thread and device, so that reads overlap.

    Copies wait for the work queued on the calling thread's current stream of a device; ``finish``
    waits for the copies, so that any stream may use the tensors afterwards and memory may be freed.
    On a device without streams, every copy is waited for.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._lanes: list[_Lane] = []
        self._events: dict[torch.device, Any] = {}

    def memory(self, tensor: torch.Tensor) -> BoxMemory:
        """Return where to write the elements of a tensor that can be filled.

        Call it on the thread that uses the tensor: current streams are per thread.
        """
        import torch

        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
            return ArrayMemory(bits_of(tensor))
        if tensor.device not in self._events:
            self._events[tensor.device] = _work_so_far(tensor.device)
        return _DeviceMemory(tensor, self)

    def lane(self, device: torch.device) -> _Lane:
        """Return the buffers of this thread for a device."""
        lanes: dict[Any, _Lane] = self._local.__dict__.setdefault("lanes", {})
        if device not in lanes:
            lanes[device] = _Lane(device, self._events[device])
            self._lanes.append(lanes[device])
        return lanes[device]

    def finish(self) -> None:
        """Wait until all staged data has arrived."""
        for lane in self._lanes:
            lane.finish()


class _DeviceMemory:
    """A tensor on a device, filled part by part as integers, which devices copy whatever the type.

    Complex numbers of 16 bytes have no integers of their size.
    """

    def __init__(self, tensor: torch.Tensor, staging: Staging) -> None:
        import torch

        integer = _INTEGERS.get(tensor.element_size())
        self._tensor = tensor.view(getattr(torch, integer)) if integer else tensor
        self._staging = staging

    @contextmanager
    def part(self, where: Box) -> Iterator[Array]:
        """Yield an array of the host whose elements are copied to the device on exit."""
        lane = self._staging.lane(self._tensor.device)
        itemsize = self._tensor.element_size()
        staged = lane.memory(where.volume * itemsize)
        yield staged.view(unit(itemsize)).reshape(where.shape)
        numbers = staged.view(_INTEGERS.get(itemsize, "complex128")).reshape(where.shape)
        lane.send(numbers, self._tensor[tuple(map(slice, where.lo, where.hi))])


_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def _module(device: torch.device) -> Any:
    """Return torch's module for a kind of device, such as ``torch.cuda``."""
    import torch

    return getattr(torch, device.type, None)


def _has_streams(device: torch.device) -> bool:
    return hasattr(_module(device), "Stream")


def _work_so_far(device: torch.device) -> Any:
    """Record an event on this thread's current stream, after its work so far; or return None."""
    if not _has_streams(device):
        return None
    event = _make_event(device)
    event.record(_module(device).current_stream(device))
    return event


def _make_event(device: torch.device) -> Any:
    """Return an event for which a thread sleeps: by default one of CUDA keeps a core busy.

    Other devices' events take no such option.
    """
    event = _module(device).Event
    return event(blocking=True) if device.type == "cuda" else event()


class _Lane:
    """One thread's copies to one device, which come after an event on it.

    The thread calls torch as little as it can, and stages in numpy's arrays: with most of torch's
    calls it gives the GIL away and waits for it again (docs/decisions.md has the numbers).
    """

    def __init__(self, device: torch.device, event: Any) -> None:
        module = _module(device)
        self._stream = module.Stream(device) if _has_streams(device) else None
        if self._stream is not None:
            self._stream.wait_event(event)
            module.set_stream(self._stream)  # this thread's alone, which ends with the read
        self._buffers = [_Buffer(device, self._stream) for _ in range(2)]

    def memory(self, nbytes: int) -> Array:
        """Return so many bytes of the host, once what they held has arrived."""
        self._buffers.reverse()
        return self._buffers[0].memory(nbytes)

    def send(self, staged: Array, part: torch.Tensor) -> None:
        """Start copying what was staged last to the device.

        If the part is not contiguous, torch copies through device memory on the same stream.
        Tensors created in inference mode are written in that mode, which is per thread.
        """
        import torch

        with torch.inference_mode(part.is_inference()):
            part.copy_(torch.from_numpy(staged), non_blocking=self._stream is not None)
        self._buffers[0].note_copy()

    def finish(self) -> None:
        """Wait until everything has arrived."""
        for buffer in self._buffers:
            buffer.wait()


class _Buffer:
    """Host memory whose content a stream copies to a device, pinned; or that torch copies at once.

    Its one event is recorded after each copy: waiting for one that never was ends at once.
    """

    def __init__(self, device: torch.device, stream: Any) -> None:
        self._stream = stream
        self._copied = None if stream is None else _make_event(device)
        self._memory = _allocate(0, pinned=False)

    def memory(self, nbytes: int) -> Array:
        """Return the first so many bytes, once what they held has arrived."""
        self.wait()
        if len(self._memory) < nbytes:
            self._memory = _allocate(nbytes, pinned=self._stream is not None)
        return self._memory[:nbytes]

    def note_copy(self) -> None:
        """Record that the stream was told to copy the content."""
        if self._copied is not None:
            self._copied.record(self._stream)

    def wait(self) -> None:
        """Wait until the content has arrived."""
        if self._copied is not None:
            self._copied.synchronize()


def _allocate(nbytes: int, *, pinned: bool) -> Array:
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned).numpy()
