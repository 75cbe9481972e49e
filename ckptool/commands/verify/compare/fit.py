"""How to make the names of one checkpoint match another's: a prefix, a rename, a key map."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.keymap.choice import maps_between
from ckptool.commands.model.records import records, records_around
from ckptool.commands.open import OpenedCheckpoint, require_sound
from ckptool.commands.options.rewrite import MapOptions, RewriteOptions, Selection
from ckptool.commands.rewrite import only_model, rewrite
from ckptool.core.catalog import Catalog
from ckptool.core.keymap.wrappers import unwrapping_rule
from ckptool.core.selection import substitution
from ckptool.core.text import MOST_STEPS
from ckptool.errors import CkptoolError

_MOST_PREFIXES = 3
_MOST_RENAMES = 12
_MOST_COMPARED = 2000
_MOST_MAPS = 3


class Prefix(Struct, frozen=True):
    """The prefix of names, and the prefix that target names have instead."""

    old: str
    new: str

    @property
    def keyword(self) -> str:
        """Return the keyword of Python's functions that changes this prefix."""
        if not self.new:
            return f"strip_prefix={self.old[:-1]!r}"
        return f"rename=[{self.rule!r}]"

    def selection(self, among: Selection) -> Selection:
        """Return a selection that changes this prefix, too."""
        if not self.new:
            return replace(among, strip_prefix=self.old[:-1])
        return replace(among, rename=(self.rule,))

    @property
    def rule(self) -> str:
        """Return the rule of ``--rename`` that changes this prefix."""
        return f"^{re.escape(self.old)}={self.new}"

    def within(self, tail: str) -> Prefix:
        """Return the change of only those names whose tails begin with the same step."""
        step = tail.partition(".")[0]
        is_kind = "." in tail and not step.isdecimal()
        return Prefix(f"{self.old}{step}.", f"{self.new}{step}.") if is_kind else self

    def changed(self, name: str) -> str:
        """Return a name with the new prefix, unchanged if it does not have the old one."""
        return self.new + name.removeprefix(self.old) if name.startswith(self.old) else name


def prefix_changes(
    names: Iterable[str], targets: Sequence[str], *, narrow: bool = False
) -> list[Prefix]:
    """Return the prefix changes that turn names into targets, the most productive first.

    A target is compared with the first name that shares most of its last steps; of many targets
    only a few thousand are used. ``narrow`` changes also name the first step that stays the same.
    That only one name of a kind ends in ``weight`` is chance, and no reason to rename it.
    """
    by_chance: set[Prefix] = set()
    by_tail: dict[str, str] = {}
    for name in names:
        for tail in _tails(name):
            by_tail.setdefault(tail, name)
    counts: Counter[Prefix] = Counter()
    for name in targets[:: 1 + len(targets) // _MOST_COMPARED]:
        common = next((tail for tail in _tails(name) if tail in by_tail), None)
        if common is None:
            continue
        match = by_tail[common]
        prefix = Prefix(match.removesuffix(common), name.removesuffix(common))
        counts[prefix.within(common) if narrow else prefix] += 1
        if "." not in common and common not in (match, name):
            by_chance.add(prefix)
    return [prefix for prefix, n in counts.most_common() if n > 1 or prefix not in by_chance]


def _tails(name: str) -> Iterator[str]:
    """Yield a name, and its tails without its first steps, longest first, up to a limit."""
    yield name
    steps = name.rsplit(".", MOST_STEPS)
    for at in range(1, len(steps)):
        yield ".".join(steps[at:])


class Fit(Struct, frozen=True):
    """An option that gives A's tensors more of B's names: ``common`` of ``wanted``."""

    option: str
    common: int
    wanted: int


class Candidate(Struct, frozen=True):
    """The names that tensors have once rewritten as ``rewriting`` asks."""

    names: Sequence[str]
    rewriting: RewriteOptions

    def score(self, targets: Collection[str]) -> tuple[int, int]:
        """Return how many names are targets, and minus how many are not."""
        common = sum(name in targets for name in self.names)
        return common, common - len(self.names)

    @property
    def option(self) -> str:
        """The options of the command line that ask for it."""
        selection, by_map = self.rewriting.selection, self.rewriting.map
        words = ["--model-only"] if selection.model_only else []
        if selection.strip_prefix is not None:
            words.append(f"--strip-prefix {selection.strip_prefix}")
        words += [f"--rename '{rule}'" for rule in selection.rename]
        words += [f"--map {by_map.name}"] if by_map.name else []
        words += [f"--hf-assets {by_map.assets}"] if by_map.assets else []
        return " ".join(words)


def find_fit(
    opened: OpenedCheckpoint, catalog: Catalog, other: Catalog, assets: Path | None
) -> Fit | None:
    """Return the option that gives a checkpoint, rewritten to ``catalog``, most names of another.

    None if no option gives more of the other's names, or as many and fewer that are not its.
    """
    start = Candidate(list(catalog.tensors), RewriteOptions())
    best = find_rewriting(opened, start, catalog, other, assets)
    if best is None or best.score(other.tensors) <= start.score(other.tensors):
        return None
    common, _ = best.score(other.tensors)
    return Fit(best.option, common, len(other.tensors))


def find_rewriting(
    opened: OpenedCheckpoint,
    start: Candidate,
    catalog: Catalog,
    other: Catalog,
    assets: Path | None,
    *,
    whole: bool = True,
) -> Candidate | None:
    """Return what gives a checkpoint, rewritten to ``catalog``, most names of another.

    ``start`` has its names so far. None if fewer than half of the smaller side get common names:
    some, like ``norm.weight``, fit anywhere. Key maps are tried if nothing else gives half;
    ``assets`` is a folder with the config.json that they may need. Unless it is ``whole``, the
    checkpoint may lack part of the model.
    """
    targets = other.tensors
    best = start
    for candidate in _ways(start, catalog, targets):
        best = max(best, candidate, key=lambda way: way.score(targets))
        if best.score(targets) == (len(targets), 0):
            break
    if 2 * best.score(targets)[0] < len(targets):
        by_map = mapped(opened, other, assets, whole=whole)
        best = max([best, *by_map], key=lambda way: way.score(targets))
    common, _ = best.score(targets)
    return best if common and 2 * common >= min(len(best.names), len(targets)) else None


def _ways(start: Candidate, catalog: Catalog, targets: Collection[str]) -> Iterator[Candidate]:
    selection = start.rewriting.selection
    yield from _rename(selection, start.names, targets)
    if selection.model_only:
        return
    try:
        names = list(only_model(catalog).tensors)
    except CkptoolError:
        return
    model_only = replace(selection, model_only=True)
    yield Candidate(names, RewriteOptions(model_only))
    yield from _rename(model_only, names, targets)


def _rename(
    selection: Selection, names: Sequence[str], targets: Collection[str]
) -> Iterator[Candidate]:
    """Yield the names with the targets' prefixes, and without wrappers."""
    lookup = set(names)
    missing = [name for name in targets if name not in lookup]
    unexpected = [name for name in names if name not in targets]
    prefixes = prefix_changes(unexpected, missing)[:_MOST_PREFIXES]
    changes: list[tuple[Selection, Callable[[str], str]]] = [
        (prefix.selection(selection), prefix.changed) for prefix in prefixes
    ]
    if rule := unwrapping_rule(unexpected):
        changes.append((replace(selection, rename=(rule,)), substitution(rule)))
    for changed, change in changes:
        renamed = [change(name) for name in names]
        if len({*renamed}) == len(renamed):
            yield Candidate(renamed, RewriteOptions(changed))
    if prefixes:
        yield from _rename_in_steps(selection, names, targets)


def _rename_in_steps(
    selection: Selection, names: Sequence[str], targets: Collection[str]
) -> Iterator[Candidate]:
    """Yield the names under one rename after another, each the one that gives most targets."""
    rules: tuple[str, ...] = ()
    while len(rules) < _MOST_RENAMES:
        lookup, common = set(names), sum(name in targets for name in names)
        missing = [name for name in targets if name not in lookup]
        unexpected = [name for name in names if name not in targets]
        gains: dict[Prefix, int] = {}
        for narrow in (False, True):
            for prefix in prefix_changes(unexpected, missing, narrow=narrow)[:_MOST_PREFIXES]:
                renamed = {*map(prefix.changed, names)}
                gains[prefix] = sum(n in targets for n in renamed) - common
                gains[prefix] *= len(renamed) == len(names)
        best = max(gains, key=gains.__getitem__, default=None)
        if best is None or gains[best] <= 0:
            return
        names, rules = [*map(best.changed, names)], (*rules, best.rule)
        yield Candidate(names, RewriteOptions(replace(selection, rename=rules)))


def mapped(
    opened: OpenedCheckpoint, other: Catalog, assets: Path | None, *, whole: bool
) -> Iterator[Candidate]:
    """Yield the model's names under the key map that gives most names of another, if one does."""
    selection = Selection(model_only=True) if whole else Selection(("*",), model_only=True)
    for folder in dict.fromkeys((None, assets)):
        try:
            configs = records(opened.source, opened.catalog, folder)
            configs += records_around(opened.path, opened.catalog).values()
            names = maps_between(only_model(opened.catalog), other, configs)
        except CkptoolError:
            continue
        for name in names[:_MOST_MAPS]:
            options = RewriteOptions(selection, MapOptions(name, assets=folder))
            try:
                result = rewrite(opened, options, check=require_sound)
            except CkptoolError:
                continue
            yield Candidate(list(result.catalog.tensors), options)
            return
