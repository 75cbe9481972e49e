"""How to merge checkpoints: what each tensor is computed as, and how to write it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from os import fspath
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Any

from ckptool.commands.options import FILE, MESH, PLACE, parse_place
from ckptool.commands.options.declaration import (
    COUNT,
    FLAG,
    NUMBER,
    TEXTS,
    Kind,
    OptionSet,
    group,
    option,
    parse_whole,
)
from ckptool.commands.options.rewrite import NAMED
from ckptool.commands.options.target import ConvertOptions
from ckptool.errors import UsageError

if TYPE_CHECKING:
    from ckptool.core.mesh import Mesh
    from ckptool.storage.url import Location


ROWS = "such as --rows embed_tokens=152064 --rows lm_head=152064 --fill mean"
_FROM = "FROM"
_TAKE = f"GLOB {_FROM} SRC"


def _weights(value: Any, name: str) -> tuple[float, ...]:
    words = value.split(",") if isinstance(value, str) else value
    with suppress(TypeError, ValueError):  # an empty word is no number: each SRC has its own
        if numbers := tuple(NUMBER.parse(float(word), name) for word in words):
            return numbers
    raise UsageError(f"{name} {value!r}: not numbers", hint="such as --weights 1,2,1")


def _takes(value: Any, name: str) -> tuple[tuple[str, Location], ...]:
    """Return names and the places to take them from, of a table or of three words each."""
    if isinstance(value, Mapping):
        value = [(what, _FROM, fspath(place)) for what, place in value.items()]
    for what, between, place in value:
        if not (what and between.upper() == _FROM) or place.startswith("--"):
            raise UsageError(
                f"invalid {name} {join((what, between, place))}: expected {_TAKE}",
                hint="such as --take 'mtp.*' FROM base/",
            )
    return tuple((what, parse_place(place, name)) for what, _, place in value)


def _rows(value: Any, name: str) -> tuple[tuple[str, int], ...]:
    """Return names and how many rows they are to have."""
    if isinstance(value, Mapping):
        value = [f"{what}={count}" for what, count in value.items()]
    rows = []
    for text in TEXTS.parse(value, name):
        what, _, written = text.rpartition("=")
        what, count = what.strip(), parse_whole(written.strip())
        if not what or count is None:
            raise UsageError(f"invalid {name} {text!r}: expected NAME=COUNT", hint=ROWS)
        rows.append((what, count))
    return tuple(rows)


_TAKES = Kind(list[str], "Mapping[str, AnyPath]", _takes, (), _TAKE, words=3)
_ROWS = Kind(list[str], "Mapping[str, int] | Strings", _rows, (), "NAME=COUNT")
_WEIGHTS = Kind(str, "str | Sequence[float]", _weights, (), "W,W,...")


class ExpressionOptions(OptionSet):
    """What each tensor is computed as."""

    average: bool = option("--average", FLAG, help="Average the tensors of all SRC.")
    sum: bool = option("--sum", FLAG, help="Add up the tensors of all SRC, by their weights.")
    weights: tuple[float, ...] = option(
        "--weights",
        _WEIGHTS,
        help="Weights of the SRC: in a sum as given, in an average over what they add up to;"
        " default: all the same.",
    )
    ema: float | None = option(
        "--ema",
        NUMBER,
        metavar="DECAY",
        help="Average all SRC, the oldest first: each moves the average by 1 - DECAY.",
    )
    onto: Location | None = option(
        "--onto", PLACE, metavar="BASE", help="Start from the tensors of BASE."
    )
    lora: Location | None = option(
        "--lora",
        PLACE,
        metavar="ADAPTER",
        help="Fold PEFT's LoRA or DoRA into BASE, as its merge_and_unload does.",
    )
    add: Location | None = option(
        "--add", PLACE, metavar="A", help="Add the tensors of A, times --scale."
    )
    minus: Location | None = option(
        "--minus", PLACE, metavar="B", help="Subtract the tensors of B, times --scale."
    )
    scale: float = option("--scale", NUMBER, default=1.0, help="Multiply A and B by X.")
    apply_delta: bool = option(
        "--apply-delta",
        FLAG,
        help="Apply the weight deltas SRC, in this order, to --onto BASE, bit for bit.",
    )
    take: tuple[tuple[str, Location], ...] = option(
        "--take",
        _TAKES,
        help=f"Take matching tensors from SRC instead: {NAMED} (repeatable).",
    )
    last: int | None = option(
        "--last", COUNT, minimum=2, help="Take the newest N complete steps of the run SRC."
    )
    rows: tuple[tuple[str, int], ...] = option(
        "--rows",
        _ROWS,
        help=f"Append rows to matching tensors, up to COUNT: {NAMED} (repeatable).",
    )
    fill: str | None = option(
        "--fill",
        metavar="RULE",
        help="Fill the new rows with the mean of the others, with zeros, or as copied:ROW.",
    )
    with_optimizer: bool = option(
        "--with-optimizer",
        FLAG,
        help="Keep everything, not only the model: merge the optimizer's state, too.",
    )
    recipe: Path | None = option(
        "--recipe",
        FILE,
        help="Read these options from a TOML file, and SRC as its sources; paths are relative to"
        " its folder.",
    )


class MergeOptions(OptionSet):
    """What to compute, how to read and rewrite each source, and how to write the result."""

    expression: ExpressionOptions = group(ExpressionOptions, "What to compute")
    mesh: Mesh | None = option(
        "--mesh",
        MESH,
        help="Write for this device mesh, 2x4 or dp=2,tp=4, placed and in the formats of reshard.",
    )
    convert: ConvertOptions = group(ConvertOptions, without=("peft_adapter",))
