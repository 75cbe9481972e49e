"""Parse key maps from TOML, and require that their rules work in both directions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

from msgspec.structs import replace

from ckptool.core.keymap.axes import NAME, Dim, axes_of, parse_axes
from ckptool.core.keymap.include import begin, is_about, keep_rule, moved, with_included
from ckptool.core.keymap.invertible import require_invertible
from ckptool.core.keymap.model import Block, KeepRule, KeyMap, Pattern, Rule, Slot
from ckptool.core.text import did_you_mean
from ckptool.errors import CkptoolError, UsageError

_NUMBER = re.compile(r"[0-9]+")
_SLOT = re.compile(r"\{(\w+)(?:\+(\w+))?\}")
_STACKED = re.compile(r"<(\.\{(\w+)\})>")
_PLAIN = re.compile(r"[^\s\d{}\[\]<>?#]*")
_BEGINNING = re.compile(r"([^\s{}\[\]<>?#]|\{\w+( ?\+ ?\w+)?\})*")
_BLOCKS = re.compile(r"([^|]*?)\((?:([^()|]*)\()?([^()]*\|[^()]*)(?:\)([^()|]*))?\)([^|]*)")
_NAMED = re.compile(r"(?P<name>\S+?)(?P<optional>\?)?(?:\s+\[(?P<axes>[^\[\]]*)\])?")
SEE_A_MAP = "`ckptool maps NAME` prints a map to begin with"
_KEYS = frozenset(
    "name summary from to dims rule drop marks model_types unless facts keep detect include without"
    " within also".split()
)
_TYPES = {"padding": str, "tie": bool, "when": str, "unless": str, "only": str, "add": int}
_CALLED: Mapping[type, str] = {str: "text", bool: "true or false", int: "a whole number"}
_RULE_KEYS = frozenset(("from", "to", "beside", *_TYPES))

_MOST_RULES = 10_000
"""Each name that several rules may match is held against all: a hostile map has millions."""
_MOST_SIZES = 200
"""Each may be looked up for the one before, in nested calls, of which Python allows a thousand."""
_MOST_ADDED = 1 << 24
"""Up to here a float of 32 bits has every whole number."""
_LARGEST_SIZE = 1 << 63

Included = Callable[[str], KeyMap]
"""Returns the map that another includes, by its name there."""


def parse_map(content: Mapping[str, Any], where: str, included: Included) -> KeyMap:
    """Parse a TOML file's content; UsageError naming the rule if something is wrong."""
    names = _texts(content.get("include", []), where)
    key_map = _require_bounds(_parse_own(content, where, has_more=bool(names)), where)
    without = _texts(content.get("without", []), where)
    within = _starts(_table(content, "within", where), f"{where}: [within]", _PLAIN)
    maps = [moved(included(name), within) for name in names]
    rules = [rule for other in maps for rule in other.rules]
    for glob in without:
        if not any(is_about(rule, glob) for rule in rules):
            raise UsageError(f"{where}: without = {glob!r} matches no name of what is included")
    for other in maps:
        key_map = _require_bounds(with_included(key_map, other, without), where)
    for table in _tables(content, "also", where):
        starts = _starts(table, f"{where}: [[also]]", _BEGINNING)
        rules, keep = _copies(key_map.rules, starts), _keep_copies(key_map.keep, starts, where)
        if not rules and not keep:
            raise UsageError(f"{where}: [[also]] matches the beginning of no rule")
        key_map = replace(key_map, rules=(*rules, *key_map.rules), keep=(*keep, *key_map.keep))
        key_map = _require_bounds(key_map, where)
    return key_map


def _require_bounds(key_map: KeyMap, where: str) -> KeyMap:
    if max(len(key_map.rules), len(key_map.keep)) > _MOST_RULES:
        raise UsageError(f"{where}: more than {_MOST_RULES:,} rules, with those included")
    if len(key_map.sizes) > _MOST_SIZES:
        raise UsageError(f"{where}: more than {_MOST_SIZES} sizes in [dims]")
    return key_map


def _starts(
    table: Mapping[str, Any], where: str, allowed: re.Pattern[str]
) -> list[Mapping[str, str]]:
    """Return prefixes and their replacements, by side."""
    _require_keys(table, {"from", "to"}, where)
    sides = [_table(table, side, where) for side in ("from", "to")]
    for text in (text for side in sides for pair in side.items() for text in pair):
        if not isinstance(text, str) or not allowed.fullmatch(text):
            raise UsageError(f"{where} {text!r} must be the beginning of a name")
    return sides


def _copies(rules: Sequence[Rule], starts: Sequence[Mapping[str, str]]) -> list[Rule]:
    """Return copies, with other prefixes, of the rules all of whose names begin as in ``starts``.

    They precede the others: of ``layers.{mtp + layers}`` and ``layers.{layer}`` the second matches
    all numbers. Raises UsageError if a new name is no valid pattern.
    """
    copies = []
    for rule in rules:
        besides = [p for p in (rule.beside, rule.back) if p is not None]
        sides = [
            [_move(pattern, begin) for pattern in patterns]
            for patterns, begin in zip((rule.sources, rule.targets), starts, strict=True)
        ]
        beside, back = (
            name and _move(name, begin)
            for name, begin in zip((rule.beside, rule.back), starts, strict=True)
        )
        sources, targets = (tuple(p for p in side if p is not None) for side in sides)
        whole = len(sources) + len(targets) == len(rule.sources) + len(rule.targets)
        if whole and len(besides) == sum(p is not None for p in (beside, back)):
            copies.append(replace(rule, sources=sources, targets=targets, beside=beside, back=back))
    return copies


def _keep_copies(
    keep: Sequence[KeepRule], starts: Sequence[Mapping[str, str]], where: str
) -> list[KeepRule]:
    """Return copies of the keep rules whose globs begin as in ``starts``, as ``_copies`` does."""
    sides = ((begin(rule.source, starts[0]), begin(rule.target, starts[1])) for rule in keep)
    return [keep_rule(new, to, f"{where}: [[also]]") for new, to in sides if new and to]


def _move(pattern: Pattern, starts: Mapping[str, str]) -> Pattern | None:
    """Return a pattern with another prefix; None if it has none of the prefixes."""
    text = begin(pattern.text, starts)
    return None if text is None else _blocks(text)[pattern.block.place if pattern.block else 0]


def _parse_own(content: Mapping[str, Any], where: str, *, has_more: bool) -> KeyMap:
    """Parse a map without its includes."""
    _require_keys(content, _KEYS, where)
    rules = []
    for number, table in enumerate(_tables(content, "rule", where), 1):
        try:
            rules += [_rule(variant) for variant in _variants(table)]
        except CkptoolError as error:
            raise UsageError(f"{where}: rule {number}: {error.message}") from None
    if not rules and not has_more:
        raise UsageError(f"{where}: no [[rule]] found", hint=SEE_A_MAP)
    drop, back_drop = _sides(content, "drop", where)
    marks, back_marks = _sides(content, "marks", where)
    return KeyMap(
        name=_text(content, "name", where, where),
        summary=_text(content, "summary", "", where),
        source=_text(content, "from", "one side", where),
        target=_text(content, "to", "the other", where),
        rules=tuple(rules),
        sizes={n: _lookups(n, v, where) for n, v in _table(content, "dims", where).items()},
        drop=drop,
        marks=marks,
        model_types=tuple(_texts(content.get("model_types", []), where)),
        unless=tuple(_texts(content.get("unless", []), where)),
        keep=tuple(_keep_rules(content.get("keep", []), where)),
        detected=_detect(content, where) != "asked",
        back_detected=_detect(content, where) not in ("from", "asked"),
        needs_model_type=_detect(content, where) == "config",
        tells={n: _patterns(v, where) for n, v in _table(content, "facts", where).items()},
        back_drop=back_drop,
        back_marks=back_marks,
    )


def _require_keys(table: Mapping[str, Any], keys: Set[str], where: str) -> None:
    unknown = sorted(table.keys() - keys)
    if unknown:
        message = f"{where}: {unknown[0]!r} is not one of {', '.join(sorted(keys))}"
        raise UsageError(message, hint=did_you_mean(unknown[0], keys, SEE_A_MAP))


def _keep_rules(value: Any, where: str) -> Iterator[KeepRule]:
    """Yield the names that no rule matches: globs, or prefixes on either side."""
    for item in value if isinstance(value, list) else [value]:
        sides = item if isinstance(item, Mapping) else {"from": item, "to": item}
        if sides.keys() != {"from", "to"}:
            raise UsageError(f"{where}: keep requires both `from` and `to`")
        source, target = _texts([sides["from"], sides["to"]], where)
        yield keep_rule(source, target, where)


def _detect(content: Mapping[str, Any], where: str) -> str:
    """Return when ``--map auto`` selects the map."""
    how = content.get("detect", "both")
    if how not in ("both", "from", "config", "asked"):
        raise UsageError(f"{where}: detect = {how!r} must be 'both', 'from', 'config' or 'asked'")
    return str(how)


def _table(content: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    table = content.get(key, {})
    if not isinstance(table, Mapping):
        raise UsageError(f"{where}: [{key}] is not a table")
    return table


def _tables(content: Mapping[str, Any], key: str, where: str) -> list[Mapping[str, Any]]:
    tables = content.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise UsageError(f"{where}: [[{key}]] is not a list of tables")
    return tables


def _sides(
    content: Mapping[str, Any], key: str, where: str
) -> tuple[tuple[Pattern, ...], tuple[Pattern, ...]]:
    table = _table(content, key, where)
    _require_keys(table, {"from", "to"}, f"{where}: [{key}]")
    return _patterns(table.get("from", []), where), _patterns(table.get("to", []), where)


def _patterns(value: Any, where: str = "") -> tuple[Pattern, ...]:
    return tuple(pattern for text in _texts(value, where) for pattern in _blocks(text))


def _blocks(text: str) -> list[Pattern]:
    """Parse a name whose dim may have several blocks, ``[(kv (q | k) dim) hidden]``: one of each.

    Raises UsageError.
    """
    name, bracket, axes = text.partition("[")
    if "|" not in axes:
        return [parse_pattern(text)]
    match = _BLOCKS.fullmatch(axes)
    if match is None or (match[2] is None) != (match[4] is None):
        raise UsageError(f"{text!r}: blocks are (a b | c) or (x (a b | c) y), in one dim")
    before, outer, blocks, inner, after = (part or "" for part in match.groups())
    dim, sides = len(parse_axes(before)), (_dim(outer), _dim(inner))
    words = [f"{before}({outer} {block.strip()} {inner}){after}" for block in blocks.split("|")]
    parsed = [parse_pattern(f"{name}{bracket}{word}") for word in words]
    return [
        replace(pattern, text=text, block=Block(dim, *sides, place))
        for place, pattern in enumerate(parsed)
    ]


def _dim(text: str) -> Dim:
    return tuple(axes_of(parse_axes(text)))


def _lookups(name: str, value: Any, where: str) -> tuple[str | int, ...]:
    lookups = value if isinstance(value, list) else [value]
    if not NAME.fullmatch(name) or not all(type(lookup) in (str, int) for lookup in lookups):
        raise UsageError(f"{where}: [dims] {name} = {value!r} must be a list of keys or a number")
    for lookup in lookups:
        if isinstance(lookup, int) and not 0 <= lookup < _LARGEST_SIZE:
            raise UsageError(f"{where}: [dims] {name} = {lookup} is not a size")
        words = lookup.split() if isinstance(lookup, str) else ["number"]
        if len(words) % 2 == 0 or not set(words[1::2]) <= {"*", "/", "-"}:
            raise UsageError(
                f"{where}: [dims] {name} = {lookup!r} is not KEY, A / B, A * B or A - B"
            )
    return tuple(lookups)


def _text(content: Mapping[str, Any], key: str, default: str, where: str) -> str:
    text = content.get(key, default)
    if not isinstance(text, str):
        raise UsageError(f"{where}: {key} = {text!r} must be text")
    return text


def _texts(value: Any, where: str = "") -> list[str]:
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        place = f"{where}: " if where else ""
        raise UsageError(f"{place}{value!r} is not a name or a list of names")
    return texts


def _variants(table: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rule; or the two that ``<.{axis}>`` in its only ``from`` name stands for.

    One matches tensors stacked along a first dim, unless the fact ``apart`` holds, the other a
    tensor per index.
    """
    if not isinstance(table, Mapping):
        raise UsageError("is not a table")
    text = table.get("from")
    match = _STACKED.search(text) if isinstance(text, str) else None
    if match is None or not isinstance(text, str):
        return [table]
    if "[" not in text:
        raise UsageError(f"{text!r}: a stacked name needs axes in brackets")
    stacked = text.replace(match[0], "").replace("[", f"[{match[2]} ")
    return [
        {"unless": "apart", **table, "from": stacked},
        {**table, "from": text.replace(match[0], match[1])},
    ]


def _rule(table: Mapping[str, Any]) -> Rule:
    _require_keys(table, _RULE_KEYS, "a key")
    sources, targets = (_patterns(table.get(side, [])) for side in ("from", "to"))
    if not sources or not targets:
        raise UsageError("requires both `from` and `to`")
    beside, back = _beside(table, sources, targets)
    for key, kind in _TYPES.items():
        if key in table and type(table[key]) is not kind:
            raise UsageError(f"{key} = {table[key]!r} must be {_CALLED[kind]}")
    add = table.get("add", 0)
    if abs(add) > _MOST_ADDED:
        raise UsageError(f"add = {add} is beyond {_MOST_ADDED:,}")
    rule = Rule(
        sources,
        targets,
        padding=table.get("padding"),
        tie=table.get("tie", False),
        when=table.get("when"),
        only=table.get("only"),
        unless=table.get("unless"),
        beside=beside,
        back=back,
        add=add,
    )
    require_invertible(rule)
    return rule


def _beside(
    table: Mapping[str, Any], *sides: Sequence[Pattern]
) -> tuple[Pattern | None, Pattern | None]:
    """Return the names that must exist beside the names of either side."""
    required: list[Pattern | None] = []
    names = _table(table, "beside", "the rule")
    _require_keys(names, {"from", "to"}, "beside")
    for key, patterns in zip(("from", "to"), sides, strict=True):
        name = parse_pattern(str(names[key])) if key in names else None
        if name and any(set(name.spelled) - set(pattern.spelled) for pattern in patterns):
            raise UsageError(f"beside: {name.text!r} has a number missing in `{key}`")
        required.append(name)
    return required[0], required[1]


def parse_pattern(text: str) -> Pattern:
    """Parse ``NAME`` or ``NAME [AXES]``, with ``?`` after an optional name; or raise UsageError."""
    tight = re.sub(r"(?<=[{+])\s+|\s+(?=[+}])", "", text) if "{" in text else text
    match = _NAMED.fullmatch(tight.strip())
    if match is None or not text.isprintable():
        raise UsageError(f"{text!r} is not NAME or NAME [AXES]")
    slots: list[Slot | int] = []
    key, at, name = "", 0, match["name"]
    for slot in _SLOT.finditer(name):
        key += _literal(name[at : slot.start()], slots) + "#"
        if not all(NAME.fullmatch(word) for word in slot.groups() if word is not None):
            raise UsageError(f"{text!r}: an axis is a word of small letters, digits and _")
        slots.append(Slot(slot[1], slot[2]))
        at = slot.end()
    key += _literal(name[at:], slots)
    if "{" in key or "}" in key or "##" in key:
        raise UsageError(f"{text!r}: write a number in a name as {{axis}} or {{axis + size}}")
    axes = parse_axes(match["axes"]) if match["axes"] is not None else None
    pattern = Pattern(text, key, tuple(slots), axes, bool(match["optional"]))
    inside = {name for axis in axes_of(axes or ()) for name in axis}
    repeated = inside & set(pattern.spelled)
    if repeated:
        raise UsageError(f"{text!r}: {min(repeated)} is both in the name and in the dims")
    return pattern


def _literal(text: str, slots: list[Slot | int]) -> str:
    slots += [int(number) for number in _NUMBER.findall(text)]
    return _NUMBER.sub("#", text)
