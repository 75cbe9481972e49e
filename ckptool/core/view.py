"""Places of a tensor's parts: shifted, narrowed, and cut out of a flat run of elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckptool.core.box import Box, flat_range, row_major_strides
from ckptool.core.catalog import Extent, Packed, Part, Place


def shifted(at: Place, start: tuple[int, ...]) -> Place:
    """The place of the part of a tensor that begins at index ``start``."""
    if isinstance(at, Extent):
        return replace(at, offset=at.offset + _distance(start, at.strides))
    if isinstance(at, Packed):
        return replace(at, start=at.start + _distance(start, at.strides))
    raise TypeError(f"{at} cannot be shifted")


def _distance(start: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum(i * s for i, s in zip(start, strides, strict=True))


def part_of_place(
    at: Place,
    shape: Sequence[int],
    part: Sequence[int],
    start: int,
    strides: Sequence[int],
    itemsize: int,
) -> Place:
    """Where a part of shape ``part`` lies, of a tensor of ``shape`` that lies ``at``.

    ``start`` and ``strides`` address the part in the row-major order of the tensor, in elements of
    ``itemsize`` bytes. ValueError where the tensor's own strides cannot express it.
    """
    if isinstance(at, Extent):
        offset, steps = mapped(shape, at.strides, part, start, strides, itemsize)
        return replace(at, offset=at.offset + offset, strides=steps)
    if isinstance(at, Packed):
        offset, steps = mapped(shape, at.strides, part, start, strides, itemsize)
        return replace(at, start=at.start + offset, strides=steps)
    if at.part is None:
        return replace(at, part=Part(tuple(shape), start, tuple(strides)))
    offset, steps = mapped(shape, at.part.strides, part, start, strides, 1)
    return replace(at, part=Part(at.part.shape, at.part.start + offset, steps))


def mapped(
    shape: Sequence[int],
    steps: Sequence[int],
    part: Sequence[int],
    start: int,
    strides: Sequence[int],
    unit: int,
) -> tuple[int, tuple[int, ...]]:
    """A row-major start and strides within ``shape``, for a tensor that has other ``steps``.

    ``unit`` is the step of a row-major tensor's last dim. ValueError where a stride is no dim's.
    """
    rows = row_major_strides(shape, 1)
    wide = [dim for dim, size in enumerate(shape) if size > 1]
    scales = {steps[dim] / rows[dim] for dim in wide} or {float(unit)}
    if len(scales) == 1 and (scale := scales.pop()).is_integer():
        return start * int(scale), tuple(stride * int(scale) for stride in strides)
    by_row = {rows[dim]: dim for dim in wide}
    index = {dim: start // rows[dim] % shape[dim] for dim in wide}
    found = []
    for size, stride in zip(part, strides, strict=True):
        dim = by_row.get(stride) if size > 1 else None
        if size > 1 and (dim is None or index[dim] + size > shape[dim]):
            raise ValueError(f"a tensor of {list(shape)} whose elements lie {list(steps)} apart")
        found.append(0 if dim is None else steps[dim])
    return sum(at * steps[dim] for dim, at in index.items()), tuple(found)


def narrowed(
    at: Place, shape: Sequence[int], box: Box, itemsize: int, *, dropped: int = 0
) -> Place:
    """Where ``box`` of a tensor of ``shape`` lies, without its first ``dropped`` dims."""
    rows = row_major_strides(shape, 1)
    start = sum(index * row for index, row in zip(box.lo, rows, strict=True))
    return part_of_place(at, shape, box.shape[dropped:], start, rows[dropped:], itemsize)


def pieces_of_run(
    at: Place, run: Sequence[int], start: int, stop: int, shape: Sequence[int], itemsize: int
) -> Iterator[tuple[Box, Place]]:
    """The boxes of a row-major tensor of ``shape`` whose elements ``start`` to ``stop`` lie ``at``.

    ``run`` is the shape under which those elements are stored, in order.
    """
    rows = row_major_strides(shape, 1)
    for box in flat_range(shape, start, stop):
        first = sum(index * row for index, row in zip(box.lo, rows, strict=True))
        yield box, part_of_place(at, run, box.shape, first - start, rows, itemsize)
