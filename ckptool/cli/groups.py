"""Groups of options that several commands share: one declaration, one value each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptool.cli.arguments import From, Overwrite, Workers

if TYPE_CHECKING:
    from ckptool.commands.map_report import MapOptions
    from ckptool.commands.read_options import ReadOptions
    from ckptool.commands.rewriting import RewriteOptions
    from ckptool.commands.selection import Selection
    from ckptool.commands.transfer import TransferOptions


@dataclass(frozen=True)
class Reading:
    """How to read the source."""

    from_format: From = None
    tp_rule: Annotated[
        list[str] | None,
        typer.Option(
            "--tp-rule",
            metavar="GLOB=RULE",
            help="Say how tensor-parallel ranks' parameters fit together, where the files do not:"
            " replicate, column, row, gated or Shard(dim) (repeatable, first wins).",
        ),
    ] = None
    flat_params: Annotated[
        Path | None,
        typer.Option(
            "--flat-params",
            metavar="FILE",
            help="Take FSDP1's flat parameters apart by this JSON of names and shapes, in order.",
        ),
    ] = None
    world_size: Annotated[
        int | None,
        typer.Option(
            "--world-size",
            metavar="N",
            min=1,
            help="Read the files of N ranks, where rank files of several saves lie together, or"
            " nothing records how many there were.",
        ),
    ] = None

    def options(self, *, per_rank: bool = False, unstack: bool = False) -> ReadOptions:
        """What the command line says; UsageError where a rule makes no sense."""
        from ckptool.commands.read_options import ReadOptions
        from ckptool.core.tp_rules import parse_tp_rules

        rules = parse_tp_rules(self.tp_rule)
        return ReadOptions(
            self.from_format,
            per_rank,
            self.flat_params,
            rules,
            unstack,
            world_size=self.world_size,
        )


@dataclass(frozen=True)
class Selecting:
    """What to take of the source, and how to call it."""

    select: Annotated[
        list[str] | None,
        typer.Option("--select", metavar="GLOB", help="Keep only what matches (repeatable)."),
    ] = None
    drop: Annotated[
        list[str] | None,
        typer.Option("--drop", metavar="GLOB", help="Leave out what matches (repeatable)."),
    ] = None
    model_only: Annotated[
        bool, typer.Option("--model-only", help="Keep the model, under its own names.")
    ] = False
    strip_prefix: Annotated[
        str | None,
        typer.Option("--strip-prefix", metavar="PREFIX", help="Take PREFIX off the names of SRC."),
    ] = None
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--rename",
            metavar="REGEX=REPLACEMENT",
            help="Rename in SRC what matches (repeatable, in order).",
        ),
    ] = None

    def options(self) -> Selection:
        """What the command line says."""
        from ckptool.commands.selection import Selection

        return Selection(
            tuple(self.select or ()),
            tuple(self.drop or ()),
            self.model_only,
            self.strip_prefix,
            tuple(self.rename or ()),
        )


@dataclass(frozen=True)
class KeyMap:
    """Which key map to apply, and what it needs."""

    key_map: Annotated[
        str | None,
        typer.Option(
            "--map",
            metavar="NAME|FILE",
            help="Give tensors the names and layout of another framework: a built-in key map"
            " (`ckptool maps` lists them), a TOML file, or auto.",
        ),
    ] = None
    dims: Annotated[
        list[str] | None,
        typer.Option(
            "--dim",
            metavar="NAME=SIZE",
            help="Give the size of a dim that the --map names (repeatable).",
        ),
    ] = None
    inverse: Annotated[
        bool | None,
        typer.Option(
            "--inverse/--no-inverse",
            help="Apply the --map backwards, from its `to` names to its `from` names; default:"
            " as the names fit.",
            show_default=False,
        ),
    ] = None
    hf_assets: Annotated[
        Path | None,
        typer.Option(
            "--hf-assets",
            metavar="FOLDER",
            help="Copy the config.json and tokenizer files of FOLDER; the --map reads dims there.",
        ),
    ] = None

    def options(self) -> MapOptions:
        """What the command line says; UsageError where a dim is not NAME=SIZE."""
        from ckptool.commands.map_report import MapOptions
        from ckptool.core.amounts import parse_dims

        return MapOptions(self.key_map, parse_dims(self.dims or ()), self.hf_assets, self.inverse)


@dataclass(frozen=True)
class Casting:
    """As which numbers to take the source."""

    dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype",
            metavar="DTYPE|GLOB=DTYPE",
            help="Cast the model's weights, e.g. bf16; with a GLOB what matches, whatever it is"
            " (repeatable, first wins). Integers and tensors without dims are never cast.",
        ),
    ] = None
    dequantize: Annotated[
        bool,
        typer.Option(
            "--dequantize", help="Make numbers of FP8, INT8 and MXFP4: bf16, or what --dtype says."
        ),
    ] = False


def rewrite_options(selecting: Selecting, key_map: KeyMap, casting: Casting) -> RewriteOptions:
    """What the command line says of the rewriting of SRC; UsageError where it makes no sense."""
    from ckptool.commands.rewriting import RewriteOptions
    from ckptool.core.casts import parse_casts

    casts = parse_casts(casting.dtype or ())
    return RewriteOptions(
        selecting.options(), key_map.options(), casts.model, casts.rules, casting.dequantize
    )


@dataclass(frozen=True)
class Writing:
    """How to move the bytes."""

    overwrite: Overwrite = False
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue what an interrupted run left.")
    ] = False
    workers: Workers = None
    budget: Annotated[
        str, typer.Option("--budget", metavar="SIZE", help="Move bytes within this much memory.")
    ] = "1GiB"
    fsync: Annotated[
        bool, typer.Option("--fsync/--no-fsync", help="Wait until the disk has everything.")
    ] = True

    def options(self, *, verify: bool = False) -> TransferOptions:
        """What the command line says, with the defaults where it says nothing."""
        from ckptool.commands.transfer import TransferOptions
        from ckptool.core.amounts import parse_size
        from ckptool.engine.run import RunOptions

        run = RunOptions(self.workers, parse_size(self.budget, "--budget"), self.fsync)
        return TransferOptions(self.overwrite, self.resume, verify, run)
