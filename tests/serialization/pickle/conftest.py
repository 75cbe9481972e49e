"""What all tests of pickles need."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from ckptool.serialization.pickle import machine


@pytest.fixture(autouse=True, scope="package")
def small_pickles_too() -> Iterator[None]:
    """Search for instances in any pickle, however small."""
    with mock.patch.object(machine, "_LEAST_REPEATED", 0):
        yield
