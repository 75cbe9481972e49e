"""How to read a checkpoint, and what to make of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ckptool.commands.options import CASTS, DIMS, FILE, TP_RULES
from ckptool.core.options import COUNT, FLAG, TEXTS, OptionSet, group, option

if TYPE_CHECKING:
    from ckptool.core.casts import Casts
    from ckptool.core.sharding.tensor_parallel import NamedRule

READING = "How to read SRC"


class ReadOptions(OptionSet):
    """How to read a checkpoint.

    Without ``values`` those that lie among the data may be left ``UNREAD``.
    """

    from_format: str | None = option(
        "--from", metavar="FORMAT", help="Read as this format instead of detecting it."
    )
    per_rank: bool = option(
        "--per-rank",
        FLAG,
        default=False,
        help="Keep plain tensors that differ between ranks, as NAME@rankR.",
    )
    flat_params: Path | None = option(
        "--flat-params",
        FILE,
        metavar="FILE",
        help="Unflatten FSDP1 parameters by this JSON file of names and shapes, in order.",
    )
    tp_rules: tuple[NamedRule, ...] = option(
        "--tp-rule",
        TP_RULES,
        default=(),
        metavar="GLOB=RULE",
        help="Join tensor-parallel shards by this rule where the files do not say how: replicate,"
        " column, row, gated or Shard(dim) (repeatable, first match wins).",
    )
    split_stacked: bool = option(
        "--split-stacked",
        FLAG,
        default=False,
        former="--unstack",
        help="Split stacked layers and experts into one tensor each.",
    )
    values: bool = True
    world_size: int | None = option(
        "--world-size",
        COUNT,
        metavar="N",
        minimum=1,
        help="Read the files of N ranks, where several saves share a folder or nothing records"
        " how many there were.",
    )


AS_DETECTED = ReadOptions()


class Selection(OptionSet):
    """Which tensors and values to keep and how to rename them, in this order."""

    select: tuple[str, ...] = option(
        "--select", TEXTS, default=(), metavar="GLOB", help="Keep only matching names (repeatable)."
    )
    drop: tuple[str, ...] = option(
        "--drop", TEXTS, default=(), metavar="GLOB", help="Exclude matching names (repeatable)."
    )
    model_only: bool = option(
        "--model-only",
        FLAG,
        default=False,
        help="Keep the model only, under its own names.",
    )
    strip_prefix: str | None = option(
        "--strip-prefix", metavar="PREFIX", help="Remove PREFIX from the names."
    )
    rename: tuple[str, ...] = option(
        "--rename",
        TEXTS,
        default=(),
        metavar="REGEX=REPLACEMENT",
        help="Rename what matches (repeatable, in order).",
    )


EVERYTHING = Selection()


class MapOptions(OptionSet):
    """Which key map to apply, and what it needs. ``inverse`` None: the way that the names fit."""

    name: str | None = option(
        "--map",
        metavar="NAME|FILE",
        help="Convert names and layout to another framework's: a built-in key map (`ckptool maps`"
        " lists them), a TOML file, or auto.",
    )
    dims: Mapping[str, int] = option(
        "--dim",
        DIMS,
        factory=dict,
        metavar="NAME=SIZE",
        help="Size of a dim that the key map names (repeatable).",
    )
    assets: Path | None = option(
        "--hf-assets",
        FILE,
        metavar="FOLDER",
        help="Copy config.json and tokenizer files from FOLDER; the key map reads dims there.",
    )
    inverse: bool | None = option(
        "--inverse/--no-inverse",
        FLAG,
        help="Apply the key map backwards, from its `to` names to its `from` names; default:"
        " whichever way the names fit.",
    )


class RewriteOptions(OptionSet):
    """What to keep of a checkpoint, under which names and element types, in this order."""

    selection: Selection = group(Selection, "What to keep, and how to rename it")
    map: MapOptions = group(MapOptions, "Names and layout of another framework")
    casts: Casts | None = option(
        "--dtype",
        CASTS,
        metavar="DTYPE|GLOB=DTYPE",
        help="Cast the model's weights, e.g. to bf16; with a GLOB, cast whatever matches"
        " (repeatable, first match wins). Integers and tensors without dims are never cast.",
    )
    dequantize: bool = option(
        "--dequantize",
        FLAG,
        default=False,
        help="Dequantize FP8, INT8 and MXFP4, to bf16 or what --dtype says.",
    )
