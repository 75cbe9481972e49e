"""Every format passes the suite meant for external ones: ``ckptool.conformance``.

It reads a fixture, writes it in the format and reads it back, cuts each of its files, and changes
bytes of each.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import FIXTURES, GOOD, Case, by_name
from trials import trials

from ckptool import conformance
from ckptool.conformance import conformance_problems
from ckptool.formats import FORMATS

TAKES_A_PART = {"megatron-torch_dist"}
"""Formats that are written of a model alone."""
WITHOUT_TRUTH = ("random_states.",)
"""Values of ranks, which are in a checkpoint and not in its truth."""


def smallest_of(name: str) -> list[Case]:
    """The smallest checkpoint of a format, if there is one that is read whole."""
    cases = [one for one in GOOD if (one.facts["format"], one.expect) == (name, "ok")]
    sizes = {
        one: sum(p.stat().st_size for p in one.path.rglob("*") if p.is_file()) for one in cases
    }
    return sorted(cases, key=sizes.__getitem__)[:1]


CASES = [one for name in FORMATS if name not in TAKES_A_PART for one in smallest_of(name)]


@pytest.mark.trials
@pytest.mark.parametrize("one", CASES, ids=by_name)
def test_a_format_passes_the_suite(
    one: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, count in (("_FLIPS", 43), ("_FEWEST_FLIPS", 2), ("_MOST_FLIPS", 6)):
        monkeypatch.setattr(conformance, name, trials(count))
    row = FORMATS[one.facts["format"]]
    problems = conformance_problems(row, FIXTURES / one.name, tmp_path)
    assert [text for text in problems if not text.split(": ")[1].startswith(WITHOUT_TRUTH)] == []
