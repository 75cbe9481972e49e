"""Many small tensors compared at once, however each side is cut and wherever its bytes are."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.commands.options.verify import CompareOptions
from ckptool.commands.verify.compare import tensors
from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import Chunk, Extent, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.engine.check import small_pairs
from ckptool.engine.check.pairs import TensorPair
from ckptool.engine.read.gather import Gatherer
from ckptool.engine.read.tensors import TensorSource
from ckptool.storage.local import LocalSource

ROWS, COLUMNS = 6, 4
CUTS = {
    "whole": [Box((0, 0), (6, 4))],
    "rows": [Box((0, 0), (1, 4)), Box((1, 0), (1, 4)), Box((1, 0), (6, 4))],
    "rows in another order": [Box((3, 0), (6, 4)), Box((0, 0), (3, 4))],
    "columns": [Box((0, 0), (6, 1)), Box((0, 1), (6, 4))],
}
TENSORS = st.lists(
    st.tuples(*[st.sampled_from([*CUTS])] * 2, st.integers(-1, ROWS * COLUMNS - 1)), max_size=12
)


def write(folder: Path, name: str, cut: str, values: bytes, gap: int) -> TensorEntry:
    """Append the chunks of a tensor to a file, each followed by a gap."""
    chunks = []
    with open(folder / "data", "ab") as stream:
        for box in CUTS[cut]:
            place = Extent("data", stream.tell(), row_major_strides(box.shape, 1))
            chunks.append(Chunk(box, place))
            for row in range(box.lo[0], box.hi[0]):
                stream.write(values[row * COLUMNS :][box.lo[1] : box.hi[1]])
            stream.write(b"\xff" * gap)
    return TensorEntry(name, (name,), BY_NAME["uint8"], (ROWS, COLUMNS), tuple(chunks))


@settings(max_examples=60)
@given(wanted=TENSORS, gap=st.sampled_from([0, 3, 5000]), lost=st.integers(0, 30))
def test_what_differs_or_cannot_be_read_is_found_for_each_tensor(
    wanted: list[tuple[str, str, int]],
    gap: int,
    lost: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    sides = [tmp_path_factory.mktemp("side") for _ in range(2)]
    for side in sides:
        (side / "data").touch()
    pairs, changed = [], {}
    for number, (one, other, place) in enumerate(wanted):
        values = bytearray(range(number, number + ROWS * COLUMNS))
        first = write(sides[0], f"t{number}", one, bytes(values), gap)
        if place >= 0:
            values[place] ^= 1
            changed[f"t{number}"] = divmod(place, COLUMNS)
        pairs.append(TensorPair(first, write(sides[1], f"t{number}", other, bytes(values), gap)))
    size = (sides[1] / "data").stat().st_size - lost
    if size > 0:
        with open(sides[1] / "data", "r+b") as stream:
            stream.truncate(size)
    ends = {
        pair.one.name: max(c.at.offset + c.box.volume for c in pair.other.chunks) for pair in pairs
    }
    cut_off = {name for name, end in ends.items() if end > max(size, 0)} if size > 0 else set()
    read = [TensorSource(LocalSource.folder(side)) for side in sides]
    progress: list[int] = []
    found = tensors.compare(pairs, (read[0], read[1]), CompareOptions(), 1, progress.append)
    assert found.unreadable.keys() == cut_off
    assert {side for side, _ in found.unreadable.values()} <= {1}
    assert {n: d.first for n, d in found.differences.items()} == {
        name: first for name, first in changed.items() if name not in cut_off
    }
    assert sum(progress) == 2 * ROWS * COLUMNS * len(pairs)


def test_memory_is_bounded_whatever_lies_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_pairs, "_MOST", 4)
    entries = [write(tmp_path, f"t{n}", "whole", bytes(24), gap=4000) for n in range(8)]
    source = LocalSource.folder(tmp_path)
    pairs = [TensorPair(entry, entry) for entry in entries]
    sizes: list[int] = []

    def memory(_: Gatherer, nbytes: int) -> memoryview:
        sizes.append(nbytes)
        return memoryview(bytearray(nbytes))

    monkeypatch.setattr(Gatherer, "memory", memory)
    found = tensors.compare(pairs, (TensorSource(source),) * 2, CompareOptions(), 1)
    assert not found.differences
    assert sizes == [4 * 24 + 3 * 4000] * 4
