"""How to make the names of one checkpoint match another's: a prefix, a rename, a key map."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from ckptool.commands.open import OpenedCheckpoint
from ckptool.commands.options.rewrite import MapOptions, RewriteOptions, Selection
from ckptool.commands.rewrite import only_model, rewrite
from ckptool.core.catalog import Catalog
from ckptool.core.keymap.wrappers import unwrapping_rule
from ckptool.core.selection import substitution
from ckptool.errors import CkptoolError

_MOST_PREFIXES = 3
_MOST_COMPARED = 2000


class Prefix(NamedTuple):
    """The prefix of names, and the prefix that wanted names have instead."""

    old: str
    new: str

    @property
    def keyword(self) -> str:
        """Return the keyword that changes it."""
        if not self.new:
            return f"strip_prefix={self.old[:-1]!r}"
        return f"rename=[{self._rule!r}]"

    @property
    def flag(self) -> str:
        """Return the option that changes it."""
        if not self.new:
            return f"--strip-prefix {self.old[:-1]}"
        return f"--rename '{self._rule}'"

    @property
    def _rule(self) -> str:
        return f"^{re.escape(self.old)}={self.new}"

    def changed(self, name: str) -> str:
        """Return a name with the new prefix, unchanged if it does not have the old one."""
        return self.new + name.removeprefix(self.old) if name.startswith(self.old) else name


def prefix_changes(names: Iterable[str], wanted: Sequence[str]) -> list[Prefix]:
    """Return the prefix changes that yield wanted names, the most productive first.

    A wanted name is compared with the first name that shares most of its last steps; of many wanted
    names only a few thousand are used.
    """
    by_tail: dict[str, str] = {}
    for name in names:
        for tail in _tails(name):
            by_tail.setdefault(tail, name)
    counts: Counter[Prefix] = Counter()
    for name in wanted[:: 1 + len(wanted) // _MOST_COMPARED]:
        common = next((tail for tail in _tails(name) if tail in by_tail), None)
        if common is not None:
            found = by_tail[common]
            counts[Prefix(found.removesuffix(common), name.removesuffix(common))] += 1
    return [prefix for prefix, _ in counts.most_common()]


def _tails(name: str) -> Iterator[str]:
    """Yield a name, and its tails without its first steps, longest first."""
    yield name
    for at, character in enumerate(name):
        if character == ".":
            yield name[at + 1 :]


class Fit(Struct, frozen=True):
    """An option that gives A's tensors more of B's names: ``common`` of ``wanted``."""

    option: str
    common: int
    wanted: int


class _Candidate(NamedTuple):
    option: str
    names: Sequence[str]


def find_fit(
    opened: OpenedCheckpoint, made: Catalog, wanted: Collection[str], assets: Path | None
) -> Fit | None:
    """Return the option that gives the tensors ``made`` of a checkpoint most wanted names.

    None if no option gives more of them, or as many and fewer others, or if fewer than half of the
    smaller side are alike: some names like ``norm.weight`` fit anywhere. Key maps are tried if
    nothing else gives half; ``assets`` is a folder with the config.json that they may need.
    """
    targets = dict.fromkeys(wanted)
    names = list(made.tensors)

    def score(candidate: _Candidate) -> tuple[int, int]:
        common = sum(name in targets for name in candidate.names)
        return common, common - len(candidate.names)

    found = best = _Candidate("", names)
    for candidate in _candidates(names, made, targets):
        best = max(best, candidate, key=score)
        if score(best) == (len(targets), 0):
            break
    if 2 * score(best)[0] < len(targets):
        best = max([best, *_mapped(opened, assets)], key=score)
    common, _ = score(best)
    few = 2 * common < min(len(best.names), len(targets))
    if not common or few or score(best) <= score(found):
        return None
    return Fit(best.option, common, len(targets))


def _candidates(
    names: Sequence[str], made: Catalog, wanted: Collection[str]
) -> Iterator[_Candidate]:
    yield from _renamed("", names, wanted)
    try:
        model = list(only_model(made).tensors)
    except CkptoolError:
        return
    yield _Candidate("--model-only", model)
    yield from _renamed("--model-only ", model, wanted)


def _renamed(head: str, names: Sequence[str], wanted: Collection[str]) -> Iterator[_Candidate]:
    """Yield the names without prefixes and wrappers."""
    known = set(names)
    missing = [name for name in wanted if name not in known]
    unexpected = [name for name in names if name not in wanted]
    prefixes = prefix_changes(unexpected, missing)[:_MOST_PREFIXES]
    changes: list[tuple[str, Callable[[str], str]]] = [(p.flag, p.changed) for p in prefixes]
    if rule := unwrapping_rule(unexpected):
        changes.append((f"--rename '{rule}'", substitution(rule)))
    for flag, change in changes:
        renamed = [change(name) for name in names]
        if len({*renamed}) == len(renamed):
            yield _Candidate(head + flag, renamed)


def _mapped(opened: OpenedCheckpoint, assets: Path | None) -> Iterator[_Candidate]:
    """Yield the model's names under the key map that matches them, if there is one."""
    for folder in dict.fromkeys((None, assets)):
        options = RewriteOptions(Selection(model_only=True), MapOptions("auto", assets=folder))
        try:
            made = rewrite(opened, options)
        except CkptoolError:
            continue
        if made.map is not None:
            more = "" if folder is None else f" --hf-assets {folder}"
            option = f"--model-only --map {made.map.name}{more}"
            yield _Candidate(option, list(made.catalog.tensors))
            return
