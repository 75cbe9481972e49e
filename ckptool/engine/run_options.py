"""How the engine moves bytes, and where to."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property
from typing import Protocol

from msgspec import Struct


class RunOptions(Protocol):
    """What a command asks of the engine."""

    @property
    def workers(self) -> int | None:
        """The number of threads; None for what suits the source and the target best."""

    @property
    def budget(self) -> int:
        """Bytes of memory for tiles, source spans and decoded blobs together."""

    @property
    def fsync(self) -> bool:
        """Whether to wait until everything is on disk."""


class StageOptions(Struct, frozen=True, dict=True):
    """``overwrite`` replaces an existing target; ``resume`` continues a partial output.

    ``plan`` and ``source`` are digests that a resumed run must share with the first, and the parts
    of a run also ``source_state``; ``verify`` means that output is compared with the source before
    it counts; ``find_own`` returns the files of the checkpoint at the target, or None.
    """

    plan: str
    source: str
    source_state: str = ""
    overwrite: bool = False
    resume: bool = False
    fsync: bool = True
    verify: bool = True
    find_own: Callable[[], Collection[str] | None] = lambda: None

    @cached_property
    def own(self) -> Collection[str] | None:
        """The files of the checkpoint at the target, once one is known to be there."""
        return self.find_own()
