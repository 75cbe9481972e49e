"""A cheap first check of names finds all quantized tensors."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.quantization import names


@pytest.mark.parametrize("pattern", [*names._KINDS.values(), names._WORDS])
def test_no_name_that_tells_a_kind_is_skipped(pattern: re.Pattern[str]) -> None:
    @given(st.from_regex(pattern, fullmatch=True))
    def check(name: str) -> None:
        assert names._MARKED.search(name)

    check()
