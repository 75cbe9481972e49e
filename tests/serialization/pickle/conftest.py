"""What all tests of pickles need."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from ckptool.serialization.pickle import instances, machine


@pytest.fixture(autouse=True, scope="package")
def small_pickles_too() -> Iterator[None]:
    """Search for instances in any pickle, however small, and for rows, however few."""
    with (
        mock.patch.object(machine, "_LEAST_REPEATED", 0),
        mock.patch.object(instances, "_WORTH_NUMPY", 0),
    ):
        yield
