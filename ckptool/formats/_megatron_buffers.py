"""Where Megatron's distributed optimizer puts each parameter in its flat buffers.

A buffer holds the parameters of one element type (and of dense or expert layers) in reverse order
of the model, each at a multiple of 64 elements. It is cut into buckets; a bucket ends once it has
reached the bucket size, and a shared embedding has a bucket of its own. What is saved of it is
everything up to its padding, which makes it divisible among the data-parallel ranks
(``_ParamAndGradBuffer``, megatron-core 0.5 to 0.20).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class Bucket:
    """A saved bucket of ``numel`` elements, and where its stored chunks begin and end."""

    numel: int
    cuts: Set[int] | None = None


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a parameter lies: elements ``start`` to ``stop`` of a bucket."""

    bucket: int
    start: int
    stop: int


def slots_in_buckets(numels: Sequence[int], buckets: Sequence[Bucket]) -> list[Slot] | None:
    """The slot of each parameter, in the model's order; None where they do not fill the buckets.

    Every start and end must be where a stored chunk begins or ends.
    """
    slots: list[Slot] = []
    bucket = position = 0
    for numel in reversed(numels):
        start = _aligned(position)
        if bucket < len(buckets) and start + numel > buckets[bucket].numel:
            if not _filled(position, buckets[bucket].numel):
                return None
            bucket, start = bucket + 1, 0
        if bucket == len(buckets) or start + numel > buckets[bucket].numel:
            return None
        position = start + numel
        slots.append(Slot(bucket, start, position))
    if bucket != len(buckets) - 1 or not _filled(position, buckets[bucket].numel):
        return None
    return slots[::-1] if all(_at_cuts(slot, buckets) for slot in slots) else None


def _filled(position: int, numel: int) -> bool:
    """A bucket ends with its last parameter, or where the shared embedding would have begun."""
    return numel in (position, _aligned(position))


def _at_cuts(slot: Slot, buckets: Sequence[Bucket]) -> bool:
    cuts = buckets[slot.bucket].cuts
    return cuts is None or {slot.start, slot.stop} <= cuts


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


def slots_in_run(
    numels: Sequence[int], total: int, alone: Set[int], views: Sequence[int | None]
) -> list[list[Slot]]:
    """The slots of all parameters where all buckets were saved as one run of ``total`` elements.

    The buckets themselves are not recorded: every bucket size is tried, and each way in which the
    parameters fill the run is returned. ``alone`` are the positions of shared embeddings, ``views``
    where parameters begin in the buffer, if they were saved as views of it.
    """
    if sum(numels) == total:
        return [_packed(numels)]
    found: list[list[Slot]] = []
    for limit in _bucket_sizes(numels):
        for shared in (alone, frozenset[int]()) if alone else (alone,):
            slots = _simulated(numels, limit, shared, views)
            if slots and slots[0].stop == total and slots not in found:
                found.append(slots)
    return found


def gaps(slots: Sequence[Slot]) -> list[tuple[int, int]]:
    """The elements of a run that no parameter has: padding, which is saved as zeros."""
    ordered = sorted(slots, key=lambda slot: slot.start)
    return [(a.stop, b.start) for a, b in pairwise(ordered) if a.stop < b.start]


def _packed(numels: Sequence[int]) -> list[Slot]:
    """One parameter after the other, with no gap."""
    slots, position = [], 0
    for numel in reversed(numels):
        slots.append(Slot(0, position, position + numel))
        position += numel
    return slots[::-1]


def _bucket_sizes(numels: Sequence[int]) -> list[int | None]:
    """None for a single bucket, and sizes that close the first bucket at each of the parameters."""
    sizes: list[int | None] = [None]
    position = 0
    for numel in reversed(numels):
        position = _aligned(position) + numel
        sizes.append(position)
    return sizes


def _simulated(
    numels: Sequence[int], limit: int | None, alone: Set[int], views: Sequence[int | None]
) -> list[Slot] | None:
    """The slots in the run under a bucket size; None where the views contradict them."""
    slots: list[Slot] = []
    run = buffer = begun = 0
    for position in reversed(range(len(numels))):
        numel, view = numels[position], views[position]
        start = _aligned(buffer)
        run += start - buffer
        if buffer == begun or (position in alone and start > begun):
            begun = start = _bucket_start(start, view)
        if view is not None and view != start:
            return None
        slots.append(Slot(0, run, run + numel))
        run, buffer = run + numel, start + numel
        if position in alone or (limit is not None and buffer - begun >= limit):
            begun = buffer = _bucket_start(buffer, None)
    return slots[::-1]


def _bucket_start(least: int, view: int | None) -> int:
    """Where a bucket begins that begins at ``least`` or later: at its first parameter's view."""
    start = -(-least // _BUCKET_ALIGNMENT) * _BUCKET_ALIGNMENT
    return view if view is not None and view >= start and not view % _BUCKET_ALIGNMENT else start
