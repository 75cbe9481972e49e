"""Reading back the non-tensor bytes of a file: all, once, and in bounded memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.box import Box
from ckptool.core.layout import Data, FileLayout, Literal, Part, Verbatim
from ckptool.engine.check import rest as rest_module
from ckptool.engine.check.rest import Rest, RestRun
from ckptool.engine.read.sums import ReadSums
from ckptool.storage.files import ReadPolicy
from ckptool.storage.local import LocalSource

TILE, HOLE = 32, 20

parts = st.lists(
    st.one_of(
        st.integers(0, 100).map(lambda n: Literal(bytes(n))),
        st.integers(0, 30).map(lambda n: Data.of("t", Box((0,), (n,)), 1)),
        st.integers(0, 9).map(lambda n: Verbatim("copied", n)),
    ),
    max_size=30,
)


def runs_of(parts: list[Part], tmp_path: Path) -> list[RestRun]:
    source = LocalSource(tmp_path, {})
    source.policy = ReadPolicy(tile=TILE)
    file = FileLayout("f", tuple(parts))
    found = Rest([file], (source, source), ReadSums())._rest_of(file)
    return [run for run in found if isinstance(run, RestRun)]


@given(parts)
def test_each_byte_is_read_once_in_bounded_memory(parts: list[Part]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rest_module, "_HOLE", HOLE)
        runs = runs_of(parts, Path())
    looked_at: Counter[int] = Counter()
    for run in runs:
        assert run.nbytes < 2 * TILE + HOLE
        looked_at.update(range(run.offset, run.end))
        for at, nbytes in run.holes:
            assert run.offset < at < at + nbytes <= run.end
            assert nbytes <= HOLE
            looked_at.subtract(range(at, at + nbytes))
    offset, expected = 0, Counter[int]()
    for part in parts:
        if isinstance(part, Literal):
            expected.update(range(offset, offset + part.nbytes))
        offset += part.nbytes
    assert +looked_at == expected


def test_a_header_before_many_small_tensors_is_read_alone(tmp_path: Path) -> None:
    small = [Data.of(f"t{n}", Box((0,), (8,)), 1) for n in range(1000)]
    assert [run.nbytes for run in runs_of([Literal(bytes(24)), *small], tmp_path)] == [24]
