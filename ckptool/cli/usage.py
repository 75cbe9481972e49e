"""Wrong words on the command line, answered as every other error is: what, why, and what works."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import pairwise
from operator import itemgetter
from shlex import quote
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand

from ckptool.cli.examples import EXAMPLES
from ckptool.core.text import list_some
from ckptool.errors import UsageError

RENAMED = {"--map": "--shards", "--ranks": "--rank-bytes", "--junit": "--format junit"}
"""New names of options by former ones, of which other commands still have some."""
OTHERS_OPTIONS = {
    "--out": "--output --output-dir --output-path --save -o",
    "--to": "--format --target-format --output-format --out-format --type",
    "--format": "--output-format",
    "--from": "--input-format --source-format --from-format",
    "--overwrite": "--force --replace --clobber -f",
    "--yes": "--force --delete -f -y",
    "--select": "--include --only --keep --filter --tensors --keys",
    "--tensors": "--select --include --only --filter --keys --layers",
    "--drop": "--exclude --skip --remove --without",
    "--dtype": "--torch-dtype --precision --cast",
    "--dtype bf16": "--bf16 --bfloat16",
    "--dtype fp16": "--fp16 --half",
    "--dtype fp32": "--fp32 --float",
    "--mesh dp=2,tp=4": "--tp --dp --pp --ep --fsdp --tp-size --dp-size --tensor-parallel-size"
    " --tensor-model-parallel-size --data-parallel-size --target-tensor-parallel-size",
    "--mesh 8": "--ranks --world --nproc --nproc-per-node --num-gpus --gpus --num-ranks",
    "--workers": "--threads --jobs --num-workers --num-threads --processes -j",
    "--salvage": "--fix --repair --recover",
    "--keep-last": "--keep --max-to-keep --save-total-limit --last",
    "--against": "--compare --reference --expected --baseline",
    "--write-manifest": "--hash --sha256 --checksum --checksums",
    "--dry-run": "--plan-only --dryrun --simulate -n",
    "--budget": "--memory --max-memory --memory-limit",
    "--map": "--mapping --key-map --key-mapping --keymap",
    "--values": "--metadata --hyperparameters --config",
    "--sort size": "--top --largest --by-size",
    "--all": "--recursive --all-steps -r",
    "--latest-good": "--resumable --can-resume --resume --good --latest",
    "--all-steps": "--recursive --all -r",
    "--quiet": "--silent -s",
    "--debug": "--verbose --traceback -v",
}
"""What other tools call options, after what it is here, where a command has that."""
_ROWS = "--rows --row --slice --slices --range --index --head -n"
_SLICE = "a slice is part of the name: `ckptool extract CKPT 'NAME[0:3]'`"
OTHERWISE = {
    ("prune", "--dry-run --dryrun --plan-only --simulate -n"): "prune only shows what it would"
    " remove, as long as --yes is left out",
    **{(command, _ROWS): _SLICE for command in ("inspect", "extract")},
}
"""Options that a command has no use for, and what does what they ask."""
_TARGETS = (
    "--output",
    "--output-dir",
    "--output-path",
    "--out",
    "-o",
    "--dst",
    "--dest",
    "--target",
)
_SOURCES = ("--input", "--checkpoint", "--ckpt", "--path", "--src", "--source", "--model", "-i")
"""What other tools call the words that have no option's name here."""
_SAID = (
    (r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", r"unexpected words: \1"),
    (r"Missing (argument|option) '(.*)'", r"missing \1 \2"),
    (r"Option '(.*)' requires an argument", r"\1 needs a value"),
    (r"Option '(.*)' requires (\d+) arguments", r"\1 needs \2 words"),
    (r"Option '(.*)' does not take a value", r"\1 takes no value"),
    (
        r"Invalid value for '(.*?)': ('.*') is not a valid int.*",
        r"invalid \1 \2: not a whole number",
    ),
    (r"Invalid value for '(.*?)': ('.*') is not a valid.*", r"invalid \1 \2: not a number"),
    (
        r"Invalid value for '(.*?)': (.*) is not in the range x>=(.*)",
        r"invalid \1 \2: less than \3",
    ),
    (
        r"Invalid value for '(.*?)': (.*) is not in the range (.*)<=x<=(.*)",
        r"invalid \1 \2: not \3 to \4",
    ),
)
"""Typer's sentences, and ours."""
_HELP = "NoArgsIsHelpError"
"""The name of the error with which typer shows the help of a command without words."""
_SHOWS_ALL = "ckptool.help_all"
"""The key in a context whose help is shown with what is rarely needed."""


class Command(TyperCommand):
    """A command whose wrong words are answered with the ones that it has."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of the command line; UsageError if they are wrong."""
        with answering(ctx):
            _require_values(self, args)
            _require_once(self, args)
            return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show the panels in their order; what is rarely needed only for ``--help-all``."""
        from ckptool.commands.options.declaration import RARE, SPEED

        order = {None: 0, SPEED: 2} | ({RARE: 3} if ctx.meta.get(_SHOWS_ALL) else {RARE: -1})
        declared = self.params
        places = [order.get(getattr(param, "rich_help_panel", None), 1) for param in declared]
        pairs = sorted(zip(places, declared, strict=True), key=itemgetter(0))
        self.params = [param for place, param in pairs if place >= 0]
        try:
            super().format_help(ctx, formatter)
        finally:
            self.params = declared


def show_all_help(ctx: typer.Context, value: bool) -> None:
    """Show the help with what is rarely needed, and exit, if that is asked."""
    if value:
        ctx.meta[_SHOWS_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


def _require_values(command: Any, args: Sequence[str]) -> None:
    """Raise UsageError where a flag stands in the place of an option's value, as typer allows."""
    flags = {flag: item for item in command.params for flag in (*item.opts, *item.secondary_opts)}
    words = args[: args.index("--")] if "--" in args else args
    for word, value in pairwise(words):
        option = flags.get(word) if word.startswith("--") else None
        if option is not None and not option.is_flag and value in flags and value.startswith("--"):
            raise UsageError(f"{word} needs a value", hint=_describe(option))


def _require_once(command: Any, args: Sequence[str]) -> None:
    """Raise UsageError where an option of one value has two, of which typer drops the first."""
    values = dict[str, str]()
    once = {flag: param for param in command.params if _takes_one(param) for flag in param.opts}
    words = args[: args.index("--")] if "--" in args else args
    for word, following in pairwise([*words, ""]):
        flag, equals, inline = word.partition("=")
        value = inline if equals else following
        if (option := once.get(flag)) and values.setdefault(option.name, value) != value:
            message = f"{option.opts[0]} takes one value, not {values[option.name]} and {value}"
            raise UsageError(message, hint=_describe(option))


def _takes_one(parameter: Any) -> bool:
    """Return whether a parameter is an option of one value, of one word."""
    is_option = parameter.opts[0].startswith("-")
    return is_option and not (parameter.is_flag or parameter.multiple) and parameter.nargs == 1


@contextmanager
def answering(ctx: Any) -> Iterator[None]:
    """Raise UsageError, with a hint, for typer's own errors on words of the command of ``ctx``."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, "format_message") or type(error).__name__ == _HELP:
            raise
        _raise(error, ctx)


def _raise(error: Any, ctx: Any) -> NoReturn:
    """Raise UsageError for one of typer's."""
    wrong = getattr(error, "option_name", "") if hasattr(error, "possibilities") else ""
    message = f"no such option: {wrong}" if wrong else _reword(error.format_message())
    raise UsageError(message, hint=_hint(error, wrong, ctx)) from None


def _reword(message: str) -> str:
    """Return a sentence of typer's in our words."""
    text = message.strip().removesuffix(".")
    for theirs, ours in _SAID:
        if match := re.fullmatch(theirs, text):
            return match.expand(ours)
    return f"{text[:1].lower()}{text[1:]}"


def _hint(error: Any, wrong: str, ctx: Any) -> str:
    """Return what works: the option that was meant, what an option takes, or how it is called."""
    called = " ".join(["ckptool", *([ctx.info_name] if ctx.parent else [])])
    words = [piece.strip("{}") for piece in ctx.command.collect_usage_pieces(ctx)]
    usage = " ".join([called, *words])
    if wrong:
        return _hint_for(wrong, called, usage, ctx)
    name = getattr(error, "option_name", None)
    option = getattr(error, "param", None) or _option(name, ctx)
    if option is not None and option.opts[0].startswith("-"):
        usage = _describe(option)
    example = min(EXAMPLES.get(ctx.info_name, ()), key=len, default="")
    lacks = type(error).__name__.startswith("Missing")
    if instead := _word_too_many(error, ctx):
        return instead
    if not (lacks and example):
        return usage
    # Help ends as a sentence, but what may be repeated ends in an ellipsis
    sentence = usage if usage.endswith("...") else usage.removesuffix(".")
    return f"{sentence}; such as `{example}`"


def _describe(option: Any) -> str:
    """Return an option as it is typed, and what it does."""
    takes = f" {option.metavar}" if option.metavar else ""
    return f"{option.opts[0]}{takes}: {option.help}"


def _word_too_many(error: Any, ctx: Any) -> str | None:
    """Return the command for what one word too many of verify or diff means; None of others."""
    words = re.search(r"unexpected words: (\S+)$", _reword(error.format_message()))
    if words is None or ctx.info_name not in ("verify", "diff"):
        return None
    if ctx.info_name == "diff":
        return f"`--select {quote(words[1])}` compares only what it names"
    source, other = quote(ctx.params["source"]), quote(words[1])
    return f"`ckptool verify {source} --against {other}` compares both"


def _option(flag: str | None, ctx: Any) -> Any:
    """Return the option of a command with this flag, None without one."""
    return next((param for param in ctx.command.params if flag in param.opts), None)


def _hint_for(wrong: str, called: str, usage: str, ctx: Any) -> str:
    """Return what a wrong flag stands for, or which commands have it."""
    for (command, theirs), instead in OTHERWISE.items():
        if command == ctx.info_name and wrong in theirs.split():
            return instead
    flags = [flag for param in ctx.command.params for flag in (*param.opts, *param.secondary_opts)]
    meant = [RENAMED.get(wrong, ""), *_called_by_others(wrong)]
    for word in meant:
        if word.partition(" ")[0] in flags:
            return f"did you mean {word}?"
    arguments = [param.metavar for param in ctx.command.params if not param.opts[0].startswith("-")]
    if (wrong in _TARGETS and {"DST", "OUT"} & {*arguments}) or (wrong in _SOURCES and arguments):
        return f"it is a word of its own, without an option: {usage}"
    close = get_close_matches(wrong, flags, n=1, cutoff=0.75)
    for word in (wrong, *meant, *close):
        if word in flags:
            return f"did you mean {word}?"
        if elsewhere := _commands_with(word, ctx):
            after = (
                "it comes after the command"
                if ctx.parent is None
                else f"`{called} --help` lists those it has"
            )
            return f"{word} is an option of {elsewhere}; {after}"
    return f"`{called} --help` lists the options"


def _called_by_others(wrong: str) -> list[str]:
    """Return what a word of other tools may be here."""
    return [ours for ours, theirs in OTHERS_OPTIONS.items() if wrong in theirs.split()]


def _commands_with(word: str, ctx: Any) -> str:
    """Return the other commands that have an option, in words; empty if none has."""
    group = ctx.find_root().command
    return list_some(group.commands_with(word.partition(" ")[0]), 3) if word else ""
