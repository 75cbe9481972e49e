"""Apply a key map to a checkpoint: catalog in, catalog out. No byte is moved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.core.catalog import Catalog, ObjectEntry, TensorEntry
from ckptool.core.keymap.carry import (
    CarriedTensor,
    carry,
    join_blocks,
    one_value,
    split_blocks,
)
from ckptool.core.keymap.match import Claim, Frame, Matcher, ModelFacts, find_frames
from ckptool.core.keymap.model import KeyMap, Rule
from ckptool.core.keymap.sizes import BoundTensor, UnknownSizes, group_sizes
from ckptool.core.keymap.wrappers import unwrapping_hint
from ckptool.core.quantization.names import dequantizing_hint
from ckptool.core.selection import rename_entry
from ckptool.core.state_category import state_category
from ckptool.core.text import list_lines, plural
from ckptool.errors import Unsupported, UsageError

_MOMENTS = (".exp_avg", ".exp_avg_sq", ".max_exp_avg_sq", ".momentum_buffer")


class Move(Struct, frozen=True):
    """One tensor of the result, its source tensors, and the operation."""

    sources: tuple[str, ...]
    target: str
    entry: TensorEntry
    operation: str


class MapResult(Struct, frozen=True):
    """A checkpoint under a map; ``excluded`` are the names that the map excludes.

    ``computed`` are the tensors of the result whose elements the map changes.
    """

    catalog: Catalog
    moves: tuple[Move, ...]
    excluded: tuple[str, ...]
    computed: tuple[str, ...]


def apply_map(catalog: Catalog, key_map: KeyMap, facts: ModelFacts) -> MapResult:
    """Apply a map to a checkpoint: to its model, and to an optimizer's state of each parameter.

    The places of tensors must have been located. Raises UsageError if no rule matches a tensor or
    two yield one name, UnknownSizes, and Unsupported if shapes contradict the map or the
    optimizer's state cannot follow.
    """
    unsupported = [name for name in key_map.unless if name in facts.true]
    if unsupported:
        raise Unsupported(
            f"map {key_map.name} does not support models with {', '.join(unsupported)}"
        )
    return _Application(catalog, key_map, facts.of(catalog, key_map)).run()


class _Group(Struct, frozen=True):
    """Tensors carried over together in one frame; ``first`` is the claim to one of its names."""

    frame: Frame
    first: Claim
    tensors: list[BoundTensor] = field(default_factory=list)
    values: list[ObjectEntry] = field(default_factory=list)

    @property
    def is_scalar(self) -> bool:
        """Whether the optimizer keeps this per parameter, not per element."""
        tensor = self.tensors[0]
        if self.frame.part == "model" or self.first.rule.renames:
            return False
        return tensor.entry.elements == 1 and len(tensor.entry.shape) < len(tensor.axes)


class _Application:
    """One map on one catalog."""

    def __init__(self, catalog: Catalog, key_map: KeyMap, facts: ModelFacts) -> None:
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
        self._computed: list[str] = []
        self._refused: list[str] = []
        self._unknown: dict[str, UnknownSizes] = {}

    def run(self) -> MapResult:
        knows = [self._matchers[part].knows for part in ("model", "optimizer")]
        frames, unmatched = find_frames(self._catalog, *knows)
        self._require_matched(unmatched)
        groups = [group for frame, names in frames.items() for group in self._groups(frame, names)]
        for scalars in (False, True):
            for group in groups:
                if group.tensors and group.is_scalar == scalars:
                    self._carry(group)
        for group in groups:
            self._carry_values(group)
        if self._excluded and not self._moves:
            raise UsageError(f"map {self._map.name} excludes every tensor")
        handled = {name for names in frames.values() for name in names.values()}
        self._rename_in_lists(handled)
        self._require_done(handled)
        return self._result(handled)

    def _require_matched(self, unmatched: Sequence[str]) -> None:
        if unmatched:
            raise UsageError(
                f"map {self._map.name} ({self._map.source} to {self._map.target}) has no rule for"
                f" {len(unmatched):,} of the tensors:\n" + list_lines(unmatched),
                hint=dequantizing_hint(self._catalog, unmatched)
                or unwrapping_hint(unmatched, self._matchers["model"].knows)
                or "use --drop 'NAME' to exclude tensors, or edit the map of `ckptool maps NAME`"
                " and pass it as --map FILE",
            )

    def _groups(self, frame: Frame, names: Mapping[str, str]) -> Iterable[_Group]:
        """Return the groups of one frame's names."""
        matcher = self._matchers[frame.part]
        groups: dict[object, _Group] = {}
        for inner, name in names.items():
            claim = matcher.claim(inner)
            if claim is not None:
                group = groups.setdefault(claim.group, _Group(frame, claim))
                entry = self._catalog.tensors.get(name)
                if entry is None:
                    group.values.append(self._catalog.objects[name])
                else:
                    group.tensors.append(BoundTensor(claim.pattern, claim.binding, entry))
            elif matcher.drops(inner):
                self._excluded.append(name)
            else:
                self._refused.append(name)
        return groups.values()

    def _carry(self, group: _Group) -> None:
        rule, is_model = group.first.rule, group.frame.part == "model"
        try:
            targets = (
                self._scalars(group)
                if group.is_scalar
                else self._elements(_for(rule, group.frame), group.tensors, exact=not is_model)
            )
        except UnknownSizes as error:
            self._unknown.setdefault(rule.whole.text, error)
            return
        except Unsupported as error:
            if is_model:
                raise
            self._refused.append(f"{group.tensors[0].entry.name} ({error.message})")
            return
        self._names.setdefault(group.first.group, [target.name for target in targets])
        sources = tuple(tensor.entry.name for tensor in group.tensors)
        for target in targets:
            name = group.frame.around(target.name)
            entry = rename_entry(target.entry, name)
            self._moves.append(Move(sources, name, entry, target.operation))
            if rule.add and is_model:
                self._computed.append(name)

    def _elements(
        self, rule: Rule, tensors: list[BoundTensor], *, exact: bool
    ) -> list[CarriedTensor]:
        tensors = split_blocks(rule, tensors, self._facts.sizes)
        targets = []
        for part in rule.pairs or [rule]:
            group = [t for t in tensors if t.pattern in part.sources]
            if not group:
                raise Unsupported(
                    f"{tensors[0].entry.name}: no {part.sources[0].text} found, required to make"
                    f" {part.targets[0].text}"
                )
            sizes = group_sizes(part, group, self._facts.sizes)
            self._require_same_sizes(part, group[0], sizes)
            targets += carry(part, group, sizes, exact=exact)
        return join_blocks(targets)

    def _require_same_sizes(self, rule: Rule, first: BoundTensor, sizes: Mapping[str, int]) -> None:
        """Raise Unsupported if a dim of the model, or a number of names, has two sizes.

        Indices in all names of a rule, such as layers, may differ in its other indices: experts.
        """
        binding = tuple((axis, first.binding[axis]) for axis in rule.common)
        axes = {name for axis in rule.axes for name in axis}
        for name in (self._numbered & axes | self._map.sizes.keys()) & sizes.keys():
            scope = binding if name in self._numbered else ()
            size, tensor = self._sizes.setdefault((name, scope), (sizes[name], first.entry.name))
            if size != sizes[name]:
                raise Unsupported(
                    f"{name} is {sizes[name]:,} in {first.entry.name} {list(first.entry.shape)},"
                    f" but {size:,} in {tensor}: a tensor is missing, or the given dims are wrong"
                )

    def _scalars(self, group: _Group) -> list[CarriedTensor]:
        names = self._names.get(group.first.group)
        if names is None:
            raise Unsupported("its parameter was not found")
        return one_value(names, [tensor.entry for tensor in group.tensors])

    def _carry_values(self, group: _Group) -> None:
        targets = self._names.get(group.first.group)
        if targets is None or len({repr(entry.value) for entry in group.values}) > 1:
            self._refused += [entry.name for entry in group.values]
            return
        for entry in group.values[:1]:
            self._values += [rename_entry(entry, group.frame.around(name)) for name in targets]

    def _rename_in_lists(self, handled: set[str]) -> None:
        """Rename in lists of parameters' names, such as those of optimizer parameter groups."""
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
                hint="use --model-only to exclude the optimizer, or --drop 'NAME' for tensors",
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
                f"map {self._map.name} gives {plural(len(duplicates), 'duplicate name')}:\n"
                + list_lines(duplicates)
            )
        tensors = {move.target: move.entry for move in moves}
        rest = {n: e for n, e in self._catalog.tensors.items() if n not in handled}
        objects = {n: e for n, e in self._catalog.objects.items() if n not in handled}
        objects |= {value.name: value for value in self._values}
        catalog = replace(self._catalog, tensors=tensors | rest, objects=objects)
        return MapResult(catalog, tuple(moves), tuple(self._excluded), tuple(self._computed))


def _for(rule: Rule, frame: Frame) -> Rule:
    """Return a rule for one part: gradients, and so their moments, are those of ``weight + 1``.

    Raises Unsupported if the effect of an adding rule on an optimizer's state is unknown.
    """
    if not rule.add or frame.part == "model":
        return rule
    if frame.suffix not in _MOMENTS:
        raise Unsupported(f"the map adds {rule.add} to the model's tensor, perhaps also to this")
    return replace(rule, add=0)


def _is_list_of_names(entry: ObjectEntry) -> bool:
    """Return whether a value of the optimizer is a list of texts."""
    if state_category(entry) != "optimizer" or not isinstance(entry.value, list | tuple):
        return False
    return bool(entry.value) and all(isinstance(item, str) for item in entry.value)
