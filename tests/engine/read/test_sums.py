"""Notes of what was made are small, and say what was noted."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.box import Box
from ckptool.engine.read.sums import MadeBox, ReadSums, checksum

COUNT = 10_000


def test_a_note_of_a_box_is_small() -> None:
    sums = ReadSums()
    tracemalloc.start()
    try:
        for row in range(COUNT):
            sums.note_made("w", Box((row * 512, 0), (row * 512 + 512, 1024)), b"%d" % row)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken / COUNT < 50
    assert len(sums.made("w", 2)) == COUNT


@given(
    st.integers(0, 4).flatmap(
        lambda dims: st.lists(
            st.tuples(
                st.lists(st.integers(0, 1 << 60), min_size=2 * dims, max_size=2 * dims),
                st.binary(max_size=9),
                st.sampled_from([(), (("infinite", 3),)]),
            ),
            min_size=1,
        )
    )
)
def test_what_was_noted_is_returned_once(
    noted: list[tuple[list[int], bytes, tuple[tuple[str, int], ...]]],
) -> None:
    sums, wanted = ReadSums(), set[MadeBox]()
    dims = len(noted[0][0]) // 2
    for edges, data, lost in noted:
        box = Box(tuple(edges[:dims]), tuple(edges[dims:]))
        sums.note_made("w", box, data, lost)
        wanted.add(MadeBox(box, checksum(data), lost))
    found = sums.made("w", dims)
    assert len(found) == len(wanted)
    assert {*found} == wanted
    assert not sums.made("other", dims)
