"""What the ranks told, sorted into a report's parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptool.commands.bench.report import Limits, Measured


@dataclass(slots=True)
class Heard:
    """What rank 0 has told so far."""

    limits: Limits = field(default_factory=dict)
    results: list[Measured] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def hear(self, event: Mapping[str, Any]) -> None:
        """Keep one event."""
        kind = event["event"]
        if kind == "limits":
            self.limits = event["limits"] or {}
            if event["failure"]:
                self.failed["limits"] = event["failure"]
        elif kind == "measured":
            self.results.append(Measured.of_event(event))
        elif kind == "left-out":
            self.left_out[event["name"]] = event["reason"]
        elif kind == "failed":
            self.failed[event["name"]] = event["reason"]
