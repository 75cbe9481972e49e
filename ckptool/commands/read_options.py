"""How to read a checkpoint, where its files alone leave that open."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ckptool.commands.input_file import text_of
from ckptool.core.tp_rules import NamedRule
from ckptool.errors import Problem, UsageError
from ckptool.formats.base import Format, ScanOptions

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a checkpoint.

    ``format_name`` reads it as that format instead of detecting it. ``per_rank`` keeps plain
    tensors that differ between ranks, as NAME@rankR. ``flat_params`` is a JSON file of the model's
    parameters and their shapes, in order, by which FSDP1's flat ones are taken apart. ``tp_rules``
    say how tensor-parallel ranks' parameters fit together. ``unstack`` makes one tensor a layer
    and expert of stacked ones. Without ``values`` those that lie among the data may be left
    ``UNREAD``. ``world_size`` is the number of ranks whose files are read.
    """

    format_name: str | None = None
    per_rank: bool = False
    flat_params: Path | None = None
    tp_rules: tuple[NamedRule, ...] = ()
    unstack: bool = False
    values: bool = True
    world_size: int | None = None

    def scan_options(self, of: Format, found: list[Problem] | None = None) -> ScanOptions:
        """What a scan of that format is asked for; UsageError where it cannot heed it."""
        if self.tp_rules and not of.takes_tp_rules:
            raise UsageError(f"--tp-rule: {of.name} says itself how its ranks fit together")
        if self.world_size is not None and not of.takes_world_size:
            raise UsageError(f"--world-size: {of.name} says itself how many ranks there are")
        shapes = _shapes_in(self.flat_params) if self.flat_params else ()
        return ScanOptions(
            self.per_rank, shapes, self.tp_rules, found, self.values, self.world_size
        )


AS_DETECTED = ReadOptions()


def _shapes_in(path: Path) -> Shapes:
    """Names and shapes, in order, of a JSON file; UsageError where it is none."""
    try:
        content = json.loads(text_of(path, "--flat-params"))
        found = tuple((name, tuple(shape)) for name, shape in content.items())
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise UsageError(f"--flat-params {path}: {error}") from None
    if not all(type(n) is int and n >= 0 for _, shape in found for n in shape):
        raise UsageError(f"--flat-params {path}: a shape that is no list of sizes")
    return found
