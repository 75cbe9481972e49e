"""Check a key map against a checkpoint's names: ``maps NAME --check CKPT``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import ClassVar

from msgspec import Struct

from ckptool.commands.document import Report
from ckptool.commands.keymap.choice import requested_map
from ckptool.commands.keymap.maps import map_checkpoint
from ckptool.commands.keymap.sizes import facts
from ckptool.commands.model.records import records, records_around
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.rewrite import MapOptions
from ckptool.commands.rewrite import only_model
from ckptool.core.keymap.match import Frames, Matcher, find_frames
from ckptool.core.keymap.model import KeyMap, abstract
from ckptool.core.keymap.sizes import UnknownSizes
from ckptool.core.keymap.wrappers import unwrapping_hint
from ckptool.core.quantization.names import dequantizing_hint
from ckptool.core.text import nearest
from ckptool.errors import CkptoolError
from ckptool.storage.url import Location


class Unmatched(Struct, frozen=True):
    """A name, or a rule's pattern, without a match; ``count`` names differ only in numbers.

    ``nearest`` is the most similar on the other side, None if there is none.
    """

    name: str
    count: int
    nearest: str | None


class MapCheck(Report, frozen=True):
    """How a map matches a checkpoint's model, applied from ``source`` to ``target``.

    ``names`` are the model's tensors that no rule matches, ``rules`` the patterns without a match.
    ``problem`` is why the map cannot be applied although all names match: sizes, shapes.
    """

    schema: ClassVar[str] = "map_check"
    map: str
    source: str
    target: str
    tensors: int
    matched: int
    names: tuple[Unmatched, ...]
    rules: tuple[Unmatched, ...]
    problem: str | None = None
    hint: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the map can be applied."""
        return self.problem is None and not self.names


def check_map(path: Location, options: MapOptions) -> MapCheck:
    """Compare the names of a map's rules with those of a checkpoint's model, and try the map.

    Raises UsageError if there is no such map, and the errors of opening the checkpoint.
    """
    opened = open_checkpoint(path)
    catalog = only_model(opened.catalog)
    key_map, _ = requested_map(catalog, options)
    configs = [*records(opened.source, opened.catalog, options.assets)]
    configs += records_around(opened.path, opened.catalog).values()
    matcher = Matcher(key_map, facts(key_map, configs, options.dims).of(catalog, key_map), "model")
    frames, rest = find_frames(catalog, matcher.knows, matcher.knows)
    problem, hint = None, dequantizing_hint(catalog, rest) or unwrapping_hint(rest, matcher.knows)
    if not rest:
        try:
            map_checkpoint(opened, opened.open_containers(catalog), options)
        except CkptoolError as error:
            problem, hint = error.message, error.hint
    names = tuple(_unmatched_names(rest, key_map))
    return MapCheck(
        key_map.name,
        key_map.source,
        key_map.target,
        len(catalog.tensors),
        len(catalog.tensors) - len(rest),
        names,
        tuple(_unused_patterns(key_map, frames, matcher, [unmatched.name for unmatched in names])),
        problem,
        hint,
    )


def _unmatched_names(names: Iterable[str], key_map: KeyMap) -> Iterable[Unmatched]:
    """Yield a name of each kind, with the most similar pattern."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in names:
        kinds[abstract(name)[0] or name].append(name)
    plain = dict.fromkeys(p.text.partition(" ")[0] for r in key_map.rules for p in r.sources)
    for group in kinds.values():
        yield Unmatched(group[0], len(group), nearest(group[0], plain))


def _is_claimed(name: str, matcher: Matcher) -> bool:
    """Return whether a rule matches a name, or may: which one does, sizes may decide."""
    try:
        return matcher.claim(name) is not None
    except UnknownSizes:
        return True


def _unused_patterns(
    key_map: KeyMap, frames: Frames, matcher: Matcher, left: Collection[str]
) -> Iterable[Unmatched]:
    """Yield the patterns that match no name, each with the most similar unmatched name."""
    names = (name for frame in frames.values() for name in frame)
    used = {abstract(name)[0] for name in names if _is_claimed(name, matcher)}
    unused = (p for rule in key_map.rules for p in rule.sources if p.key not in used)
    for text in dict.fromkeys(pattern.text.partition(" ")[0] for pattern in unused):
        yield Unmatched(text, 0, nearest(text, left))
