"""Include a map in another: other prefixes, excluded names, precedence."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from msgspec.structs import replace

from ckptool.core.keymap.model import KeepRule, KeyMap, Pattern, Rule
from ckptool.errors import UsageError

_PLAIN = re.compile(r"[^*?\[\]#]*")


def moved(key_map: KeyMap, within: Sequence[Mapping[str, str]]) -> KeyMap:
    """Return a map with other prefixes, as ``within`` gives for either side.

    Raises UsageError if kept names would need two prefixes and no rule says which.
    """

    def move(pattern: Pattern, starts: Mapping[str, str]) -> Pattern:
        text, key = (begin(name, starts) for name in (pattern.text, pattern.key))
        return replace(pattern, text=text, key=key) if text and key else pattern

    def all_of(patterns: Sequence[Pattern], side: int) -> tuple[Pattern, ...]:
        return tuple(move(pattern, within[side]) for pattern in patterns)

    def move_keep(keep: KeepRule) -> KeepRule:
        source, target = (
            begin(glob, starts) or glob
            for glob, starts in zip((keep.source, keep.target), within, strict=True)
        )
        return keep_rule(source, target, "[within]")

    rules = (
        replace(
            rule,
            sources=all_of(rule.sources, 0),
            targets=all_of(rule.targets, 1),
            beside=rule.beside and move(rule.beside, within[0]),
            back=rule.back and move(rule.back, within[1]),
        )
        for rule in key_map.rules
    )
    return replace(
        key_map,
        rules=tuple(rules),
        drop=all_of(key_map.drop, 0),
        back_drop=all_of(key_map.back_drop, 1),
        keep=tuple(map(move_keep, key_map.keep)),
        tells={name: all_of(patterns, 1) for name, patterns in key_map.tells.items()},
    )


def keep_rule(source: str, target: str, where: str) -> KeepRule:
    """Return the rule that keeps names; UsageError if their new names do not follow from it."""
    keep = KeepRule(source, target)
    if not all(map(_PLAIN.fullmatch, keep.prefixes)):
        raise UsageError(
            f"{where}: keep {source!r} = {target!r}: names may begin otherwise, but the globs after"
            " that must be the same"
        )
    return keep


def begin(name: str, starts: Mapping[str, str]) -> str | None:
    """Return a name with another prefix; None if it has none of the prefixes."""
    old = next((old for old in starts if name.startswith(old)), None)
    return None if old is None else starts[old] + name.removeprefix(old)


def is_about(rule: Rule, glob: str) -> bool:
    """Return whether a glob matches one of a rule's names."""
    names = (p.text.partition(" ")[0] for p in (*rule.sources, *rule.targets))
    return any(fnmatchcase(name, glob) for name in names)


def with_included(key_map: KeyMap, other: KeyMap, without: Sequence[str]) -> KeyMap:
    """Append another map's rules to a map, which keeps the models it is for.

    Rules that are already present, as of a map that several include, are not repeated.
    """
    rules = (rule for rule in other.rules if not any(is_about(rule, glob) for glob in without))
    return replace(
        key_map,
        rules=tuple(dict.fromkeys((*key_map.rules, *rules))),
        sizes={**other.sizes, **key_map.sizes},
        drop=tuple(dict.fromkeys((*key_map.drop, *other.drop))),
        keep=tuple(dict.fromkeys((*key_map.keep, *other.keep))),
        tells={**other.tells, **key_map.tells},
        back_drop=tuple(dict.fromkeys((*key_map.back_drop, *other.back_drop))),
    )
