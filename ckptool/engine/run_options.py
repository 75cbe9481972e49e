"""How the engine moves bytes."""

from __future__ import annotations

from typing import Any

from ckptool.core.options import COUNT, FLAG, SIZE, OptionSet, option


def workers_option() -> Any:
    """Declare the number of threads; None is as many as suit the source and the target."""
    return option(
        "--workers",
        COUNT,
        minimum=1,
        maximum=256,
        help="Use N threads, at most 256; default: one per core, at most 8; for a URL 4 at least.",
    )


class RunOptions(OptionSet):
    """``budget`` in bytes of memory for tiles, source spans and decoded blobs together."""

    workers: int | None = workers_option()
    budget: int = option(
        "--budget", SIZE, default=1 << 30, shown="1GiB", help="Move bytes within this much memory."
    )
    fsync: bool = option(
        "--fsync/--no-fsync", FLAG, default=True, help="Wait until everything is on disk."
    )
