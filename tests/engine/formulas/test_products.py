"""A product of split factors is exact up to its last rounding, in whatever order BLAS adds."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.engine.formulas.products import Factor, multiply, split
from ckptool.engine.read.numbers import Array

NUMBERS = st.floats(-(2.0**60), 2.0**60, width=32)
PROGRAM = """
import hashlib, numpy
from ckptool.engine.formulas.products import multiply, split
random, digest = numpy.random.default_rng(0), hashlib.sha256()
for rank in (1, 3, 16, 64, 200):
    for rows, columns in ((64, 256), (7, 77), (1, 5)):
        left = random.standard_normal((rows, rank)).astype("f4").astype("f8")
        right = random.standard_normal((rank, columns)).astype("f4").astype("f8")
        product = numpy.empty((rows, columns))
        multiply(split(left, 1), split(right[None], 1), product[None])
        digest.update(product.tobytes())
print(digest.hexdigest())
"""


def product(left: Array, right: Array) -> Array:
    made = np.empty((len(left), right.shape[1]))
    multiply(split(left, 1), split(right[None], 1), made[None])
    return made


@given(st.integers(1, 40), st.data())
def test_the_order_of_the_rank_changes_nothing(rank: int, data: st.DataObject) -> None:
    numbers = st.lists(NUMBERS, min_size=2 * rank, max_size=2 * rank)
    left = np.array(data.draw(numbers)).reshape(2, rank)
    right = np.array(data.draw(numbers)).reshape(rank, 2)
    order = data.draw(st.permutations(range(rank)))
    found = product(left, right)
    assert found.tobytes() == product(left[:, order], right[order]).tobytes()
    assert found[:1].tobytes() == product(left[:1], right).tobytes()
    exact = [
        [
            sum(map(Fraction.__mul__, map(Fraction, row), map(Fraction, column)))
            for column in right.T
        ]
        for row in left
    ]
    largest = np.abs(left).max(axis=1)[:, None] * np.abs(right).max(axis=0)
    for index in np.ndindex(2, 2):
        wrong = abs(Fraction(float(found[index])) - exact[index[0]][index[1]])
        assert wrong <= rank * Fraction(float(largest[index])) * Fraction(1, 1 << 46)


def test_floats_of_one_size_are_exact_up_to_the_last_rounding() -> None:
    random = np.random.default_rng(0)
    left, right = (random.standard_normal(shape).astype("f4") for shape in ((9, 16), (16, 9)))
    found = product(left.astype("f8"), right.astype("f8"))
    for row, column in np.ndindex(9, 9):
        wanted = math.fsum(map(float, left[row].astype("f8") * right[:, column].astype("f8")))
        assert abs(found[row, column] - wanted) <= 2 * math.ulp(max(1.0, abs(wanted)))


@pytest.mark.parametrize("processor", ["Nehalem", "Prescott"])
def test_all_processors_compute_the_same(processor: str) -> None:
    """OpenBLAS multiplies as on an older x86; elsewhere the name means nothing to it."""
    runs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, **named},
            capture_output=True,
            check=True,
        ).stdout
        for named in ({}, {"OPENBLAS_CORETYPE": processor})
    ]
    assert runs[0] == runs[1]


def test_what_is_not_finite_is_multiplied_as_it_is() -> None:
    left, right = np.array([[math.inf, 1.0]]), np.array([[2.0, 0.0], [3.0, 4.0]])
    with np.errstate(all="ignore"):
        found = product(left, right)
    assert found[0, 0] == math.inf
    assert math.isnan(found[0, 1])
    assert split(right, 0).whole.tobytes() == right.tobytes()
    assert Factor(right).whole is right
