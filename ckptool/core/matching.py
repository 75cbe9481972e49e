"""Which rule of a map takes which name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ckptool.core.catalog import Catalog
from ckptool.core.frames import Frame, Framed, framed, unwrapped
from ckptool.core.group import UnknownSizes
from ckptool.core.keymap import Binding, KeyMap, Pattern, Rule, abstract
from ckptool.core.parts import part_of


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of the model: sizes of axes by name, the facts that hold, names there are."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    true: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()

    def of(self, catalog: Catalog, key_map: KeyMap) -> Facts:
        """These, with the names of a checkpoint's tensors, wrapped or not, and what they tell."""
        if not key_map.tells and all(rule.beside is None for rule in key_map.rules):
            return self
        names = frozenset(inner for name in catalog.tensors for inner in unwrapped(name))
        kinds = {found[0] for found in map(abstract, catalog.tensors) if found}
        keys = {inner for kind in kinds for inner in unwrapped(kind)}
        told = {n for n, patterns in key_map.tells.items() if all(p.key in keys for p in patterns)}
        return replace(self, true=self.true | told, names=names)


@dataclass(frozen=True, slots=True)
class Claim:
    rule: Rule
    pattern: Pattern
    binding: Binding
    inner: str

    @property
    def group(self) -> object:
        """What the claims share whose tensors are carried over together."""
        return id(self.rule), *(self.binding[axis] for axis in self.rule.common)


class Matcher:
    """Finds the rule that takes a parameter's name, in one part of a checkpoint."""

    def __init__(self, key_map: KeyMap, facts: Facts, part: str) -> None:
        self._facts = facts
        self._patterns: dict[str, list[tuple[Rule, Pattern]]] = defaultdict(list)
        for rule in key_map.rules:
            holds = rule.when is None or rule.when in facts.true
            if holds and rule.unless not in facts.true and rule.only in (None, part):
                for pattern in rule.sources:
                    self._patterns[pattern.key].append((rule, pattern))
        self._dropped: dict[str, list[Pattern]] = defaultdict(list)
        for pattern in key_map.drop:
            self._dropped[pattern.key].append(pattern)

    def claim(self, name: str) -> Claim | None:
        """The first rule that takes the name, or None. UnknownSizes where that cannot be told."""
        found = abstract(name)
        for rule, pattern in self._patterns.get(found[0], ()) if found else ():
            unknown = pattern.needs - self._facts.sizes.keys()
            if unknown:
                raise UnknownSizes(sorted(unknown), rule.whole.text)
            binding = pattern.match(found[1] if found else (), self._facts.sizes)
            if binding is not None and self._has_beside(rule, binding):
                return Claim(rule, pattern, binding, name)
        return None

    def _has_beside(self, rule: Rule, binding: Binding) -> bool:
        if rule.beside is None:
            return True
        return rule.beside.name(binding, self._facts.sizes) in self._facts.names

    def drops(self, name: str) -> bool:
        """Whether the map says to leave the name out. UnknownSizes where that cannot be told."""
        found = abstract(name)
        for pattern in self._dropped.get(found[0], ()) if found else ():
            unknown = pattern.needs - self._facts.sizes.keys()
            if unknown:
                raise UnknownSizes(sorted(unknown), pattern.text)
            if pattern.match(found[1] if found else (), self._facts.sizes) is not None:
                return True
        return False

    def knows(self, name: str) -> bool:
        """Whether the map says anything of the name."""
        try:
            return self.claim(name) is not None or self.drops(name)
        except UnknownSizes:
            return True


def kinds_of(catalog: Catalog) -> frozenset[str]:
    """The model's names with ``#`` for each number; there are few, however many the tensors."""
    names = [n for n, e in catalog.tensors.items() if part_of(e) == "model"]
    return frozenset(found[0] if (found := abstract(name)) else name for name in names)


def fits(catalog: Catalog, kinds: frozenset[str], key_map: KeyMap, facts: Facts) -> bool:
    """Whether the map takes every tensor of the model, and one of its marks (if any) is there.

    ``kinds`` are those of the catalog.
    """
    patterns = [*(p for rule in key_map.rules for p in rule.sources), *key_map.drop]
    known = {pattern.key for pattern in patterns}
    if not all(known.intersection(unwrapped(kind)) for kind in kinds):
        return False
    matcher = Matcher(key_map, facts.of(catalog, key_map), "model")
    found, odd = framed(catalog, matcher.knows, matcher.knows)
    names = {inner for frame, inner in _inner(found) if frame.part == "model"}
    if odd or not names:
        return False
    keys = {key[0] for key in map(abstract, names) if key}
    return not key_map.marks or any(mark.key in keys for mark in key_map.marks)


def _inner(found: Framed) -> Iterator[tuple[Frame, str]]:
    for frame, names in found.items():
        for inner in names:
            yield frame, inner
