"""Catalog -> catalog: select, drop, rename, split stacked layers and experts. No byte is moved."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TypeVar

from msgspec.structs import replace

from ckptool.core.catalog import Catalog, ObjectEntry, Path, RankStep, TensorEntry, flat_name
from ckptool.core.text import plural
from ckptool.core.views import unstack
from ckptool.errors import Problem, UsageError

AnyEntry = TensorEntry | ObjectEntry
Entry = TypeVar("Entry", bound=AnyEntry)


def meant_by(patterns: Collection[str], names: Container[str]) -> Callable[[str], bool]:
    """Return whether any of the patterns of an option means a name.

    A pattern that is one of the ``names`` means only that one, whatever characters it has. Any
    other is a glob, whose ``*`` also matches dots, or else a part between dots: ``layers.1`` means
    ``model.layers.1.weight``, not ``model.layers.10.weight``.
    """
    whole = {pattern for pattern in patterns if pattern in names}
    globs = [pattern for pattern in patterns if pattern not in whole and is_glob(pattern)]
    parts = [f".{pattern}." for pattern in patterns if pattern not in whole | {*globs}]

    def is_meant(name: str) -> bool:
        if name in whole or any(fnmatchcase(name, glob) for glob in globs):
            return True
        steps = f".{name}.".replace("@rank", ".@rank") if parts else ""
        return any(part in steps for part in parts)

    return is_meant


def is_glob(pattern: str) -> bool:
    """Return whether a pattern has glob characters."""
    return any(character in pattern for character in "*?[")


def matching_names(names: Collection[str], pattern: str) -> list[str]:
    """Return the names that ``pattern`` means, in order."""
    return [*filter(meant_by([pattern], names), names)]


def is_used(pattern: str, names: Collection[str], former_names: Container[str] = ()) -> bool:
    """Return whether a pattern means any of the names; it may also be a former name itself."""
    is_former = pattern not in names and pattern in former_names
    return any(map(meant_by([pattern], former_names if is_former else names), names))


def closest_names(query: str, names: Collection[str]) -> list[str]:
    """Return up to three names most similar to ``query``, those with all its steps first.

    If no name is similar, return the most similar step of a name.
    """
    steps = [step for step in re.split(r"[.*{}]+", query) if step]
    inside = sorted((name for name in names if all(step in name for step in steps)), key=len)
    if steps and inside:
        return inside[:3]
    sample = list(names)[:20_000]  # which take a second
    parts = {part for name in sample for part in name.split(".")}
    close = get_close_matches(query, sample, n=3, cutoff=0.5)
    return close or get_close_matches(query, sorted(parts), n=1, cutoff=0.75)


class Unmatched(UsageError):
    """A pattern of an option means nothing in a checkpoint."""

    option = pattern = ""


def unmatched(option: str, pattern: str, names: Collection[str], noun: str = "name") -> Unmatched:
    """Return the error of a pattern of an option that means none of the names."""
    message = f"{option} {pattern!r} matches none of {plural(len(names), noun)}"
    return _unmatched(option, pattern, message, _hint_at_names(pattern, names))


def _unmatched(option: str, pattern: str, message: str, hint: str) -> Unmatched:
    error = Unmatched(message, hint=hint)
    error.option, error.pattern = option, pattern
    return error


def _hint_at_names(query: str, names: Collection[str]) -> str:
    """Return a hint at what matches, or else at the names most similar to ``query``."""
    inside = [name for name in names if query in name] if query else []
    if inside:
        example = f"'*{query}*' matches {len(inside):,}, such as {inside[0]}"
        return f"a name, a glob, or a whole part between dots: {example}"
    close = " or ".join(closest_names(query, names))
    return f"did you mean {close}?" if close else "`ckptool inspect CKPT --tensors '*'` lists all"


def tensors_named(catalog: Catalog, patterns: Sequence[str], option: str) -> list[str]:
    """Return the names of tensors that any pattern means; UsageError if one means none."""
    for pattern in patterns:
        if not is_used(pattern, catalog.tensors):
            count = plural(len(catalog.tensors), "tensor")
            message = f"{option} {pattern!r} matches none of {count}"
            raise unknown_tensor(message, pattern, catalog)
    return [*filter(meant_by(patterns, catalog.tensors), catalog.tensors)]


def unknown_tensor(message: str, name: str, catalog: Catalog) -> UsageError:
    """Return an error with a hint at names; ``name`` may be that of a value."""
    if name in catalog.objects:
        hint = "`ckptool inspect CKPT --values` shows it"
        return UsageError(f"{name!r}: not a tensor, but a value", hint=hint)
    return UsageError(message, hint=_hint_at_names(name, catalog.tensors))


def select(catalog: Catalog, patterns: Sequence[str]) -> Catalog:
    """Keep only the tensors and values that are meant. UsageError if a pattern means nothing."""
    return keep_names(catalog, _choose_names(catalog, patterns, (), "--select"))


def drop(catalog: Catalog, patterns: Sequence[str], former_names: Container[str] = ()) -> Catalog:
    """Drop the tensors and values that are meant. UsageError if a pattern means nothing.

    ``former_names`` are names that the catalog had before, which a pattern may be, too.
    """
    return drop_names(catalog, _choose_names(catalog, patterns, former_names, "--drop"))


def drop_names(catalog: Catalog, names: Iterable[str]) -> Catalog:
    """Drop these tensors, values and conflicts."""
    return keep_names(catalog, {*names_of(catalog)}.difference(names))


def _choose_names(
    catalog: Catalog, patterns: Sequence[str], former_names: Container[str], option: str
) -> set[str]:
    names = names_of(catalog)
    for pattern in patterns:
        if not is_used(pattern, names, former_names):
            raise unmatched(option, pattern, names)
    literals = {pattern for pattern in patterns if pattern in names or pattern in former_names}
    return {*filter(meant_by(patterns, literals), names)}


def names_of(catalog: Catalog) -> Collection[str]:
    """Return the names of tensors, values and conflicts, and of tensors that are not read."""
    unread = [n.tensor for n in catalog.notes if isinstance(n, Problem) and n.tensor]
    return dict.fromkeys((*catalog.tensors, *catalog.objects, *catalog.conflicts, *unread))


def keep_names(catalog: Catalog, names: Container[str]) -> Catalog:
    """Keep only the tensors, values and conflicts with these names."""
    return replace(
        catalog,
        tensors={name: entry for name, entry in catalog.tensors.items() if name in names},
        objects={name: entry for name, entry in catalog.objects.items() if name in names},
        conflicts={name: why for name, why in catalog.conflicts.items() if name in names},
    )


def rename(catalog: Catalog, change: Callable[[str], str]) -> Catalog:
    """Change every name; UsageError if two names become one or a name becomes empty."""
    former: dict[str, str] = {}
    for name in (*catalog.tensors, *catalog.objects):
        new = change(name)
        if not new:
            raise UsageError(f"renaming {name!r} gives an empty name")
        if new in former:
            raise UsageError(
                f"renaming gives {former[new]!r} and {name!r} the same name {new!r}",
                hint="each needs its own: a group in the left side keeps what differs,"
                " '(a|b)=new.\\1'; or --drop one",
            )
        former[new] = name
    pairs = zip(entries_of(catalog), former, strict=True)
    return with_entries(catalog, (rename_entry(entry, new) for entry, new in pairs))


def with_entries(catalog: Catalog, entries: Iterable[AnyEntry]) -> Catalog:
    """Replace all tensors and values of a catalog by ``entries``, keyed by their names."""
    entries = [*entries]
    return replace(
        catalog,
        tensors={entry.name: entry for entry in entries if isinstance(entry, TensorEntry)},
        objects={entry.name: entry for entry in entries if isinstance(entry, ObjectEntry)},
    )


def rename_entry(entry: Entry, name: str) -> Entry:
    """Return a tensor or value under another name, its path renamed alike."""
    return replace(entry, name=name, path=renamed_path(entry.path, name))


def without_rank(catalog: Catalog, names: set[str]) -> Catalog:
    """Rename ``NAME@rankR`` back to ``NAME`` for these names, at its old path."""
    return with_entries(
        catalog,
        (_without_rank(entry) if entry.name in names else entry for entry in entries_of(catalog)),
    )


def _without_rank(entry: AnyEntry) -> AnyEntry:
    *head, last = entry.path
    path = (*head, last.step) if isinstance(last, RankStep) else entry.path
    return replace(entry, name=flat_name(path), path=path)


def without_first_step(catalog: Catalog) -> Catalog:
    """Return the catalog of what is below the first step of all paths, under the same names."""
    return with_entries(catalog, (replace(e, path=e.path[1:]) for e in entries_of(catalog)))


def renamed_path(path: Path, new: str) -> Path:
    """Return the path of a renamed entry: steps at both ends that the new name keeps stay steps.

    The part between becomes one step; a name that shares nothing becomes a path of one step.
    """
    head = 0
    while head < len(path) and new.startswith(flat_name(path[: head + 1]) + "."):
        head += 1
    rest = new[len(flat_name(path[:head])) + 1 :] if head else new
    tail = len(path)
    while tail > head and (
        rest == flat_name(path[tail - 1 :]) or rest.endswith("." + flat_name(path[tail - 1 :]))
    ):
        tail -= 1
    suffix = flat_name(path[tail:])
    middle = rest[: len(rest) - len(suffix)].rstrip(".") if suffix else rest
    return (*path[:head], *((middle,) if middle else ()), *path[tail:])


def entries_of(catalog: Catalog) -> list[AnyEntry]:
    """Return all tensors and values."""
    return [*catalog.tensors.values(), *catalog.objects.values()]


def strip_prefix(catalog: Catalog, prefix: str) -> Catalog:
    """Strip ``prefix`` (and the dot after it) from names that have it; UsageError if none do."""
    head = prefix.rstrip(".") + "."
    if not any(name.startswith(head) for name in (*catalog.tensors, *catalog.objects)):
        message = f"--strip-prefix {prefix!r}: no name begins with {head!r}"
        hint = "`ckptool inspect CKPT --tensors '*'` lists all"
        raise _unmatched("--strip-prefix", prefix, message, hint)
    return rename(catalog, lambda name: name.removeprefix(head))


def strip_prefixes(catalog: Catalog, prefixes: Sequence[str]) -> Catalog:
    """Strip the first of these prefixes (and the dot after it) that a name begins with."""
    heads = tuple(prefix + "." for prefix in prefixes)
    return rename(
        catalog, lambda name: next((name[len(h) :] for h in heads if name.startswith(h)), name)
    )


def with_prefix(catalog: Catalog, prefix: str) -> Catalog:
    """Put ``prefix`` as the first step before every path."""
    entries = (
        replace(entry, name=f"{prefix}.{entry.name}", path=(prefix, *entry.path))
        for entry in entries_of(catalog)
    )
    conflicts = {
        f"{prefix}.{name}": why.of_tensor(f"{prefix}.{name}") if isinstance(why, Problem) else why
        for name, why in catalog.conflicts.items()
    }
    return replace(with_entries(catalog, entries), conflicts=conflicts)


def substitution(rule: str) -> Callable[[str], str]:
    """Return the renaming of a ``REGEX=REPLACEMENT`` rule; UsageError if it is invalid.

    Nothing is replaced where a match has just ended, as by sed: Python's ``.*`` matches there, too.
    """
    pattern, new = _parse_rule(rule)

    def change(name: str) -> str:
        ends = {match.end() for match in pattern.finditer(name) if match[0]}
        return pattern.sub(lambda m: m.expand(new) if m[0] or m.end() not in ends else "", name)

    return change


_SEARCHED = (
    "its left side is a regular expression, searched for in full names after --model-only and the"
    " rules before it; `ckptool inspect CKPT --tensors '*'` lists names"
)


def rename_by(catalog: Catalog, rule: str) -> Catalog:
    """Change the names that a ``--rename`` rule matches; UsageError also if it matches none."""
    pattern, names = _parse_rule(rule)[0], names_of(catalog)
    if not any(map(pattern.search, names)):
        message = f"--rename {rule!r} matches none of {plural(len(names), 'name')}"
        raise _unmatched("--rename", rule, message, _SEARCHED)
    return rename(catalog, substitution(rule))


_RENAMING = "such as '^module\\.=' (removes it) or '^model\\.(.*)=net.\\1'; \\( is a bracket"


def _parse_rule(rule: str) -> tuple[re.Pattern[str], str]:
    pattern, equals, replacement = rule.rpartition("=")
    if not equals:
        raise UsageError(f"invalid --rename {rule!r}: expected REGEX=REPLACEMENT", hint=_RENAMING)
    try:
        compiled = re.compile(pattern)
        compiled.sub(replacement, "")
    except (re.error, IndexError) as error:
        message = f"--rename {rule!r}: not a regular expression: {error}"
        raise UsageError(message, hint=_RENAMING) from None
    return compiled, replacement


_STACKED = (
    (re.compile(r"((?:.*?\.)?layers\.)(?![0-9])(.+)"), ""),
    (re.compile(r"(.*\.experts\.)experts\.(?![0-9])((?!.*[0-9]$).+)"), "local_experts."),
)
"""Names of stacked tensors, and the prefix of the number in a slice's name."""


def split_stacked(catalog: Catalog) -> Catalog:
    """Split ``layers.NAME`` into ``layers.3.NAME`` and so on, and likewise for experts.

    ``experts.experts.NAME`` becomes ``experts.local_experts.3.NAME``, as in Megatron-core's
    modules. Raises UsageError if no name is stacked, or a slice's name exists.
    """
    tensors: dict[str, TensorEntry] = {}
    for entry in catalog.tensors.values():
        for part in _slices(entry):
            if part.name in tensors:
                message = f"slice {part.name!r} of {entry.name} already exists"
                raise UsageError(f"--split-stacked: {message}")
            tensors[part.name] = part
    if tensors.keys() == catalog.tensors.keys():
        raise UsageError("--split-stacked: no tensors with stacked layers or experts found")
    return catalog.with_tensors(tensors)


def _slices(entry: TensorEntry) -> list[TensorEntry]:
    """Return a tensor's slices, by layer and by expert; the tensor itself if it is not stacked."""
    slices = [entry]
    for pattern, inserted in _STACKED:
        slices = [part for whole in slices for part in _split(whole, pattern, inserted)]
    return slices


def _split(entry: TensorEntry, pattern: re.Pattern[str], inserted: str) -> Iterator[TensorEntry]:
    match = pattern.fullmatch(entry.name)
    if not match or not entry.shape:
        yield entry
        return
    for number, part in enumerate(unstack(entry)):
        yield rename_entry(part, f"{match[1]}{inserted}{number}.{match[2]}")
