"""How two catalogs agree: which tensors and values either has, and of which shape and type."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ckptool.commands.convert import Choice, only_model
from ckptool.commands.numbers import is_numeric
from ckptool.commands.verify.findings import Finding, Severity
from ckptool.commands.verify.values import value_digest
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.parts import part_of
from ckptool.core.rewrite import matches
from ckptool.errors import CannotDo, Problem
from ckptool.formats._values import Foreign, type_name

_HOLD_NO_VALUES = frozenset(["safetensors", "hf", "dcp-safetensors", "sharded-state"])
_LONGEST_SHOWN = 60


def counterpart(catalog: Catalog, mine: Catalog, options: Choice) -> tuple[Catalog, int]:
    """What of another catalog a choice of ``mine`` is about, and how many names it is not about.

    It is not about names that it would leave out, unless ``mine`` has them once renamed.
    """
    wanted = {*mine.tensors, *mine.objects, *mine.conflicts}
    before = len(catalog.tensors) + len(catalog.objects)
    if options.model_only:
        catalog = _model_like(catalog, wanted)

    def kept(name: str) -> bool:
        chosen_too = not options.select or matches(name, options.select)
        return name in wanted or (chosen_too and not matches(name, options.drop))

    narrowed = replace(
        catalog,
        tensors={name: entry for name, entry in catalog.tensors.items() if kept(name)},
        objects={name: entry for name, entry in catalog.objects.items() if kept(name)},
        conflicts={name: why for name, why in catalog.conflicts.items() if kept(name)},
    )
    return narrowed, before - len(narrowed.tensors) - len(narrowed.objects)


def _model_like(catalog: Catalog, wanted: set[str]) -> Catalog:
    """The model's tensors, under their own names or the bare ones, whichever are wanted."""
    names = [n for n, e in catalog.tensors.items() if part_of(n, e.path) == "model"]
    plain = replace(catalog, tensors={name: catalog.tensors[name] for name in names}, objects={})
    try:
        bare = only_model(catalog)
    except CannotDo:
        return plain
    return max((plain, bare), key=lambda one: len(wanted & one.tensors.keys()))


def differing_names(mine: Catalog, theirs: Catalog) -> Iterator[Finding]:
    """One finding for each tensor and each value that only one of the two has."""
    yield from _only(mine.tensors, theirs.tensors, theirs.objects, "a tensor here", "there")
    yield from _only(theirs.tensors, mine.tensors, mine.objects, "a tensor there", "here")
    for holds, lacks, code, what in (
        (mine, theirs, "value-missing", "a value here, missing there"),
        (theirs, mine, "value-extra", "a value there, missing here"),
    ):
        names = [name for name in holds.objects if not has(lacks, name)]
        if names and not lacks.objects and holds_no_values(lacks.format):
            yield Finding(
                "value-not-compared",
                Severity.INFO,
                f"{len(names):,} values besides tensors are not compared: {lacks.format} holds"
                " tensors alone",
            )
            continue
        for name in names:
            yield Finding(code, Severity.ERROR, f"{name}: {what}", tensor=name)


def holds_no_values(format_name: str) -> bool:
    """Whether a format holds tensors alone; what else there was lies in a side file, if at all."""
    return format_name in _HOLD_NO_VALUES


def has(catalog: Catalog, name: str) -> bool:
    """Whether a catalog has a tensor or a value of this name."""
    return name in catalog.tensors or name in catalog.objects


def _only(
    names: Iterable[str],
    others: dict[str, TensorEntry],
    values: Iterable[str],
    what: str,
    where: str,
) -> Iterator[Finding]:
    code = "tensor-missing" if where == "there" else "tensor-extra"
    as_value = set(values)
    for name in names:
        if name not in others:
            state = f"a value {where}" if name in as_value else f"missing {where}"
            yield Finding(code, Severity.ERROR, f"{name}: {what}, {state}", tensor=name)


def unread_notes(catalog: Catalog) -> list[Problem]:
    """What a scan noted of tensors that it does not read at all."""
    notes = [note for note in catalog.notes if isinstance(note, Problem)]
    unread = [note for note in notes if note.code == "tensor-unread"]
    return [note for note in unread if note.tensor not in catalog.objects]


def differing_type(one: TensorEntry, other: TensorEntry, *, as_numbers: bool) -> Finding | None:
    """How the shapes or element types of two tensors differ, None where values can be compared.

    ``as_numbers`` says that numbers of different types will do.
    """
    if one.shape != other.shape:
        message = f"{one.name}: shape {list(one.shape)} here, {list(other.shape)} there"
        return Finding("shape-differs", Severity.ERROR, message, tensor=one.name)
    types = one.source_dtype, other.source_dtype
    if types[0] == types[1] or (as_numbers and all(map(is_numeric, types))):
        return None
    return Finding(
        "dtype-differs",
        Severity.ERROR,
        f"{one.name}: {types[0]} here, {types[1]} there",
        tensor=one.name,
        hint="--cast compares after casting; --rtol and --atol compare numbers",
    )


def differing_values(mine: Catalog, theirs: Catalog) -> Iterator[Finding]:
    """One finding for each value that both have and that differs, or cannot be compared."""
    known = Foreign()
    for name in common_values(mine, theirs):
        one, other = mine.objects[name].value, theirs.objects[name].value
        if any("torch storage" in known.of(value) for value in (one, other)):
            message = f"{name}: a {type_name(one)}, whose bytes ckptool does not read"
            yield Finding("value-not-compared", Severity.WARNING, message, tensor=name)
        elif value_digest(one, name) != value_digest(other, name):
            message = f"{name}: {_short(one)} here, {_short(other)} there"
            yield Finding("value-differs", Severity.ERROR, message, tensor=name)


def common_values(mine: Catalog, theirs: Catalog) -> list[str]:
    """The names of the values that both have."""
    return [name for name in mine.objects if name in theirs.objects]


def _short(value: object) -> str:
    """A small plain value as it is, any other by its type."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length():,} bits"
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 1]}…"
    return f"a {type_name(value)}"
