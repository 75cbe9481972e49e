"""Each rank has several files where ranks need the same rows, and one where none do."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Chunk, Extent, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.mesh import Placements, Shard
from ckptool.core.sharding.placement import PlacedTensors, parse_mesh
from ckptool.formats.base import Request
from ckptool.formats.dcp import splits
from ckptool.formats.dcp.write import lay_out

ROWS: Placements = (Shard(0), Shard(0))
COLUMNS: Placements = (Shard(0), Shard(1))
ACROSS: Placements = (Shard(1), Shard(0))


def tensor(name: str, shape: tuple[int, ...], columns: int = 1) -> TensorEntry:
    """Return a tensor that the source has in so many chunks of columns."""
    width = shape[1] // columns
    boxes = [
        Box((0, at * width, *[0] * (len(shape) - 2)), (shape[0], (at + 1) * width, *shape[2:]))
        for at in range(columns)
    ]
    chunks = tuple(Chunk(box, Extent("file", 0, (1,) * len(shape)), 0) for box in boxes)
    return TensorEntry(name, (name,), BY_NAME["bfloat16"], shape, chunks)


def units(entries: list[TensorEntry], placements: Mapping[str, Placements]) -> list[list[str]]:
    """Return the data files that are made of the same rows, by unit, in the layout's order."""
    placed = PlacedTensors(parse_mesh("2x4"), dict(placements))
    catalog = Catalog("dcp", {entry.name: entry for entry in entries}, {}, {})
    found: dict[object, list[str]] = {}
    for file in lay_out(catalog, Request("out", placed=placed)).files:
        if file.rank is not None:
            found.setdefault(file.unit, []).append(file.path)
    return [*found.values()]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "_LEAST", 1 << 10)


def test_ranks_that_share_rows_have_a_file_for_each_of_them() -> None:
    entries = [tensor(f"w{n}", (64, 64)) for n in range(4)]
    found = units(entries, {entry.name: COLUMNS for entry in entries})
    first, second = range(4), range(4, 8)
    assert found == [
        [f"__{rank}_{number}.distcp" for rank in ranks]
        for ranks in (first, second)
        for number in range(4)
    ]


def test_what_ranks_share_by_several_tensors_is_one() -> None:
    """By the rows of one tensor ranks 0 and 1 are together, by those of another 0 and 4."""
    entries = [tensor(f"w{n}", (64, 64)) for n in range(16)]
    cuts = {entry.name: (COLUMNS, ACROSS)[n % 2] for n, entry in enumerate(entries)}
    found = units(entries, cuts)
    assert [len(unit) for unit in found] == [8] * 8


def test_a_few_bytes_are_not_worth_files(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [tensor("w", (256, 256)), tensor("b", (8, 64))]
    alone = [[f"__{rank}_0.distcp"] for rank in range(8)]
    assert units(whole, {"w": ROWS, "b": COLUMNS}) == alone
    assert units(whole, {"w": COLUMNS, "b": ROWS}) != alone
    monkeypatch.setattr(splits, "_LEAST", 32 << 20)
    assert units(whole, {"w": COLUMNS, "b": ROWS}) == alone


@pytest.mark.parametrize(
    ("shape", "columns", "count"),
    [
        ((64, 64), 4, 1),  # the source's own columns
        ((64, 64), 2, 4),
        ((64, 64), 8, 1),
        ((8, 8, 64), 1, 4),
        ((8, 8, 16 << 10), 1, 1),  # parts of rows that are long enough to be read by themselves
    ],
)
def test_columns_share_rows_only_if_reading_one_reads_others(
    shape: tuple[int, ...], columns: int, count: int
) -> None:
    cuts = dict.fromkeys(("w", "v"), COLUMNS)
    found = units([tensor(name, shape, columns) for name in cuts], cuts)
    assert {len(unit) for unit in found} == ({4} if count > 1 else {1})
