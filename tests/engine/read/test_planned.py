"""Tiles of any cut of a tensor, read from any other cut of it, against numpy."""

from __future__ import annotations

import zlib
from contextlib import closing
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ckptool.core.box import Box, Piece
from ckptool.core.catalog import Catalog, Chunk, Extent, Record, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.layout import Data, FileLayout, Layout
from ckptool.core.planning import groups
from ckptool.core.planning.plan import Plan
from ckptool.engine.checksum import RecordCheck
from ckptool.engine.read import gather
from ckptool.engine.read.planned import PlanReader
from ckptool.engine.read.segments import segments_of_tensor
from ckptool.storage.local import LocalSource

RNG = np.random.default_rng(5)


def at(box: Box) -> tuple[slice, ...]:
    return tuple(map(slice, box.lo, box.hi))


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that tile a tensor, cut in some dims."""
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    cells = product(*(pairwise(ends) for ends in cuts))
    return [Box(*zip(*cell, strict=True)) for cell in cells]


SHAPES = st.lists(st.integers(1, 9), min_size=2, max_size=3).map(tuple)
CUTS = SHAPES.flatmap(lambda s: st.tuples(st.just(s), grids(s), grids(s)))


def stored(values: np.ndarray, cells: list[Box], turned: int) -> tuple[bytes, TensorEntry]:
    """A file of records, those at multiples of ``turned`` in column-major order."""
    data, chunks = bytearray(3), []
    for number, box in enumerate(cells):
        cell = values[at(box)]
        image = np.asarray(cell, order="F" if number % turned == turned - 1 else "C")
        raw = image.tobytes(order="A")
        record = Record("f", len(data), len(raw), zlib.crc32(raw))
        chunks.append(Chunk(box, Extent("f", len(data), image.strides, record=record)))
        data += raw
    kind = BY_NAME["bfloat16"]
    return bytes(data), TensorEntry("t", ("t",), kind, values.shape, tuple(chunks))


def parts_of(shape: tuple[int, ...], cells: list[Box], scattered: bool) -> list[tuple[Box, ...]]:
    """The boxes of each part, one behind the other in the second dim if they are ``scattered``."""
    if not scattered:
        return [(box,) for box in cells]
    rows: dict[object, list[Box]] = {}
    for box in cells:
        rows.setdefault((box.lo[0], *box.lo[2:]), []).append(box)
    return [tuple(of_row[::2]) for of_row in rows.values()] + [
        tuple(of_row[1::2]) for of_row in rows.values() if len(of_row) > 1
    ]


def part_of(boxes: tuple[Box, ...], name: str = "t") -> Data:
    if len(boxes) == 1:
        return Data.of(name, boxes[0], 2)
    pieces, end = [], 0
    for box in boxes:
        corner = (0, end, *(0 for _ in box.lo[2:]))
        pieces.append(Piece(box, Box.at(corner, box.shape)))
        end += box.shape[1]
    return Data(name, (box.shape[0], end, *box.shape[2:]), tuple(pieces), 2)


@given(CUTS, st.integers(1, 40), st.integers(2, 64), st.integers(2, 9), st.booleans())
def test_any_cut_is_read_from_any_other(
    found: tuple[tuple[int, ...], list[Box], list[Box]],
    limit: int,
    span: int,
    turned: int,
    scattered: bool,
) -> None:
    """Nothing is missing, and what was noted of the records is as they are."""
    shape, cells, wanted = found
    values = RNG.integers(0, 2**16, shape, np.uint16)
    data, entry = stored(values, cells, turned)
    parts = parts_of(shape, wanted, scattered)
    files = tuple(FileLayout(f"o{n}", (part_of(boxes),)) for n, boxes in enumerate(parts))
    plan = Plan(Catalog("test", {"t": entry}, {}, {}), Layout(files, folder=True))
    images = [np.full(file.nbytes, 255, np.uint8) for file in files]
    records = RecordCheck()
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setattr(groups, "_SMALL", 0)
        patch.setattr(gather, "SPAN", span)
        Path(folder, "f").write_bytes(data)
        source = LocalSource(Path(folder), {})
        with closing(PlanReader(source, records)) as reader:
            for batch in plan.batches(range(len(files))):
                for group in plan.groups({n: files[n].parts for n in batch}, limit):
                    for tiles in plan.jobs(group, limit):
                        for piece in reader.pieces(tiles):
                            start = piece.tile.offset + piece.skip
                            images[piece.tile.file][start : start + piece.nbytes] = piece.data
                            assert piece.crc == zlib.crc32(piece.data)
        records.read_unseen(source, 1)
    assert not records.problems()
    for boxes, image in zip(parts, images, strict=True):
        expected = np.concatenate([values[at(box)] for box in boxes], axis=1)
        assert image.tobytes() == expected.tobytes()


@given(st.lists(st.tuples(CUTS, st.booleans()), min_size=1, max_size=3), st.integers(1, 3))
@settings(max_examples=60)
def test_small_tensors_of_several_kinds_are_cut_in_the_order_of_files(
    kinds: list[tuple[tuple[tuple[int, ...], list[Box], list[Box]], bool]], times: int
) -> None:
    """Each file has a part of each tensor; kinds come by turns."""
    tensors, contents = dict[str, TensorEntry](), dict[int, list[Data]]()
    expected, found = dict[int, bytes](), dict[int, bytes]()
    with TemporaryDirectory() as folder:
        for (shape, cells, wanted), scattered in kinds * times:
            name, values = f"t{len(tensors)}", RNG.integers(0, 2**16, shape, np.uint16)
            data, entry = stored(values, cells, 9)
            Path(folder, name).write_bytes(data)
            chunks = tuple(Chunk(c.box, replace(c.at, file=name)) for c in entry.chunks)
            tensors[name] = replace(entry, name=name, chunks=chunks)
            for number, boxes in enumerate(parts_of(shape, wanted, scattered)):
                contents.setdefault(number, []).append(part_of(boxes, name))
                image = np.concatenate([values[at(box)] for box in boxes], axis=1)
                expected[number] = expected.get(number, b"") + image.tobytes()
        files = tuple(FileLayout(f"o{n}", tuple(parts)) for n, parts in contents.items())
        plan = Plan(Catalog("test", tensors, {}, {}), Layout(files, folder=True))
        made = plan.groups({n: file.parts for n, file in enumerate(files)}, 1 << 20)
        tiles = [t for group in made for job in plan.jobs(group, 1 << 20) for t in job]
        with closing(PlanReader(LocalSource.folder(Path(folder)), RecordCheck())) as reader:
            pieces = [(p.tile.file, p.tile.offset, bytes(p.data)) for p in reader.pieces(tiles)]
    if all(segments_of_tensor(entry) is not None for entry in tensors.values()):
        assert pieces == sorted(pieces)
    for number, offset, data in sorted(pieces):
        assert offset == len(found.get(number, b""))
        found[number] = found.get(number, b"") + data
    assert found == expected


def test_rows_are_read_once_for_all_their_columns(tmp_path: Path) -> None:
    """Parts of the same chunks share rows, others have a job of their own."""
    values = RNG.integers(0, 2**16, (8, 12), np.uint16)
    halves = [Box((0, 0), (8, 6)), Box((0, 6), (8, 12))]
    wanted = [Box((0, lo), (8, lo + 3)) for lo in (0, 3)] + [halves[1]]
    _, entry = stored(values, halves, 9)
    files = tuple(FileLayout(f"o{n}", (Data.of("t", box, 2),)) for n, box in enumerate(wanted))
    plan = Plan(Catalog("test", {"t": entry}, {}, {}), Layout(files, folder=True))
    found = plan.groups({n: file.parts for n, file in enumerate(files)}, 12)
    assert [(len(group.parts), group.rows, group.band) for group in found] == [
        (2, 4, halves[0]),
        (1, 0, None),
    ]
    jobs = list(plan.jobs(found[0], 12))
    assert [{tile.band for tile in job} for job in jobs] == [
        {Box((0, 0), (4, 6))},
        {Box((4, 0), (8, 6))},
    ]
