"""Which steps of a run to convert."""

from __future__ import annotations

from ckptool.commands.options.declaration import COUNT, FLAG, RARE, OptionSet, changed, option
from ckptool.commands.options.target import ConvertOptions
from ckptool.commands.options.verify import (
    ALLOW_NONFINITE,
    VerifyOptions,
    ignore_option,
)
from ckptool.errors import UsageError

_FLAGS = ("--all-steps", "--last", "--every")


class StepChoice(OptionSet):
    """Which steps of a run to convert; without any of these, the source is one checkpoint."""

    all_steps: bool = option(
        "--all-steps",
        FLAG,
        help="Convert every step of the run SRC that verify calls good, each under its own name in"
        " DST; a table gives the reason for the others. Equal targets are skipped; --resume"
        " continues an interrupted step.",
    )
    last: int | None = option(
        "--last", COUNT, minimum=1, help="Convert the newest N good steps of the run SRC."
    )
    every: int | None = option(
        "--every",
        COUNT,
        minimum=1,
        metavar="K",
        help="Convert the good steps of the run SRC whose number is a multiple of K.",
    )
    allow_nonfinite: bool = ALLOW_NONFINITE
    ignore: tuple[str, ...] = ignore_option(RARE)

    def wants(self, number: int | None) -> bool:
        """Return whether a step of this number is asked for, if it is good."""
        return self.every is None or (number is not None and number % self.every == 0)

    def judging(self, options: ConvertOptions) -> VerifyOptions:
        """Return how to tell a good step from others: a dry run by its metadata alone."""
        how = options.transfer
        return VerifyOptions(
            options.read,
            quick=how.dry_run,
            allow_nonfinite=self.allow_nonfinite,
            ignore=self.ignore,
            workers=how.run.workers,
        )

    def require_one_way(self, options: ConvertOptions) -> None:
        """Raise UsageError for options that cannot be combined."""
        flags = [flag for flag in changed(self) if flag in _FLAGS]
        if len(flags) > 1:
            raise UsageError(f"{' and '.join(flags)}: one at a time")
        if not flags:
            raise UsageError(
                "--allow-nonfinite and --ignore say which steps of a run are good",
                hint="add --all-steps, --last N or --every K",
            )
        if options.transfer.part is not None or options.transfer.finish:
            shared = "--finish" if options.transfer.finish else "--part"
            raise UsageError(f"{shared} is for one checkpoint, not for several steps")
