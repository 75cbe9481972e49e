"""What was read of a checkpoint, for the checks that look at its elements."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.commands.verify.checks.content import Views
from ckptool.commands.verify.checks.training import StepCounters
from ckptool.core.catalog import TensorEntry
from ckptool.engine.check.content import ContentReport
from ckptool.engine.check.spans import ByteSpan, Part, Probe
from ckptool.errors import Problem
from ckptool.storage.files import Files


class Content(Struct):
    """What was read: tensors without padding, and ``problems`` of their places.

    ``senses`` look at the elements while they are read.
    """

    senses: Sequence[Sense] = ()
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    views: Views = field(default_factory=Views)
    spans: list[ByteSpan] = field(default_factory=list)
    read: ContentReport = field(default_factory=ContentReport)
    counters: StepCounters = field(default_factory=StepCounters)

    @property
    def probes(self) -> dict[str, Probe]:
        """The probes of tensors, which look at them while they are read, by name."""
        by_name: dict[str, Probe] = {}
        for sense in self.senses:
            for name, probe in sense.probes.items():
                by_name[name] = _Both(by_name[name], probe) if name in by_name else probe
        return by_name

    def add(
        self, tensors: Mapping[str, TensorEntry], views: Views, spans: Iterable[ByteSpan]
    ) -> None:
        """Add the content of another part of the checkpoint, and what to read of it."""
        for name, entry in tensors.items():
            previous = self.tensors.setdefault(name, entry)
            if previous is not entry:
                self.tensors[name] = replace(entry, chunks=(*previous.chunks, *entry.chunks))
        self.views.scattered += views.scattered
        self.spans += spans


class _Both(Struct, frozen=True):
    """Shows the elements of a tensor to two probes."""

    one: Probe
    other: Probe

    def take(self, data: memoryview, part: Part, first: int) -> None:
        """Look at elements of a part, the first of which is its ``first``-th."""
        self.one.take(data, part, first)
        self.other.take(data, part, first)


class Elements(Struct, frozen=True):
    """All content once it has been read, its source, and the damaged files.

    Unless it ``is_all``, it is one part's share, and tensors have the chunks of that part alone.
    ``model`` has the elements of the model if these are of an optimizer's file beside it.
    """

    content: Content
    source: Files
    damaged: Collection[str]
    is_all: bool = True
    model: Elements | None = None

    @property
    def of_model(self) -> Elements:
        """The elements that have the model's weights."""
        return self if self.model is None else self.model

    @property
    def located(self) -> Mapping[str, TensorEntry]:
        """The tensors, without padding, with their containers opened."""
        return self.content.tensors

    def are_sound(self, *names: str) -> bool:
        """Return whether tensors are there, in no damaged file, and whole in this part."""
        located = self.located
        if not all(name in located and _is_whole(located[name]) for name in names):
            return False
        return not any(
            chunk.at.file in self.damaged for name in names for chunk in located[name].chunks
        )

    def place_named(self, words: re.Pattern[str], entries: Iterable[TensorEntry]) -> str | None:
        """Return a name with these words, of a file of tensors or of a folder around it."""
        files = {chunk.at.file for entry in entries for chunk in entry.chunks}
        steps = {step for file in files for step in file.split("/")}
        steps.add(posixpath.basename(self.source.root))
        return next((step for step in sorted(steps) if words.search(step)), None)


def _is_whole(entry: TensorEntry) -> bool:
    """Return whether all elements are there: not in a part, nor where a file has lost its end."""
    return sum(chunk.box.volume for chunk in entry.chunks) >= entry.elements


class Sense(Protocol):
    """A check of what intact bytes mean, which shares the one pass over the data."""

    @property
    def probes(self) -> Mapping[str, Probe]:
        """The probes of tensors, which look at them while they are read, by name."""

    def problems(self, elements: Elements) -> Iterator[Problem]:
        """Yield the problems; only odd tensors are read again."""
