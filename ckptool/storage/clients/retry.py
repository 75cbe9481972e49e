"""Retry requests to stores, and distinguish permanent errors from temporary ones.

obstore's errors are ``Answer``; each file system of fsspec has errors of its own, such as that of
huggingface_hub that nothing is there, raised from an answer that says why. What they share is the
answer's status, in them or in their causes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ckptool.errors import CkptoolError, Denied, NoAnswer, NotFound, error_text

_T = TypeVar("_T")
_LASTING = (FileNotFoundError, PermissionError, NotImplementedError, ValueError)
_DENIED = (401, 403)
GONE = (404, 410)
"""The statuses of answers that nothing is there."""
_REFUSED = (*_DENIED, *GONE, 301, 405, 412, 416, 501)
_ENDLESS = "TooManyRedirects"
"""The error of httpx and requests for a loop of redirects."""
_LONGEST_RETRY_AFTER = 60.0
_CREDENTIALS_HINT = "check the credentials: `ckptool help stores` says where they are read from"
_WEB_HINT = (
    "use a URL that is signed, or pass what the server asks for, such as --storage-option"
    """ 'headers={"Authorization": "Bearer TOKEN"}'"""
)
_HUB_HINT = "set HF_TOKEN or run `hf auth login`, and ask for access on the page of a gated model"
_HINTS = {"http": _WEB_HINT, "https": _WEB_HINT, "hf": _HUB_HINT}
"""What helps where access is denied, by the scheme; elsewhere ``_CREDENTIALS_HINT``."""
_RENEW_HINT = "renew the credentials"
_REFUSALS = {
    "ExpiredToken": ("the credentials have expired", _RENEW_HINT),
    "TokenRefreshRequired": ("the credentials have expired", _RENEW_HINT),
    "InvalidToken": ("the session token is not valid", _RENEW_HINT),
    "RequestTimeTooSkewed": ("this machine's clock is wrong", "set the clock"),
    "InvalidAccessKeyId": ("the access key is unknown", _CREDENTIALS_HINT),
    "SignatureDoesNotMatch": ("the secret key is wrong", _CREDENTIALS_HINT),
    "Invalid Credentials": ("the credentials are not, or no longer, valid", _RENEW_HINT),
    "AuthenticationFailed": ("the credentials are not, or no longer, valid", _RENEW_HINT),
    "InvalidAuthenticationInfo": ("the credentials are not, or no longer, valid", _RENEW_HINT),
}
"""Answers of stores (S3's codes, Google's words, Azure's codes) to rejected credentials."""
_REFUSAL = re.compile(rf"\b(?:{'|'.join(_REFUSALS)})")
_BARE_400 = re.compile(r"\(400\)|: Bad Request$")
_WRONG_NAME = re.compile(r"\b(?:InvalidResourceName|OutOfRangeInput|InvalidBucketName)\b")
"""Codes of Azure and S3 for an invalid name of a container, a bucket or a key."""
_UNCONNECTED = re.compile(
    r"EndpointConnection|ClientConnector|Connection refused|ConnectionRefused|"
    r"Could not connect|[Nn]ame or service not known|failed to lookup|dns error"
)


class Unaccepted(Denied):
    """A store does not, or no longer, accept the credentials, whatever the request."""


class RetryPolicy(Struct, frozen=True):
    """How often a request is tried, and the seconds to wait: for an answer, and between tries.

    No try begins later than ``total`` seconds after the first, or than ``connecting`` if no server
    listens.
    """

    attempts: int = 10
    timeout: float = 60.0
    pause: float = 0.5
    longest_pause: float = 20.0
    total: float = 120.0
    connecting: float = 6.0

    def before(self, attempt: int) -> float:
        """Return the seconds before this attempt: doubled each time, with random jitter."""
        import random

        doubled: float = self.pause * 2 ** (attempt - 2)
        return min(self.longest_pause, doubled) * random.uniform(0.5, 1)

    def of_listings(self) -> RetryPolicy:
        """Return the policy for the first requests, while a user waits."""
        return replace(self, total=min(self.total, 40.0))


def retry(policy: RetryPolicy, what: str, work: Callable[[], _T]) -> _T:
    """Return the answer to a request, retried if that may help.

    Raises NotFound if nothing is there, Denied if access is denied, NoAnswer if the store gives
    none, or one that says nothing of it. An error of our own code is raised as it is.
    """
    started = time.monotonic()
    attempt = 1
    while True:
        try:
            return work()
        except (CkptoolError, NoAnswer):
            raise
        except Exception as error:
            if is_ours(error):
                raise
            if lasts(error):
                raise unreachable(what, error) from None
            reason = error_text(error)
            pause = max(_retry_after(error), policy.before(attempt + 1))
            limit = policy.connecting if _is_unconnected(error) else policy.total
        spent = time.monotonic() - started
        if attempt >= policy.attempts or spent + pause > limit:
            tried = "after 1 attempt " if attempt == 1 else f"after {attempt} attempts "
            tried = tried if policy.attempts > 1 else ""
            raise NoAnswer(f"{what}: no answer {tried}in {spent:.0f} s: {reason}")
        time.sleep(pause)
        attempt += 1


def unreachable(what: str, error: Exception) -> NotFound | NoAnswer:
    """Return the error for a permanently unreachable place, with its message.

    NotFound only if nothing is there, or nothing can be called so.
    """
    status, text = status_of(error), error_text(error)
    if (refusal := _refusal(error)) is not None:
        reason, hint = refusal
        return Unaccepted(f"{what}: {reason} ({text})", hint)
    if status in GONE or (status is None and isinstance(error, FileNotFoundError)):
        return NotFound(f"{what}: no such file or folder ({text})")
    if _lacks_credentials(error):
        return Unaccepted(f"{what}: no credentials were found", _CREDENTIALS_HINT)
    if isinstance(error, PermissionError) or status in _DENIED:
        hint = _HINTS.get(what.partition("://")[0], _CREDENTIALS_HINT)
        return Denied(f"{what}: access is denied ({text})", hint)
    if status is None or _has_wrong_name(error):
        return NotFound(f"{what}: cannot be read: {text}")
    return NoAnswer(f"{what}: cannot be read: {text}")


def is_ours(error: BaseException) -> bool:
    """Return whether an error is our own code's, or of a wrong call, not a store's answer."""
    at = error.__traceback__
    if isinstance(error, OSError | CkptoolError) or at is None:
        return False
    if isinstance(error, TypeError):
        return True
    while at.tb_next is not None:
        at = at.tb_next
    return str(at.tb_frame.f_globals.get("__name__")).startswith("ckptool.")


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of the answer that an error represents, None if it has none."""
    for cause in _causes(error):
        for holder in (cause, getattr(cause, "response", None)):
            values = (getattr(holder, name, None) for name in ("status_code", "status", "code"))
            status = next((text for text in map(str, values) if text.isdecimal()), None)
            if status is not None:
                return int(status)
    return None


def lasts(error: Exception) -> bool:
    """Return whether an error is permanent, so that asking again does not help."""
    status = status_of(error)
    if (status is None and isinstance(error, _LASTING)) or _lacks_credentials(error):
        return True
    if _has_wrong_name(error) or type(error).__name__ == _ENDLESS:
        return True
    return status in _REFUSED or _refusal(error) is not None


def _has_wrong_name(error: Exception) -> bool:
    """Return whether an answer says that nothing can be called so."""
    texts = map(str, _causes(error)) if status_of(error) == 400 else ()
    return any(_WRONG_NAME.search(text) for text in texts)


def _refusal(error: Exception) -> tuple[str, str] | None:
    """Return why the credentials are not accepted, and the remedy, if an answer says so.

    S3 answers expired credentials with status 400; an answer without a body has only that.
    """
    for cause in _causes(error):
        match = _REFUSAL.search(str(cause))
        if match is not None:
            return _REFUSALS[match[0]]
    if status_of(error) == 400 and any(_BARE_400.search(str(cause)) for cause in _causes(error)):
        return "the request is refused", "the credentials may have expired"
    return None


def _is_unconnected(error: Exception) -> bool:
    """Return whether no server listens at the store's address."""
    if isinstance(error, ConnectionRefusedError):
        return True
    texts = (f"{type(cause).__name__} {cause}" for cause in _causes(error))
    return any(_UNCONNECTED.search(text) for text in texts)


def _retry_after(error: Exception) -> float:
    """Return the seconds that a store asks to wait, 0 if it does not."""
    for cause in _causes(error):
        response: Any = getattr(cause, "response", cause)
        headers = getattr(response, "headers", None) or {}
        text = str(headers.get("retry-after") or headers.get("Retry-After") or "")
        if text.isdecimal():
            return min(float(text), _LONGEST_RETRY_AFTER)
    return 0.0


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and its causes."""
    cause: BaseException | None = error
    for _ in range(8):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


def _lacks_credentials(error: Exception) -> bool:
    return "credential" in type(error).__name__.lower()
