"""Which tensors of a checkpoint can be read, and why the others cannot."""

from __future__ import annotations

from dataclasses import replace

from ckptool.commands.open import Opened
from ckptool.core.catalog import Catalog, TensorEntry, coverage_problem
from ckptool.errors import Damaged, Hostile, Problem


def readable(opened: Opened, catalog: Catalog) -> tuple[Catalog, dict[str, Problem]]:
    """The catalog's tensors with every container opened, and why the others cannot be read.

    ``catalog`` is that of ``opened``, rewritten or not. No tensor byte is read.
    """
    gaps = {entry.name: coverage_problem(entry) for entry in catalog.tensors.values()}
    lost = {name: problem for name, problem in gaps.items() if problem is not None}
    tiled = {name: entry for name, entry in catalog.tensors.items() if name not in lost}
    try:
        return opened.located(replace(catalog, tensors=tiled)), lost
    except (Damaged, Hostile):
        return _one_by_one(opened, replace(catalog, tensors=tiled), lost)


def _one_by_one(
    opened: Opened, catalog: Catalog, lost: dict[str, Problem]
) -> tuple[Catalog, dict[str, Problem]]:
    """Open the containers of each tensor by themselves, to find those that cannot be."""
    found: dict[str, TensorEntry] = {}
    for name, entry in catalog.tensors.items():
        try:
            found |= opened.located(replace(catalog, tensors={name: entry})).tensors
        except (Damaged, Hostile) as error:
            lost[name] = error.problems[0]
    return replace(catalog, tensors=found), lost
