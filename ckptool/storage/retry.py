"""Retry the requests of stores, and tell errors that last from those that pass.

Each client of fsspec has errors of its own (s3fs 2026.9, gcsfs 2026.10, adlfs 2026.8, and 2.4 of
huggingface_hub): what they share is the answer's status, in them or in what caused them.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ckptool.errors import CkptoolError, NotFound

_T = TypeVar("_T")
_LASTING = (FileNotFoundError, PermissionError, NotImplementedError, ValueError)
_DENIED = (401, 403)
_GONE = (404, 410)
_REFUSED = (*_DENIED, *_GONE, 301, 405, 412, 416, 501)
_LONGEST_RETRY_AFTER = 120.0


class NoAnswer(OSError):
    """A store did not answer, however often it was asked: this says nothing of what it holds."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.strerror = message


class Denied(NotFound):
    """A store refuses, or no longer accepts, who asks."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a request is tried, and the seconds to wait: for an answer, and between tries."""

    attempts: int = 5
    timeout: float = 120.0
    pause: float = 0.5
    longest_pause: float = 20.0

    def before(self, attempt: int) -> float:
        """Return the seconds before this attempt, twice as long each time and randomly fewer."""
        doubled: float = self.pause * 2 ** (attempt - 2)
        return min(self.longest_pause, doubled) * random.uniform(0.5, 1)


def retry(policy: RetryPolicy, what: str, work: Callable[[], _T]) -> _T:
    """Return the answer to a request, tried again where that may help.

    Raises NotFound where nothing is there, Denied where access is, NoAnswer where the store gives
    none. An error of our own code is no answer, and is raised as it is.
    """
    retry_after = 0.0
    for attempt in range(1, policy.attempts + 1):
        if attempt > 1:
            time.sleep(max(retry_after, policy.before(attempt)))
        try:
            return work()
        except CkptoolError:
            raise
        except Exception as error:
            if is_ours(error):
                raise
            if _lasts(error):
                raise unreachable(what, error) from None
            reason, retry_after = error_text(error), _retry_after(error)
    raise NoAnswer(f"{what}: no answer in {policy.attempts} attempts: {reason}")


def unreachable(what: str, error: Exception) -> NotFound:
    """Return the error for a place that lasts, with what it says."""
    hint = "see the store's own tools for the credentials it needs"
    status = status_of(error)
    if isinstance(error, FileNotFoundError) or status in _GONE:
        return NotFound(f"{what}: no such file or folder ({error_text(error)})")
    if _lacks_credentials(error):
        return Denied(f"{what}: no credentials were found", hint=hint)
    if isinstance(error, PermissionError) or status in _DENIED or _is_forbidden(error):
        return Denied(f"{what}: access is denied ({error_text(error)})", hint=hint)
    return NotFound(f"{what}: cannot be read: {error_text(error)}")


def is_ours(error: BaseException) -> bool:
    """Return whether an error is our own code's, or of a wrong call: no answer of a store."""
    at = error.__traceback__
    if isinstance(error, OSError | CkptoolError) or at is None:
        return False
    if isinstance(error, TypeError):
        return True
    while at.tb_next is not None:
        at = at.tb_next
    return str(at.tb_frame.f_globals.get("__name__")).startswith("ckptool.")


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of the answer that an error stands for, None where it has none."""
    for cause in _causes(error):
        for holder in (cause, getattr(cause, "response", None)):
            if isinstance(holder, Mapping):
                values: Iterator[object] = iter([_boto(holder).get("HTTPStatusCode")])
            else:
                values = (getattr(holder, name, None) for name in ("status_code", "status", "code"))
            status = next((text for text in map(str, values) if text.isdecimal()), None)
            if status is not None:
                return int(status)
    return None


def _lasts(error: Exception) -> bool:
    if isinstance(error, _LASTING) or _lacks_credentials(error) or _is_forbidden(error):
        return True
    return status_of(error) in _REFUSED


def _retry_after(error: Exception) -> float:
    """Return the seconds that a store asks to wait, 0 where it does not."""
    for cause in _causes(error):
        response: Any = getattr(cause, "response", cause)
        if isinstance(response, Mapping):
            headers = _boto(response).get("HTTPHeaders", {})
        else:
            headers = getattr(response, "headers", None) or {}
        text = str(headers.get("retry-after") or headers.get("Retry-After") or "")
        if text.isdecimal():
            return min(float(text), _LONGEST_RETRY_AFTER)
    return 0.0


def _boto(response: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what botocore says of an answer."""
    metadata: Mapping[str, Any] = response.get("ResponseMetadata", {})
    return metadata


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and those that it was raised for."""
    cause: BaseException | None = error
    for _ in range(8):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


def _lacks_credentials(error: Exception) -> bool:
    return "credentials" in type(error).__name__.lower()


def _is_forbidden(error: Exception) -> bool:
    """Return whether an error is gcsfs's for a 403: it has no class (2024.6 to 2026.10)."""
    return type(error) is OSError and str(error).startswith("Forbidden:")


def error_text(error: BaseException) -> str:
    """Return what an error says, in one line, without credentials that URLs in it may hold."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r"(\w+://)[^/\s@'\"]*@", r"\1", text)
    return re.sub(r"\?[^\s'\")]*=[^\s'\")]*", "", text)[:300]
