"""Options and arguments that several commands share.

Groups of options that several commands share: one declaration, one value each.

Options that go together: a command has one parameter for them all.

Paths and URLs as the command line has them.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.commands.keymap.options import MapOptions
    from ckptool.commands.open import ReadOptions
    from ckptool.commands.rewrite import RewriteOptions
    from ckptool.commands.selection import Selection
    from ckptool.commands.transfer import TransferOptions
    from ckptool.storage.url import Location


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
        from ckptool.commands.open import ReadOptions
        from ckptool.core.sharding.tensor_parallel import parse_tp_rules

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
        from ckptool.commands.keymap.options import MapOptions
        from ckptool.core.units import parse_dims

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
    from ckptool.commands.rewrite import RewriteOptions
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
        from ckptool.core.units import parse_size
        from ckptool.engine.write.run import RunOptions

        run = RunOptions(self.workers, parse_size(self.budget, "--budget"), self.fsync)
        return TransferOptions(self.overwrite, self.resume, verify, run)


Command = Callable[..., None]


def with_groups(command: Command) -> Command:
    """The command with every group's fields as parameters of their own, in the group's place.

    A group is a parameter whose type is a dataclass with fields that are annotated as typer's
    options are. ``Annotated[Group, "Panel"]`` puts its options into a panel of the help.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    parameters: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        hint = hints[parameter.name]
        group, *panel = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if is_dataclass(group):
            groups[parameter.name] = group
            parameters += _options_of(group, *panel)
        else:
            parameters.append(parameter.replace(annotation=hint))

    @wraps(command)
    def run(**said: Any) -> None:
        for name, group in groups.items():
            said[name] = group(**{field.name: said.pop(field.name) for field in fields(group)})
        command(**said)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _options_of(group: Any, panel: str | None = None) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=_in_panel(hints[field.name], panel),
        )
        for field in fields(group)
    ]


def _in_panel(hint: Any, panel: str | None) -> Any:
    kind, option = get_args(hint)
    option = copy(option)
    option.rich_help_panel = panel or option.rich_help_panel
    return Annotated[kind, option]


SourcePath = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="A checkpoint: its folder, a file inside it, or its parent folder; a path or a URL.",
    ),
]
From = Annotated[
    str | None,
    typer.Option("--from", metavar="FORMAT", help="Read as this format instead of detecting it."),
]
PerRank = Annotated[
    bool,
    typer.Option("--per-rank", help="Keep plain tensors that differ between ranks, as NAME@rankR."),
]
Unstack = Annotated[
    bool, typer.Option("--unstack", help="Take stacked layers and experts apart: a tensor each.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and write nothing.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the target once all is written.")
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        min=1,
        max=256,
        help="Use N threads, 256 at most; default: one a core, 8 at most, and 16 for a URL.",
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Show no progress and no notes."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def parse_place(text: str, argument: str) -> Location:
    """The path or URL of an argument; UsageError where it is empty, as an unset variable is."""
    from ckptool.storage.url import location

    if not text:
        raise UsageError(f"{argument}: an empty path")
    return location(text)
