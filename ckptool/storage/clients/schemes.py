"""The kinds of stores, by the scheme of their URLs, and URLs as messages show them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ckptool.errors import UsageError, error_text

WEB = ("http", "https")
"""Schemes of web servers, which list nothing and are not written to."""
S3 = ("s3", "s3a")
GOOGLE = ("gs", "gcs")
AZURE = ("az", "abfs", "abfss")
BUCKETS = (*S3, *GOOGLE, *AZURE, "hf", *WEB)
"""Schemes whose URLs begin with a bucket, container, repository or host."""


def require_supported(scheme: str, rest: str) -> str:
    """Return a URL with its scheme in lower case; UsageError if it is not supported."""
    if scheme in BUCKETS and not rest.partition("/")[0]:
        raise UsageError(f"{scheme}://{rest}: names no bucket or host", hint=f"{scheme}://NAME/...")
    if scheme == "hf" and "/" not in rest.strip("/"):
        hint = f"hf://OWNER/{rest.strip('/')}, as its page on the Hugging Face Hub is called"
        raise UsageError(f"hf://{rest}: a repository has an owner and a name", hint=hint)
    if "?versionid=" in rest.lower() and scheme not in WEB:
        raise UsageError(
            f"{scheme}://{rest}: versions of objects are not read",
            hint="copy the version to a key of its own",
        )
    return f"{scheme}://{rest}"


def unaccepted(url: str, reason: str, hint: str | None = None) -> UsageError:
    """Return the error for storage options that are not understood."""
    scheme = url.partition("://")[0]
    message = f"{redact_url(url)}: storage options that {scheme}:// does not accept: {reason}"
    return UsageError(message, hint=hint)


@contextmanager
def require_accepted(url: str) -> Iterator[None]:
    """Raise UsageError if a client cannot be made of a URL, or of storage options."""
    try:
        yield
    except ValueError as error:
        if url.partition("://")[0] not in WEB:
            raise unaccepted(url, error_text(error)) from None
        raise UsageError(f"{redact_url(url)}: cannot be asked for: {error_text(error)}") from None
    except (TypeError, AttributeError) as error:
        raise unaccepted(url, error_text(error)) from None


def redact_url(url: str) -> str:
    """Return a URL for messages: without user, password or signature."""
    head, mark, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    user, at, server = host.rpartition("@")
    if at and (":" in user or head.lower() in WEB):
        host = server
    path = re.sub(r"\?[^/]*=.*", "", path, flags=re.DOTALL)
    return f"{head}{mark}{host}{slash}{path}"
