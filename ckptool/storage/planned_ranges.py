"""Announced ranges of files: each is fetched once, ahead of its reader."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

from ckptool.storage.block_cache import Block, Fetch
from ckptool.storage.clients.client import AT_ONCE, ObjectVersion

VersionSpan = tuple[ObjectVersion, int, int]
"""Bytes that are read together: their file, offset and how many they are."""

CAPACITY = 128 << 20
"""Bytes of memory for what was fetched and not read yet, unless a budget says otherwise."""
_LARGEST = 8 << 20
"""Bytes of one request, for which the transfer takes longer than the latency."""
_LEAST = 1 << 20
"""Bytes of the smallest requests into which a long run is cut if memory is short."""
_GAP = 16 << 10
"""Bytes of a gap that are fetched with any request, rather than starting another."""
_WORTH_A_GAP = 32
"""One unwanted byte is accepted for so many wanted ones."""
_CHEAP = 256 << 10
"""Bytes that take no longer than another request: up to twice the wanted ones may be unwanted."""
_LEAST_KEPT = 8
"""The least number of ranges that there is room for, if they are small enough."""
_MOST_PLANS = 4
"""Both sides of a comparison may be in one store, each with a plan that ends and one begun."""


class Range(NamedTuple):
    """Bytes ``start`` to ``end`` of a file, which one request fetches."""

    file: ObjectVersion
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the range."""
        return self.end - self.start


def join_runs(runs: Iterable[VersionSpan], largest: int = _LARGEST) -> Iterator[Range]:
    """Yield the fewest ranges of at most ``largest`` bytes that contain all runs, file by file.

    Runs close to one another share a range if there are few unwanted bytes between them.
    """
    for file, start, end in _join_near(runs):
        count = -(-(end - start) // largest)
        cuts = [start + (end - start) * at // count for at in range(count + 1)]
        for low, high in pairwise(cuts):
            yield Range(file, low, high)


def _join_near(runs: Iterable[VersionSpan]) -> Iterator[Range]:
    joined: Range | None = None
    unwanted = 0
    for file, start, nbytes in sorted(runs):
        if not nbytes:
            continue
        if joined is not None and file == joined.file:
            gap = max(0, start - joined.end)
            payload = joined.end - joined.start - unwanted
            cheap = min(_CHEAP, 2 * payload)
            if unwanted + gap <= max(_GAP, cheap, payload // _WORTH_A_GAP):
                unwanted += gap
                joined = joined._replace(end=max(joined.end, start + nbytes))
                continue
        if joined is not None:
            yield joined
        joined, unwanted = Range(file, start, start + nbytes), 0
    if joined is not None:
        yield joined


class _Uses(NamedTuple):
    """At which ``places`` of the order a range is read, and its bytes read by the end of each."""

    places: list[int]
    ends: list[int]

    def add(self, place: int, nbytes: int) -> None:
        """Note that so many bytes of it are read next."""
        self.places.append(place)
        self.ends.append(nbytes + (self.ends[-1] if self.ends else 0))


class _Plan:
    """The ranges of some runs, in the order in which they are read."""

    def __init__(self, runs: Sequence[VersionSpan], largest: int) -> None:
        self._ranges: dict[ObjectVersion, list[Range]] = {}
        for part in join_runs(runs, largest):
            self._ranges.setdefault(part.file, []).append(part)
        self._starts = {file: [r.start for r in ranges] for file, ranges in self._ranges.items()}
        self._uses: dict[Range, _Uses] = {}
        self.order: list[Range] = []
        """The range that is read at each place; it repeats unless its reads are consecutive."""
        for file, start, nbytes in runs:
            for part in self._between(file, start, start + nbytes):
                if not self.order or self.order[-1] != part:
                    self.order.append(part)
                common = min(part.end, start + nbytes) - max(part.start, start)
                self._uses.setdefault(part, _Uses([], [])).add(len(self.order) - 1, common)
        self.unread = {part: uses.ends[-1] for part, uses in self._uses.items()}
        """Bytes of each range that are still to be read."""
        self.ahead = 0
        """How many places, in order, have been fetched ahead or need not be."""
        used = {part: (uses.places[0], uses.places[-1]) for part, uses in self._uses.items()}
        self.memory = _peak(used)
        """The most bytes of all ranges that are begun and not yet read completely."""

    def find(self, file: ObjectVersion, offset: int) -> Range | None:
        """Return the range that contains a byte of a file and is still to be read."""
        part = next(self._between(file, offset, offset + 1), None)
        return part if part in self.unread else None

    def next_place(self, part: Range) -> int:
        """Return where in the order an unread range is read next."""
        uses = self._uses[part]
        return uses.places[bisect_right(uses.ends, uses.ends[-1] - self.unread[part])]

    def _between(self, file: ObjectVersion, start: int, end: int) -> Iterator[Range]:
        starts = self._starts.get(file, [])
        for at in range(max(0, bisect_right(starts, start) - 1), len(starts)):
            part = self._ranges[file][at]
            if part.start >= end:
                return
            if part.end > start:
                yield part


def _peak(used: Mapping[Range, tuple[int, int]]) -> int:
    """Return the most bytes at once of ranges that are kept from a first to a last use."""
    begun = [(first, part.nbytes) for part, (first, _) in used.items()]
    ended = [(last + 1, -part.nbytes) for part, (_, last) in used.items()]
    return max(accumulate(nbytes for _, nbytes in sorted([*begun, *ended])), default=0)


def unversioned(runs: Iterable[tuple[str, int, int]]) -> Iterator[VersionSpan]:
    """Yield runs of files of one source, of any version: what is planned before it is read."""
    for file, start, nbytes in runs:
        yield ObjectVersion(file, ""), start, nbytes


def memory_to_read(runs: Iterable[VersionSpan]) -> int:
    """Return the bytes kept at once if runs are read in this order, each byte once."""
    return _Plan(list(runs), _LARGEST).memory


class PlannedRanges:
    """Ranges of some files that are fetched ahead, for all threads, in at most ``capacity`` bytes.

    A range is kept until all of it has been read. If there is no room for what is requested now,
    those needed last are dropped, to be fetched again.
    """

    def __init__(self, fetch: Fetch, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self._fetch = fetch
        self._plans: list[_Plan] = []
        self._futures: dict[Range, Future[Block]] = {}
        self._nbytes = 0
        self._on_their_way = 0
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def plan(self, runs: Iterable[VersionSpan]) -> Callable[[], None]:
        """Announce the next reads, in order; return a function that ends the announcement.

        Threads may still read what was announced before.
        """
        spans = list(runs)
        plan = self._cut(spans)
        with self._lock:
            self._plans = [plan, *(p for p in self._plans if p.unread)][:_MOST_PLANS]
            self._drop_unplanned()
        self._fetch_ahead(plan)
        return partial(self._end, plan)

    def _cut(self, spans: Sequence[VersionSpan]) -> _Plan:
        """Return a plan of ranges as large as there is room for, beside those on their way.

        Small ones help if few bytes of each are read at once, not if they are read again later.
        """
        size = max(_LEAST, min(_LARGEST, self.capacity // _LEAST_KEPT))
        plan = smaller = _Plan(spans, size)
        while size > _LEAST and smaller.memory > max(
            self.capacity // 2, self.capacity - AT_ONCE * size
        ):
            size = max(_LEAST, size // 2)
            smaller = _Plan(spans, size)
        return smaller if 10 * smaller.memory < 9 * plan.memory else plan

    def has_planned(self, file: ObjectVersion, offset: int, nbytes: int) -> bool:
        """Return whether both ends of some bytes were announced and are still to be read."""
        ends = (offset, offset + max(nbytes, 1) - 1)
        with self._lock:
            return all(any(plan.find(file, end) for plan in self._plans) for end in ends)

    def clear(self) -> None:
        """Forget everything: the files have changed."""
        for plan in self._plans:
            self._end(plan)

    def _end(self, plan: _Plan) -> None:
        """Drop a plan, and what was fetched only for it."""
        with self._lock:
            plan.unread.clear()
            plan.order.clear()
            self._plans = [other for other in self._plans if other is not plan]
            self._drop_unplanned()

    def _drop_unplanned(self) -> None:
        for part in [part for part in self._futures if not self._is_unread(part)]:
            self._drop(part)

    def read_into(self, file: ObjectVersion, offset: int, buffer: memoryview) -> int | None:
        """Fill a buffer from ``offset``; return the bytes there are, fewer if the file ends.

        None if some of them were not announced. Raises as ``fetch`` does.
        """
        done = 0
        while done < len(buffer):
            hit = self._data(file, offset + done)
            if hit is None:
                return None
            plan, part, data = hit
            low = offset + done - part.start
            piece = memoryview(data)[low : low + len(buffer) - done]
            buffer[done : done + len(piece)] = piece
            done += len(piece)
            self._note_read(plan, part, len(piece))
            if not piece:  # the file ends
                break
        return done

    def _is_unread(self, part: Range) -> bool:
        return any(part in plan.unread for plan in self._plans)

    def _data(self, file: ObjectVersion, offset: int) -> tuple[_Plan, Range, Block] | None:
        """Return the range that contains a byte, with its bytes; None if none is announced."""
        with self._lock:
            plan, part = next(
                ((p, part) for p in self._plans if (part := p.find(file, offset))), (None, None)
            )
            if plan is None or part is None:
                return None
            future = self._futures.get(part)
            is_ours = future is None
            if future is None:
                future = self._begin(part)
            if self._nbytes > self.capacity:
                self._drop_last(self._droppable(part), self.capacity)
        self._fetch_ahead(plan)
        if is_ours:  # without the lock, so that all fetch side by side
            self._fill(part, future)
        return plan, part, future.result()

    def _begin(self, part: Range) -> Future[Block]:
        """Note, with the lock held, that a range is being fetched."""
        future = self._futures[part] = Future()
        self._nbytes += part.nbytes
        self._on_their_way += 1
        return future

    def _drop(self, part: Range) -> None:
        """Drop, with the lock held, what was fetched of a range."""
        if self._futures.pop(part, None) is not None:
            self._nbytes -= part.nbytes

    def _fill(self, part: Range, future: Future[Block]) -> None:
        """Fetch a range; an error goes to all who wait for it, and ends reading ahead."""
        try:
            data = self._fetch(*part)
        except BaseException as error:  # noqa: BLE001 (raised where the range is read)
            with self._lock:
                self._on_their_way -= 1
                self._drop(part)
                for plan in self._plans:  # reading ends with it
                    plan.order.clear()
            future.set_exception(error)
        else:
            with self._lock:
                self._on_their_way -= 1
            future.set_result(data)

    def _fill_ahead(self, plan: _Plan, part: Range, future: Future[Block]) -> None:
        self._fill(part, future)
        self._fetch_ahead(plan)

    def _fetch_ahead(self, plan: _Plan) -> None:
        """Fetch the next ranges of the plan, as many as there is room for."""
        with self._lock:
            while plan.ahead < len(plan.order):
                part = plan.order[plan.ahead]
                was_read = part not in plan.unread or plan.next_place(part) > plan.ahead
                if was_read or part in self._futures:
                    plan.ahead += 1
                    continue
                if self._on_their_way >= AT_ONCE or not self._make_room_ahead(plan, part):
                    return
                self._pool = self._pool or ThreadPoolExecutor(AT_ONCE, "ckptool-ahead")
                future = self._begin(part)
                try:
                    self._pool.submit(self._fill_ahead, plan, part, future)
                except RuntimeError as error:  # no thread can be started: the reader fetches it
                    self._on_their_way -= 1
                    self._drop(part)
                    future.set_exception(error)
                    return

    def _make_room_ahead(self, plan: _Plan, target: Range) -> bool:
        """Return whether there is room for a range, with the lock held.

        If the plan does not fit, ranges that only it needs later are dropped, if that suffices. If
        it fits, reading on makes room, and dropping would fetch bytes twice.
        """
        missing = self._nbytes + target.nbytes - self.capacity
        if missing <= 0 or plan.memory <= self.capacity:
            return missing <= 0
        candidates = [part for part in self._droppable(target) if self._place(part) > plan.ahead]
        candidates = [part for part in candidates if self._plans_of(part) == [plan]]
        if sum(part.nbytes for part in candidates) < missing:
            return False
        self._drop_last(candidates, self.capacity - target.nbytes)
        return True

    def _drop_last(self, parts: list[Range], most: int) -> None:
        """Drop, with the lock held, those of some ranges that are needed last, down to ``most``."""
        for part in sorted(parts, key=self._place, reverse=True):
            if self._nbytes <= most:
                return
            self._drop(part)

    def _droppable(self, target: Range) -> list[Range]:
        """Return the fetched ranges, except the target."""
        return [part for part, future in self._futures.items() if future.done() and part != target]

    def _plans_of(self, part: Range) -> list[_Plan]:
        return [plan for plan in self._plans if part in plan.unread]

    def _place(self, part: Range) -> int:
        """Return how late a range is next read in the plans that contain it."""
        return min((plan.next_place(part) for plan in self._plans_of(part)), default=0)

    def _note_read(self, plan: _Plan, part: Range, nbytes: int) -> None:
        """Note that bytes of a range have been read; drop it once all are."""
        with self._lock:
            if part in plan.unread:
                plan.unread[part] -= nbytes
                if plan.unread[part] <= 0:
                    del plan.unread[part]
            if not self._is_unread(part):
                self._drop(part)
