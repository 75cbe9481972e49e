"""What the elements of all tensors show once they have been read: the checks share one pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.commands.verify.checks.content import Views
from ckptool.commands.verify.checks.masters import (
    Mastered,
    master_problems,
    mastered_weights,
    rounded_types,
)
from ckptool.commands.verify.checks.training import StepCounters
from ckptool.commands.verify.checks.zeros import zero_weights
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.dtype import DType
from ckptool.engine.check.content import ContentReport
from ckptool.engine.check.spans import ByteSpan
from ckptool.errors import Problem
from ckptool.storage.files import Files


class Content(Struct):
    """What was read: tensors as they are and without padding, and ``problems`` of their places.

    ``masters`` are the weights with masters, of which ``printed`` names are fingerprinted.
    """

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    trimmed: dict[str, TensorEntry] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    views: Views = field(default_factory=Views)
    spans: list[ByteSpan] = field(default_factory=list)
    read: ContentReport = field(default_factory=ContentReport)
    counters: StepCounters = field(default_factory=StepCounters)
    masters: list[Mastered] = field(default_factory=list)
    printed: Mapping[str, DType] = field(default_factory=dict)

    @classmethod
    def of(cls, catalog: Catalog | None, *, is_all: bool) -> Content:
        """Return what is to be read of a catalog, all of it or not."""
        if catalog is None or not is_all:
            return cls()
        masters = mastered_weights(catalog)
        return cls(masters=masters, printed=rounded_types(catalog, masters))

    def add(
        self,
        tensors: Mapping[str, TensorEntry],
        trimmed: Mapping[str, TensorEntry],
        views: Views,
        spans: Iterable[ByteSpan],
    ) -> None:
        """Add the content of another part of the checkpoint, and what to read of it."""
        for mine, others in ((self.tensors, tensors), (self.trimmed, trimmed)):
            for name, entry in others.items():
                known = mine[name].chunks if name in mine else ()
                mine[name] = replace(entry, chunks=(*known, *entry.chunks))
        self.views.scattered += views.scattered
        self.spans += spans


class Elements(NamedTuple):
    """All content, where it is, and the files that have problems of their own."""

    content: Content
    source: Files
    damaged: Collection[str]


def whole_problems(elements: Elements) -> Iterator[Problem]:
    """Yield what can only be said of content of which all was read."""
    for check in _CHECKS:
        yield from check(elements)


def _zeros(elements: Elements) -> Iterator[Problem]:
    content = elements.content
    if content.read.zeros:
        yield from zero_weights(content.tensors, content.read.zeros, content.spans)


def _masters(elements: Elements) -> Iterator[Problem]:
    content, source, damaged = elements
    if content.masters:
        yield from master_problems(content.masters, content.trimmed, content.read, source, damaged)


_CHECKS: tuple[Callable[[Elements], Iterator[Problem]], ...] = (_zeros, _masters)
"""Each looks at what the one pass has noted, and reads again only what is odd."""
