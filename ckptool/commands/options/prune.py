"""Which steps of a run to keep."""

from __future__ import annotations

from msgspec import NODEFAULT

from ckptool.commands.options.declaration import COUNT, FLAG, OptionSet, group, option
from ckptool.commands.options.verify import VerifyOptions

_CHECKING = ("sample", "seed", "part", "fail_nonfinite")
_READING = ("split_stacked", "tp_rule", "flat_params")
"""How tensors are joined or split where the files do not say how: prune converts nothing."""


class PruneOptions(OptionSet):
    """Which steps to keep, how to verify them, and whether to remove the others."""

    keep_last: int = option(
        "--keep-last",
        COUNT,
        default=NODEFAULT,
        minimum=1,
        help="Keep the newest N steps that verify calls good.",
    )
    keep_every: int | None = option(
        "--keep-every",
        COUNT,
        minimum=1,
        metavar="K",
        help="Also keep every step whose number is a multiple of K.",
    )
    no_optimizer: bool = option(
        "--no-optimizer",
        FLAG,
        former="--drop-optimizer-of-older",
        help="Remove the optimizer's state from steps that only --keep-every keeps; the newest keep"
        " theirs.",
    )
    yes: bool = option(
        "--yes", FLAG, help="Remove the others; without it, only show what would be removed."
    )
    verify: VerifyOptions = group(VerifyOptions, without=(*_CHECKING, *_READING))
