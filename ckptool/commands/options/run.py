"""Options of every command that moves tensor bytes."""

from __future__ import annotations

from ckptool.commands.options.declaration import COUNT, FLAG, RARE, SIZE, SPEED, OptionSet, option

WORKERS = option(
    "--workers",
    COUNT,
    minimum=1,
    maximum=256,
    panel=SPEED,
    help="Use N threads, at most 256; default: one per core, at most 8; for a URL, at least 4.",
)


class RunOptions(OptionSet):
    """``budget`` is in bytes of memory for tiles, source spans and decoded blobs together."""

    workers: int | None = WORKERS
    budget: int = option(
        "--budget",
        SIZE,
        default=1 << 30,
        shown="1GiB",
        help="Move bytes within this much memory.",
        panel=RARE,
    )
    fsync: bool = option(
        "--fsync/--no-fsync",
        FLAG,
        default=True,
        help="Wait until everything is on disk.",
        panel=RARE,
    )
