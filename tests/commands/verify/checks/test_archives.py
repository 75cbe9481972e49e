"""An archive similar to a sound one is judged as if it were the first to be checked."""

from __future__ import annotations

import io

import pytest
from fuzz_target import Bytes

from ckptool.commands.verify.checks.archives import ArchiveCheck, ArchiveTemplates
from ckptool.commands.verify.checks.pickles import PickleAudit
from ckptool.core.catalog import Container
from ckptool.serialization.zip import Region, read_directory

torch = pytest.importorskip("torch")


def saved(seed: int, rows: int) -> bytes:
    stream = io.BytesIO()
    torch.save(torch.rand((rows, 20), generator=torch.manual_seed(seed)), stream)
    return stream.getvalue()


def judged(
    first: bytes, second: bytes, *, both: bool
) -> tuple[list[str], list[tuple[object, ...]]]:
    """What is said of the second of two archives in one file, after the first or without it."""
    data = first + second
    check = ArchiveCheck(Bytes(data, "items"), PickleAudit())
    if both:
        check.look_at(Container("items", 0, len(first)))
        assert not check.problems
    before = len(check.spans)
    check.look_at(Container("items", len(first), len(second)))
    spans = [(span.offset, span.nbytes, span.crc32, span.what) for span in check.spans[before:]]
    return list(check.problems), spans


@pytest.mark.parametrize("rows", [2, 300], ids=["all at hand", "both ends at hand"])
def test_a_changed_byte_shows_as_in_the_first(rows: int) -> None:
    first, second = saved(1, rows), saved(2, rows)
    end = len(second)
    for at in [*range(0, min(1000, end), 2), *range(max(0, end - 1300), end, 2)]:
        changed = second[:at] + bytes([second[at] ^ 0x41]) + second[at + 1 :]
        assert judged(first, changed, both=True) == judged(first, changed, both=False), at


def test_one_that_differs_in_its_values_alone_is_known() -> None:
    first, second = (saved(seed, 300) for seed in (1, 2))
    regions = [Region(Bytes(d, "x"), "x", 0, len(d)) for d in (first, second)]
    templates = ArchiveTemplates()
    templates.add(regions[0], read_directory(regions[0]).values())
    found = templates.match(regions[1])
    records = read_directory(regions[1])
    assert found == [records["archive/data/0"], records["archive/.data/serialization_id"]]
