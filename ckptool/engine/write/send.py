"""Plan -> a store: each file is written from its beginning to its end, several files at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from queue import SimpleQueue

from ckptool.core.layout import Data, FileLayout, Literal, Part, Scattered, Verbatim
from ckptool.core.plan import Group, LayoutPart, Plan, Tile
from ckptool.engine.check.unchanged import require_unchanged
from ckptool.engine.checksum import crc32
from ckptool.engine.options import RunOptions
from ckptool.engine.read.planned import PlanReader
from ckptool.engine.read.records import RecordCheck, require_intact
from ckptool.engine.threads import share_jobs
from ckptool.engine.write.run import patched, touch_files, verbatim
from ckptool.errors import TransferError, Unsupported
from ckptool.storage.local import SPAN, Files
from ckptool.storage.multipart import Upload, memory_of_part
from ckptool.storage.remote import AT_ONCE
from ckptool.storage.url import RemotePath

HELD = 4 << 20
"""Bytes of a part that are kept where its checksum has to be written before it."""


@dataclass(frozen=True, slots=True)
class Room:
    """What the memory budget has room for.

    ``files`` that are sent at once; for each of them threads that read, and parts that are held.
    """

    files: int
    readers: int
    parts: int


@dataclass(slots=True)
class Sending:
    """One run: what all uploads of it share. ``folder`` is where the layout's files go."""

    plan: Plan
    source: Files
    folder: RemotePath
    progress: Callable[[int], None]
    room: Room
    records: RecordCheck = field(default_factory=RecordCheck)
    stop: threading.Event = field(default_factory=threading.Event)


def send(
    plan: Plan,
    source: Files,
    folder: RemotePath,
    options: RunOptions,
    progress: Callable[[int], None],
    *,
    numbers: Collection[int],
    finished: Collection[str],
) -> None:
    """Write those of the plan's files in ``numbers`` that are not ``finished`` yet.

    The layout's last file appears after all others, and once the source is found to be unchanged
    and its checksums right. Raises as ``run`` does.
    """
    files = plan.layout.files
    todo = [number for number in numbers if files[number].path not in finished]
    last = [number for number in todo if number == len(files) - 1]
    first = [number for number in todo if number not in last]
    room = within_budget(plan, source, options, todo)
    sending = Sending(plan, source, folder, progress, room)
    done = [number for number in numbers if number not in todo]
    touch_files(plan, done, sending.records)
    progress(sum(files[number].nbytes for number in done))
    share_jobs(iter(first), room.files, lambda: _Stream(sending), _Stream.send, sending.stop)
    with closing(_Stream(sending)) as stream:
        uploads = [stream.upload(number) for number in last]
    try:
        for upload in uploads:
            upload.finish()
        sending.records.read_unseen(source, options.workers or source.workers)
        require_intact(sending.records.problems())
        if last:
            require_unchanged(plan.catalog, source)
    except BaseException:
        for upload in uploads:
            upload.abort()
        raise
    for upload in uploads:
        upload.close()


def within_budget(plan: Plan, source: Files, options: RunOptions, numbers: Collection[int]) -> Room:
    """What there is room for while files of the layout, those of ``numbers``, are sent.

    Unsupported where there is none for one file, one thread that reads and one part.
    """
    cached = options.budget // 8
    part = memory_of_part(max((plan.layout.files[number].nbytes for number in numbers), default=0))
    reader = 2 * source.tile + 2 * SPAN + plan.largest_blob
    least, left = HELD + part + reader, options.budget - cached
    if least > left:
        needed = least * 8 // 7
        raise Unsupported(
            f"a budget of {options.budget:,} bytes is too small: an upload needs {needed:,}",
            hint=f"--budget {-(-needed // (1 << 20))}MiB",
        )
    source.keep(cached)
    reading, sending = options.workers or source.workers, options.workers or AT_ONCE
    files = max(1, min(len(numbers), sending, left // least))
    spare = left // files - least
    readers = min(-(-reading // files) - 1, spare // 2 // reader)
    parts = min(-(-sending // files), (spare - readers * reader) // part)
    return Room(files, 1 + readers, 1 + parts)


class _Stream:
    """Sends one file after the other; ``readers`` threads gather what comes next of it."""

    def __init__(self, sending: Sending) -> None:
        self._sending = sending
        self._pool = ThreadPoolExecutor(sending.room.readers, "ckptool-read")
        self._idle: SimpleQueue[PlanReader] = SimpleQueue()
        for _ in range(sending.room.readers):
            self._idle.put(PlanReader(sending.source, sending.records))

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().close()

    def send(self, number: int) -> None:
        """Write one file of the layout."""
        self.upload(number).close()

    def upload(self, number: int) -> Upload:
        """Write all bytes of one file of the layout, which appears when the upload is closed."""
        file = self._sending.plan.layout.files[number]
        place = self._sending.folder / file.path
        upload = Upload(place, file.nbytes, self._sending.room.parts)
        try:
            for data in _Content(file, number, self).pieces():
                if self._sending.stop.is_set():
                    raise TransferError("interrupted")
                upload.write(data)
        except BaseException:
            upload.abort()
            raise
        return upload

    def tiles(self, spot: LayoutPart) -> Iterator[bytes]:
        """The bytes of a tensor part, in order, while further tiles are read."""
        group = Group((spot,), 0)
        waiting: deque[Future[bytes]] = deque()
        for tiles in self._sending.plan.jobs(group, self._sending.source.tile):
            waiting.append(self._pool.submit(self._gathered, tiles[0]))
            if len(waiting) > self._sending.room.readers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def verbatim(self, part: Verbatim) -> Iterator[memoryview]:
        """The bytes of a file that is copied as it is."""
        for piece in verbatim(part, self._sending.source):
            yield piece
            self._sending.progress(len(piece))

    def sent(self, nbytes: int) -> None:
        self._sending.progress(nbytes)

    def _gathered(self, tile: Tile) -> bytes:
        reader = self._idle.get()
        try:
            return bytes(reader.data(tile))
        finally:
            self._idle.put(reader)


class _Content:
    """The bytes of one file in order.

    A checksum that stands before its part is taken ahead: what is small is kept meanwhile, what is
    large is read twice.
    """

    def __init__(self, file: FileLayout, number: int, stream: _Stream) -> None:
        self._parts = file.parts
        self._number = number
        self._stream = stream
        self._crcs: dict[int, int] = {}
        self._held: dict[int, list[bytes]] = {}
        offset = 0
        self._offsets = []
        for part in self._parts:
            self._offsets.append(offset)
            offset += part.nbytes

    def pieces(self) -> Iterator[bytes | memoryview]:
        """All bytes, piece by piece."""
        for position, part in enumerate(self._parts):
            yield from self._part(position, part)

    def _part(self, position: int, part: Part) -> Iterator[bytes | memoryview]:
        if isinstance(part, Literal):
            yield patched(part, self._crc)
        elif isinstance(part, Verbatim):
            yield from self._stream.verbatim(part)
        else:
            for data in self._held.pop(position, None) or self._counted(position, part):
                yield data
                self._stream.sent(len(data))

    def _counted(self, position: int, part: Data | Scattered) -> Iterator[bytes]:
        """The tiles of a part; its CRC-32 is known at the end."""
        total = 0
        spot = LayoutPart(self._number, position, self._offsets[position], part)
        for data in self._stream.tiles(spot):
            total = crc32(data, total)
            yield data
        self._crcs[position] = total

    def _crc(self, position: int) -> int:
        """The CRC-32 of a tensor part, sent or not."""
        part = self._parts[position]
        if position not in self._crcs and isinstance(part, Data | Scattered):
            tiles = self._counted(position, part)
            if part.nbytes <= HELD:
                self._held[position] = list(tiles)
            else:
                deque(tiles, maxlen=0)
        return self._crcs[position]
