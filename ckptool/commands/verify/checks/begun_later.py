"""Whether parameters with fewer steps than others are those of which training began later.

Whole parts are frozen at first: groups of the optimizer, layers, modules, or parameters of one kind
in all layers; of parameters with numbers, which are in the order of a model, several that follow
one another, or all of one shape. One module alone, such as the embedding, may have been frozen,
too, or a branch of a layer be dropped now and then, but nothing tells that from the state of an
earlier save.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby

from ckptool.commands.verify.checks.optimizer_names import StateName, groups_of
from ckptool.core.catalog import Catalog
from ckptool.core.keymap.model import abstract

_STEP = ".step"
_SEVERAL = 2
"""Counters of a file that tell whose they are: where ranks share them out, each may have one."""
_OUTSIDE = 2
"""Parameters before the layers, or after them, or of a shape that no layer has."""

Values = Mapping[str, float]


def code_of_fewer(counters: Mapping[float, Sequence[str]], catalog: Catalog) -> str | None:
    """Return the code of step counters of which some are behind, None if those are of whole parts.

    A file of an earlier save may have whole parts as well: then it has several counters, and all
    are behind.
    """
    values = {name: value for value, names in counters.items() for name in names}
    behind = {name for name, value in values.items() if value < max(counters)}
    if _have_own_files(behind, values, catalog):
        return "steps-differ"
    parts = (part for part in _parts(values, catalog) if len({values[n] for n in part}) == 1)
    late = {name for part in parts for name in part} & behind
    modules = Counter(map(_module_of, values))
    if late and all(modules[_module_of(name)] == 1 for name in behind - late):
        return None
    late.update(_lone_counters(values, catalog))
    return "steps-apart" if behind <= late else "steps-differ"


def _have_own_files(names: Collection[str], values: Values, catalog: Catalog) -> bool:
    """Return whether counters are all those of some of the files, at least two a file."""
    files: dict[str, set[str]] = defaultdict(set)
    for name in values.keys() & catalog.tensors.keys():
        for chunk in catalog.tensors[name].chunks[:1]:
            files[chunk.at.file].add(name)
    groups = [group for group in files.values() if not group.isdisjoint(names)]
    are_several = _SEVERAL * len(groups) <= len(names)
    return are_several and len(groups) < len(files) and set().union(*groups) == set(names)


def _parts(values: Values, catalog: Catalog) -> Iterator[Collection[str]]:
    """Yield the counters of each part of a model or an optimizer that may be frozen whole."""
    yield from _option_groups(catalog, values)
    groups: dict[object, list[str]] = defaultdict(list)
    numbered = sorted((len(of), of, n) for n in values if (of := _parameter_of(n)).isdigit())
    for _, run in groupby(numbered, lambda counter: values[counter[-1]]):
        part = [name for *_, name in run]
        groups[part[0], "run"] = part
    shapes = _shapes(catalog) if numbered else {}
    for name in values:
        kind, numbers = abstract(_parameter_of(name))
        groups[_module_of(name)].append(name)
        if not _parameter_of(name).isdigit():
            groups[kind, len(numbers)].append(name)
        elif (head := name.removesuffix(_STEP)) in shapes:
            groups[shapes[head]].append(name)
    yield from (part for part in groups.values() if len(part) > 1)


def _lone_counters(values: Values, catalog: Catalog) -> Iterator[str]:
    """Yield the counters of what may be frozen alone: a module, or several parameters of a layer.

    Among parameters with numbers, these are known by their shape, which an embedding shares with a
    head, or by the group's order: parameters outside the layers are at its ends.
    """
    outside, inside, numbered = (defaultdict[object, list[str]](list) for _ in range(3))
    shapes = _shapes(catalog)
    for name, value in values.items():
        if _parameter_of(name).isdigit():
            numbered[shapes.get(name.removesuffix(_STEP))].append(name)
        elif _first_number(_parameter_of(name).split(".")) is None:
            outside[_module_of(name) or name].append(name)
        else:
            inside[_module_of(name), value].append(name)
    yield from (n for names in inside.values() if len(names) > 1 for n in names)
    yield from (n for names in numbered.values() if len(names) <= _OUTSIDE for n in names)
    for group in _option_groups(catalog, values) if numbered else ():
        ordered = sorted(group, key=lambda name: (len(name), name))
        yield from ordered[:_OUTSIDE] + ordered[-_OUTSIDE:]
    for names in outside.values():
        if len({values[name] for name in names}) == 1:
            yield from names


def _option_groups(catalog: Catalog, values: Values) -> Iterator[Collection[str]]:
    """Yield the counters of each of an optimizer's groups of parameters."""
    for group in groups_of(catalog):
        yield values.keys() & {f"{state}{_STEP}" for state in map(group.state_of, group.parameters)}


def _shapes(catalog: Catalog) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of parameters' state other than counters."""
    tensors = catalog.tensors.items()
    return {name.rpartition(".")[0]: entry.shape for name, entry in tensors if entry.shape}


def _parameter_of(name: str) -> str:
    return StateName.of(name).parameter


def _module_of(name: str) -> str:
    """Return the name of a parameter's layer, up to its number, or else of its module.

    What is in no module may be frozen together, and has one name; ``diff`` lists each by its own.
    """
    steps = _parameter_of(name).split(".")
    number = _first_number(steps)
    return ".".join(steps[: len(steps) - 1 if number is None else number + 1])


def _first_number(steps: Sequence[str]) -> int | None:
    return next((at for at, step in enumerate(steps) if step.isdigit()), None)
