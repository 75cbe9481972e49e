"""The ``.metadata`` pickle of torch.distributed.checkpoint, torch 2.1 to 2.15."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from msgspec import Struct, field

from ckptool.core.box import Box, is_countable
from ckptool.core.catalog import Container, Index, Path
from ckptool.core.chunks import ChunkTable
from ckptool.core.dtype import DType
from ckptool.errors import Damaged, Unsupported, coded, naming
from ckptool.formats.dcp.tables import StoredTables, more_fields
from ckptool.serialization.archive.tensors import read_dtype, read_natural, read_sizes
from ckptool.serialization.pickle.load import read_pickle
from ckptool.serialization.pickle.records import Call, Global
from ckptool.serialization.pickle.rows import Rows, expand_rows

_MOST_STEPS = 100
_CLASSES = ("Metadata", "MCoreMetadata")
_EXTRA = ("user_defined_dict", "bytecheckpoint_version")
_QUANTIZED = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")


class TensorMetadata(Struct, frozen=True):
    """A tensor's element type, shape, and the boxes of its chunks.

    ``table`` has the chunks with their items, if they are columns.
    """

    dtype: DType
    shape: tuple[int, ...]
    boxes: Sequence[Box]
    table: ChunkTable | None = None


MetadataIndex = tuple[str, tuple[int, ...] | None]
"""A name and a chunk's offset; the offset is None for a bytes item."""
SavePlan = tuple[MetadataIndex, ...]
"""What one rank intended to save, in its own order."""


class DcpMetadata(Struct, frozen=True):
    """The content of one metadata file.

    ``items`` are those in no table, by name and chunk offset; the offset is None for a bytes item.
    ``positions`` has the byte of the first occurrence of each global of the pickle, without mere
    records of other packages than torch: trainers have their own (OLMo-core 3.0 ``_StorageInfo``).

    Megatron-core records more. ``plans`` are, for each rank, the name and offset of every chunk it
    intended to save, in its own order (None if they were not recorded). ``reformulated`` are the
    shapes of tensors that are stored as ``[X/x, Y/y, x*y]`` if ranks held ``[x, y]`` of ``[X, Y]``,
    so that ranks can cut the last dim (up to 0.15).

    ByteCheckpoint records ``skeletons``, the pickle of each item's tensor without its bytes, and
    the members of its flat parameters, which are in the ``extra`` fields that DCP lacks.
    """

    tensors: dict[str, TensorMetadata]
    bytes_names: tuple[str, ...]
    items: dict[MetadataIndex, Container]
    paths: dict[str, Path]
    version: str | None
    positions: dict[tuple[str, str], int]
    plans: tuple[SavePlan, ...] | None = None
    reformulated: dict[str, tuple[int, ...]] = field(default_factory=dict)
    skeletons: dict[MetadataIndex, bytes] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


def parse(data: bytes, what: str) -> DcpMetadata:
    """Read a metadata pickle; Damaged if it is not one."""
    with coded("metadata-unreadable", file=what), naming(what):
        try:
            loaded = read_pickle(data, what=what, rows=True)
        except Damaged as error:
            raise Damaged(error.message.recoded("metadata-unreadable")) from None
        del data  # for a large one as much as all columns take
        found, records = loaded.globals, loaded.globals.records
        named = {i: at for i, at in found.items() if i not in records or _is_of_torch(i)}
        positions = {(i.module, i.name): at for i, at in named.items()}
        return _metadata(loaded.value, positions, what)


def _is_of_torch(item: Global) -> bool:
    return item.module.partition(".")[0] == "torch"


def _metadata(value: Any, positions: dict[tuple[str, str], int], what: str) -> DcpMetadata:
    if not isinstance(value, Call) or value.name.rpartition(".")[2] not in _CLASSES:
        raise Damaged(f"{what}: the pickle contains no torch.distributed.checkpoint Metadata")
    fields = value.fields
    try:
        entries = fields["state_dict_metadata"]
        stored = fields["storage_data"].items()
        has_rows = any(type(index) is Rows for index, _ in stored)
        tables = StoredTables(stored) if has_rows else None
        sizes = _Sizes()
        may_be_quantized = any(("torch", name) in positions for name in _QUANTIZED)
        tensors = {
            _text(name): _tensor(name, entry, f"{what}: {name}", sizes, tables)
            for name, entry in entries.items()
            if entry.name.endswith(".TensorStorageMetadata")
            and not (may_be_quantized and _is_quantized(entry))
        }
        bytes_names = tuple(_text(name) for name in entries if name not in tensors)
        sliced = {name for name in bytes_names if entries[name].fields.get("chunks")}
        items: dict[MetadataIndex, Container] = {}
        singles = chain(tables.rest(), _items(tables.records)) if tables else _items(stored)
        for (name, at), item in singles:
            if items.setdefault(index := (name, None if name in sliced else at), item) is not item:
                raise Damaged(f"{what}: {name}: two items for {index[1] or 'a value'}")
        paths = _paths(fields.get("planner_data"))
        plans = _plans(fields.get("all_local_plans"))
        reformulated = dict(_read_reformulations(fields.get("mcore_data")))
        shapes = _Sizes()
        pickles = fields.get("all_tensor_metadata") or {}
        skeletons = {
            _index(record, shapes): pickled
            for record, pickled in pickles.items()
            if isinstance(pickled, bytes)
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Damaged(f"{what}: not as DCP writes it: {error}") from None
    return DcpMetadata(
        tensors,
        bytes_names,
        items,
        paths,
        fields.get("version") if isinstance(fields.get("version"), str) else None,
        positions,
        plans,
        reformulated,
        skeletons,
        {name: value for name, value in fields.items() if name in _EXTRA},
    )


def _is_quantized(entry: Call) -> bool:
    """Return whether torch quantized a tensor: its one item is read like a value's."""
    try:
        dtype = _dtype(entry)
    except (KeyError, TypeError, AttributeError, IndexError):
        return False
    return isinstance(dtype, Global) and dtype.module == "torch" and dtype.name in _QUANTIZED


def _dtype(entry: Call) -> Any:
    properties = entry.fields["properties"].state
    return properties["dtype"] if isinstance(properties, dict) else properties[0]


def _tensor(
    name: str, entry: Call, what: str, sizes: _Sizes, tables: StoredTables | None
) -> TensorMetadata:
    fields = entry.fields
    try:
        dtype, shape = read_dtype(_dtype(entry)), read_sizes(fields["size"])
        if not is_countable(shape, dtype.itemsize):
            raise Damaged(f"a shape of too many elements to be counted: {list(shape)}")
        table = tables.take(name, shape, fields["chunks"]) if tables else None
        if table is not None:
            return TensorMetadata(dtype, shape, table.boxes, table)
        boxes = tuple(_box(chunk, sizes) for chunk in expand_rows(fields["chunks"]))
        return TensorMetadata(dtype, shape, boxes)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise Damaged(f"{what}: not as DCP writes it: {error}") from None
    except (Damaged, Unsupported) as error:
        raise error.within(what, tensor=name) from None


class _Sizes(dict[Call, tuple[int, ...]]):
    """The sizes in records: the same tuple for the same record."""

    def __missing__(self, record: Call) -> tuple[int, ...]:
        self[record] = shape = read_sizes(record)
        return shape

    def of(self, value: Any) -> tuple[int, ...]:
        """Return a shape or strides of a pickle."""
        return self[value] if type(value) is Call else read_sizes(value)


def _box(chunk: Call, sizes: _Sizes) -> Box:
    """Return the box of a ChunkStorageMetadata."""
    if fields := more_fields(chunk):
        raise Unsupported(f"a chunk with {fields[0]!r}, which is not known")
    low, shape = sizes.of(chunk.fields["offsets"]), sizes.of(chunk.fields["sizes"])
    if len(low) != len(shape):
        raise ValueError(f"a chunk of {len(shape)} dims at an offset of {len(low)}")
    return Box.at(low, shape)


def _items(stored: Iterable[tuple[Call, Call]]) -> Iterator[tuple[MetadataIndex, Container]]:
    """Yield items by name and offset, from a record of each."""
    shapes = _Sizes()
    for record, info in stored:
        where = info.fields
        transforms = where.get("transform_descriptors") or ()
        file, start, length = where["relative_path"], where["offset"], where["length"]
        if not isinstance(file, str):
            raise Damaged("a relative_path that is not text")
        steps = tuple(map(_text, transforms)) if transforms else ()
        yield (
            _index(record, shapes),
            Container(file, read_natural(start), read_natural(length), steps),
        )


def _index(record: Call, shapes: _Sizes) -> MetadataIndex:
    offset = record.fields.get("offset")
    return _text(record.fields["fqn"]), None if offset is None else shapes.of(offset)


def _plans(value: Any) -> tuple[SavePlan, ...] | None:
    if not isinstance(value, list):
        return None
    shapes = _Sizes()
    return tuple(
        tuple(_index(item.fields["index"], shapes) for item in plan.fields.get("items") or ())
        for plan in value
    )


def _read_reformulations(value: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, entry in (value or {}).items():
        shape = entry.get("nd_reformulated_orig_global_shape") if isinstance(entry, dict) else None
        if shape is not None:
            yield _text(name), read_sizes(shape)


def _text(value: Any) -> str:
    if not _is_text(value):
        raise Damaged("not as DCP writes it: a name that is not text")
    return str(value)


def _is_text(value: Any) -> bool:
    """Return whether a value is text that can be written, without half of a surrogate pair."""
    try:
        return isinstance(value, str) and (value.isascii() or bool(value.encode()))
    except UnicodeEncodeError:
        return False


def _paths(planner_data: Any) -> dict[str, Path]:
    """Return the path of each flat name; empty if the state dict was saved unflattened."""
    if not isinstance(planner_data, dict):
        return {}
    return {
        name: _path(path)
        for name, path in planner_data.items()
        if _is_text(name) and isinstance(path, tuple | list)
    }


def _path(steps: Sequence[Any]) -> Path:
    if set(map(type, steps)) == {str} and len(steps) <= _MOST_STEPS and "".join(steps).isascii():
        return tuple(steps)
    if len(steps) > _MOST_STEPS or not all(map(_is_step, steps)):
        raise Damaged(
            f"a path of more than {_MOST_STEPS} steps, or of steps that are neither "
            "names nor indices"
        )
    return tuple(Index(step) if isinstance(step, int) else step for step in steps)


def _is_step(step: Any) -> bool:
    return _is_text(step) or (isinstance(step, int) and abs(step) < 1 << 63)
