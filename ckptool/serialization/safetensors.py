"""The header of one safetensors file, and the layout of a new one.

Format: 8 bytes little-endian header length, a JSON header, then the tensors' bytes without gaps
(safetensors 0.8). A header may be padded with spaces; torch's consolidation writes none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from json.encoder import encode_basestring as _quoted
from typing import NamedTuple

from msgspec import Struct

from ckptool.core.box import Box
from ckptool.core.catalog import TensorEntry
from ckptool.core.dtype import DType
from ckptool.core.layout import Data, FileLayout, Literal, Part
from ckptool.errors import Damaged, Problem, Unsupported, coded
from ckptool.serialization.file_kinds import detect_kind, not_a, read_head
from ckptool.serialization.safetensors_header import (
    FEWER,
    MOST_DIMS,
    StoredSlice,
    problems_within,
    read_entries,
    require_within_limits,
)
from ckptool.serialization.source import Source

LONGEST_HEADER = 100_000_000
"""Bytes; the safetensors library refuses longer ones."""
_dumps = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


class SafetensorsFile(Struct, frozen=True):
    """The tensors of one file in the order of their bytes, and its ``__metadata__``."""

    tensors: dict[str, StoredSlice]
    metadata: dict[str, str]


def looks_like_safetensors(head: bytes) -> bool:
    """Return whether the first nine bytes can begin a safetensors file."""
    return len(head) >= 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 40


def read_safetensors(
    source: Source, file: str, problems: list[Problem] | None = None
) -> SafetensorsFile:
    """Read and check a header. Raises Damaged if it breaks one of the format's rules.

    With a list of ``problems``, bad entries are added there and skipped, if the others are valid
    nevertheless; so are two that share bytes, as neither can be trusted.
    """
    with coded("safetensors-header", file=file):
        count = len(problems or ())
        metadata, tensors, start = _read_header(source, file, problems)
        if _is_seamless(tensors.values(), start, source.files[file]):
            return SafetensorsFile(tensors, metadata)
        ordered = dict(sorted(tensors.items(), key=lambda pair: (pair[1].offset, pair[1].end)))
        _drop_overlaps(file, ordered, problems)
        is_whole = len(problems or ()) == count
        try:
            _require_no_holes(file, ordered, start, source.files[file], is_whole=is_whole)
        except Damaged as error:
            if problems is None or error.message.code == "file-truncated":
                raise
            problems += problems_within(error, file)
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
    text = source.read(file, 8, length)
    return *read_entries(text, file, 8 + length, problems), 8 + length


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
    """Lay out one file: tensors by decreasing alignment, then name, so that all are aligned."""
    ordered = sorted(slices, key=lambda item: (-item.dtype.alignment, item.name))
    header = [f'"__metadata__":{_dumps(dict(metadata))}'] if metadata else []
    data: list[Data] = []
    position = 0
    for name, dtype, box, head in ordered:
        short = name.removeprefix(head)
        if short == "__metadata__":
            raise Unsupported(f"{path}: safetensors cannot store a tensor named __metadata__")
        shape = box.shape
        if len(shape) > MOST_DIMS:
            message = f"{path}: {name} has {len(shape):,} dims; ckptool reads up to {MOST_DIMS}"
            raise Unsupported(message)
        end = position + math.prod(shape) * dtype.itemsize
        sizes = ",".join(map(str, _header_shape(dtype, shape)))
        header.append(
            f'{_quoted(short)}:{{"dtype":"{dtype.safetensors}","shape":[{sizes}],'
            f'"data_offsets":[{position},{end}]}}'
        )
        data.append(Data.of(name, box, dtype.itemsize))
        position = end
    text = _encode("{" + ",".join(header) + "}")
    text += b" " * (-len(text) % 8)
    _require_readable(text, path)
    parts: list[Part] = [Literal(len(text).to_bytes(8, "little") + text), *data]
    return FileLayout(path, parts, rank, 8 + len(text) + position)


def _require_readable(text: bytes, path: str) -> None:
    """Raise Unsupported if a header would be refused when it is read."""
    if len(text) > LONGEST_HEADER:
        message = f"{path}: a header of {len(text):,} bytes; the format allows {LONGEST_HEADER:,}"
        raise Unsupported(message, "limit-exceeded", file=path, hint=FEWER)
    require_within_limits(text, path)


def _encode(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        name = ascii(error.object[max(0, error.start - 40) : error.end])
        raise Unsupported(f"safetensors cannot store a name that is not Unicode: {name}") from None


def _header_shape(dtype: DType, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] * dtype.packed) if dtype.packed > 1 else shape
