"""The checks of what intact bytes mean: those of metadata, and those of all data."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptool.commands.open import Survey
from ckptool.commands.verify.checks.elements import Elements, Sense
from ckptool.commands.verify.checks.meaning.arguments import (
    argument_problems,
    lost_tensor_problems,
)
from ckptool.commands.verify.checks.meaning.counts import count_problems
from ckptool.commands.verify.checks.meaning.extra_state import (
    stateless_problems,
    unfit_state_problems,
)
from ckptool.commands.verify.checks.meaning.masters import Masters
from ckptool.commands.verify.checks.meaning.moments import Moments
from ckptool.commands.verify.checks.meaning.ranks import rank_problems
from ckptool.commands.verify.checks.meaning.state_shapes import shape_problems
from ckptool.commands.verify.checks.meaning.weights import Weights
from ckptool.core.catalog import Catalog
from ckptool.errors import Problem

_SENSES: tuple[Callable[[Catalog, Elements | None], Sense], ...] = (
    lambda catalog, model: Weights(catalog),
    lambda catalog, model: Masters(catalog),
    Moments,
)

_OF_METADATA: tuple[Callable[[Survey, Catalog], Iterator[Problem]], ...] = (
    lambda surveyed, catalog: unfit_state_problems(catalog),
    stateless_problems,
    lambda surveyed, catalog: shape_problems(catalog),
    count_problems,
    rank_problems,
    argument_problems,
    lost_tensor_problems,
)


def metadata_problems(surveyed: Survey, catalog: Catalog) -> Iterator[Problem]:
    """Yield the problems that metadata alone tells; damage might explain them, so there is none."""
    for check in _OF_METADATA:
        yield from check(surveyed, catalog)


def senses_of(catalog: Catalog | None, model: Elements | None) -> list[Sense]:
    """Return the checks of a catalog, of which all data, or a part's share, is about to be read.

    The catalog may be that of an optimizer's file beside its ``model``.
    """
    return [sense(catalog, model) for sense in _SENSES] if catalog is not None else []


def meaning_problems(elements: Elements) -> Iterator[Problem]:
    """Yield the problems of all checks once data has been read, and a remark if it is a share."""
    senses = elements.content.senses
    for sense in senses:
        yield from sense.problems(elements)
    if elements.is_all:
        return
    names = {name for sense in senses for name in sense.probes}
    if not all(map(elements.are_sound, names)):
        message = "weights, masters and moments that several parts share: only verify in one"
        yield Problem(f"{message} process compares them", "parts-not-judged")
