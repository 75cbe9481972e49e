"""Small parts that are written together: every byte in its place, and noted only once there."""

from __future__ import annotations

import os
import random
import tracemalloc
import zlib
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SUFFIX, convert_to, read_back
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckptool.core.box import Box
from ckptool.core.catalog import TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.layout import Data, FileLayout, Literal, Part, Patch
from ckptool.core.planning.groups import Tile
from ckptool.engine.read.planned import PlannedPiece
from ckptool.engine.write import output
from ckptool.engine.write.output import (
    OutputFiles,
    SmallRun,
    UnfinishedFile,
    apply_patches,
    small_runs,
)

ENTRY = TensorEntry("t", ("t",), BY_NAME["uint8"], (64,), ())


@st.composite
def layouts(draw: st.DrawFn) -> list[Part]:
    """Data of some bytes or none, literals between them, checksums of any earlier data."""
    parts: list[Part] = []
    for _ in range(draw(st.integers(1, 8))):
        for _ in range(draw(st.integers(0, 2))):
            before = [at for at, part in enumerate(parts) if isinstance(part, Data)]
            patches = draw(st.lists(st.sampled_from(before), max_size=1)) if before else []
            back = tuple(Patch(2, len(parts) - part) for part in patches)
            parts.append(Literal(b"literal", back))
        parts.append(Data.of("t", Box((0,), (draw(st.integers(0, 9)),)), 1))
    return parts


def read(tiles: Iterable[Tile], images: list[bytearray]) -> Iterator[PlannedPiece]:
    for tile in tiles:
        data = bytearray(images[tile.file][tile.offset : tile.offset + tile.nbytes])
        yield PlannedPiece(tile, 0, memoryview(data), zlib.crc32(data))
        data[:] = bytes(len(data))  # as what is read next may be where it was


@given(
    files=st.lists(layouts(), min_size=1, max_size=3),
    random=st.randoms(use_true_random=False),
    limit=st.sampled_from([1, 20, 1000]),
    in_order=st.booleans(),
)
def test_what_is_noted_is_written(
    files: list[list[Part]],
    random: Any,
    limit: int,
    in_order: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("out")
    rows = [FileLayout(str(number), tuple(parts)) for number, parts in enumerate(files)]
    noted = set[tuple[int, int]]()
    images = [bytearray(file.nbytes) for file in rows]
    tiles = []
    for number, file in enumerate(rows):
        (folder / file.path).write_bytes(bytes(file.nbytes))
        offset = 0
        for at, part in enumerate(file.parts):
            if isinstance(part, Data) and part.nbytes:
                tiles.append(Tile(number, at, offset, part.shape, ENTRY, ()))
                data = random.randbytes(part.nbytes)
                images[number][offset : offset + part.nbytes] = data
            offset += part.nbytes

    state = [UnfinishedFile(file.parts) for file in rows]

    def note(run: SmallRun) -> None:
        content = (folder / rows[run.file].path).read_bytes()
        parts, written = rows[run.file].parts, run.crcs
        ends = [*accumulate(part.nbytes for part in parts)]
        for at, crc in written.items():
            assert zlib.crc32(content[ends[at] - parts[at].nbytes : ends[at]]) == crc
        assert not noted & {(run.file, part) for part in written}
        noted.update((run.file, part) for part in written)
        of_tensors = [parts[at].nbytes for at in written if isinstance(parts[at], Data)]
        assert len(run.data) - run.literals == sum(of_tensors)
        literals = [parts[at].nbytes for at in written if isinstance(parts[at], Literal)]
        assert run.literals == sum(literals)
        state[run.file].crcs.update(written)

    if not in_order:
        random.shuffle(tiles)
    opened = OutputFiles(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "_RUN", limit)
        for run in small_runs(read(tiles, images), dict(enumerate(state))):
            opened.write(rows[run.file].path, run.start, memoryview(run.data))
            note(run)
    opened.close()
    assert {(tile.file, tile.part) for tile in tiles} <= noted
    for file, image, written in zip(rows, images, state, strict=True):
        left = {at: offset for at, offset, _ in written.unwritten()}
        offset, crcs = 0, dict[int, int]()
        for at, part in enumerate(file.parts):
            if isinstance(part, Literal):
                data = apply_patches(part, at, crcs.__getitem__)
                image[offset : offset + part.nbytes] = data if at not in left else bytes(len(data))
                assert left.get(at, offset) == offset
            else:
                crcs[at] = zlib.crc32(image[offset : offset + part.nbytes])
                assert written.part_crc(at) == crcs[at]
            offset += part.nbytes
        assert (folder / file.path).read_bytes() == image
        assert left or written.crc == zlib.crc32(image)


def test_what_is_noted_of_a_small_part_is_its_checksum() -> None:
    count = 20_000
    state = UnfinishedFile((Data.of("t", Box((0,), (8,)), 1),) * count)
    data = memoryview(b"12345678")
    tiles = (Tile(0, at, 8 * at, (8,), ENTRY, ()) for at in range(count))
    read = (PlannedPiece(tile, 0, data, 1 << 31 | tile.part) for tile in tiles)
    tracemalloc.start()
    for run in small_runs(read, {0: state}):
        state.crcs.update(run.crcs)
    noted, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(state.crcs) == count
    assert noted < 200 * count


@pytest.mark.parametrize("target", ["safetensors", "torch-save", "dcp"])
def test_many_small_tensors_take_few_writes(
    target: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"layers.{n}.weight": torch.full((n % 5, 3), float(n)) for n in range(200)}
    (out / "source").mkdir()
    save_file(tensors, out / "source/model.safetensors")
    writes: list[int] = []
    real = os.pwrite

    def count(descriptor: int, data: Any, at: int) -> int:
        writes.append(len(data))
        return real(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", count)
    convert_to(target, out / "source/model.safetensors", out / f"m{SUFFIX[target]}")
    assert len(writes) < 20
    written = read_back(target, out / f"m{SUFFIX[target]}")
    assert written == read_back("safetensors", out / "source")


def test_parts_of_which_a_later_one_cannot_be_read_are_not_written() -> None:
    """Whoever goes on with the file reads them again."""
    part = Data.of("t", Box((0,), (4,)), 1)

    def read() -> Iterator[PlannedPiece]:
        yield PlannedPiece(Tile(0, 0, 0, part.shape, ENTRY, ()), 0, memoryview(b"four"), 0)
        raise ValueError("the first")

    with pytest.raises(ValueError, match="the first"):
        next(small_runs(read(), {0: UnfinishedFile((part,))}))


def test_what_is_synced_while_it_is_written_is_the_same(tmp_path: Path) -> None:
    """Windows are begun as writes pass their ends, in whatever order these come."""
    step = output._SYNC
    data = random.Random(3).randbytes(2 * step + 100)
    files = OutputFiles(tmp_path, synced=True)
    (tmp_path / "f").touch()
    for start in (step - 7, 0, 2 * step, step + 1000):
        end = {step - 7: step + 1000, 0: step - 7, 2 * step: len(data)}.get(start, 2 * step)
        files.write("f", start, memoryview(data)[start:end])
    files.close()
    assert (tmp_path / "f").read_bytes() == data
