"""How long a transfer takes: the bytes that it moves, at the rate at which SRC can be read now."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import accumulate

from msgspec import Struct

from ckptool.commands.transfer.report import TransferReport
from ckptool.errors import CkptoolError
from ckptool.storage.files import SPAN, TILE, Files, ReadSpan

WORTH = 256 << 20
"""Bytes that a transfer reads, below which nothing is measured."""
_SECONDS = 1.0
_SHARE = 32
"""A probe reads about one byte of so many, at most."""
_MOST = 4096
_GOLDEN = 0.6180339887498949
"""However many of its multiples, modulo 1, are taken: they leave no large gap between them."""
_SLOWER = 3
"""How many times longer all may well take on a busy machine, or where the target is slower."""


class Estimate(Struct, frozen=True):
    """``least`` to ``most`` seconds for the bytes ``moved``, at a ``rate`` in bytes a second."""

    least: float
    most: float
    moved: int
    rate: float


def estimate(
    report: TransferReport, source: Files, files: Mapping[str, int], workers: int | None
) -> Estimate | None:
    """Estimate a transfer that reads ``files`` of a source; None for one of seconds.

    Pieces of them, from all over, are read for a second; what is in memory counts as it will then.
    Nothing is written: ``least`` is for writing beside reading, and as fast.
    """
    share = 1.0 if report.part is None else report.part.nbytes / max(1, report.write_bytes)
    if share * report.read_bytes < WORTH:
        return None
    threads = workers or source.policy.workers
    piece = TILE if source.policy.by_request else SPAN
    pieces = min(_MOST, max(threads, report.read_bytes // _SHARE // piece))
    try:
        rate = _rate(source, [*_spread(files, piece, pieces)], threads)
    except (CkptoolError, OSError):
        return None  # the transfer itself says what is wrong
    again = report.write_bytes + report.reread_bytes if report.verify else 0
    nbytes = share * (report.read_bytes + report.write_bytes + again)
    least_bytes = share * (max(report.read_bytes, report.write_bytes) + again)
    return Estimate(least_bytes / rate, _SLOWER * nbytes / rate, int(nbytes), rate)


def _spread(files: Mapping[str, int], piece: int, count: int) -> Iterator[ReadSpan]:
    """Yield places in files; the first few are spread over the files as evenly as all of them."""
    names = [name for name, size in files.items() if size]
    ends = [*accumulate(files[name] for name in names)]
    for number in range(count):
        at = int(number * _GOLDEN % 1 * ends[-1])
        index = bisect_right(ends, at)
        size = files[names[index]]
        nbytes = min(piece, size)
        yield names[index], min(at - ends[index] + size, size - nbytes), nbytes


def _rate(source: Files, spans: Sequence[ReadSpan], threads: int) -> float:
    """Return the bytes a second that threads read together, for a second or to the last span."""
    began = time.monotonic()

    def read(spans: Sequence[ReadSpan]) -> int:
        done, memory = 0, memoryview(bytearray(SPAN))
        with closing(source.reader()) as reader:
            for file, offset, nbytes in spans:
                reader.read_into(file, offset, memory[:nbytes])
                done += nbytes
                if time.monotonic() - began > _SECONDS:
                    break
        return done

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(threads) as pool:
        done = sum(pool.map(read, [spans[first::threads] for first in range(threads)]))
    return done / (time.monotonic() - began)
