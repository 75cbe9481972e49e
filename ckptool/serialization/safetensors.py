"""The header of one safetensors file, and the layout of a new one.

Format: 8 bytes little-endian header length, a JSON header, then the tensors' bytes without gaps
(safetensors 0.8). A header may be padded with spaces; torch's consolidation writes none.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from json.encoder import encode_basestring as _quoted
from typing import Any, NamedTuple, cast

from msgspec import Struct

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import Extent, TensorEntry
from ckptool.core.dtype import BY_SAFETENSORS, DType
from ckptool.core.layout import Data, FileLayout, Literal, Part
from ckptool.core.sharding.table import WholeTensor
from ckptool.errors import UNCODED, Damaged, Problem, Unsupported, coded
from ckptool.serialization.file_kinds import detect_kind, not_a, read_head
from ckptool.serialization.source import Source

LONGEST_HEADER = 100_000_000
"""Bytes; the safetensors library refuses longer ones."""
_MOST_ENTRIES = 300_000
_MOST_TOKENS = 32 * _MOST_ENTRIES
_MOST_DIMS = 64
_FEWER = "put fewer tensors in each file (convert: a smaller --max-shard-size)"
_MOST_DIGITS = 20
_INTEGERS = {int}
_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_dumps = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
_SPACED_COLON = re.compile(rb'"\s+:')
_LONG_NUMBER = b"0" * (_MOST_DIGITS + 1)
"""Matches a number with too many digits, or a name, once all digits are zeros."""


class _Kind(NamedTuple):
    """The properties of tensors of one element type and shape: their bytes, strides and box."""

    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    strides: tuple[int, ...]
    boxes: tuple[Box]


class StoredSlice(NamedTuple):
    """One tensor of a file: its kind, and where in the file it begins and ends."""

    kind: _Kind
    file: str
    offset: int
    end: int

    @property
    def dtype(self) -> DType:
        return self.kind.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.kind.shape

    @property
    def nbytes(self) -> int:
        return self.kind.nbytes

    @property
    def at(self) -> Extent:
        """The place of its elements."""
        return Extent(self.file, self.offset, self.kind.strides)

    @property
    def chunks(self) -> WholeTensor:
        """The only chunk, which is the whole tensor."""
        return WholeTensor(self.kind.boxes, self.file, self.offset, self.kind.strides)


class SafetensorsFile(Struct, frozen=True):
    """The tensors of one file in the order of their bytes, and its ``__metadata__``."""

    tensors: dict[str, StoredSlice]
    metadata: dict[str, str]


def looks_like_safetensors(head: bytes, size: int) -> bool:
    """Return whether the first nine bytes can begin a safetensors file of ``size`` bytes."""
    return len(head) >= 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 40


def read_safetensors(
    source: Source, file: str, problems: list[Problem] | None = None
) -> SafetensorsFile:
    """Read and check a header. Raises Damaged if it breaks one of the format's rules.

    With a list of ``problems``, bad entries are added there and skipped, if the others are valid
    nevertheless; so are two that share bytes, as neither can be trusted.
    """
    with coded("safetensors-header", file=file):
        before = len(problems or ())
        metadata, tensors, start = _read_header(source, file, problems)
        if _is_seamless(tensors.values(), start, source.files[file]):
            return SafetensorsFile(tensors, metadata)
        ordered = dict(sorted(tensors.items(), key=lambda pair: (pair[1].offset, pair[1].end)))
        _drop_overlaps(file, ordered, problems)
        is_whole = len(problems or ()) == before
        try:
            _require_no_holes(file, ordered, start, source.files[file], is_whole=is_whole)
        except Damaged as error:
            if problems is None or error.message.code == "file-truncated":
                raise
            problems += _within(error, file)
        return SafetensorsFile(ordered, metadata)


def read_promised_size(source: Source, file: str) -> int:
    """Return the size in bytes that a file should have by its header; Damaged if incomplete."""
    with coded("safetensors-header", file=file):
        _, tensors, start = _read_header(source, file, [])
    return max((item.end for item in tensors.values()), default=start)


def _read_header(
    source: Source, file: str, problems: list[Problem] | None
) -> tuple[dict[str, str], dict[str, StoredSlice], int]:
    """Return the metadata and the tensors of a header, and where it ends."""
    size = source.files[file]
    if not size:
        raise Damaged(f"{file}: the file is empty (0 bytes): truncated", "file-empty")
    length = int.from_bytes(source.read(file, 0, 8), "little") if size >= 8 else 0
    if size < 8 or length > size - 8:
        head = read_head(source, file)
        if detect_kind(head, file) is not None:
            raise not_a("a safetensors file", source, file)
        message = f"{file}: the header should have {length:,} bytes, but the file has {size:,};"
        raise Damaged(f"{message} truncated or not a safetensors file")
    if length > LONGEST_HEADER:
        raise Damaged(f"{file}: a header of {length:,} bytes; the format allows {LONGEST_HEADER:,}")
    header = _parse(source.read(file, 8, length), file)
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise Damaged(f"{file}: __metadata__ must map text to text")
    tensors = {}
    kinds: dict[tuple[object, ...], _Kind] = {}
    for name, entry in header.items():
        try:
            tensors[name] = _read_entry(file, name, entry, 8 + length, kinds)
        except Damaged as error:
            if problems is None:
                raise
            problems += _within(error, file, name)
    return metadata, tensors, 8 + length


def _within(error: Damaged, file: str, name: str | None = None) -> Iterator[Problem]:
    """Yield the problems of an error, which concern one entry of the header or all of it."""
    for problem in error.problems:
        code = "safetensors-header" if problem.code == UNCODED else problem.code
        yield Problem(str(problem), code, file=file, tensor=name or problem.tensor)


def _parse(text: bytes, file: str) -> dict[str, Any]:
    if text[:1] != b"{":
        raise Damaged(f"{file}: the header is not a JSON object")
    _require_within_limits(text, file)
    parse_int = _parse_int if _LONG_NUMBER in text.translate(_ZEROS) else None
    try:
        if b"\\" not in text and not _SPACED_COLON.search(text):
            header = json.loads(text.decode(), parse_int=parse_int)
            entries = (entry for entry in header.values() if isinstance(entry, dict))
            if len(header) + sum(map(len, entries)) == text.count(b'":'):  # no name is there twice
                return cast(dict[str, Any], header)
        header = json.loads(
            text.decode(),
            object_pairs_hook=_unique_unicode if b"\\u" in text else _unique,
            parse_int=parse_int,
        )
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{file}: the header is not valid JSON: {error}") from None
    return cast(dict[str, Any], header)


def _require_within_limits(text: bytes, file: str) -> None:
    """Raise Unsupported if a header has more in it than ckptool reads, and so than it writes.

    A name with brackets, quotes, commas or colons in it counts for more.
    """
    entries = text.count(b"{")
    tokens = sum(map(text.count, (b'"', b"[", b",", b":")), entries)
    if entries > _MOST_ENTRIES or tokens > _MOST_TOKENS:
        message = f"{file}: a header of {entries:,} entries and {tokens:,} tokens; ckptool reads up"
        message += f" to {_MOST_ENTRIES:,} and {_MOST_TOKENS:,}"
        raise Unsupported(message, "limit-exceeded", file=file, hint=_FEWER)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a name appears twice")
    return unique


def _unique_unicode(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Do the same as ``_unique``; ValueError also if an escape represents half a character."""
    unique = _unique(pairs)
    for text in itertools.chain(unique, (v for v in unique.values() if isinstance(v, str))):
        text.encode()
    return unique


def _parse_int(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


def _read_entry(
    file: str, name: str, entry: Any, start: int, kinds: dict[tuple[object, ...], _Kind]
) -> StoredSlice:
    """Return the tensor that an entry describes; Damaged if it contradicts itself.

    A type and a shape are checked once: ``kinds`` are the valid ones.
    """
    try:
        dtype_name, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise Damaged(f"{file}: {name} lacks dtype, shape or data_offsets") from None
    if isinstance(shape, list) and len(shape) > _MOST_DIMS:
        raise Damaged(f"{file}: {name} has {len(shape):,} dims; ckptool reads up to {_MOST_DIMS}")
    numbers = (*shape, begin, end) if isinstance(shape, list) else (None,)
    is_of_integers = {*map(type, numbers)} == _INTEGERS
    if not (is_of_integers and min(numbers) >= 0 and max(numbers) < 1 << 63):
        raise Damaged(f"{file}: {name} has a shape or offsets that are not natural numbers")
    key = (dtype_name, *shape) if isinstance(dtype_name, str) else ()
    kind = kinds.get(key)
    if kind is None:
        kind = kinds[key] = _kind_of(file, name, dtype_name, tuple(shape))
    if end - begin != kind.nbytes:
        raise Damaged(
            f"{file}: {name} ({dtype_name} {shape}) needs {kind.nbytes:,} bytes, its offsets"
            f" give {end - begin:,}"
        )
    return StoredSlice(kind, file, start + begin, start + end)


def _kind_of(file: str, name: str, dtype_name: object, shape: tuple[int, ...]) -> _Kind:
    """Return the kind of an element type and a shape; Damaged if there is none."""
    dtype = BY_SAFETENSORS.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        shown = repr(dtype_name[:40]) if isinstance(dtype_name, str) else "that is not text"
        message = f"{file}: {name} has the unknown element type {shown}"
        raise Damaged(message, "safetensors-dtype", tensor=name)
    sizes = _torch_shape(file, name, dtype, shape)
    nbytes = math.prod(sizes) * dtype.itemsize
    strides = row_major_strides(sizes, dtype.itemsize)
    return _Kind(dtype, sizes, nbytes, strides, (Box.whole(sizes),))


def _torch_shape(file: str, name: str, dtype: DType, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape as torch counts it: pairs where safetensors counts four-bit elements."""
    if dtype.safetensors != "F4":
        return shape
    if not shape or shape[-1] % 2:
        raise Damaged(f"{file}: {name} has an odd number of four-bit elements")
    return (*shape[:-1], shape[-1] // 2)


def _is_seamless(tensors: Iterable[StoredSlice], start: int, size: int) -> bool:
    """Return whether tensors follow one another, from ``start`` to the end of the file."""
    position = start
    for item in tensors:
        if item.offset != position:
            return False
        position = item.end
    return position == size


def _require_no_holes(
    file: str, tensors: Mapping[str, StoredSlice], start: int, size: int, *, is_whole: bool
) -> None:
    """Raise Damaged if bytes belong to no tensor, or are missing.

    If entries were skipped (``is_whole`` is False) gaps are not damage.
    """
    position = start
    for name, item in tensors.items():
        if item.offset != position and is_whole:
            message = f"{file}: {name} begins at byte {item.offset:,}, the tensor before it ends"
            message += f" at {position:,}: a gap before it"
            raise Damaged(message, "safetensors-gap", tensor=name)
        position = item.end
    if position > size or (is_whole and position != size):
        message = f"{file}: the header describes {position:,} bytes, the file has {size:,};"
        code = "file-truncated" if position > size else "safetensors-gap"
        reason = "truncated, or extra bytes at the end"
        raise Damaged(f"{message} {reason}", code, file=file, end=position)


def _drop_overlaps(
    file: str, tensors: dict[str, StoredSlice], problems: list[Problem] | None
) -> None:
    """Drop tensors, which are in the order of their bytes, that share bytes with others.

    Raises Damaged for the first two if there is no list of ``problems``.
    """
    shared: set[str] = set()
    widest, end = "", 0
    for name, item in tensors.items():
        if not item.nbytes:
            continue
        if item.offset < end:
            message = f"{file}: {name} begins at byte {item.offset:,}, inside {widest}, which"
            message += f" ends at {end:,}: overlaps the tensor before it"
            if problems is None:
                raise Damaged(message, "safetensors-overlap", tensor=name)
            for overlapping in (widest, name):
                code = "safetensors-overlap"
                problems.append(Problem(message, code, file=file, tensor=overlapping))
                shared.add(overlapping)
        if item.end > end:
            widest, end = name, item.end
    for name in shared:
        del tensors[name]


class OutgoingSlice(NamedTuple):
    """A box of a tensor to be written, named in the file without ``head``."""

    name: str
    dtype: DType
    box: Box
    head: str = ""

    @property
    def nbytes(self) -> int:
        return self.box.volume * self.dtype.itemsize

    @staticmethod
    def whole(entry: TensorEntry, head: str = "") -> OutgoingSlice:
        """Return all of the catalog's entry."""
        return OutgoingSlice(entry.name, entry.dtype, Box.whole(entry.shape), head)


def lay_out_safetensors(
    path: str,
    slices: Iterable[OutgoingSlice],
    metadata: Mapping[str, str],
    rank: int | None = None,
) -> FileLayout:
    """Lay out one file: tensors by decreasing item size, then name, so that all are aligned."""
    ordered = sorted(slices, key=lambda item: (-item.dtype.itemsize, item.name))
    header = [f'"__metadata__":{_dumps(dict(metadata))}'] if metadata else []
    data: list[Data] = []
    position = 0
    for name, dtype, box, head in ordered:
        short = name.removeprefix(head)
        if short == "__metadata__":
            raise Unsupported(f"{path}: safetensors cannot store a tensor named __metadata__")
        shape = box.shape
        if len(shape) > _MOST_DIMS:
            message = f"{path}: {name} has {len(shape):,} dims; ckptool reads up to {_MOST_DIMS}"
            raise Unsupported(message)
        end = position + math.prod(shape) * dtype.itemsize
        sizes = ",".join(map(str, _header_shape(dtype, shape)))
        header.append(
            f'{_quoted(short)}:{{"dtype":"{dtype.safetensors}","shape":[{sizes}],'
            f'"data_offsets":[{position},{end}]}}'
        )
        data.append(Data(name, box, dtype.itemsize))
        position = end
    text = _encode("{" + ",".join(header) + "}")
    text += b" " * (-len(text) % 8)
    _require_readable(text, path)
    parts: tuple[Part, ...] = (Literal(len(text).to_bytes(8, "little") + text), *data)
    return FileLayout.lazy(path, 8 + len(text) + position, lambda: parts, rank)


def _require_readable(text: bytes, path: str) -> None:
    """Raise Unsupported if a header would be refused when it is read."""
    if len(text) > LONGEST_HEADER:
        message = f"{path}: a header of {len(text):,} bytes; the format allows {LONGEST_HEADER:,}"
        raise Unsupported(message, "limit-exceeded", file=path, hint=_FEWER)
    _require_within_limits(text, path)


def _encode(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        name = ascii(error.object[max(0, error.start - 40) : error.end])
        raise Unsupported(f"safetensors cannot store a name that is not Unicode: {name}") from None


def _header_shape(dtype: DType, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] * 2) if dtype.safetensors == "F4" else shape
