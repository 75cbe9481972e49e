"""What torchrun tells a process by its environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckptool.errors import UsageError

_HINT = "torchrun sets it; to work alone, unset RANK and WORLD_SIZE"


class Launch(NamedTuple):
    """The place of a process among the ranks of a job, and where they meet (host:port)."""

    rank: int
    size: int
    local_rank: int
    address: str


def launch_of(environment: Mapping[str, str]) -> Launch | None:
    """Return what torchrun tells, None of a process that it did not start.

    Raises UsageError where a variable is missing, is no number, or does not fit the others.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    rank, size = number_in(environment, "RANK"), number_in(environment, "WORLD_SIZE")
    if rank >= size:
        raise UsageError(f"RANK={rank} of WORLD_SIZE={size}: no such rank", hint=_HINT)
    local = number_in(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else 0
    host = environment.get("MASTER_ADDR")
    if not host:
        raise UsageError("RANK and WORLD_SIZE are set, and MASTER_ADDR is not", hint=_HINT)
    port = number_in(environment, "MASTER_PORT")
    if port > 65535:
        raise UsageError(f"MASTER_PORT={port}: no port", hint=_HINT)
    return Launch(rank, size, local, f"{host}:{port}")


def number_in(environment: Mapping[str, str], name: str) -> int:
    """Return a variable that is a natural number; UsageError where it is none, or not set."""
    text = environment.get(name)
    if text is None:
        raise UsageError(f"RANK and WORLD_SIZE are set, and {name} is not", hint=_HINT)
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise UsageError(f"{name}={text!r}: not a number", hint=_HINT)
    return int(text)
