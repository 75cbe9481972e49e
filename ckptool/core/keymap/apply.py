"""A checkpoint under another map of keys: catalog in, catalog out. No byte is moved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptool.core.catalog import Catalog, ObjectEntry, TensorEntry
from ckptool.core.keymap.carry import CarriedTensor, carry, one_value
from ckptool.core.keymap.match import Claim, Facts, Frame, Frames, Matcher, find_frames
from ckptool.core.keymap.model import BoundTensor, KeyMap, Rule, UnknownSizes, group_sizes
from ckptool.core.selection import rename_entry
from ckptool.core.state_category import state_category
from ckptool.errors import Unsupported, UsageError

_MOST_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Move:
    """One tensor of the result, the tensors it is made of, and how."""

    sources: tuple[str, ...]
    target: str
    entry: TensorEntry
    operation: str


@dataclass(frozen=True, slots=True)
class MapResult:
    """A checkpoint under a map; ``excluded`` are the names that the map says to leave out."""

    catalog: Catalog
    moves: tuple[Move, ...]
    excluded: tuple[str, ...]


def apply_map(catalog: Catalog, key_map: KeyMap, facts: Facts) -> MapResult:
    """Apply a map to a checkpoint: its model, and what an optimizer keeps for each parameter.

    The places of tensors must have been located. Raises UsageError where no rule takes a tensor
    or two make one name, UnknownSizes, and Unsupported where shapes are not what the map says or
    the optimizer's state cannot follow.
    """
    unsupported = [name for name in key_map.unless if name in facts.true]
    if unsupported:
        raise Unsupported(
            f"map {key_map.name} does not support models with {', '.join(unsupported)}"
        )
    return _Application(catalog, key_map, facts.of(catalog, key_map)).run()


class _Application:
    """One map on one catalog."""

    def __init__(self, catalog: Catalog, key_map: KeyMap, facts: Facts) -> None:
        self._catalog = catalog
        self._map = key_map
        self._facts = facts
        self._matchers = {p: Matcher(key_map, facts, p) for p in ("model", "optimizer")}
        self._order = {n: at for at, n in enumerate((*catalog.tensors, *catalog.objects))}
        self._names: dict[object, list[str]] = {}
        self._numbered = key_map.numbered
        self._sizes: dict[object, tuple[int, str]] = {}
        self._moves: list[Move] = []
        self._values: list[ObjectEntry] = []
        self._excluded: list[str] = []
        self._refused: list[str] = []
        self._unknown: dict[str, UnknownSizes] = {}

    def run(self) -> MapResult:
        knows = [self._matchers[part].knows for part in ("model", "optimizer")]
        frames, unmatched = find_frames(self._catalog, *knows)
        handled: set[str] = set()
        self._require_matched(unmatched)
        groups = [
            (frame, group)
            for frame, names in frames.items()
            for group in self._groups(frame, names, handled)
        ]
        for scalars in (False, True):
            for frame, names, claims in self._tensor_groups(groups, frames, scalars=scalars):
                self._carry(frame, names, claims, scalars=scalars)
        for frame, claims in groups:
            self._carry_values(frame, frames[frame], claims)
        self._rename_in_lists(handled)
        self._require_done(handled)
        return self._result(handled)

    def _require_matched(self, unmatched: Sequence[str]) -> None:
        if unmatched:
            raise UsageError(
                f"map {self._map.name} ({self._map.source} to {self._map.target}) has no rule for"
                f" {len(unmatched):,} of the tensors:\n" + list_lines(unmatched),
                hint="use --drop 'GLOB' to exclude tensors, or edit the map of `ckptool maps NAME`"
                " and pass it as --map FILE",
            )

    def _groups(
        self, frame: Frame, names: Mapping[str, str], handled: set[str]
    ) -> Iterator[list[Claim]]:
        """Yield the claims of one frame's names, grouped as they are carried over."""
        matcher = self._matchers[frame.part]
        groups: dict[object, list[Claim]] = defaultdict(list)
        for inner, name in names.items():
            handled.add(name)
            claim = matcher.claim(inner)
            if claim is not None:
                groups[claim.group].append(claim)
            elif matcher.drops(inner):
                self._excluded.append(name)
            else:
                self._refused.append(name)
        yield from groups.values()

    def _tensor_groups(
        self, groups: Iterable[tuple[Frame, list[Claim]]], frames: Frames, *, scalars: bool
    ) -> Iterator[tuple[Frame, Mapping[str, str], list[Claim]]]:
        for frame, claims in groups:
            names = frames[frame]
            tensors = [c for c in claims if names[c.inner] in self._catalog.tensors]
            if tensors and scalars == self._is_scalar(frame, names, tensors[0]):
                yield frame, names, tensors

    def _is_scalar(self, frame: Frame, names: Mapping[str, str], claim: Claim) -> bool:
        """Return whether the optimizer keeps this per parameter, not per element."""
        entry = self._catalog.tensors[names[claim.inner]]
        if frame.part == "model" or claim.rule.renames:
            return False
        return entry.elements == 1 and len(entry.shape) < len(claim.pattern.axes or ())

    def _carry(
        self, frame: Frame, names: Mapping[str, str], claims: list[Claim], *, scalars: bool
    ) -> None:
        rule = claims[0].rule
        tensors = [
            BoundTensor(c.pattern, c.binding, self._catalog.tensors[names[c.inner]]) for c in claims
        ]
        try:
            targets = (
                self._scalars(claims, tensors)
                if scalars
                else self._elements(rule, tensors, exact=frame.part != "model")
            )
        except UnknownSizes as error:
            self._unknown.setdefault(rule.whole.text, error)
            return
        except Unsupported as error:
            if frame.part == "model":
                raise
            self._refused.append(f"{names[claims[0].inner]} ({error.message})")
            return
        self._names.setdefault(claims[0].group, [target.name for target in targets])
        sources = tuple(names[claim.inner] for claim in claims)
        for target in targets:
            name = frame.around(target.name)
            entry = rename_entry(target.entry, name)
            self._moves.append(Move(sources, name, entry, target.operation))

    def _elements(
        self, rule: Rule, tensors: list[BoundTensor], *, exact: bool
    ) -> list[CarriedTensor]:
        sizes = group_sizes(rule, tensors, self._facts.sizes)
        self._require_alike(rule, tensors[0], sizes)
        return carry(rule, tensors, sizes, exact=exact)

    def _require_alike(self, rule: Rule, first: BoundTensor, sizes: Mapping[str, int]) -> None:
        """Raise Unsupported where a dim of the model, or a number of names, has two sizes.

        What all names of a rule number, such as layers, may differ in its other numbers: experts.
        """
        within = tuple((axis, first.binding[axis]) for axis in rule.common)
        axes = {name for axis in rule.axes for name in axis}
        for name in (self._numbered & axes | self._map.sizes.keys()) & sizes.keys():
            of = within if name in self._numbered else ()
            size, seen = self._sizes.setdefault((name, of), (sizes[name], first.entry.name))
            if size != sizes[name]:
                raise Unsupported(
                    f"{name} is {sizes[name]:,} in {first.entry.name} {list(first.entry.shape)},"
                    f" but {size:,} in {seen}: a tensor is missing, or the given dims are wrong"
                )

    def _scalars(self, claims: list[Claim], tensors: list[BoundTensor]) -> list[CarriedTensor]:
        names = self._names.get(claims[0].group)
        if names is None:
            raise Unsupported("its parameter was not found")
        return one_value(names, [tensor.entry for tensor in tensors])

    def _carry_values(self, frame: Frame, names: Mapping[str, str], claims: list[Claim]) -> None:
        values = [
            self._catalog.objects[names[c.inner]]
            for c in claims
            if names[c.inner] in self._catalog.objects
        ]
        if not values:
            return
        targets = self._names.get(claims[0].group)
        first = values[0]
        if targets is None or any(repr(v.value) != repr(first.value) for v in values):
            self._refused += [value.name for value in values]
            return
        for target in targets:
            self._values.append(rename_entry(first, frame.around(target)))

    def _rename_in_lists(self, handled: set[str]) -> None:
        """Rename in lists of parameters' names, as an optimizer's parameter groups have them."""
        listed_before: set[str] = set()
        for name, entry in self._catalog.objects.items():
            if name in handled or not _is_list_of_names(entry):
                continue
            claims = [self._matchers["optimizer"].claim(item) for item in entry.value]
            groups = dict.fromkeys(claim.group for claim in claims if claim is not None)
            if not groups:
                continue
            names = [new for group in groups for new in self._names.get(group, ())]
            whole = None not in claims and groups.keys() <= self._names.keys()
            if not whole or listed_before & set(names):
                self._refused.append(name)
                continue
            handled.add(name)
            listed_before |= set(names)
            self._values.append(replace(entry, value=type(entry.value)(names)))

    def _require_done(self, handled: set[str]) -> None:
        if self._unknown:
            names = sorted({name for error in self._unknown.values() for name in error.names})
            raise next(iter(self._unknown.values())).all_of(names)
        unhandled = [
            name
            for name, entry in self._catalog.tensors.items()
            if name not in handled and state_category(entry) == "optimizer"
        ]
        refused = [*self._refused, *unhandled]
        if refused:
            raise Unsupported(
                f"{len(refused):,} parts of the optimizer state cannot follow the parameters:\n"
                + list_lines(refused),
                hint="use --model-only to exclude the optimizer, or --drop 'GLOB' for tensors",
            )

    def _result(self, handled: set[str]) -> MapResult:
        moves = sorted(self._moves, key=lambda move: self._order[move.sources[0]])
        by_target: dict[str, list[str]] = defaultdict(list)
        for move in moves:
            by_target[move.target].append(" + ".join(move.sources))
        duplicates = [
            f"{name}, from {' and from '.join(sources)}"
            for name, sources in by_target.items()
            if len(sources) > 1
        ]
        if duplicates:
            raise UsageError(
                f"map {self._map.name} gives {len(duplicates):,} duplicate names:\n"
                + list_lines(duplicates)
            )
        tensors = {move.target: move.entry for move in moves}
        rest = {n: e for n, e in self._catalog.tensors.items() if n not in handled}
        objects = {n: e for n, e in self._catalog.objects.items() if n not in handled}
        objects |= {value.name: value for value in self._values}
        catalog = replace(self._catalog, tensors=tensors | rest, objects=objects)
        return MapResult(catalog, tuple(moves), tuple(self._excluded))


def _is_list_of_names(entry: ObjectEntry) -> bool:
    """Return whether a value of the optimizer is a list of texts."""
    if state_category(entry) != "optimizer" or not isinstance(entry.value, list | tuple):
        return False
    return bool(entry.value) and all(isinstance(item, str) for item in entry.value)


def list_lines(names: Sequence[Any]) -> str:
    """List some names, one a line, and how many more there are."""
    shown = [f"  - {name}" for name in names[:_MOST_SHOWN]]
    if len(names) > len(shown):
        shown.append(f"  - and {len(names) - len(shown):,} more")
    return "\n".join(shown)
