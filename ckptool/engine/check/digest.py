"""The SHA-256 of tensors and files, and which places of tensors are damaged."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator

from ckptool.core.box import Box
from ckptool.core.catalog import EncodedBlob, Extent, Place, Record, TensorEntry, places
from ckptool.engine.checksum import crc_of
from ckptool.engine.progress import UNWATCHED, Progress
from ckptool.engine.read.byte_reader import ByteSource, byte_job
from ckptool.engine.read.tensors import TensorReader, TensorSource, TensorTile, tensor_job
from ckptool.engine.read.tiles import Job, known_runs, read_tiles
from ckptool.errors import CkptoolError
from ckptool.storage.files import Files


def digests(
    entries: Iterable[TensorEntry],
    source: TensorSource,
    workers: int,
    progress: Progress = UNWATCHED,
) -> dict[str, str]:
    """Return the SHA-256 (hex) of each tensor's elements in row-major order, by name.

    It does not depend on how tensors are sharded. Memory is bounded: one tile per worker. The
    chunks must tile each tensor exactly; the largest tensors are started first.
    """
    from ckptool.engine.read.gather import raw

    hexes: dict[str, str] = {}

    def digest(entry: TensorEntry, tiles: Iterator[TensorTile]) -> None:
        hexes[entry.name] = _sha256(raw(tile.values) for tile in tiles)

    # else one thread may read the largest while the others have nothing left
    largest_first = sorted(entries, key=lambda entry: -entry.nbytes)
    read_tiles(source, map(tensor_job, largest_first), digest, workers, progress)
    return hexes


def file_digests(
    files: Iterable[str],
    source: Files,
    workers: int,
    progress: Progress = UNWATCHED,
) -> dict[str, str]:
    """Return the SHA-256 (hex) of whole files of a source; NotFound if one cannot be read."""
    hexes: dict[str, str] = {}

    def digest(file: str, tiles: Iterator[memoryview]) -> None:
        hexes[file] = _sha256(tiles)

    jobs = (byte_job(file, file, 0, source.files[file]) for file in files)
    read_tiles(ByteSource(source), jobs, digest, workers, progress)
    return hexes


def _sha256(pieces: Iterable[memoryview]) -> str:
    total = hashlib.sha256()
    for data in pieces:
        total.update(data)
    return total.hexdigest()


class DamageMap:
    """Reads the records and blobs of some tensors once, and records which of them are damaged.

    Bytes without a checksum count as intact if the file has them.
    """

    def __init__(self, entries: Iterable[TensorEntry], source: Files, workers: int) -> None:
        self._sizes = source.files
        self._damaged: dict[Record | EncodedBlob, str] = {}
        self._lock = threading.Lock()
        records: set[Record] = set()
        blobs: dict[EncodedBlob, TensorEntry] = {}
        for entry in entries:
            for place in places(entry):
                if isinstance(place, EncodedBlob):
                    blobs[place] = entry
                elif isinstance(place, Extent) and place.record and place.record.nbytes:
                    records.add(place.record)
        ordered = sorted(records, key=lambda record: (record.file, record.offset))
        reading = (byte_job(record, *record[:3]) for record in ordered)
        read_tiles(ByteSource(source), reading, self._check, workers)
        decoding = (_decode_job(blob, entry) for blob, entry in blobs.items())
        read_tiles(TensorSource(source), decoding, self._check, workers)

    def problem(self, place: Place, shape: tuple[int, ...], itemsize: int) -> str | None:
        """Return the problem of the bytes at a place; None if none is known.

        ``shape`` and ``itemsize`` (bytes) describe the elements there.
        """
        if isinstance(place, EncodedBlob):
            return self._damaged.get(place)
        if not isinstance(place, Extent):
            return None
        if place.record is not None:
            return self._damaged.get(place.record)
        return self._overrun(place, shape, itemsize)

    def _overrun(self, place: Extent, shape: tuple[int, ...], itemsize: int) -> str | None:
        """Return how far elements reach beyond the end of their file; None if they do not."""
        if not all(shape):
            return None
        steps = zip(shape, place.strides, strict=True)
        end = place.offset + itemsize + sum((n - 1) * stride for n, stride in steps if stride > 0)
        size = self._sizes.get(place.file, 0)
        if end <= size:
            return None
        return f"it lies at bytes {place.offset:,} to {end:,} of {place.file}, which has {size:,}"

    def _check(self, place: Record | EncodedBlob, tiles: Iterator[memoryview]) -> None:
        """Note the problem of a record, or of a blob that its job decodes."""
        problem, end = None, place.offset + place.nbytes
        try:
            if end > self._sizes.get(place.file, 0):
                problem = f"{place.file} ends before its record does"
            else:
                crc = crc_of(tiles)
                if isinstance(place, Record) and crc != place.crc32:
                    span = f"bytes {place.offset:,} to {end:,} of {place.file}"
                    problem = f"{span} have CRC-32 {crc:08x}, the writer recorded {place.crc32:08x}"
        except CkptoolError as error:
            problem = str(error.message)
        if problem is not None:
            with self._lock:
                self._damaged[place] = problem


def _decode_job(
    blob: EncodedBlob, entry: TensorEntry
) -> Job[EncodedBlob, TensorReader, memoryview]:
    """Return the job that decodes a blob completely and yields nothing; it raises problems."""

    def decode(reader: TensorReader) -> Iterator[memoryview]:
        from ckptool.engine.read.gather import array

        box = Box.whole((0,) * len(entry.shape))
        out = array(box.shape, entry.source_dtype, memoryview(b""))
        reader.elements.fill_from(blob, out, box, entry.source_dtype)
        yield from ()

    return Job(blob, decode, [known_runs((blob.file, blob.offset, blob.nbytes))])
