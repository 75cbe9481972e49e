"""Write the ``.metadata`` pickle of torch.distributed.checkpoint (torch 2.4 to 2.13 load it).

The records are those that ``metadata`` reads. There may be millions of them, all alike: so
classes, names and sizes are pickled once and fetched from the memo, and a record is a few
joined byte strings.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ckptool.core.box import Box
from ckptool.core.catalog import Index, Path, TensorEntry

_METADATA = "torch.distributed.checkpoint.metadata"
_BATCH = 1000
_END = pickle.SETITEMS + pickle.BUILD


class WrittenChunk(NamedTuple):
    """Where one chunk was put: ``length`` bytes of ``file`` from ``offset``."""

    box: Box
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """A tensor and where its chunks were put."""

    entry: TensorEntry
    chunks: list[WrittenChunk]


@dataclass(frozen=True, slots=True)
class WrittenValue:
    """A non-tensor value, and where it was put."""

    name: str
    path: Path
    file: str
    offset: int
    length: int


def metadata_pickle(tensors: list[WrittenTensor], values: list[WrittenValue]) -> bytes:
    """The whole ``.metadata`` file."""
    return _Writer().metadata(tensors, values)


class _Writer:
    """Opcodes of protocol 4. A method that returns bytes returns what pushes a value."""

    def __init__(self) -> None:
        self._head: list[bytes] = [pickle.PROTO + b"\x04"]
        self._memo: dict[object, bytes] = {}
        self._sizes: dict[tuple[int, ...], bytes] = {}
        self._files: dict[str, bytes] = {}

    def metadata(self, tensors: list[WrittenTensor], values: list[WrittenValue]) -> bytes:
        state = {
            "state_dict_metadata": self._dict(self._entries(tensors, values)),
            "planner_data": self._dict(self._paths(tensors, values)),
            "storage_data": self._dict(self._storage(tensors, values)),
            "storage_meta": pickle.NONE,
            "version": self._text("1.0.0"),
        }
        body = self._object(_METADATA, "Metadata", **state)
        return b"".join([*self._head, body, pickle.STOP])

    def _entries(
        self, tensors: list[WrittenTensor], values: list[WrittenValue]
    ) -> Iterable[tuple[bytes, bytes]]:
        for tensor in tensors:
            yield self._text(tensor.entry.name), self._tensor(tensor)
        nothing = self._global(_METADATA, "BytesStorageMetadata")
        for value in values:
            yield self._text(value.name), nothing + pickle.EMPTY_TUPLE + pickle.NEWOBJ

    def _tensor(self, tensor: WrittenTensor) -> bytes:
        entry = tensor.entry
        return self._object(
            _METADATA,
            "TensorStorageMetadata",
            properties=self._properties(entry.dtype.name),
            size=self._size(entry.shape),
            chunks=self._chunks(chunk.box for chunk in tensor.chunks),
        )

    def _chunks(self, boxes: Iterable[Box]) -> bytes:
        begin = self._begin(_METADATA, "ChunkStorageMetadata") + self._text("offsets")
        sizes = self._text("sizes")
        chunks = [begin + self._size(b.lo) + sizes + self._size(b.shape) + _END for b in boxes]
        return pickle.EMPTY_LIST + pickle.MARK + b"".join(chunks) + pickle.APPENDS

    def _properties(self, dtype: str) -> bytes:
        layout = self._call("torch.serialization", "_get_layout", self._text("torch.strided"))
        encoding = self._call(_METADATA, "_MEM_FORMAT_ENCODING", _integer(0))
        fields = (
            self._global("torch", dtype),
            layout,
            pickle.NEWFALSE,
            encoding,
            pickle.NEWFALSE,
        )
        state = pickle.MARK + b"".join(fields) + pickle.TUPLE
        cls = self._global(_METADATA, "TensorProperties")
        return cls + pickle.EMPTY_TUPLE + pickle.NEWOBJ + state + pickle.BUILD

    def _paths(
        self, tensors: list[WrittenTensor], values: list[WrittenValue]
    ) -> Iterable[tuple[bytes, bytes]]:
        """The path of each name, which torch's loader must be able to rebuild."""
        entries: list[TensorEntry | WrittenValue] = [tensor.entry for tensor in tensors]
        for entry in [*entries, *values]:
            steps = b"".join(
                _integer(step.position) if isinstance(step, Index) else self._text(str(step))
                for step in entry.path
            )
            yield self._text(entry.name), pickle.MARK + steps + pickle.TUPLE

    def _storage(
        self, tensors: list[WrittenTensor], values: list[WrittenValue]
    ) -> Iterable[tuple[bytes, bytes]]:
        for value in values:
            key = self._object(
                _METADATA, "MetadataIndex", fqn=self._text(value.name), index=pickle.NONE
            )
            yield key, self._stored(value.file, value.offset, value.length)
        for tensor in tensors:
            head = self._begin(_METADATA, "MetadataIndex") + self._text("fqn")
            head += self._text(tensor.entry.name) + self._text("index")
            offset_key = self._text("offset")
            for number, (box, file, offset, length) in enumerate(tensor.chunks):
                key = head + _integer(number) + offset_key + self._size(box.lo) + _END
                yield key, self._stored(file, offset, length)

    def _stored(self, file: str, offset: int, length: int) -> bytes:
        ends = _integer(offset) + self._text("length") + _integer(length) + _END
        return self._stored_in(file) + ends

    def _stored_in(self, file: str) -> bytes:
        """A ``_StorageInfo`` of a file, up to its offset."""
        found = self._files.get(file)
        if found is None:
            begin = self._begin("torch.distributed.checkpoint.filesystem", "_StorageInfo")
            path = self._text("relative_path") + self._text(file)
            found = self._files[file] = begin + path + self._text("offset")
        return found

    # Building blocks

    def _object(self, module: str, name: str, **fields: bytes) -> bytes:
        state = [self._text(key) + value for key, value in fields.items()]
        return b"".join([self._begin(module, name), *state, _END])

    def _begin(self, module: str, name: str) -> bytes:
        """An object of a class, up to the fields of its state; ``_END`` ends it."""
        made = pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.MARK
        return self._global(module, name) + made

    def _call(self, module: str, name: str, argument: bytes) -> bytes:
        return self._global(module, name) + argument + pickle.TUPLE1 + pickle.REDUCE

    def _dict(self, pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
        found = [key + value for key, value in pairs]
        batches = [
            pickle.MARK + b"".join(found[start : start + _BATCH]) + pickle.SETITEMS
            for start in range(0, len(found), _BATCH)
        ]
        return b"".join([pickle.EMPTY_DICT, *batches])

    def _size(self, shape: tuple[int, ...]) -> bytes:
        found = self._sizes.get(shape)
        if found is None:
            sizes = pickle.MARK + b"".join(map(_integer, shape)) + pickle.TUPLE
            found = self._global("torch", "Size") + sizes + pickle.TUPLE1 + pickle.REDUCE
            self._sizes[shape] = found
        return found

    def _global(self, module: str, name: str) -> bytes:
        found = self._memo.get((module, name))
        if found is None:
            push = self._text(module) + self._text(name) + pickle.STACK_GLOBAL
            found = self._remember((module, name), push)
        return found

    def _text(self, text: str) -> bytes:
        found = self._memo.get(text)
        if found is None:
            encoded = text.encode("utf-8", "surrogatepass")
            push = pickle.BINUNICODE + len(encoded).to_bytes(4, "little") + encoded
            found = self._remember(text, push)
        return found

    def _remember(self, value: object, push: bytes) -> bytes:
        """Pickle a value at the head of the file, off the stack; returns what fetches it."""
        fetch = pickle.LONG_BINGET + len(self._memo).to_bytes(4, "little")
        self._memo[value] = fetch
        self._head += [push, pickle.MEMOIZE, pickle.POP]
        return fetch


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 16:
        return pickle.BININT2 + value.to_bytes(2, "little")
    if 0 <= value < 1 << 31:
        return pickle.BININT + value.to_bytes(4, "little")
    encoded = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return pickle.LONG1 + bytes([len(encoded)]) + encoded
