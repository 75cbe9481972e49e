"""Matching of names with a map's rules, and of names that belong to one parameter.

A frame is what precedes and follows a parameter's name, as in ``model.W`` and
``optimizer.state.W.exp_avg``. All names of one frame are renamed together, as the parameters are.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import filter as filter_names
from fnmatch import fnmatchcase

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.core.catalog import Catalog
from ckptool.core.keymap.model import Binding, KeyMap, Pattern, Rule, abstract
from ckptool.core.keymap.sizes import UnknownSizes
from ckptool.core.state_category import state_category
from ckptool.core.text import MOST_STEPS


class ModelFacts(Struct, frozen=True):
    """Facts about the model: sizes of axes by name, the facts that hold, names that exist."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    true: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()

    def of(self, catalog: Catalog, key_map: KeyMap) -> ModelFacts:
        """Add the names of a checkpoint's tensors, wrapped or not, and the facts that follow."""
        if not key_map.tells and all(rule.beside is None for rule in key_map.rules):
            return self
        names = frozenset(inner for name in catalog.tensors for inner in unwrap(name))
        kinds = {abstract(name)[0] for name in catalog.tensors}
        keys = {inner for kind in kinds for inner in unwrap(kind)}
        tells = key_map.tells.items()
        true = self.true.union(n for n, patterns in tells if all(p.key in keys for p in patterns))
        return replace(self, true=true, names=names)


class Claim(Struct, frozen=True):
    """A rule, and its pattern that matches a parameter's name."""

    rule: Rule
    pattern: Pattern
    binding: Binding

    @property
    def group(self) -> object:
        """The key shared by claims whose tensors are carried over together."""
        return id(self.rule), *(self.binding[axis] for axis in self.rule.common)


class Matcher:
    """Finds the rule that matches a parameter's name, in one part of a checkpoint."""

    def __init__(self, key_map: KeyMap, facts: ModelFacts, part: str) -> None:
        self._facts = facts
        self._kept_as = key_map.kept_as
        self._kept_claims: dict[str, Claim] = {}
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
        """Return the first rule that matches the name, or None; UnknownSizes if sizes decide."""
        key, numbers = abstract(name)
        for rule, pattern in self._patterns.get(key, ()):
            binding = self._match(pattern, numbers, rule.whole.text)
            if binding is not None and self._has_beside(rule, binding):
                return Claim(rule, pattern, binding)
        return self._claim_kept(name) if key else None

    def _claim_kept(self, name: str) -> Claim | None:
        """Return the claim of a name that the map keeps, by a rule made for it, else None."""
        if name not in self._kept_claims and (new := self._kept_as(name)):
            source, target = (Pattern(side, *abstract(side)) for side in (name, new))
            self._kept_claims[name] = Claim(Rule((source,), (target,)), source, {})
        return self._kept_claims.get(name)

    def _match(self, pattern: Pattern, numbers: Sequence[int], text: str) -> Binding | None:
        unknown = pattern.needs - self._facts.sizes.keys()
        if unknown:
            raise UnknownSizes(sorted(unknown), text)
        return pattern.match(numbers, self._facts.sizes)

    def _has_beside(self, rule: Rule, binding: Binding) -> bool:
        if rule.beside is None:
            return True
        return rule.beside.name(binding, self._facts.sizes) in self._facts.names

    def drops(self, name: str) -> bool:
        """Return whether the map excludes the name. Raises UnknownSizes if sizes decide."""
        key, numbers = abstract(name)
        patterns = self._dropped.get(key, ())
        return any(self._match(p, numbers, p.text) is not None for p in patterns)

    def knows(self, name: str) -> bool:
        """Return whether the map matches or excludes the name."""
        try:
            return self.claim(name) is not None or self.drops(name)
        except UnknownSizes:
            return True


def kinds_of(catalog: Catalog) -> frozenset[str]:
    """Return the model's names with ``#`` for each number: few, however many the tensors."""
    names = [n for n, e in catalog.tensors.items() if state_category(e) == "model"]
    return frozenset(abstract(name)[0] or name for name in names)


def inner_kinds(catalog: Catalog) -> list[str]:
    """Return the kinds of the model's names, and what wrappers may have been put around, sorted."""
    return sorted({inner for kind in kinds_of(catalog) for inner in unwrap(kind)})


def may_match(kinds: Sequence[str], key_map: KeyMap) -> bool:
    """Return whether a map may match a name of one of these ``inner_kinds``, by any rule or glob.

    It costs the same however many kinds there are, unlike ``fits``.
    """
    patterns = [*(p for rule in key_map.rules for p in rule.sources), *key_map.drop]
    if any(key in _beginning_with(kinds, key)[:1] for key in (p.key for p in patterns)):
        return True
    globs = [abstract(keep.source)[0] for keep in key_map.keep]
    kept = [kind for kind in kinds if kind.count(".") <= MOST_STEPS]
    return any(filter_names(_beginning_with(kept, re.split(r"[*?[]", g)[0]), g) for g in globs)


def _beginning_with(names: Sequence[str], text: str) -> Sequence[str]:
    """Return the names, of sorted ones, that begin with a text."""
    return names[bisect_left(names, text) : bisect_left(names, f"{text}\U0010ffff")]


def fits(catalog: Catalog, kinds: frozenset[str], key_map: KeyMap, facts: ModelFacts) -> bool:
    """Return whether the map matches every tensor of the model, with one of its marks (if any).

    ``kinds`` are the ``kinds_of`` the catalog.
    """
    patterns = [*(p for rule in key_map.rules for p in rule.sources), *key_map.drop]
    pattern_keys = {pattern.key for pattern in patterns}
    globs = [abstract(keep.source)[0] for keep in key_map.keep]
    for kind in kinds - pattern_keys:
        inner = [*unwrap(kind)]
        is_kept = any(fnmatchcase(name, glob) for name in inner for glob in globs)
        if pattern_keys.isdisjoint(inner) and not is_kept:
            return False
    matcher = Matcher(key_map, facts.of(catalog, key_map), "model")
    frames, unmatched = find_frames(catalog, matcher.knows, matcher.knows)
    names = {n for frame, inner in frames.items() if frame.part == "model" for n in inner}
    if unmatched or not names:
        return False
    keys = {abstract(name)[0] for name in names}
    return not key_map.marks or any(mark.key in keys for mark in key_map.marks)


_MOST_WRAPPERS = 3
"""As in ``model.module.module.``, for a model that is wrapped twice."""


class Frame(Struct, frozen=True):
    """The text around parameters' names, including dots, and the part it is in."""

    prefix: str
    suffix: str = ""
    part: str = "model"

    def inner(self, name: str) -> str | None:
        """Return the parameter's name within ``name``; None if the frame does not fit."""
        if len(name) <= len(self.prefix) + len(self.suffix):
            return None
        if not name.startswith(self.prefix) or not name.endswith(self.suffix):
            return None
        return name[len(self.prefix) : len(name) - len(self.suffix)]

    def around(self, inner: str) -> str:
        """Return the name of a parameter in this frame."""
        return f"{self.prefix}{inner}{self.suffix}"


Frames = dict[Frame, dict[str, str]]
"""For each frame: parameter's name -> whole name."""

Knows = Callable[[str], bool]
"""Whether a map's rules match a parameter's name."""


def find_frames(catalog: Catalog, is_parameter: Knows, is_state: Knows) -> tuple[Frames, list[str]]:
    """Return the names that contain a parameter's, by frame, and the model's names that do not.

    ``is_parameter`` recognizes a parameter's name in the model, ``is_state`` in an optimizer.
    """
    model = [n for n, e in catalog.tensors.items() if state_category(e) == "model"]
    frames: Frames = {frame: {} for frame in _model_frames(model, is_parameter)}
    unmatched = []
    for name in model:
        match = next(((f, i) for f in frames if is_parameter(i := f.inner(name) or "")), None)
        if match is None:
            unmatched.append(name)
        else:
            frames[match[0]][match[1]] = name
    parameters = {inner for names in frames.values() for inner in names}
    model_names = set(model)
    candidates = [name for name in (*catalog.tensors, *catalog.objects) if name not in model_names]
    for name in _add_state_frames(candidates, parameters, frames):
        for frame, names in frames.items():
            inner = frame.inner(name) if frame.part != "model" else None
            if inner is not None and is_state(inner):
                names[inner] = name
                break
    return frames, unmatched


def _model_frames(names: Sequence[str], is_parameter: Knows) -> list[Frame]:
    """Return the wrappers of parameters' names, such as none, ``model.`` or ``ema.``.

    A name's wrapper is its shortest prefix that is followed by a parameter's name, or a longer one
    that all names have: ``model.layers.0`` may be another spelling of ``layers.0``.
    """
    parameters = ((name, next(filter(is_parameter, unwrap(name)), None)) for name in names)
    counts = Counter(name.removesuffix(inner) for name, inner in parameters if inner is not None)
    most = max(counts.values(), default=0)
    frames = [Frame(prefix) for prefix, count in counts.items() if 2 * count >= most]
    for frame in map(Frame, counts if len(counts) > 1 else ()):
        if all(is_parameter(frame.inner(name) or "") for name in names):
            return [frame]
    return frames or [Frame("")]


def unwrap(name: str) -> Iterator[str]:
    """Yield the name, and the name without its first steps, which a wrapper may have added."""
    steps = name.split(".", _MOST_WRAPPERS)
    for count in range(len(steps)):
        yield ".".join(steps[count:])


def _add_state_frames(
    names: Iterable[str], parameters: Collection[str], frames: Frames
) -> list[str]:
    """Sort names that contain parameters' names into frames, made as needed; return the rest."""
    unframed = []
    for name in names:
        states = (frame for frame in frames if frame.part != "model")
        frame = next((f for f in states if f.inner(name) in parameters), None)
        frame = frame or _frame_around(name, parameters)
        if frame is None:
            unframed.append(name)
        else:
            frames.setdefault(frame, {})[frame.inner(name) or ""] = name
    return unframed


def _frame_around(name: str, parameters: Collection[str]) -> Frame | None:
    """Return the frame of the longest parameter's name within a name of a sensible length."""
    steps = name.split(".")
    for length in range(len(steps), 0, -1) if len(steps) <= MOST_STEPS else ():
        for start in range(len(steps) - length + 1):
            if ".".join(steps[start : start + length]) in parameters:
                head, tail = steps[:start], steps[start + length :]
                prefix = "".join(f"{step}." for step in head)
                return Frame(prefix, "".join(f".{s}" for s in tail), "optimizer")
    return None
