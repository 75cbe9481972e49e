"""What to benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ckptool.commands.options import DURATION, FILE, INTERVAL, PLACE, SHARE
from ckptool.commands.options.choices import strategy_names
from ckptool.commands.options.declaration import COUNT, FLAG, LIST, SIZE, OptionSet, group, option
from ckptool.commands.options.screen import HTML

if TYPE_CHECKING:
    from ckptool.commands.bench.cost import Interval
    from ckptool.storage.url import Location

STATE_SIZE = 1 << 30


class BenchOptions(OptionSet):
    """What to measure: state of ``size`` bytes or shaped as in ``like``, written below ``out``."""

    size: int | None = option(
        "--size",
        SIZE,
        help="State size; default: 1GiB.",
    )
    like: Location | None = option(
        "--like",
        PLACE,
        metavar="CKPT",
        help="Save tensors shaped as in this checkpoint; a path or a URL.",
    )
    out: Location = option(
        "--out",
        PLACE,
        default=Path(),
        shown=".",
        metavar="DIR",
        help="Where to save, a folder or a URL; everything is removed at the end.",
    )
    strategies: tuple[str, ...] = option(
        "--strategies",
        LIST,
        choices=strategy_names,
        help="Comma-separated names, families or globs, such as dcp-sync,dcp-async-*; or"
        " MODULE:CLASS for a saver of your own. Default: all.",
    )
    ranks: int | None = option(
        "--ranks",
        COUNT,
        minimum=1,
        help="Save on N ranks; default: one per accelerator, or 2 on the CPU.",
    )
    repeat: int = option(
        "--repeat",
        COUNT,
        default=5,
        minimum=1,
        help="Save N times after the first.",
    )
    step_time: float | None = option(
        "--step-time",
        DURATION,
        help="How long a training step of your job takes, such as 0.4s: shows costs in steps too.",
    )
    interval: Interval | None = option(
        "--interval",
        INTERVAL,
        help="How often your job saves, such as 30min or 500steps: shows the share of time spent"
        " saving.",
    )
    mtbf: float | None = option(
        "--mtbf",
        DURATION,
        help="The mean time between failures of your job, such as 12h: show what failures cost"
        " and how often to save.",
    )
    abort: bool = option(
        "--abort", FLAG, help="Also kill each strategy in mid-save, and report what is left."
    )


class BenchCommand(OptionSet):
    """What to measure, and how to show it; ``tolerance`` is the slowdown that is no regression."""

    bench: BenchOptions = group(BenchOptions)
    plot: Path | None = option("--plot", FILE, help="Draw the bars as .svg or .png.")
    compare: Path | None = option(
        "--compare", FILE, metavar="OLD.json", help="Exit 1 if this earlier run was faster."
    )
    tolerance: float = option(
        "--tolerance", SHARE, default=0.1, shown="10%", help="Allowed slowdown for --compare."
    )
    recommend: bool = option(
        "--recommend", FLAG, help="Print only the recommended strategy and why."
    )
    html: str | None = HTML
