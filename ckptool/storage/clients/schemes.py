"""The kinds of stores, by the scheme of their URLs, and URLs as messages show them."""

from __future__ import annotations

import re

from ckptool.errors import UsageError

WEB = ("http", "https")
"""Schemes of web servers, which list nothing and are not written to."""
S3 = ("s3", "s3a")
GOOGLE = ("gs", "gcs")
AZURE = ("az", "abfs", "abfss")
_BUCKETS = (*S3, *GOOGLE, *AZURE, "hf", *WEB)
"""Schemes whose URLs begin with a bucket, container, repository or host."""


def require_supported(scheme: str, rest: str) -> str:
    """Return a URL with its scheme in lower case; UsageError if it is not supported."""
    if scheme in _BUCKETS and not rest.partition("/")[0]:
        raise UsageError(f"{scheme}://{rest}: names no bucket or host", hint=f"{scheme}://NAME/...")
    if "?versionid=" in rest.lower() and scheme not in WEB:
        raise UsageError(
            f"{scheme}://{rest}: versions of objects are not read",
            hint="copy the version to a key of its own",
        )
    return f"{scheme}://{rest}"


def redact_url(url: str) -> str:
    """Return a URL for messages: without user, password or signature."""
    head, mark, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    user, at, server = host.rpartition("@")
    if at and (":" in user or head.lower() in WEB):
        host = server
    path = re.sub(r"\?[^/]*=.*", "", path, flags=re.DOTALL)
    return f"{head}{mark}{host}{slash}{path}"
