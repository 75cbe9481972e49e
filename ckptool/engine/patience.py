"""Asking a store patiently, and what is said where that is vain."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ckptool.errors import CkptoolError, NotFound

_T = TypeVar("_T")
_LASTING = (FileNotFoundError, PermissionError, NotImplementedError, ValueError, TypeError)


class NoAnswer(OSError):
    """A store did not answer, however often it was asked: this says nothing of what it holds."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.strerror = message


@dataclass(frozen=True, slots=True)
class Patience:
    """How often a request is tried, and the seconds to wait: for an answer, and between tries."""

    attempts: int = 5
    timeout: float = 120.0
    pause: float = 0.5
    longest_pause: float = 20.0

    def before(self, attempt: int) -> float:
        """Seconds before this attempt: twice as long each time, and never in step with others."""
        doubled: float = self.pause * 2 ** (attempt - 2)
        return min(self.longest_pause, doubled) * random.uniform(0.5, 1)


def ask(patience: Patience, what: str, work: Callable[[], _T]) -> _T:
    """The answer to a request, tried again where that may help.

    NotFound where nothing is there or access is denied, NoAnswer where the store gives none.
    """
    for attempt in range(1, patience.attempts + 1):
        if attempt > 1:
            time.sleep(patience.before(attempt))
        try:
            return work()
        except CkptoolError:
            raise
        except _LASTING as error:
            raise unreachable(what, error) from None
        except Exception as error:
            if _lacks_credentials(error):
                raise unreachable(what, error) from None
            reason = said(error)
    raise NoAnswer(f"{what}: no answer in {patience.attempts} attempts: {reason}")


def unreachable(what: str, error: Exception) -> NotFound:
    """What an error that lasts says of a place."""
    if isinstance(error, FileNotFoundError):
        return NotFound(f"{what}: no such file or folder ({said(error)})")
    hint = "the store's own tools say what credentials it takes"
    if _lacks_credentials(error):
        return NotFound(f"{what}: no credentials were found", hint=hint)
    if isinstance(error, PermissionError):
        return NotFound(f"{what}: access is denied ({said(error)})", hint=hint)
    return NotFound(f"{what}: cannot be read: {said(error)}")


def _lacks_credentials(error: Exception) -> bool:
    return "credentials" in type(error).__name__.lower()


def said(error: BaseException) -> str:
    """What an error says, in one line, without credentials that URLs in it may hold."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r"(\w+://)[^/\s@'\"]*@", r"\1", text)
    return re.sub(r"\?[^\s'\")]*=[^\s'\")]*", "", text)[:300]
