"""How to verify a checkpoint: by itself, by a manifest, against another, or to salvage it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptool.commands.options import PART, PART_OF_ALL, PLACE
from ckptool.commands.options.choices import code_names, format_names
from ckptool.commands.options.declaration import (
    COUNT,
    FLAG,
    NUMBER,
    RARE,
    TEXTS,
    OptionSet,
    group,
    option,
)
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.run import WORKERS, RunOptions
from ckptool.commands.options.target import OVERWRITE, TransferOptions

if TYPE_CHECKING:
    from ckptool.engine.check.difference import Tolerance
    from ckptool.engine.share import Share
    from ckptool.storage.url import Location


ALLOW_NONFINITE = option(
    "--allow-nonfinite",
    FLAG,
    help="For a run: also call steps good whose model has NaN or infinite values.",
    panel=RARE,
)


def ignore_option(panel: str | None = None) -> Any:
    """Declare which findings do not count."""
    return option(
        "--ignore",
        TEXTS,
        metavar="CODE",
        choices=code_names,
        help="Ignore findings with this code (repeatable).",
        panel=panel,
    )


class VerifyOptions(OptionSet):
    """How to read it, how much to check, and what fails.

    ``sample`` is the share of the data that is read, above 0 and up to 1.
    """

    read: ReadOptions = group(ReadOptions)
    quick: bool = option("--quick", FLAG, help="Read metadata only, not the data.")
    sample: float = option(
        "--sample", PART_OF_ALL, default=1.0, help="Read a share of the data, e.g. 5%."
    )
    seed: int = option(
        "--seed", COUNT, default=0, help="Seed that selects the --sample.", panel=RARE
    )
    part: Share | None = option(
        "--part",
        PART,
        help="Check the K-th of N parts of the data, each in any process; if all exit 0, the"
        " checkpoint has no errors.",
        panel=RARE,
    )
    fail_nonfinite: bool = option(
        "--fail-nonfinite",
        FLAG,
        former="--finite",
        help="Report NaN and infinite values as errors.",
    )
    allow_nonfinite: bool = ALLOW_NONFINITE
    strict: bool = option("--strict", FLAG, help="Fail on warnings too.")
    ignore: tuple[str, ...] = ignore_option()
    workers: int | None = WORKERS

    @property
    def depth(self) -> str:
        """Return how much is read: ``quick``, ``part``, ``sample`` or ``full``."""
        if self.quick:
            return "quick"
        return "part" if self.part is not None else "sample" if self.sample < 1 else "full"


class CompareOptions(OptionSet):
    """When two values are equal, and how to read the other checkpoint.

    Without ``rtol``, ``atol`` and ``cast``, element types must be equal and bits are compared.
    """

    rtol: float | None = option(
        "--rtol", NUMBER, minimum=0, help="Allowed difference relative to OTHER's value."
    )
    atol: float | None = option("--atol", NUMBER, minimum=0, help="Allowed absolute difference.")
    cast: bool = option(
        "--cast",
        FLAG,
        help="Round the model's weights to the coarser element type of both before comparing.",
    )
    other_format: str | None = option(
        "--other-format",
        metavar="FORMAT",
        choices=format_names,
        former="--against-from",
        help="Read OTHER as this format; --from is for SRC.",
        panel=RARE,
    )

    @property
    def tolerance(self) -> Tolerance | None:
        """By how much numbers may differ; None if bits are compared."""
        from ckptool.engine.check.difference import Tolerance

        if self.rtol is None and self.atol is None:
            return None
        return Tolerance(self.rtol or 0, self.atol or 0)


class LikeOptions(OptionSet):
    """The model that a checkpoint should be, and what training should have changed of it."""

    like: Location | None = option(
        "--like",
        PLACE,
        metavar="OTHER",
        help="Also compare the model's names and shapes with those of this checkpoint of any format"
        " and naming (a base model, an earlier step), or of a config.json.",
    )
    expect_changed: tuple[str, ...] = option(
        "--expect-changed",
        TEXTS,
        metavar="NAME",
        help="Report what matches and is equal to OTHER's (repeatable).",
    )
    expect_equal: tuple[str, ...] = option(
        "--expect-equal",
        TEXTS,
        metavar="NAME",
        help="Report what matches and is not equal to OTHER's (repeatable).",
    )


class FollowOptions(OptionSet):
    """Whether to verify the steps of a run while it is trained, and what to do with each."""

    follow: bool = option(
        "--follow",
        FLAG,
        help="Verify each step once it is finished, the oldest first; print one line for each, or"
        " with --json one object. Ctrl-C or SIGTERM ends it: exit 0 if nothing failed.",
    )
    then: str | None = option(
        "--then",
        metavar="'CMD {}'",
        help="With --follow: run this command for each good step, whose path replaces {}.",
    )


class ManifestOptions(OptionSet):
    """Which manifest to write, or to verify by."""

    write_manifest: Location | None = option(
        "--write-manifest",
        PLACE,
        metavar="FILE",
        help="Write the SHA-256 of every tensor, value and file, if no errors are found.",
    )
    manifest: Location | None = option(
        "--manifest",
        PLACE,
        metavar="FILE",
        help="Verify against this manifest, whatever format it was written from.",
    )
    overwrite: bool = OVERWRITE


class SalvageOptions(OptionSet):
    """How to read the source, and how to write what is intact in it."""

    read: ReadOptions = group(ReadOptions, without=("split_stacked",))
    transfer: TransferOptions = group(
        TransferOptions,
        without=("resume", "verify", "budget", "fsync", "part", "finish", "dry_run"),
    )


def salvage_options(verify: VerifyOptions, *, overwrite: bool) -> SalvageOptions:
    """Return the options of verify that a salvage needs."""
    return SalvageOptions(verify.read, TransferOptions(overwrite, run=RunOptions(verify.workers)))
