"""``ckptool verify``.

How deep ``ckptool verify`` looks, and what fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from ckptool.cli.options import (
    Casting,
    Debug,
    KeyMap,
    Overwrite,
    PerRank,
    Reading,
    Selecting,
    SourcePath,
    Unstack,
    Workers,
    rewrite_options,
)
from ckptool.cli.verify_modes import (
    Against,
    All,
    ByManifest,
    Comparing,
    LatestGood,
    SalvageTo,
    Telling,
    Told,
    WriteManifest,
    require_against,
    require_other,
    run_against,
    run_proving,
    run_salvage,
    run_steps,
    run_writing,
    told_of,
)
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.commands.open import ReadOptions
    from ckptool.commands.verify.verify import Started, VerifyOptions
    from ckptool.storage.url import Location


REWRITING = "What of SRC, under which names and as which numbers, as `ckptool convert` makes it"


def verify(
    source: SourcePath = ".",
    *,
    looking: Looking,
    codes: Annotated[bool, typer.Option("--codes", help="List the codes and end.")] = False,
    against: Against = None,
    comparing: Comparing,
    selecting: Annotated[Selecting, REWRITING],
    key_map: Annotated[KeyMap, REWRITING],
    casting: Annotated[Casting, REWRITING],
    unstack: Unstack = False,
    write_manifest: WriteManifest = None,
    manifest: ByManifest = None,
    latest_good: LatestGood = False,
    every: All = False,
    salvage: SalvageTo = None,
    overwrite: Overwrite = False,
    reading: Reading,
    per_rank: PerRank = False,
    workers: Workers = None,
    telling: Telling,
    debug: Debug = False,
) -> None:
    """Check that a checkpoint is whole, unchanged and safe, from its own files alone.

    Reads everything once. Exits 0 where it is sound, 1 where it is not, 3 where there is none.
    Other questions, one at a time: is it the same as OTHER, is it what a manifest says, which step
    of a run is the newest whole one, and what is left of a damaged one. With the options that
    `ckptool convert SRC DST` took, `--against DST` proves that DST is what it should be.
    Where GITHUB_ACTIONS is true, findings are annotations too (on stderr beside --json).
    """
    if codes:
        telling.tell_codes()
        return
    _require_one_question(against, write_manifest, manifest, latest_good or every, salvage)
    if against is None:
        require_against(comparing)
        if manifest is None and write_manifest is None:
            require_other(selecting, key_map, casting)
    elif looking.quick or looking.sample:
        raise UsageError("--against compares every byte: not with --quick or --sample")
    from ckptool.cli.options import parse_place
    from ckptool.render.progress import started_progress
    from ckptool.storage.url import location

    place = parse_place(source, "SRC")
    options = looking.options(reading.options(per_rank=per_rank, unstack=unstack), workers)
    rewriting = rewrite_options(selecting, key_map, casting)
    how = {"as_json": telling.as_json, "quiet": telling.quiet}
    if salvage is not None:
        _end(run_salvage(place, location(salvage), options, overwrite=overwrite, **how))
    if latest_good or every:
        _end(run_steps(place, options, every=every, **how))
    with started_progress(quiet=telling.quiet) as started:
        if against is not None:
            told = run_against(place, location(against), comparing, rewriting, options, started)
        elif write_manifest is not None:
            written = location(write_manifest)
            told = run_writing(place, written, rewriting, options, started, overwrite=overwrite)
        elif manifest is not None:
            told = run_proving(place, location(manifest), rewriting, options, started)
        else:
            told = _verified(place, options, started)
    telling.tell(told, strict=looking.strict)
    _end(told.report.sound)


def _verified(place: Location, options: VerifyOptions, started: Started) -> Told:
    from ckptool.commands.verify.verify import verify as run_verify

    return told_of(run_verify(place, options, started))


def _end(answer: bool) -> NoReturn:
    raise typer.Exit(0 if answer else 1)


def _require_one_question(*asked: str | bool | None) -> None:
    if sum(one is not None and one is not False for one in asked) > 1:
        raise UsageError(
            "--against, --write-manifest, --manifest, --latest-good or --all, and --salvage:"
            " one at a time"
        )


@dataclass(frozen=True)
class Looking:
    """How deep to look, and what counts."""

    quick: Annotated[bool, typer.Option("--quick", help="Read metadata only, not the data.")] = (
        False
    )
    sample: Annotated[
        str | None,
        typer.Option("--sample", metavar="SHARE", help="Read a share of the data, such as 5%."),
    ] = None
    seed: Annotated[int, typer.Option("--seed", help="What --sample chooses by.")] = 0
    finite: Annotated[
        bool, typer.Option("--finite", help="NaN and infinite values are errors.")
    ] = False
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail too.")] = False
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="CODE", help="Leave out what has this code (repeatable)."),
    ] = None

    def options(self, read: ReadOptions, workers: int | None) -> VerifyOptions:
        """What the command line says; UsageError where the share is none."""
        from ckptool.commands.verify.verify import VerifyOptions
        from ckptool.core.units import parse_share

        return VerifyOptions(
            read=read,
            quick=self.quick,
            sample=parse_share(self.sample, "--sample") if self.sample else 1.0,
            seed=self.seed,
            finite=self.finite,
            strict=self.strict,
            ignore=tuple(self.ignore or ()),
            workers=workers,
        )
