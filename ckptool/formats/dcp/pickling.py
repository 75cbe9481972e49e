"""The ``.metadata`` of a DCP folder, as torch 2.13 writes it; torch 2.4 to 2.13 load it.

Classes and names are pickled once and fetched from the memo. The records of chunks are rows of
bytes that numpy fills in. The opcodes are those of Python's own pickler, so that ckptool reads
many records at once, here as in what torch wrote.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ckptool.core.catalog import Index, ObjectEntry, TensorEntry
from ckptool.core.layout import FileLayout, Literal, Part
from ckptool.formats.dcp.cuts import ItemBoxes, WrittenItems
from ckptool.serialization.pickle.write import require_of_torch

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_BATCH = 4096
_NEW = pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.MEMOIZE
_BEGIN = _NEW + pickle.EMPTY_DICT + pickle.MEMOIZE + pickle.MARK
_END = pickle.SETITEMS + pickle.BUILD
_SIZED = pickle.TUPLE1 + pickle.MEMOIZE + pickle.REDUCE + pickle.MEMOIZE


class WrittenAt(NamedTuple):
    """The place of a value: ``length`` bytes of ``file`` from ``offset``."""

    file: str
    offset: int
    length: int


WrittenValue = tuple[ObjectEntry, WrittenAt]


class MetadataFile(FileLayout):
    """The file, in opcodes of protocol 4: hundreds of MB for a large mesh, made as it is written.

    A method that returns bytes returns those that push a value.
    """

    def __init__(self, chunks: WrittenItems, values: Sequence[WrittenValue]) -> None:
        self._head: list[bytes] = [pickle.PROTO + b"\x04"]
        self._memo: dict[object, bytes] = {}
        self._chunks = chunks
        self._values = values
        self._lists: dict[int, bytes] = {}
        self._files: Any = None
        body = sum(map(len, self._body()))  # fills the head
        super().__init__(".metadata", (), nbytes=sum(map(len, self._head)) + body)

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Literal(b"".join([*self._head, *self._body()])),)

    @property
    def decisive(self) -> Iterator[Part]:
        """Yield what decides this file and, except for values, the files with chunks."""
        yield from map(Literal, self._chunks.decisive())
        yield Literal(repr([(v.name, v.path, at) for v, at in self._values]).encode())

    def _body(self) -> Iterator[bytes]:
        yield self._begin(_METADATA, "Metadata")
        yield self._text("state_dict_metadata")
        yield from self._dict(self._entries())
        yield self._text("planner_data")
        yield from self._dict(self._paths())
        yield self._text("storage_data")
        yield from self._dict(self._storage_of_values())
        yield from self._storage_of_chunks()
        yield self._text("storage_meta") + pickle.NONE + self._text("version")
        yield self._text("1.0.0") + _END + pickle.STOP

    def _entries(self) -> Iterator[bytes]:
        records: dict[object, bytes] = {}
        for entry, cut in self._chunks.tensors:
            kind = entry.dtype.name, entry.shape, id(cut)
            if kind not in records:
                records[kind] = self._object(
                    _METADATA,
                    "TensorStorageMetadata",
                    properties=self._properties(entry.dtype.name),
                    size=self._size(entry.shape),
                    chunks=self._list(cut),
                )
            yield self._text(entry.name)
            yield records[kind]
        nothing = self._global(_METADATA, "BytesStorageMetadata")
        for value, _ in self._values:
            yield self._text(value.name) + nothing + pickle.EMPTY_TUPLE + pickle.NEWOBJ

    def _list(self, cut: ItemBoxes) -> bytes:
        """Pickle the chunks of tensors that are cut alike, once for all of them."""
        import numpy as np

        if id(cut) not in self._lists:
            sizes = np.array([box.shape for box in cut.boxes], np.int64).reshape(cut.lows.shape)
            rows = _rows(
                len(sizes),
                self._begin(_METADATA, "ChunkStorageMetadata") + self._text("offsets"),
                *self._size_columns(cut.lows),
                self._text("sizes"),
                *self._size_columns(sizes),
                _END,
            )
            tail = rows + pickle.APPEND if len(sizes) == 1 else pickle.MARK + rows + pickle.APPENDS
            self._lists[id(cut)] = pickle.EMPTY_LIST + pickle.MEMOIZE + tail
        return self._lists[id(cut)]

    def _properties(self, dtype: str) -> bytes:
        require_of_torch(dtype)
        layout = self._fetch_call("torch.serialization", "_get_layout", self._text("torch.strided"))
        encoding = self._fetch_call(_METADATA, "_MEM_FORMAT_ENCODING", _integer(0))
        fields = (
            self._global("torch", dtype),
            layout,
            pickle.NEWFALSE,
            encoding,
            pickle.NEWFALSE,
        )
        state = pickle.MARK + b"".join(fields) + pickle.TUPLE + pickle.MEMOIZE
        return self._global(_METADATA, "TensorProperties") + _NEW + state + pickle.BUILD

    def _paths(self) -> Iterator[bytes]:
        """Pickle the path of each name, which torch's loader must be able to rebuild."""
        entries: list[TensorEntry | ObjectEntry] = [entry for entry, _ in self._chunks.tensors]
        entries += [entry for entry, _ in self._values]
        for entry in entries:
            steps = b"".join(
                _integer(step.position) if isinstance(step, Index) else self._text(str(step))
                for step in entry.path
            )
            yield self._text(entry.name) + pickle.MARK + steps + pickle.TUPLE

    def _storage_of_values(self) -> Iterator[bytes]:
        for value, (file, offset, length) in self._values:
            name = self._text(value.name)
            yield self._object(_METADATA, "MetadataIndex", fqn=name, index=pickle.NONE)
            yield self._object(
                _FILESYSTEM,
                "_StorageInfo",
                relative_path=self._text(file),
                offset=_integer(offset),
                length=_integer(length),
            )

    def _storage_of_chunks(self) -> Iterator[bytes]:
        """Pickle the places of chunks, for tensors of as many dims together."""
        import numpy as np

        if self._files is None:
            self._files = np.zeros(len(self._chunks.nbytes), np.int64)
            for file in self._chunks.written:
                self._files[file] = self._number(self._chunks.split.path(file))
        by_dims: dict[int, list[int]] = {}
        for number, (entry, _) in enumerate(self._chunks.tensors):
            by_dims.setdefault(len(entry.shape), []).append(number)
        for numbers in by_dims.values():
            batch: list[int] = []
            count = 0
            for number in numbers:
                batch.append(number)
                count += len(self._chunks.tensors[number][1].boxes)
                if count >= _BATCH:
                    yield self._storage_rows(batch)
                    batch, count = [], 0
            yield self._storage_rows(batch)

    def _storage_rows(self, numbers: Sequence[int]) -> bytes:
        """Pickle keys and values of the chunks of some tensors, and set them into a dict."""
        import numpy as np

        tensors = [self._chunks.tensors[number] for number in numbers]
        if not tensors:
            return b""
        firsts = self._chunks.firsts[numbers]
        counts = self._chunks.firsts[np.add(numbers, 1)] - firsts
        ends = np.cumsum(counts)
        index = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        at = np.repeat(firsts, counts) + index
        names = np.array([self._number(entry.name) for entry, _ in tensors], np.int64)
        rows = _rows(
            len(at),
            self._begin(_METADATA, "MetadataIndex") + self._text("fqn") + pickle.LONG_BINGET,
            _little_endian(np.repeat(names, counts), 4),
            self._text("index"),
            *_integers(index),
            self._text("offset"),
            *self._size_columns(np.concatenate([cut.lows for _, cut in tensors])),
            _END + self._begin(_FILESYSTEM, "_StorageInfo") + self._text("relative_path"),
            pickle.LONG_BINGET,
            _little_endian(self._files[self._chunks.files[at]], 4),
            self._text("offset"),
            *_integers(self._chunks.offsets[at]),
            self._text("length"),
            *_integers(self._chunks.lengths[at]),
            _END,
        )
        return pickle.MARK + rows + pickle.SETITEMS

    def _size_columns(self, sizes: Any) -> list[Any]:
        """Return the opcodes of one torch.Size per row, of the numbers ``[n, dims]``."""
        dims = sizes.shape[1]
        size = self._global("torch", "Size")
        if not dims:
            return [size + pickle.EMPTY_TUPLE + _SIZED]
        columns = [piece for dim in range(dims) for piece in _integers(sizes[:, dim])]
        tuples = (pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
        begin, end = (b"", tuples[dims - 1]) if dims <= 3 else (pickle.MARK, pickle.TUPLE)
        return [size + begin, *columns, end + pickle.MEMOIZE + _SIZED]

    # Building blocks

    def _object(self, module: str, name: str, **fields: bytes) -> bytes:
        state = [self._text(key) + value for key, value in fields.items()]
        return b"".join([self._begin(module, name), *state, _END])

    def _begin(self, module: str, name: str) -> bytes:
        """Begin an object of a class, up to the fields of its state; ``_END`` ends it."""
        return self._global(module, name) + _BEGIN

    def _fetch_call(self, module: str, name: str, argument: bytes) -> bytes:
        """Fetch what a call returns, which is made once."""
        call = module, name, argument
        if call not in self._memo:
            push = self._global(module, name) + argument + pickle.TUPLE1 + pickle.REDUCE
            self._remember(call, push)
        return self._memo[call]

    def _dict(self, items: Iterable[bytes]) -> Iterator[bytes]:
        """Pickle a dict of which each item is its key and value; more can be set after it."""
        yield pickle.EMPTY_DICT + pickle.MARK
        yield from items
        yield pickle.SETITEMS

    def _size(self, shape: tuple[int, ...]) -> bytes:
        import numpy as np

        return _rows(1, *self._size_columns(np.array([shape], np.int64)))

    def _global(self, module: str, name: str) -> bytes:
        if (module, name) not in self._memo:
            push = self._text(module) + self._text(name) + pickle.STACK_GLOBAL
            self._remember((module, name), push)
        return self._memo[module, name]

    def _text(self, text: str) -> bytes:
        if text not in self._memo:
            encoded = text.encode("utf-8", "surrogatepass")
            self._remember(text, pickle.BINUNICODE + len(encoded).to_bytes(4, "little") + encoded)
        return self._memo[text]

    def _number(self, text: str) -> int:
        """Return the number of a text in the memo."""
        return int.from_bytes(self._text(text)[1:], "little")

    def _remember(self, value: object, push: bytes) -> None:
        """Pickle a value at the head of the file, off the stack, to be fetched from the memo."""
        self._memo[value] = pickle.LONG_BINGET + len(self._memo).to_bytes(4, "little")
        self._head += [push, pickle.MEMOIZE, pickle.POP]


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 16:
        return pickle.BININT2 + value.to_bytes(2, "little")
    if 0 <= value < 1 << 31:
        return pickle.BININT + value.to_bytes(4, "little")
    encoded = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return pickle.LONG1 + bytes([len(encoded)]) + encoded


def _integers(numbers: Any) -> tuple[bytes, Any]:
    """Return the opcode that pushes each of some integers, the same for all, and their bytes."""
    largest = int(numbers.max(initial=0))
    if largest < 1 << 16:
        return pickle.BININT2, _little_endian(numbers, 2)
    if largest < 1 << 31:
        return pickle.BININT, _little_endian(numbers, 4)
    return pickle.LONG1 + b"\x08", _little_endian(numbers, 8)


def _little_endian(numbers: Any, width: int) -> Any:
    """Return numbers as bytes ``[n, width]``."""
    import numpy as np

    return numbers.astype(f"<u{width}").view(np.uint8).reshape(-1, width)


def _rows(count: int, *pieces: Any) -> bytes:
    """Return joined rows of bytes, from pieces that are constants or arrays."""
    import numpy as np

    widths = [len(piece) if isinstance(piece, bytes) else piece.shape[1] for piece in pieces]
    rows = np.empty((count, sum(widths)), np.uint8)
    at = 0
    for piece, width in zip(pieces, widths, strict=True):
        of_all = np.frombuffer(piece, np.uint8) if isinstance(piece, bytes) else piece
        rows[:, at : at + width] = of_all
        at += width
    return rows.tobytes()
