"""How to read a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ckptool.commands.options import FILE, STORAGE_OPTIONS, TP_RULES
from ckptool.commands.options.choices import format_names
from ckptool.commands.options.declaration import COUNT, FLAG, RARE, OptionSet, option

if TYPE_CHECKING:
    from ckptool.core.sharding.tensor_parallel import NamedRule


class ReadOptions(OptionSet):
    """How to read a checkpoint.

    Without ``values``, values among the data may be left ``UNREAD``.
    """

    from_format: str | None = option(
        "--from",
        metavar="FORMAT",
        choices=format_names,
        help="Read as this format instead of detecting it.",
    )
    per_rank: bool = option(
        "--per-rank",
        FLAG,
        help="Keep plain tensors that differ between ranks, as NAME@rankR.",
        panel=RARE,
    )
    flat_params: Path | None = option(
        "--flat-params",
        FILE,
        help="Unflatten FSDP1 parameters by this JSON file of names and shapes, in order.",
        panel=RARE,
    )
    tp_rules: tuple[NamedRule, ...] = option(
        "--tp-rule",
        TP_RULES,
        help="Join tensor-parallel shards by this rule where the files do not say how: replicate,"
        " column, row, gated or Shard(dim) (repeatable, first match wins).",
        panel=RARE,
    )
    split_stacked: bool = option(
        "--split-stacked",
        FLAG,
        former="--unstack",
        help="Split stacked layers and experts into one tensor each.",
        panel=RARE,
    )
    storage_option: Mapping[str, object] = option(
        "--storage-option",
        STORAGE_OPTIONS,
        default={},
        metavar="KEY=VALUE",
        help="Open the stores of URLs with this option of their client in fsspec (repeatable).",
        panel=RARE,
    )
    values: bool = True
    world_size: int | None = option(
        "--world-size",
        COUNT,
        minimum=1,
        help="Read the files of N ranks, where several saves share a folder or nothing records"
        " how many there were.",
        panel=RARE,
    )


AS_DETECTED = ReadOptions()
