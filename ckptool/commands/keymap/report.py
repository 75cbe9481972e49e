"""What is asked of a key map, and what one did. Light: a command without a map imports no more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptool.core.keymap.apply import Move


@dataclass(frozen=True, slots=True)
class MapReport:
    """The map that was applied, why this one, and every tensor that it makes.

    ``config`` is the model's configuration as config.json has it, None where the target is not
    Hugging Face's or the checkpoint does not record enough: ``config_lacks`` says what.
    """

    name: str
    source: str
    target: str
    reason: str
    moves: tuple[Move, ...]
    excluded: tuple[str, ...]
    config: dict[str, Any] | None = None
    config_lacks: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of it."""
        said = f"map {self.name}, {self.source} to {self.target}: {self.reason}"
        left = (f"excluded by the map: {', '.join(self.excluded)}",) if self.excluded else ()
        return (said, *left)


def decided_by(report: MapReport | None) -> object:
    """What a map decides of the output, beyond names and places."""
    moves = report.moves if report is not None else ()
    return [(move.sources, move.target, move.entry.shape, move.operation) for move in moves]
