"""What obstore's errors say: texts as obstore 0.12.1 writes them."""

from __future__ import annotations

import pytest

from ckptool.errors import Unsupported, UsageError
from ckptool.storage.clients.answers import Answer, NoCredentials, answer_of
from ckptool.storage.clients.client import PartsRemain
from ckptool.storage.clients.retry import lasts, status_of


class GenericError(Exception):
    """obstore's."""

    __module__ = "obstore.exceptions"


def quoted(status: str, body: str = "", method: str = "GET", query: str = "") -> GenericError:
    return GenericError(
        f"Generic S3 error: Error performing {method} http://h/b/k{query} in 1.2ms - Server"
        f" returned non-2xx status code: {status}: {body}\n\nDebug source:\nGeneric {{}}"
    )


DENIED = "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (quoted("403 Forbidden", DENIED), 403, "403: AccessDenied: Access Denied"),
        (quoted("400 Bad Request"), 400, "400: Bad Request"),
        (quoted("403 Forbidden", DENIED, "PUT", "?partNumber=2&uploadId=x"), 403, "(part 2)"),
        (GenericError("x - HTTP error: e\n\nDebug source: kind: Connect,"), None, "Could not conn"),
        (GenericError("x - HTTP error: e\n\nDebug source: kind: Timeout,"), None, "too long"),
        (GenericError("Generic S3 error: Requested 1..9, got 2..10"), None, "bytes 2-9"),
        (GenericError("Generic S3 error: something new"), None, "something new"),
        (GenericError("x - HTTP error: error following redirect"), 301, "too many redirects"),
        (FileNotFoundError(2, "No such file", "/nosuch.pem"), None, "/nosuch.pem"),
        (FileNotFoundError("Object at location k not found"), 404, "not found"),
    ],
)
def test_an_answer_has_its_status_and_words(
    error: Exception, status: int | None, text: str
) -> None:
    found = answer_of(error, "s3://b/k")
    assert isinstance(found, Answer)
    assert status_of(found) == status
    assert text in str(found)


def test_another_region_is_seen() -> None:
    body = "<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region></Error>"
    for error, region in (
        (quoted("400 Bad Request", body), "eu-west-1"),
        (quoted("301 Moved Permanently"), ""),
        (quoted("400 Bad Request"), ""),  # to HEAD, S3 says no more
        (GenericError("Received redirect without LOCATION, this normally"), ""),
    ):
        found = answer_of(error, "s3://b/k")
        assert isinstance(found, Answer)
        assert (found.is_elsewhere, found.region) == (True, region)
    assert not answer_of(quoted("403 Forbidden", DENIED), "s3://b/k").is_elsewhere  # type: ignore[attr-defined]


def test_parts_that_may_not_be_discarded_are_told_from_what_failed() -> None:
    error = quoted("403 Forbidden", DENIED, "DELETE", "?uploadId=x")
    assert isinstance(answer_of(error, "s3://b/k"), PartsRemain)
    gone = quoted("404 Not Found", "", "DELETE", "?uploadId=x")
    assert isinstance(answer_of(gone, "s3://b/k"), Answer)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("External AWS credential provider: NoCredentialsError: Unable to", NoCredentials),
        ("External GCP credential provider: RefreshError: invalid_grant", NoCredentials),
        ("External AWS credential provider: ConnectTimeoutError: timed out", Answer),
    ],
)
def test_who_gives_no_credentials(text: str, kind: type[Exception]) -> None:
    found = answer_of(GenericError(text), "s3://b/k")
    assert type(found) is kind
    assert lasts(found) is (kind is NoCredentials)


@pytest.mark.parametrize(
    "text",
    [
        'Could not parse path: Path "a//b" contained empty path segment',
        "Generic HTTP error: Content-Length Header missing from response",
        "Generic S3 error: Received non-partial response when range requested",
        "Operation not supported: Range request not supported by m.bin",
    ],
)
def test_what_cannot_be_read_at_all(text: str) -> None:
    assert isinstance(answer_of(GenericError(text), "s3://b/a//b"), Unsupported)


def test_malformed_credentials_are_not_shown() -> None:
    text = "x External Azure credential provider: TypeError: failed: se:cret\n- more"
    found = answer_of(GenericError(text), "az://b/k")
    assert isinstance(found, UsageError)
    assert str(found) == "az://b/k: the credentials are malformed"


def test_errors_of_others_are_kept() -> None:
    error = ImportError("no boto3")
    assert answer_of(error, "s3://b/k") is error
