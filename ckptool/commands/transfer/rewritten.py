"""What a command that writes says of the rewriting: what it matched, excluded, renamed and cast."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from ckptool.commands.options.rewrite import RewriteOptions, Selection
from ckptool.commands.rewrite import RenamedCounts, RewriteResult
from ckptool.commands.transfer.report import TransferReport
from ckptool.core.catalog import Catalog
from ckptool.core.selection import matching_names, meant_by, names_of
from ckptool.core.text import plural

_FEW = 3


class Matched(Struct, frozen=True):
    """How many tensors and values a pattern of an option means, and the first of their names."""

    option: str
    pattern: str
    tensors: int
    values: int
    names: tuple[str, ...]


class RewrittenReport(TransferReport, frozen=True, kw_only=True):
    """A transfer of what was selected, renamed and cast.

    ``cast`` and ``dequantized`` count tensors by stored type, ``renamed`` those of the selection
    that have another name than before; ``unwrapped`` are the prefixes that a model's names lost.
    """

    matched: tuple[Matched, ...] = ()
    excluded: tuple[str, ...] = ()
    cast: dict[str, int] = field(default_factory=dict)
    dequantized: dict[str, int] = field(default_factory=dict)
    renamed: RenamedCounts = RenamedCounts()
    unwrapped: tuple[str, ...] = ()


def fields_of(result: RewriteResult, subset: Catalog) -> dict[str, Any]:
    """Return the fields of a report that tell of the rewriting of a selected ``subset``."""
    options = result.options
    return {
        "map": result.map,
        "matched": (*matches_of(result.whole, options.selection), *_cast(result.catalog, options)),
        "excluded": exclusions(result.whole, subset, excluding_options(options.selection)),
        "cast": result.cast,
        "dequantized": result.dequantized,
        "renamed": result.renamed,
        "unwrapped": result.unwrapped,
    }


def matches_of(whole: Catalog, selection: Selection) -> list[Matched]:
    """Return what each pattern of --select matches, and each of --drop in what these keep."""
    names = names_of(whole) if selection.select or selection.drop else ()
    matched = [_match("--select", pattern, whole, names) for pattern in selection.select]
    if selection.select:
        names = [*filter(meant_by(selection.select, names), names)]
    return matched + [_match("--drop", pattern, whole, names) for pattern in selection.drop]


def _cast(catalog: Catalog, options: RewriteOptions) -> list[Matched]:
    rules = () if options.casts is None else options.casts.rules
    return [_match("--dtype", pattern, catalog, catalog.tensors) for pattern, _ in rules]


def _match(option: str, pattern: str, catalog: Catalog, names: Any) -> Matched:
    matches = matching_names(names, pattern)
    values = sum(name in catalog.objects for name in matches)
    return Matched(option, pattern, len(matches) - values, values, tuple(matches[:_FEW]))


def excluding_options(selection: Selection) -> str:
    """Return the options with which a selection excludes something."""
    values = {
        "--select": selection.select,
        "--drop": selection.drop,
        "--model-only": selection.model_only,
        "--no-optimizer": selection.no_optimizer,
        "--peft-adapter": selection.peft_adapter,
    }
    return ", ".join(option for option, value in values.items() if value)


def exclusions(before: Catalog, after: Catalog, because: str) -> tuple[str, ...]:
    """Return what a selection excludes, one line for tensors and one for values."""
    tensors = len(before.tensors) - len(after.tensors)
    values = len(before.objects) - len(after.objects)
    return tuple(
        f"{plural(count, what)} ({because})"
        for count, what in ((tensors, "tensor"), (values, "non-tensor value"))
        if because and count
    )
