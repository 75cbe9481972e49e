"""Fingerprints: the same for the same numbers, however they are cut, and for no others."""

from __future__ import annotations

import random
from itertools import pairwise, product

import numpy as np
import pytest

from ckptool.core.box import Box, flat_range
from ckptool.core.dtype import BY_NAME
from ckptool.engine.check import fingerprint
from ckptool.engine.check.fingerprint import Fingerprint, Printer, RunPrinter
from ckptool.engine.check.spans import Part
from ckptool.engine.read.numbers import Array
from ckptool.engine.read.rounding import cast

F32, BF16, F16 = (BY_NAME[name] for name in ("float32", "bfloat16", "float16"))
SHAPES = [(7,), (1,), (70_000,), (5, 1), (3, 70_000), (13, 6), (4, 5, 6), (3, 4, 2, 5)]


def numbers(shape: tuple[int, ...], seed: int = 0) -> Array:
    made = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return made.view(np.uint32)


def whole_print(bits: Array, rounded: str = "float32") -> Fingerprint:
    stored, printer = (
        F32 if bits.dtype.itemsize == 4 else BY_NAME[rounded],
        Printer(BY_NAME[rounded]),
    )
    printer.take(memoryview(bits.tobytes()), Part(bits.shape, Box.whole(bits.shape), stored), 0)
    return printer.found


def boxes_of_a_cut(shape: tuple[int, ...], chance: random.Random) -> list[Box]:
    """Boxes that tile a tensor: each dim is cut at random places."""
    cuts = []
    for size in shape:
        at = sorted({0, size, *(chance.randrange(size + 1) for _ in range(2))})
        cuts.append(list(pairwise(at)))
    return [Box(*map(tuple, zip(*ranges, strict=True))) for ranges in product(*cuts)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rounded", ["float32", "bfloat16", "float16"])
def test_it_is_the_same_however_a_tensor_is_cut(shape: tuple[int, ...], rounded: str) -> None:
    bits, chance = numbers(shape), random.Random(1)
    expected = whole_print(bits, rounded)
    assert expected.elements == bits.size
    for _ in range(3):
        printer = Printer(BY_NAME[rounded])
        for box in boxes_of_a_cut(shape, chance):
            chunk = np.ascontiguousarray(bits[tuple(map(slice, box.lo, box.hi))]).reshape(-1)
            part, at = Part(shape, box, F32), 0
            while at < chunk.size:
                count = chance.randrange(1, chunk.size + 1)
                printer.take(memoryview(chunk[at : at + count].tobytes()), part, at)
                at += count
        assert printer.found == expected


def test_rounded_numbers_have_that_of_what_they_are_rounded_from() -> None:
    bits = numbers((40, 33))
    for wanted in (BF16, F16):
        assert whole_print(cast(bits, F32, wanted), wanted.name) == whole_print(bits, wanted.name)


@pytest.mark.parametrize("shape", [(7,), (13, 6), (3, 4, 5), (300, 300)], ids=str)
def test_other_numbers_have_another(shape: tuple[int, ...]) -> None:
    bits, chance = numbers(shape), random.Random(2)
    expected = whole_print(bits)
    for _ in range(200):
        other = bits.copy().reshape(-1)
        at, to = chance.sample(range(other.size), 2)
        kind = chance.randrange(3)
        if kind == 0:
            other[at] ^= 1 << chance.randrange(32)
        elif kind == 1:
            other[[at, to]] = other[[to, at]]
        else:
            other = np.roll(other, chance.randrange(1, other.size))
        assert whole_print(other.reshape(shape)) != expected


def test_weights_of_columns_beyond_those_that_are_kept_are_of_the_same_kind() -> None:
    kept, further = fingerprint._weigh_words(65_000, 500), fingerprint._weigh_words(65_000, 1_000)
    assert (kept == further[:500]).all()
    assert len(set(further.tolist())) == 1_000


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rounded", ["float32", "bfloat16", "float16"])
def test_that_of_runs_is_of_all_numbers_however_they_are_cut(
    shape: tuple[int, ...], rounded: str
) -> None:
    bits, wanted = numbers(shape), BY_NAME[rounded]
    whole = RunPrinter(wanted)
    made = cast(bits, F32, wanted)
    whole.take(memoryview(made.tobytes()), Part(shape, Box.whole(shape), wanted), 0)
    for at in {0, bits.size // 3, bits.size}:
        parts = [*flat_range(shape, at, bits.size), *flat_range(shape, 0, at)]
        for other in (0, 1):
            printer = RunPrinter(wanted)
            for box in parts:
                chunk = bits[tuple(map(slice, box.lo, box.hi))].copy()
                chunk.reshape(-1)[-1] ^= other << 31
                printer.take(memoryview(chunk.tobytes()), Part(shape, box, F32), 0)
            assert (printer.found == whole.found) != other
