"""Small parts that are written together: every byte in its place, and noted only once there."""

from __future__ import annotations

import os
import zlib
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
from ckptool.core.plan import Tile
from ckptool.engine.write import output
from ckptool.engine.write.output import OutputFiles, WrittenRun

ENTRY = TensorEntry("t", ("t",), BY_NAME["uint8"], (64,), ())


@st.composite
def layouts(draw: st.DrawFn) -> list[Part]:
    """Data of some bytes or none, literals between them, checksums of any earlier data."""
    parts: list[Part] = []
    for _ in range(draw(st.integers(1, 8))):
        for _ in range(draw(st.integers(0, 2))):
            before = [at for at, part in enumerate(parts) if isinstance(part, Data)]
            patches = draw(st.lists(st.sampled_from(before), max_size=1)) if before else []
            parts.append(Literal(b"literal", tuple(Patch(2, part) for part in patches)))
        parts.append(Data("t", Box((0,), (draw(st.integers(0, 9)),)), 1))
    return parts


@given(
    files=st.lists(layouts(), min_size=1, max_size=3),
    random=st.randoms(use_true_random=False),
    limits=st.tuples(st.sampled_from([1, 20, 1000]), st.sampled_from([1, 2])),
    in_order=st.booleans(),
)
def test_what_is_noted_is_written(
    files: list[list[Part]],
    random: Any,
    limits: tuple[int, int],
    in_order: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("out")
    rows = [FileLayout(str(number), tuple(parts)) for number, parts in enumerate(files)]
    noted: dict[tuple[int, int], int] = {}
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

    def note(run: WrittenRun) -> None:
        content = (folder / rows[run.file].path).read_bytes()
        literals = 0
        for part, offset, nbytes, crc in run.parts:
            assert (run.file, part) not in noted
            noted[run.file, part] = crc
            assert zlib.crc32(content[offset : offset + nbytes]) == crc
            literals += nbytes * isinstance(rows[run.file].parts[part], Literal)
        assert run.nbytes == literals
        assert run.tiles == sum(isinstance(rows[run.file].parts[p.part], Data) for p in run.parts)

    if not in_order:
        random.shuffle(tiles)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "_RUN", limits[0])
        patch.setattr(output, "_MOST_RUNS", limits[1])
        opened = OutputFiles(folder, rows, note)
        for tile in tiles:
            data = memoryview(images[tile.file])[tile.offset : tile.offset + tile.nbytes]
            opened.add(tile, rows[tile.file].parts, data, zlib.crc32(data))
        opened.close()
    assert {(tile.file, tile.part) for tile in tiles} <= noted.keys()
    for tile in tiles:
        content = (folder / rows[tile.file].path).read_bytes()
        span = slice(tile.offset, tile.offset + tile.nbytes)
        assert content[span] == images[tile.file][span]
    for number, at in noted:
        part = rows[number].parts[at]
        if isinstance(part, Literal):
            offset = sum(p.nbytes for p in rows[number].parts[:at])
            content = (folder / rows[number].path).read_bytes()[offset : offset + part.nbytes]
            crcs = [noted.get((number, patch.part), 0) for patch in part.patches]
            assert content == (b"li" + crcs[0].to_bytes(4, "little") + b"l" if crcs else b"literal")


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
