"""The fuzzer's targets on their seeds, on bytes near them, and on all past crashes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fuzz_target import TARGETS, one_input, seeds

CRASHES = Path(__file__).parent / "crashes"


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_their_neighbors(name: str) -> None:
    """Whatever the bytes: a result or an error of ours, which ``one_input`` takes."""
    run, dice, found = one_input(name), random.Random(name), list(seeds(name))
    assert found
    for seed in found:
        run(seed)
    for _ in range(200):
        data = bytearray(dice.choice(found))
        for _ in range(dice.randrange(1, 4)):
            data[dice.randrange(len(data))] = dice.choice([0, 0x7F, 0xFF, dice.randrange(256)])
        run(bytes(data[: dice.randrange(len(data) + 1)] if dice.random() < 0.2 else data))


@pytest.mark.parametrize("path", sorted(CRASHES.glob("*/*")), ids=lambda path: path.name)
def test_what_once_crashed(path: Path) -> None:
    one_input(path.parent.name)(path.read_bytes())
