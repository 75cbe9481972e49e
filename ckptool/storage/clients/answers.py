"""What obstore's errors say: they are texts, with the server's answer in them (obstore 0.12)."""

from __future__ import annotations

import re

from ckptool.errors import Unsupported, UsageError, error_text
from ckptool.storage.clients.client import PartsRemain
from ckptool.storage.clients.retry import GONE

_STATUS = re.compile(r"status code: (\d{3}) ?([\w -]*)")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_MESSAGE = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
_REGION = re.compile(r"<Region>([\w-]+)</Region>")
_RANGE = re.compile(r"Requested \d+\.\.\d+, got (\d+)\.\.(\d+)")
_PROVIDER = re.compile(r"credential provider: (\w+): (.*?)(?:\n\n|$)", re.DOTALL)
_UNKNOWN = re.compile(r"credential|RefreshError|ClientAuthenticationError", re.IGNORECASE)
"""Errors of botocore, google-auth and azure-identity if nobody gives credentials."""
_KEYS_HINT = "copy the key, token or signature again, as the store shows it"
_PART = re.compile(r"partNumber=(\d+)")
_RETRIES = re.compile(r"after (\d+) retries")
_MALFORMED = ("TypeError", "AttributeError")
"""obstore's errors for keys and signatures that are no such things."""
_MOVED = ("AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraint")
_CAUSES = (
    ("redirect without LOCATION", "the bucket is in another region", 301),
    ("error following redirect", "there are too many redirects", 301),
    ("kind: Connect", "Could not connect to the server", None),
    ("kind: Timeout", "the answer takes too long", None),
    ("TimedOut", "the answer takes too long", None),
    ("Content-Range header not present", "the answer covers other bytes: no Content-Range", None),
)
"""What to say for an error that quotes no answer, by what is in its text, and its status."""


class Answer(OSError):
    """An answer that is not what was asked for; ``status`` is None if there was none.

    ``code`` is that of S3 or Azure; ``region`` where S3 says that the bucket is.
    """

    def __init__(
        self, text: str, status: int | None = None, code: str = "", region: str = ""
    ) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.region = region

    @property
    def is_elsewhere(self) -> bool:
        """Whether S3 may say that the bucket is in another region; to HEAD it says no more."""
        return self.status == 301 or self.code in _MOVED or (self.status == 400 and not self.code)


class NoCredentials(OSError):
    """Nobody gives credentials for a store."""


def answer_of(error: Exception, key: str) -> Exception:
    """Return what an error of obstore says of a request for ``key``; other errors as they are."""
    if type(error).__name__ == "InvalidPathError" or "Could not parse path" in str(error):
        return _unnamable(key, error)
    module = type(error).__module__
    if module.startswith("ckptool.") or not (
        module.startswith("obstore") or isinstance(error, OSError)
    ):
        return error
    text = str(error)
    if (provider := _PROVIDER.search(text)) is not None:
        return _unsigned(key, *provider.groups())
    if (status := _STATUS.search(text)) is not None:
        return _answer(text, int(status[1]), status[2].strip())
    if isinstance(error, OSError) and error.errno is not None:
        return Answer(error_text(error))  # the machine's error: obstore's have no number
    if isinstance(error, FileNotFoundError):
        return Answer("not found", 404)
    return _unquoted(text, key)


def _unsigned(key: str, kind: str, text: str) -> Exception:
    """Return why a provider gives no credentials, from its error's class and text."""
    if kind in _MALFORMED:
        return UsageError(f"{key}: the credentials are malformed", hint=_KEYS_HINT)
    return NoCredentials(text) if _UNKNOWN.search(kind) else Answer(f"{kind}: {text}")


def _unquoted(text: str, key: str) -> Exception:
    """Return the error that stands for a text of obstore's which quotes no answer."""
    if "Content-Length Header missing" in text:
        return Unsupported(f"{key}: the server does not say how large it is")
    if "non-partial response" in text or "Range request not supported" in text:
        message = f"{key}: the server, or a proxy, does not answer requests for a part of a file"
        return Unsupported(message, hint="download the checkpoint first")
    if (span := _RANGE.search(text)) is not None:
        return Answer(f"the answer covers other bytes: bytes {span[1]}-{int(span[2]) - 1}")
    for mark, cause, status in _CAUSES:
        if mark in text:
            return Answer(cause, status)
    return Answer(text.partition("\n\nDebug source")[0].rpartition(" - ")[2])


def _answer(text: str, status: int, reason: str) -> Exception:
    """Return an answer with a status; PartsRemain for one to the removal of an upload."""
    code, message, region = (
        match[1] if (match := pattern.search(text)) else ""
        for pattern in (_CODE, _MESSAGE, _REGION)
    )
    description = ": ".join(filter(None, (code or reason, message if message != code else "")))
    if (part := _PART.search(text)) is not None:
        description = f"{description} (part {part[1]})"
    if "performing DELETE" in text and "uploadId=" in text and status not in GONE:
        return PartsRemain(f"{status}: {description}", status)
    retries = _RETRIES.search(text)
    again = f" ({retries[1]} retries)" if retries is not None else ""
    return Answer(f"{status}: {description}{again}", status, code, region)


def _unnamable(key: str, error: Exception) -> Unsupported:
    reason = str(error).partition("\n\n")[0]
    kinds = "with empty or dotted segments or control characters"
    message = f"{key}: there are keys {kinds}, which are not read ({reason})"
    return Unsupported(message, hint="copy the checkpoint to a plain key, such as run/step-100")
