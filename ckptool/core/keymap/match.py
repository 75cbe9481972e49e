"""Which rule of a map takes which name.

Which names belong to a parameter: ``model.W``, ``optimizer.state.W.exp_avg`` for one ``W``.

A frame is what stands before and after a parameter's name. All names of one frame are renamed
together, as the parameters themselves are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ckptool.core.catalog import Catalog
from ckptool.core.keymap.model import Binding, KeyMap, Pattern, Rule, UnknownSizes, abstract
from ckptool.core.state_category import state_category


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
    names = [n for n, e in catalog.tensors.items() if state_category(e) == "model"]
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


_MOST_WRAPPERS = 3
"""As in ``model.module.module.``, of a model that is wrapped twice."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around parameters' names, dots included, and which part it is."""

    prefix: str
    suffix: str = ""
    part: str = "model"

    def inner(self, name: str) -> str | None:
        """The parameter's name within ``name``, or None where the frame does not fit."""
        if len(name) <= len(self.prefix) + len(self.suffix):
            return None
        if not name.startswith(self.prefix) or not name.endswith(self.suffix):
            return None
        return name[len(self.prefix) : len(name) - len(self.suffix)]

    def around(self, inner: str) -> str:
        """The name of a parameter in this frame."""
        return f"{self.prefix}{inner}{self.suffix}"


Framed = dict[Frame, dict[str, str]]
"""For each frame: parameter's name -> whole name."""


Known = Callable[[str], bool]
"""Whether a map's rules take a parameter's name."""


def framed(catalog: Catalog, known: Known, known_state: Known) -> tuple[Framed, list[str]]:
    """Every name that holds a parameter's, by frame, and the model's names that hold none.

    ``known`` tells the names of the model's parameters, ``known_state`` those of an optimizer's.
    """
    model, others = _by_part(catalog)
    found: Framed = {frame: {} for frame in _model_frames(model, known)}
    odd = []
    for name in model:
        spot = next(((f, i) for f in found if known(i := f.inner(name) or "")), None)
        if spot is None:
            odd.append(name)
        else:
            found[spot[0]][spot[1]] = name
    parameters = {inner for names in found.values() for inner in names}
    unframed = _state_frames(others, parameters, found)
    for name in unframed:
        for frame, names in found.items():
            inner = frame.inner(name) if frame.part != "model" else None
            if inner is not None and known_state(inner):
                names[inner] = name
                break
    return found, odd


def _by_part(catalog: Catalog) -> tuple[list[str], list[str]]:
    model = [n for n, e in catalog.tensors.items() if state_category(e) == "model"]
    mine = set(model)
    others = [n for n in catalog.tensors if n not in mine]
    return model, [*others, *catalog.objects]


def _model_frames(names: Iterable[str], known: Known) -> list[Frame]:
    """The wrappers that parameters' names lie in, such as none, ``model.`` or ``ema.``."""
    counts = Counter(prefix for name in names for prefix in _wrapper(name, known))
    most = max(counts.values(), default=0)
    found = [Frame(prefix) for prefix, count in counts.items() if 2 * count >= most]
    return found or [Frame("")]


def _wrapper(name: str, known: Known) -> Iterator[str]:
    """The shortest beginning of a name that is followed by a parameter's name."""
    for inner in unwrapped(name):
        if known(inner):
            yield name[: len(name) - len(inner)]
            return


def unwrapped(name: str) -> Iterator[str]:
    """The name, and what it is without the first of its parts, as a wrapper may add them."""
    steps = name.split(".")
    for count in range(min(_MOST_WRAPPERS + 1, len(steps))):
        yield ".".join(steps[count:])


def _state_frames(names: Iterable[str], parameters: Collection[str], found: Framed) -> list[str]:
    """Put names around parameters' names into frames, made as needed; returns those around none."""
    frames = [frame for frame in found if frame.part != "model"]
    left = []
    for name in names:
        frame = next((f for f in frames if f.inner(name) in parameters), None)
        if frame is None:
            frame = _around_parameter(name, parameters)
            if frame is None:
                left.append(name)
                continue
            frames.append(frame)
            found[frame] = {}
        found[frame][frame.inner(name) or ""] = name
    return left


def _around_parameter(name: str, parameters: Collection[str]) -> Frame | None:
    """The frame of the longest parameter's name within a name."""
    steps = name.split(".")
    for length in range(len(steps), 0, -1):
        for start in range(len(steps) - length + 1):
            if ".".join(steps[start : start + length]) in parameters:
                before, after = steps[:start], steps[start + length :]
                prefix = "".join(f"{step}." for step in before)
                return Frame(prefix, "".join(f".{s}" for s in after), "optimizer")
    return None
