"""What an answer of verify is, whatever was asked: a report, and how to show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptool.commands.verify.findings import VerifyReport


@dataclass(frozen=True, slots=True)
class Told:
    """``show`` is for people, ``content`` makes the one JSON object."""

    report: VerifyReport
    show: Callable[[], None]
    content: Callable[[], dict[str, Any]]
