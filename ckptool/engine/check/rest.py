"""The non-tensor bytes of an output: headers, values, indexes and copied files."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate

from msgspec import Struct
from xxhash import xxh3_64_intdigest as xxh3

from ckptool.core.layout import FileLayout, Literal, Verbatim
from ckptool.engine.check.pairs import PairJob, PairTile, SideReaders
from ckptool.engine.read.containers import runs_of
from ckptool.engine.read.sums import ReadRun, ReadSums
from ckptool.engine.read.tiles import Job, known_runs
from ckptool.engine.write.run import read_verbatim
from ckptool.errors import Changed, SourceError
from ckptool.storage.files import Files

_SUM = 4
"""Bytes of the checksum of a part, which is known once the part is written."""
_HOLE = 1 << 14
"""Bytes of a tensor up to which it is read along with the bytes around it, on a disk."""

_Sum = tuple[int, int]
"""The offset of a checksum, and the number of its part."""


class RestRun(Struct, frozen=True):
    """Non-tensor bytes of a file, and small tensors between them.

    ``expected`` is what they should be; for a store, its digest. ``holes`` are the offsets and
    sizes of the tensors, which count as zeros. ``sums`` are the offsets of tensors' checksums, with
    the part of each. They are known once the part is written, and count as zeros: all of one part
    must be the same.
    """

    file: str
    offset: int
    nbytes: int
    expected: bytes | bytearray
    sums: tuple[_Sum, ...]
    holes: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        """Where the run ends in its file, in bytes."""
        return self.offset + self.nbytes


class _Copy(Struct, frozen=True):
    """A file of the source that was copied into another unchanged.

    ``runs`` are the runs that were read to copy it; none if they are not known to be all of it.
    """

    file: str
    offset: int
    part: Verbatim
    runs: tuple[ReadRun, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.part.nbytes


class _Rest:
    """An unfinished run."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.start = 0
        self.data = bytearray()
        self.sums: list[_Sum] = []
        self.holes: list[tuple[int, int]] = []

    @property
    def end(self) -> int:
        """Where in the file it ends so far."""
        return self.start + len(self.data)

    def go_on_at(self, offset: int) -> None:
        """Skip what is before an offset; begin there if the run is empty."""
        end = self.start + len(self.data)
        if not self.data:
            self.start = offset
        elif offset > end:
            self.holes.append((end, offset - end))
            self.data += bytes(offset - end)


class Rest:
    """The non-tensor bytes of written files, to be read back; ``sides`` are source and output.

    ``sums`` are the checksums of what was read of the source. A copied file that they do not cover
    is read again.
    """

    def __init__(
        self, files: Sequence[FileLayout], sides: tuple[Files, Files], sums: ReadSums
    ) -> None:
        self._files = files
        self._sums = sums
        self._source, self._written = sides
        self._problems: list[str] = []
        self._lock = threading.Lock()
        self._unequal: dict[tuple[str, int], int] = {}

    def jobs(self, tensor_jobs: Iterable[PairJob]) -> Iterator[PairJob]:
        """Yield the jobs of tensors, and those that read the rest and note how it differs.

        In a store the rest is read together with the tensors beside it, as each header would cost a
        request.
        """
        if not self._written.policy.by_request:
            yield from tensor_jobs
            for file in self._files:
                read_file = partial(self._read, self._rest_of(file))
                yield Job(None, read_file, nbytes=file.nbytes)
            return
        rest = [one for file in self._files for one in self._rest_of(file)]
        runs = [one for one in rest if isinstance(one, RestRun)]
        ends = {(run.file, run.end): run for run in runs}
        starts = {(run.file, run.offset): run for run in runs}
        for job in tensor_jobs:
            spans = list(runs_of(job.runs[1](self._written.policy.block), set()))
            for name, start, nbytes in spans:
                # each with the first tensor beside it
                for run in (ends.get((name, start)), starts.get((name, start + nbytes))):
                    if run is not None and starts.pop((name, run.offset), None) is not None:
                        yield self._job_of(run)
            yield job._replace(runs=[job.runs[0], known_runs(*spans)])
        yield from map(self._job_of, starts.values())
        yield from (self._job_of(one) for one in rest if isinstance(one, _Copy))

    def problem(self) -> str | None:
        """Return the first difference of a file from its layout, or None, once all was read."""
        for file in self._files:
            nbytes = self._written.files.get(file.path)
            if nbytes is None:
                return f"{file.path} is missing"
            if nbytes != file.nbytes:
                return f"{file.path} has {nbytes:,} bytes, not {file.nbytes:,}"
        if self._problems or not self._unequal:
            return min(self._problems, default=None)
        name, number = min(self._unequal)
        return f"{name}: two checksums of a tensor, part {number:,} of the file, differ"

    def _rest_of(self, file: FileLayout) -> Iterator[RestRun | _Copy]:
        """Yield the non-tensor bytes of a file, in order, in runs of about a tile at most."""
        tile, widest = (
            self._written.policy.tile,
            0 if self._written.policy.by_request else _HOLE,
        )
        run, offset = _Rest(file.path), 0
        for number, part in enumerate(file.parts):
            nbytes = part.nbytes
            if isinstance(part, Literal):
                run.go_on_at(offset)
                for at, distance in part.patches:
                    run.sums.append((offset + at, number - distance))
                for at in range(0, nbytes, tile):
                    if len(run.data) >= tile:
                        yield self._run(run)
                    run.data += part.data[at : at + tile]
            elif run.data and offset + nbytes - run.end > widest:
                yield self._run(run)
            if isinstance(part, Verbatim):
                yield _Copy(file.path, offset, part, self._runs_of(part))
            offset += nbytes
        if run.data:
            yield self._run(run)

    def _runs_of(self, part: Verbatim) -> tuple[ReadRun, ...]:
        """Return the runs that were read of a copied file, if they tile it; else none."""
        runs = tuple(self._sums.runs(part.file, 0, part.nbytes))
        ends = accumulate((run.nbytes for run in runs), initial=0)
        is_all = [*ends] == [*(run.offset for run in runs), part.nbytes]
        return runs if is_all else ()

    def _run(self, rest: _Rest) -> RestRun:
        """Return the run that ends here; the next one begins there."""
        data, start, end = rest.data, rest.start, rest.end
        # in a store all runs wait for the tensors beside them: digests take little memory
        expected = _digest(data) if self._written.policy.by_request else data
        sums = tuple([place for place in rest.sums if start - _SUM < place[0] < end])
        run = RestRun(rest.file, start, len(data), expected, sums, tuple(rest.holes))
        rest.start, rest.data, rest.holes = end, bytearray(), []
        rest.sums = [place for place in rest.sums if place[0] + _SUM > end]
        return run

    def _job_of(self, one: RestRun | _Copy) -> PairJob:
        copy_runs = known_runs()
        if isinstance(one, _Copy) and not one.runs and one.part.file in self._source.files:
            copy_runs = known_runs((one.part.file, 0, one.nbytes))
        written_runs = known_runs((one.file, one.offset, one.nbytes))
        return Job(None, partial(self._read, (one,)), [copy_runs, written_runs])

    def _read(self, rest: Iterable[RestRun | _Copy], readers: SideReaders) -> Iterator[PairTile]:
        """Read some of one file, and note how it differs; progress counts only tensors.

        Raises the errors of reading the source.
        """
        for one in rest:
            try:
                is_equal = self._is_as_expected(one, readers)
            except _Unreadable as error:
                self._problems.append(f"{one.file} cannot be read back: {error}")
                return
            if not is_equal:
                where = f"{one.file}: bytes {one.offset:,} to {one.offset + one.nbytes:,}"
                self._problems.append(f"{where} differ from what was to be written")
            yield PairTile(0)

    def _take_sums(self, run: RestRun, data: memoryview) -> None:
        """Note the checksums in a run, which may be truncated, and replace them with zeros.

        All checksums of one part are combined by XOR: an even number of equal ones leaves 0.
        """
        values: dict[int, int] = {}
        for at, number in run.sums:
            start = at - run.offset
            low = max(0, start)
            view = data[low : start + _SUM]
            value = int.from_bytes(view, "little") << 8 * (low - start)
            values[number] = values.get(number, 0) ^ value
            view[:] = bytes(len(view))
        for number, value in values.items():
            if value:
                with self._lock:
                    value ^= self._unequal.pop((run.file, number), 0)
                    if value:
                        self._unequal[run.file, number] = value

    def _is_as_expected(self, one: RestRun | _Copy, readers: SideReaders) -> bool:
        if isinstance(one, RestRun):
            data = _read_back(readers, one.file, one.offset, one.nbytes)
            self._take_sums(one, data)
            for at, nbytes in one.holes:
                low = at - one.offset
                data[low : low + nbytes] = bytes(nbytes)
            return one.expected == (_digest(data) if self._written.policy.by_request else data)
        for run in one.runs:
            data = _read_back(readers, one.file, one.offset + run.offset, run.nbytes)
            if xxh3(data) != run.checksum:
                return False
        if one.runs:
            return True
        at = one.offset
        for piece in read_verbatim(one.part, self._source):
            if _read_back(readers, one.file, at, len(piece)) != piece:
                return False
            at += len(piece)
        return True


class _Unreadable(Exception):
    """A file of the output cannot be read back."""


def _read_back(readers: SideReaders, file: str, offset: int, nbytes: int) -> memoryview:
    try:
        return readers.other.read(file, offset, nbytes)
    except (SourceError, Changed) as error:
        raise _Unreadable(error.message) from error


def _digest(data: bytearray | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
