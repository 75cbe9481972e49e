"""Errors of stores' clients, and the errors that ckptool raises for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from ckptool.errors import CkptoolError, Denied, NoAnswer, NotFound, error_text
from ckptool.storage.clients import retry as retrying
from ckptool.storage.clients.retry import RetryPolicy, retry, status_of

QUICK = RetryPolicy(attempts=3, pause=0.0, longest_pause=0.0, total=1000.0)


class Answer:
    """What a client keeps of an answer."""

    def __init__(self, status: int, **headers: str) -> None:
        self.status_code = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class WithStatus(Exception):
    """As webdav's and others' errors."""

    def __init__(self, status: object) -> None:
        super().__init__("said so")
        self.status_code = status


class WithCode(Exception):
    """As errors of urllib."""

    def __init__(self, code: object) -> None:
        super().__init__("said so")
        self.code = code


class WithResponse(OSError):
    """As huggingface_hub's HfHubHTTPError."""

    def __init__(self, response: object) -> None:
        super().__init__("said so")
        self.response = response


def caused(error: Exception) -> OSError:
    """As a file system translates its client's errors."""
    outer = OSError(22, "said so")
    outer.__cause__ = error
    return outer


class TooManyRedirects(Exception):
    """As httpx's."""


def taken_for_missing(error: Exception) -> FileNotFoundError:
    """As huggingface_hub has several answers."""
    outer = FileNotFoundError("hf://host/m")
    outer.__cause__ = error
    return outer


def raising(error: BaseException) -> Callable[[], None]:
    """Raises it as a client of a store does: in code that is not ours."""
    names: dict[str, Any] = {"error": error}
    exec("def work():\n    raise error", names)
    work: Callable[[], None] = names["work"]
    return work


def refused(code: str, status: int = 403) -> OSError:
    """As a file system translates a client's errors, with the store's code in the cause."""
    cause = WithResponse(Answer(status))
    cause.args = (f"An error occurred ({code}) when calling the GetObject operation: {code}",)
    return caused(cause)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("x"), NotFound),
        (PermissionError("expired token"), Denied),
        (WithStatus(404), NotFound),
        (WithStatus("403"), Denied),
        (WithCode(401), Denied),
        (WithResponse(Answer(410)), NotFound),
        (caused(WithResponse(Answer(301))), NoAnswer),
        (taken_for_missing(WithStatus(404)), NotFound),
        (taken_for_missing(WithStatus(401)), Denied),
        (taken_for_missing(WithStatus(403)), Denied),
        (taken_for_missing(WithStatus(405)), NoAnswer),
        (taken_for_missing(WithStatus(501)), NoAnswer),
        (TooManyRedirects("said so"), NotFound),
        (taken_for_missing(KeyError("x")), NotFound),
        (ValueError("no such region"), NotFound),
        (refused("InvalidBucketName", 400), NotFound),
        (NotImplementedError(), NotFound),
    ],
)
def test_an_answer_that_lasts_is_asked_for_once(error: Exception, kind: type[Exception]) -> None:
    asked: list[int] = []

    def work() -> None:
        asked.append(1)
        raising(error)()

    with pytest.raises(kind) as caught:
        retry(QUICK, "s3://b/m", work)
    assert type(caught.value) is kind
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (refused("ExpiredToken", 400), "the credentials have expired"),
        (refused("RequestTimeTooSkewed"), "this machine's clock is wrong"),
        (refused("InvalidAccessKeyId"), "the access key is unknown"),
        (refused("SignatureDoesNotMatch"), "the secret key is wrong"),
        (refused("400", 400), "the request is refused"),
        (OSError("Client error 400: <Code>ExpiredToken</Code>"), "the credentials have expired"),
    ],
)
def test_a_refusal_says_what_helps(error: OSError, words: str) -> None:
    with pytest.raises(Denied, match=words) as caught:
        retry(QUICK, "s3://b/m", raising(error))
    assert caught.value.hint
    assert not isinstance(caught.value, CkptoolError)


class Clock:
    """Time that passes only while a policy waits, and ``spent`` seconds a request."""

    def __init__(self, spent: float = 0.0) -> None:
        self.now = 0.0
        self.spent = spent
        self.asked = 0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now

    def request(self, error: Exception) -> Callable[[], None]:
        def work() -> None:
            self.asked += 1
            self.now += self.spent
            raising(error)()

        return work


@pytest.mark.parametrize(
    ("error", "spent", "policy", "longest"),
    [
        (WithStatus(503), 0.0, RetryPolicy(), 120),
        (WithStatus(503), 0.0, RetryPolicy().of_listings(), 60),
        (WithStatus(503), 10.0, RetryPolicy().of_listings(), 60),
        (WithResponse(Answer(503, Retry_After="50")), 0.0, RetryPolicy().of_listings(), 60),
        (ConnectionRefusedError(111, "refused"), 0.0, RetryPolicy(), 10),
        (caused(ConnectionRefusedError(111, "refused")), 0.5, RetryPolicy(), 10),
        (OSError('Could not connect to the endpoint URL: "http://h/"'), 0.0, RetryPolicy(), 10),
    ],
)
def test_all_tries_together_have_a_time(
    error: Exception,
    spent: float,
    policy: RetryPolicy,
    longest: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(spent)
    monkeypatch.setattr(retrying, "time", clock)
    with pytest.raises(NoAnswer, match=r"no answer after \d+ attempts? in \d+ s"):
        retry(policy, "s3://b/m", clock.request(error))
    assert clock.now <= longest
    assert clock.asked <= policy.attempts


def test_an_answer_of_an_inner_request_is_not_asked_for_again() -> None:
    asked: list[int] = []

    def work() -> None:
        asked.append(1)
        retry(QUICK, "inner", raising(WithStatus(503)))

    with pytest.raises(NoAnswer, match=r"^inner: no answer"):
        retry(QUICK, "outer", work)
    assert len(asked) == 1


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        ConnectionResetError(),
        WithStatus(503),
        WithCode(429),
        WithResponse(Answer(500)),
        caused(WithResponse(Answer(503))),
        WithStatus(None),
        WithStatus("grpc"),
        taken_for_missing(WithStatus(503)),
        taken_for_missing(WithStatus(429)),
    ],
)
def test_any_other_is_asked_for_again(error: Exception) -> None:
    left = [error, error]

    def work() -> str:
        if left:
            raising(left.pop())()
        return "here"

    assert retry(QUICK, "s3://b/m", work) == "here"
    with pytest.raises(NoAnswer, match="3 attempts"):
        retry(QUICK, "s3://b/m", raising(error))


@pytest.mark.parametrize("error", [TypeError("a slip"), ValueError("a slip"), KeyError("a slip")])
def test_a_slip_of_our_own_is_not_an_answer(error: Exception) -> None:
    ours: dict[str, Any] = {"__name__": "ckptool.storage.store", "error": error}
    exec("def work():\n    raise error", ours)
    with pytest.raises(type(error), match="a slip"):
        retry(QUICK, "s3://b/m", ours["work"])


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (WithResponse(Answer(503, Retry_After="7")), 7),
        (caused(WithResponse(Answer(503, retry_after="3"))), 3),
        (WithResponse(Answer(429, Retry_After="86400")), 60),
        (WithResponse(Answer(429, Retry_After="Thu, 01 Jan 2026 00:00:00 GMT")), 0),
        (WithStatus(503), 0),
    ],
)
def test_a_store_says_how_long_to_wait(
    error: Exception, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    with pytest.raises(NoAnswer):
        retry(QUICK, "s3://b/m", raising(error))
    assert waited == [seconds, seconds]


def test_errors_that_cause_one_another_end() -> None:
    one, other = OSError("a"), OSError("b")
    one.__cause__, other.__cause__ = other, one
    assert status_of(one) is None


def test_credentials_in_an_error_are_not_shown() -> None:
    error = OSError("no answer from https://me:secret@host/x?X-Amz-Signature=secret (twice)")
    assert error_text(error) == "no answer from https://host/x (twice)"
