"""Pickle state dicts whose tensors are references, and values from other pickles.

It names only what ``torch.load(weights_only=True)`` accepts, unless the values name more.
"""

from __future__ import annotations

import codecs
import io
import math
import pickle
from collections.abc import Sequence
from typing import Any, ClassVar

from msgspec import Struct

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import TensorEntry
from ckptool.core.dtype import BY_NAME, DType
from ckptool.core.layout import Data, Literal
from ckptool.core.sharding.dtensor import LocalShard
from ckptool.errors import Unsupported
from ckptool.serialization.pickle.globals import is_name
from ckptool.serialization.pickle.records import Call, Global, OrderedMapping, Persistent

Content = Data | Literal
"""The content of a storage: tensor data of the source, or bytes the writer knows."""


class TensorRef(Struct, frozen=True):
    """A tensor in a state dict that is to be written."""

    dtype: DType
    shape: tuple[int, ...]
    content: Content

    @staticmethod
    def whole(entry: TensorEntry) -> TensorRef:
        """Refer to all of the catalog's entry."""
        return TensorRef.of_box(entry, Box.whole(entry.shape))

    @staticmethod
    def of_box(entry: TensorEntry, box: Box) -> TensorRef:
        """Refer to a box of the catalog's entry."""
        return TensorRef(entry.dtype, box.shape, Data.of(entry.name, box, entry.dtype.itemsize))

    @staticmethod
    def of_shard(entry: TensorEntry, shard: LocalShard) -> TensorRef:
        """Refer to one rank's part of an entry: one box, possibly empty, or several."""
        if not shard.pieces:
            return TensorRef.of_box(entry, Box.whole(shard.shape))
        data = Data(entry.name, shard.shape, shard.pieces, entry.dtype.itemsize)
        return TensorRef(entry.dtype, shard.shape, data)


def dump(value: Any) -> tuple[bytes, list[Content]]:
    """Return the pickle of a value in protocol 2, and the content of its storages, by number.

    Inert records become what they were read from. Raises Unsupported if values are nested too
    deeply.
    """
    stream = io.BytesIO()
    pickler = _RecordPickler(stream, 2)
    try:
        pickler.dump(value)
    except RecursionError:
        raise Unsupported("cannot write a value that is nested too deeply") from None
    return stream.getvalue(), list(pickler.storages)


_PurePickler: Any = pickle._Pickler


class _RecordPickler(_PurePickler):  # type: ignore[misc]
    """Python's own pickler, which writes globals by name instead of importing them.

    ``storages`` numbers the storages of the tensors so far. References to the same content (tied
    tensors) share a storage.
    """

    dispatch: ClassVar = dict(_PurePickler.dispatch)

    def __init__(self, stream: io.BytesIO, protocol: int) -> None:
        super().__init__(stream, protocol)
        self.storages: dict[Content, int] = {}
        self._globals: dict[Global, Global] = {}

    def persistent_id(self, item: Any) -> Any:
        return item.value if isinstance(item, Persistent) else None

    def save_tensor(self, ref: TensorRef) -> None:
        key = self.storages.setdefault(ref.content, len(self.storages))
        self.save(_rebuild_call(ref, str(key)))

    def save_named(self, item: Global) -> None:
        entry = self.memo.get(id(self._globals.setdefault(item, item)))
        if entry is not None:
            self.write(self.get(entry[0]))
            return
        if not is_name(item.module) or not is_name(item.name):
            raise Unsupported("cannot write a global whose name is not a dotted name")
        self.write(pickle.GLOBAL + f"{item.module}\n{item.name}\n".encode())
        self.memoize(item)

    def save_call(self, call: Call) -> None:
        self.save(call.function)
        self.save(call.args)
        self.write(pickle.NEWOBJ if call.is_new else pickle.REDUCE)
        self.memoize(call)
        if call.is_filled:
            self._batch_appends(call.items)
            self._batch_setitems(call.entries)
        if call.state is not None:
            self.save(call.state)
            self.write(pickle.BUILD)

    def save_ordered(self, mapping: OrderedMapping) -> None:
        self.save(_ORDERED)
        self.save(())
        self.write(pickle.REDUCE)
        self.memoize(mapping)
        self._batch_setitems(mapping.items())
        state = getattr(mapping, "state", None)
        if state is not None:
            self.save(state)
            self.write(pickle.BUILD)

    def save_bytes(self, data: bytes) -> None:
        # empty ones, too, which Python makes by a call that weights_only refuses
        self.save_reduce(codecs.encode, (data.decode("latin-1"), "latin1"), obj=data)

    def save_set(self, items: Any) -> None:
        # written alike by every process: the order of a set differs between processes
        ordered = sorted(items, key=lambda item: (type(item).__name__, repr(item)))
        self.save_reduce(type(items), (ordered,), obj=items)

    dispatch[TensorRef] = save_tensor
    dispatch[Global] = save_named
    dispatch[Call] = save_call
    dispatch[OrderedMapping] = save_ordered
    dispatch[bytes] = save_bytes
    dispatch[set] = dispatch[frozenset] = save_set


_ORDERED = Global("collections", "OrderedDict")
_REBUILD_TYPED = Global("torch._utils", "_rebuild_tensor_v2")
_REBUILD_UNTYPED = Global("torch._utils", "_rebuild_tensor_v3")
_UNTYPED = Global("torch.storage", "UntypedStorage")
_TYPED = {name: Global("torch", dtype.storage) for name, dtype in BY_NAME.items() if dtype.storage}


def _rebuild_call(ref: TensorRef, key: str) -> Call:
    """Return the call that rebuilds a contiguous tensor from storage ``key``."""
    dtype, shape = ref.dtype, ref.shape
    typed = _TYPED.get(dtype.name)
    numel = math.prod(shape) if typed else math.prod(shape) * dtype.itemsize
    storage = Persistent(("storage", typed or _UNTYPED, key, "cpu", numel))
    args = (storage, 0, shape, contiguous_strides(shape), False, Call(_ORDERED, ()))
    if typed:
        return Call(_REBUILD_TYPED, args)
    return Call(_REBUILD_UNTYPED, (*args, dtype_global(dtype)))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor; in torch an empty dim counts as one element."""
    return row_major_strides([max(size, 1) for size in shape], 1)


def require_of_torch(name: str) -> None:
    """Raise Unsupported if torch has no element type of this name, which files of torch need."""
    if not BY_NAME[name].is_of_torch:
        raise Unsupported(
            f"torch has no element type {name}",
            "limit-exceeded",
            hint="write safetensors, or exclude such tensors with --drop",
        )


def dtype_global(dtype: DType) -> Global:
    """Return ``torch.<dtype>``. Raises Unsupported if torch has no such type."""
    require_of_torch(dtype.name)
    return Global("torch", dtype.name)
