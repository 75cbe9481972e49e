"""The entries of a safetensors header, each of them checked by itself.

A header is a JSON object: element type, shape and place of each tensor by its name, and
``__metadata__``, which maps text to text (safetensors 0.8).
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import msgspec
from msgspec import Struct

from ckptool.core.box import Box, is_countable, row_major_strides
from ckptool.core.catalog import Extent
from ckptool.core.chunks import WholeTensor
from ckptool.core.dtype import BY_SAFETENSORS, DType
from ckptool.errors import UNCODED, Damaged, Problem, Unsupported

MOST_DIMS = 64
FEWER = "put fewer tensors in each file (convert: a smaller --max-shard-size)"
"""The next step if a header has too much in it."""
_MOST_ENTRIES = 300_000
_MOST_TOKENS = 32 * _MOST_ENTRIES
"""What Python parses in seconds. Most entries have 21 quotes, brackets, commas and colons."""
_MOST_DIGITS = 20
"""Those of 2**64; to convert millions of them takes the square of their number."""
_MOST_LEVELS = 127
"""Brackets within brackets that the library parses (serde_json)."""
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"')
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_INTEGERS = {int}
_TOO_LARGE = 1 << 63
_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_SPACED_COLON = re.compile(rb'"\s+:')
_NEGATIVE_ZERO = re.compile(rb"-0(?<=[\[,:\s]-0)")
"""A floating-point number to the library, which is no size and no offset; or a part of a name.

What precedes it is looked at last: that takes a tenth of the time.
"""
_LONG_NUMBER = b"0" * (_MOST_DIGITS + 1)
"""Matches a number with too many digits, or a name, once all digits are zeros."""


class _Kind(Struct, frozen=True):
    """The properties of tensors of one element type and shape: their bytes, strides and box."""

    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    strides: tuple[int, ...]
    boxes: tuple[Box]


class StoredSlice(msgspec.Struct, frozen=True, gc=False):
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


class _Entry(msgspec.Struct, gc=False):
    """An entry as it is written; what it lacks is what no valid entry has."""

    dtype: str = ""
    shape: tuple[int, ...] = (-1,)
    data_offsets: tuple[int, int] = (-1, -1)


class _Metadata(msgspec.Struct):
    """A header without its tensors."""

    texts: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


_ENTRIES, _METADATA = msgspec.json.Decoder(dict[str, _Entry]), msgspec.json.Decoder(_Metadata)


def read_entries(
    text: bytes, file: str, start: int, problems: list[Problem] | None
) -> tuple[dict[str, str], dict[str, StoredSlice]]:
    """Return the metadata and the tensors of a header; ``start`` is where in the file it ends.

    Raises Damaged if an entry is invalid; with a list of ``problems``, it is added there and
    skipped. Raises Unsupported if there are too many.
    """
    if text[:1] != b"{":
        raise Damaged(f"{file}: the header is not a JSON object")
    require_within_limits(text, file)
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError, Damaged):
        return _read_valid(text, file, start)
    header = _parse(text, file)
    metadata = header.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise Damaged(f"{file}: __metadata__ must map text to text")
    tensors = {}
    kinds: dict[tuple[object, ...], _Kind] = {}
    for name, entry in header.items():
        try:
            tensors[name] = _read_entry(file, name, entry, start, kinds)
        except Damaged as error:
            if problems is None:
                raise
            problems += problems_within(error, file, name)
    return metadata, tensors


def _read_valid(
    text: bytes, file: str, start: int
) -> tuple[dict[str, str], dict[str, StoredSlice]]:
    """Read a header in which nothing is unusual, in a third of the time.

    Raises MsgspecError, UnicodeDecodeError, RecursionError or Damaged for any other, valid or not.
    """
    if b"\\" in text or _SPACED_COLON.search(text) or _NEGATIVE_ZERO.search(text):
        raise Damaged(f"{file}: names or numbers that are not written as usual")
    entries = _ENTRIES.decode(text)
    metadata: dict[str, str] = {}
    keys = text.count(b'":')
    if entries.pop("__metadata__", None) is not None:
        metadata = _METADATA.decode(text).texts
        keys -= 1 + len(metadata)
    if keys != 4 * len(entries):
        raise Damaged(f"{file}: a name that appears twice, or an unknown one")
    tensors = {}
    kinds: dict[tuple[str, tuple[int, ...]], _Kind] = {}
    for name, entry in entries.items():
        key = entry.dtype, entry.shape
        kind = kinds.get(key)
        if kind is None:
            if len(entry.shape) > MOST_DIMS or not all(0 <= n < _TOO_LARGE for n in entry.shape):
                raise Damaged(f"{file}: an impossible shape")
            kind = kinds[key] = _kind_of(file, name, *key)
        begin, end = entry.data_offsets
        if not 0 <= begin <= end < _TOO_LARGE or end - begin != kind.nbytes:
            raise Damaged(f"{file}: an impossible place")
        tensors[name] = StoredSlice(kind, file, start + begin, start + end)
    return metadata, tensors


def _parse(text: bytes, file: str) -> dict[str, Any]:
    unusual = _LONG_NUMBER in text.translate(_ZEROS) or _NEGATIVE_ZERO.search(text)
    try:
        header = json.loads(
            text.decode(),
            object_pairs_hook=_unique_unicode if b"\\u" in text else _unique,
            parse_int=_parse_int if unusual else None,
            parse_float=_parse_float,
            parse_constant=_parse_float,
        )
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{file}: the header is not valid JSON: {error}") from None
    if (levels := _count_levels(text)) > _MOST_LEVELS:
        message = f"{file}: the header has {levels:,} levels of brackets; safetensors reads up to"
        raise Damaged(f"{message} {_MOST_LEVELS}")
    return cast(dict[str, Any], header)


def _count_levels(text: bytes) -> int:
    brackets = _TEXT.sub(b"", text).translate(None, _NO_BRACKETS)
    return max(itertools.accumulate(1 if bracket in b"[{" else -1 for bracket in brackets))


def require_within_limits(text: bytes, file: str) -> None:
    """Raise Unsupported if a header has more in it than ckptool reads, and so than it writes.

    A name with brackets, quotes, commas or colons in it counts for more.
    """
    entries = text.count(b"{")
    tokens = sum(map(text.count, (b'"', b"[", b",", b":")), entries)
    if entries > _MOST_ENTRIES or tokens > _MOST_TOKENS:
        message = f"{file}: a header of {entries:,} entries and {tokens:,} tokens; ckptool reads up"
        message += f" to {_MOST_ENTRIES:,} and {_MOST_TOKENS:,}"
        raise Unsupported(message, "limit-exceeded", file=file, hint=FEWER)


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


def _parse_int(digits: str) -> int | float:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return float(digits) if digits == "-0" else int(digits)


def _parse_float(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:40]} is not a number that JSON has")
    return number


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
    if isinstance(shape, list) and len(shape) > MOST_DIMS:
        raise Damaged(f"{file}: {name} has {len(shape):,} dims; ckptool reads up to {MOST_DIMS}")
    numbers = (*shape, begin, end) if isinstance(shape, list) else (None,)
    is_of_integers = {*map(type, numbers)} == _INTEGERS
    if not (is_of_integers and min(numbers) >= 0 and max(numbers) < _TOO_LARGE):
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
    if not is_countable(sizes, dtype.itemsize):
        raise Damaged(f"{file}: {name} has too many elements to be counted: {list(shape)}")
    nbytes = math.prod(sizes) * dtype.itemsize
    strides = row_major_strides(sizes, dtype.itemsize)
    return _Kind(dtype, sizes, nbytes, strides, (Box.whole(sizes),))


def _torch_shape(file: str, name: str, dtype: DType, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape as torch counts it: pairs where safetensors counts four-bit elements."""
    if dtype.packed == 1:
        return shape
    if not shape or shape[-1] % dtype.packed:
        message = f"{file}: {name} has rows of {dtype.safetensors} that do not fill whole bytes"
        raise Damaged(f"{message}: {list(shape)}")
    return (*shape[:-1], shape[-1] // dtype.packed)


def problems_within(error: Damaged, file: str, name: str | None = None) -> Iterator[Problem]:
    """Yield the problems of an error, which concern one entry of the header or all of it."""
    for problem in error.problems:
        code = "safetensors-header" if problem.code == UNCODED else problem.code
        yield Problem(str(problem), code, file=file, tensor=name or problem.tensor)
