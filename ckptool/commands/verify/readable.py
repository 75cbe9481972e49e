"""Which tensors of a checkpoint can be read, and why the others cannot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptool.commands.open import Opened
from ckptool.core.catalog import Catalog, Scaled, TensorEntry, coverage_problem
from ckptool.errors import CannotDo, Damaged, Hostile, Problem


def readable(opened: Opened, catalog: Catalog) -> tuple[Catalog, dict[str, Problem]]:
    """The catalog's tensors with every container opened, and why the others cannot be read.

    ``catalog`` is that of ``opened``, rewritten or not. No tensor byte is read.
    """
    gaps = {entry.name: coverage_problem(entry) for entry in catalog.tensors.values()}
    lost = {name: problem for name, problem in gaps.items() if problem is not None}
    tiled = {name: entry for name, entry in catalog.tensors.items() if name not in lost}
    try:
        return opened.located(replace(catalog, tensors=tiled)), lost
    except (CannotDo, Damaged, Hostile):
        return _one_by_one(opened, replace(catalog, tensors=tiled), lost)


def _one_by_one(
    opened: Opened, catalog: Catalog, lost: dict[str, Problem]
) -> tuple[Catalog, dict[str, Problem]]:
    """Open the containers of each tensor by themselves, to find those that cannot be."""
    found: dict[str, TensorEntry] = {}
    for name, entry in catalog.tensors.items():
        try:
            found |= opened.located(replace(catalog, tensors={name: entry})).tensors
        except (CannotDo, Damaged, Hostile) as error:
            lost[name] = error.problems[0]
    return replace(catalog, tensors=found), lost


def stored_tensors(entry: TensorEntry) -> Iterator[TensorEntry]:
    """The tensors in files that a tensor is made of: itself, or its values and their scales."""
    made_of = [chunk.at for chunk in entry.chunks if isinstance(chunk.at, Scaled)]
    if not made_of:
        yield entry
    yield from {id(one): one for at in made_of for one in (at.values, at.scales)}.values()
