"""An honest checkpoint that an attack leaves readable, and numbers of headers."""

from __future__ import annotations

import attack_build as b
from attack_harness import Outcome

W = ("F32", (2, 3), b.WEIGHT)


def le(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little")


def require_honest(outcome: Outcome) -> None:
    assert outcome.answered, str(outcome)
    if outcome.kind == "ok" and "w" in outcome.tensors:
        assert outcome.tensors["w"] == W, "a wrong tensor was written"
