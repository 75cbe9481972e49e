"""How tensor-parallel ranks' parameters fit together: what a rule says, and the boxes it makes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product

from ckptool.core.box import Box
from ckptool.errors import UsageError


@dataclass(frozen=True, slots=True)
class TpRule:
    """Each rank holds a part along ``dim`` of each of several blocks; None: all of it.

    ``blocks`` are their sizes along ``dim``, as shares of a rank's part. A gated ``linear_fc1`` has
    two equal ones, gate and up: rank r holds ``[gate_r; up_r]``.
    """

    dim: int | None = None
    blocks: tuple[int, ...] = (1,)

    def __str__(self) -> str:
        if self.dim is None:
            return "Replicate()"
        count = len(self.blocks)
        return f"Shard({self.dim})" if count == 1 else f"Shard({self.dim}, {count})"


REPLICATED = TpRule()
NamedRule = tuple[str, TpRule]
_WORDS = {
    "replicate": REPLICATED,
    "Replicate": REPLICATED,
    "Replicate()": REPLICATED,
    "column": TpRule(0),
    "row": TpRule(1),
    "gated": TpRule(0, (1, 1)),
}
_SHARD = re.compile(r"Shard\(\s*([0-7])\s*(?:,\s*([1-9][0-9]?)\s*)?\)")


def parse_tp_rule(text: str) -> NamedRule:
    """A glob and its rule, of ``GLOB=RULE``; UsageError where it is none.

    RULE is ``replicate``, ``column`` (``Shard(0)``), ``row`` (``Shard(1)``), ``gated``
    (``Shard(0, 2)``: two blocks, each sharded), or ``Shard(dim)`` or ``Shard(dim, blocks)``.
    """
    glob, _, right = text.rpartition("=")
    word = right.strip()
    match = _SHARD.fullmatch(word)
    rule = TpRule(int(match[1]), (1,) * int(match[2] or 1)) if match else _WORDS.get(word)
    if not glob.strip() or rule is None:
        raise UsageError(
            f"--tp-rule {text!r} is not GLOB=RULE",
            hint="RULE is replicate, column, row, gated, Shard(dim) or Shard(dim, blocks)",
        )
    return glob.strip(), rule


def parse_tp_rules(texts: Sequence[str] | None) -> tuple[NamedRule, ...]:
    """The rules of an option that may be given several times; the first that matches wins."""
    return tuple(map(parse_tp_rule, texts or ()))


def how_to_say(name: str) -> str:
    """What to add to the command where nothing says how ranks' parts of a tensor fit together."""
    return (
        f"--tp-rule '{name}=column' says that they follow one another along dim 0 (row: along dim"
        " 1; gated: in each of two halves of dim 0; replicate: all are the same; Shard(dim))"
    )


def named_rule(rules: Sequence[NamedRule], name: str) -> TpRule | None:
    """The first rule whose glob matches the name."""
    return next((rule for glob, rule in rules if fnmatchcase(name, glob)), None)


def require_matched(rules: Sequence[NamedRule], names: Sequence[str]) -> None:
    """UsageError where the glob of a rule matches none of the parameters' names."""
    for glob, _ in rules:
        if not any(fnmatchcase(name, glob) for name in names):
            raise UsageError(f"--tp-rule {glob!r} matches none of the {len(names):,} parameters")


@dataclass(frozen=True, slots=True)
class Cut:
    """One rank's share along one dim: the ``index``-th of ``degree``, of each of ``blocks``.

    ``blocks`` are their sizes, as shares of the rank's part.
    """

    dim: int
    index: int
    degree: int
    blocks: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True)
class Fit:
    """Where a rank's local tensor of ``local`` shape belongs in the tensor of shape ``whole``.

    Each of ``pieces`` is a box of the local tensor and the same box of the whole one.
    """

    local: tuple[int, ...]
    whole: tuple[int, ...]
    pieces: tuple[tuple[Box, Box], ...]


def fit(local: Sequence[int], cuts: Sequence[Cut]) -> Fit:
    """The boxes of one rank's tensor; ValueError where a dim has no such blocks."""
    whole = list(local)
    spans = [[(0, size, 0)] for size in local]
    for cut in cuts:
        if cut.dim >= len(local) or local[cut.dim] % sum(cut.blocks):
            shares = " : ".join(map(str, cut.blocks))
            raise ValueError(f"{list(local)} has no blocks of {shares} along dim {cut.dim}")
        whole[cut.dim] = local[cut.dim] * cut.degree
        spans[cut.dim] = list(_spans(cut, local[cut.dim] // sum(cut.blocks)))
    pieces = []
    for combination in product(*spans):
        shape = [size for _, size, _ in combination]
        here = Box.at([start for start, _, _ in combination], shape)
        pieces.append((here, Box.at([start for _, _, start in combination], shape)))
    return Fit(tuple(local), tuple(whole), tuple(pieces))


def _spans(cut: Cut, share: int) -> Iterator[tuple[int, int, int]]:
    """For each block where it begins in the rank's part, its size, and where it belongs."""
    before = 0
    for block in cut.blocks:
        size = block * share
        yield before, size, before * cut.degree + cut.index * size
        before += size
