"""A cheap first check of names finds all quantized tensors."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.quantization import names
from ckptool.core.quantization.schemes import SCHEMES

TEXT, BY_KIND = names._patterns()


@pytest.mark.parametrize("pattern", [*BY_KIND.values(), re.compile(r".*\.qweight")])
def test_no_name_that_tells_a_kind_is_skipped(pattern: re.Pattern[str]) -> None:
    @given(st.from_regex(pattern, fullmatch=True))
    def check(name: str) -> None:
        assert TEXT.search(name)

    check()


def test_each_kind_is_of_one_scheme() -> None:
    kinds = [kind.name for scheme in SCHEMES for kind in scheme.kinds]
    marks = [kind for scheme in SCHEMES for kind in scheme.marks]
    assert len(marks) == len({*marks})
    assert {name for name in kinds if kinds.count(name) > 1} == {"MXFP4"}
