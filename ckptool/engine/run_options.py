"""How the engine moves bytes, and where to."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any

from msgspec import Struct

from ckptool.core.options import COUNT, FLAG, SIZE, OptionSet, option


def workers_option() -> Any:
    """Declare the number of threads; None means as many as suit the source and the target."""
    return option(
        "--workers",
        COUNT,
        minimum=1,
        maximum=256,
        help="Use N threads, at most 256; default: one per core, at most 8; for a URL, at least 4.",
    )


class RunOptions(OptionSet):
    """``budget`` is in bytes of memory for tiles, source spans and decoded blobs together."""

    workers: int | None = workers_option()
    budget: int = option(
        "--budget", SIZE, default=1 << 30, shown="1GiB", help="Move bytes within this much memory."
    )
    fsync: bool = option(
        "--fsync/--no-fsync", FLAG, default=True, help="Wait until everything is on disk."
    )


class StageOptions(Struct, frozen=True, dict=True):
    """``overwrite`` replaces an existing target; ``resume`` continues a partial output.

    ``plan``, made by ``make_plan``, and ``source`` are digests that a resumed run must share with
    the first, and the parts of a run also ``source_state``; ``verify`` means that output is
    compared with the source before it counts; ``find_own`` returns the files of the checkpoint at
    the target, None if there is none.
    """

    make_plan: Callable[[], str]
    source: str
    source_state: str = ""
    overwrite: bool = False
    resume: bool = False
    fsync: bool = True
    verify: bool = True
    find_own: Callable[[], Collection[str] | None] = lambda: None

    @cached_property
    def plan(self) -> str:
        """The digest of the plan, made on first access: a dry run does not need it."""
        return self.make_plan()

    @cached_property
    def own(self) -> Collection[str] | None:
        """The files of the checkpoint at the target, once one is known to be there."""
        return self.find_own()
