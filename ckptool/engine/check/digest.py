"""What tensors hold, as SHA-256, and which places can be read as they were written.

The content of tensors, whatever way they are sharded: SHA-256 of the row-major bytes.

Which places of a source can be read and are as their writer left them.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable

import numpy as np

from ckptool.core.box import Box
from ckptool.core.catalog import Extent, Packed, Place, Record, TensorEntry, places
from ckptool.core.layout import tiles
from ckptool.engine.read.gather import Gatherer, raw, unit
from ckptool.engine.threads import share_jobs
from ckptool.errors import CkptoolError
from ckptool.storage.local import Bytes, Files, pieces


def digests(
    entries: Iterable[TensorEntry],
    start: Callable[[], Gatherer],
    workers: int,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> dict[str, str]:
    """The SHA-256 (hex) of each tensor's elements in row-major order, by name.

    ``start`` makes the gatherer of a worker. Bounded memory: a tile a worker. The chunks
    must tile each tensor exactly; the largest are begun first.
    """
    found: dict[str, str] = {}

    def work(gatherer: Gatherer, entry: TensorEntry) -> None:
        found[entry.name] = _digest(entry, gatherer, progress)

    largest_first = sorted(entries, key=lambda entry: -entry.nbytes)
    share_jobs(iter(largest_first), workers, start, work)
    return found


def file_digests(
    files: Iterable[str],
    source: Files,
    workers: int,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> dict[str, str]:
    """The SHA-256 (hex) of whole files of a source. Raises NotFound where one cannot be read."""
    found: dict[str, str] = {}

    def work(reader: Bytes, file: str) -> None:
        total = hashlib.sha256()
        for piece in pieces(reader, file, source.files[file], source.tile):
            total.update(piece)
            progress(len(piece))
        found[file] = total.hexdigest()

    share_jobs(iter(list(files)), workers, source.reader, work)
    return found


def _digest(entry: TensorEntry, gatherer: Gatherer, progress: Callable[[int], None]) -> str:
    total = hashlib.sha256()
    for tile in tiles(Box.whole(entry.shape), entry.source_dtype.itemsize, gatherer.tile):
        total.update(raw(gatherer.values(entry, tile)))
        progress(tile.volume * entry.source_dtype.itemsize)
    return total.hexdigest()


_Job = tuple[Record | Packed, TensorEntry]


class Intact:
    """Reads the records and blobs of some tensors once, and knows which of them are damaged.

    Bytes without a checksum count as intact where the file has them: nothing says that they are
    not.
    """

    def __init__(self, entries: Iterable[TensorEntry], source: Files, workers: int) -> None:
        self._sizes = source.files
        self._damaged: dict[Record | Packed, str] = {}
        self._lock = threading.Lock()
        jobs: dict[Record | Packed, _Job] = {}
        for entry in entries:
            for place in places(entry):
                if isinstance(place, Packed):
                    jobs[place] = (place, entry)
                elif isinstance(place, Extent) and place.record and place.record.nbytes:
                    jobs[place.record] = (place.record, entry)
        share_jobs(iter(jobs.values()), workers, lambda: Gatherer(source), self._check)

    def problem(self, place: Place, shape: tuple[int, ...], itemsize: int) -> str | None:
        """What is wrong with the bytes of a place; None where nothing is, as far as is known.

        ``shape`` and ``itemsize`` (bytes) are of the elements that lie there.
        """
        if isinstance(place, Packed):
            return self._damaged.get(place)
        if not isinstance(place, Extent):
            return None
        if place.record is not None:
            return self._damaged.get(place.record)
        return self._beyond(place, shape, itemsize)

    def _beyond(self, place: Extent, shape: tuple[int, ...], itemsize: int) -> str | None:
        """Whether elements lie behind the end of their file."""
        if not all(shape):
            return None
        steps = zip(shape, place.strides, strict=True)
        end = place.offset + itemsize + sum((n - 1) * stride for n, stride in steps if stride > 0)
        size = self._sizes.get(place.file, 0)
        if end <= size:
            return None
        return f"it lies at bytes {place.offset:,} to {end:,} of {place.file}, which has {size:,}"

    def _check(self, gatherer: Gatherer, job: _Job) -> None:
        what, entry = job
        try:
            problem = None
            if what.offset + what.nbytes > self._sizes.get(what.file, 0):
                problem = f"{what.file} holds no whole record of it"
            elif isinstance(what, Record):
                problem = _record_problem(gatherer, what)
            else:
                _decode(gatherer, what, entry)
        except CkptoolError as error:
            problem = str(error.message)
        if problem is not None:
            with self._lock:
                self._damaged[what] = problem


def _record_problem(gatherer: Gatherer, record: Record) -> str | None:
    crc = gatherer.crc(record)
    if crc == record.crc32:
        return None
    return (
        f"bytes {record.offset:,} to {record.offset + record.nbytes:,} of {record.file} have CRC-32"
        f" {crc:08x}, the writer recorded {record.crc32:08x}"
    )


def _decode(gatherer: Gatherer, at: Packed, entry: TensorEntry) -> None:
    """Decode a blob whole; what is wrong with it is raised."""
    nowhere = Box.whole((0,) * len(entry.shape))
    out = np.empty(nowhere.shape, unit(entry.source_dtype.itemsize))
    gatherer.fill_from(at, out, nowhere, entry.source_dtype)
