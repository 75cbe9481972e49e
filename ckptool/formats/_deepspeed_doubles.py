"""Notice a rank's file that is a copy of another rank's."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from ckptool.core.catalog import Extent, Record
from ckptool.errors import Damaged, Problem
from ckptool.formats._deepspeed_read import Vector

_FEWEST = 16
_PIECE = 1 << 20


def require_distinct(held: Sequence[tuple[str, Sequence[Vector], Sequence[Vector]]]) -> None:
    """Damaged where two files hold the same partitions, which different ranks never do.

    ``held`` are the files with their masters and the optimizer's states. Only recorded checksums
    are compared; ranks whose states are all zero, or that hold next to nothing, may be alike.
    """
    first: dict[tuple[tuple[int, int], ...], str] = {}
    for file, masters, states in held:
        records = list(filter(None, map(_record, (*masters, *states))))
        if len(records) < len(masters) + len(states) or _elements(masters) < _FEWEST:
            continue
        key = tuple((record.crc32, record.nbytes) for record in records)
        if first.setdefault(key, file) != file and not all(map(_is_zero, records[len(masters) :])):
            message = (
                f"{file} holds the same partitions as {first[key]}: one was copied over the other"
            )
            raise Damaged(Problem(message, "rank-copied", file=file))


def _record(vector: Vector) -> Record | None:
    return vector.at.record if isinstance(vector.at, Extent) else None


def _elements(vectors: Sequence[Vector]) -> int:
    return sum(vector.shape[0] for vector in vectors)


def _is_zero(record: Record) -> bool:
    """Whether a record's checksum is that of zeros."""
    crc, left = 0, record.nbytes
    while left > 0:
        crc = zlib.crc32(bytes(min(left, _PIECE)), crc)
        left -= _PIECE
    return crc == record.crc32
