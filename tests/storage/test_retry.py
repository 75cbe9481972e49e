"""What the clients of stores raise, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ckptool.errors import NotFound
from ckptool.storage.retry import Denied, NoAnswer, RetryPolicy, retry, status_of, time

QUICK = RetryPolicy(attempts=3, pause=0.0, longest_pause=0.0)


class Answer:
    """What a client keeps of an answer."""

    def __init__(self, status: int, **headers: str) -> None:
        self.status_code = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class WithStatus(Exception):
    """As azure.core's HttpResponseError and aiohttp's ClientResponseError."""

    def __init__(self, status: object) -> None:
        super().__init__("said so")
        self.status_code = status


class WithCode(Exception):
    """As gcsfs's HttpError."""

    def __init__(self, code: object) -> None:
        super().__init__("said so")
        self.code = code


class WithResponse(OSError):
    """As huggingface_hub's HfHubHTTPError, and botocore's ClientError."""

    def __init__(self, response: object) -> None:
        super().__init__("said so")
        self.response = response


def boto(status: int, **headers: str) -> dict[str, Any]:
    return {"ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers}}


def caused(error: Exception) -> OSError:
    """As s3fs translates errors."""
    outer = OSError(22, "said so")
    outer.__cause__ = error
    return outer


def raising(error: BaseException) -> Callable[[], None]:
    """Raises it as a client of a store does: in code that is not ours."""
    names: dict[str, Any] = {"error": error}
    exec("def work():\n    raise error", names)
    work: Callable[[], None] = names["work"]
    return work


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("x"), NotFound),
        (PermissionError("expired token"), Denied),
        (WithStatus(404), NotFound),
        (WithStatus("403"), Denied),
        (WithCode(401), Denied),
        (WithResponse(Answer(410)), NotFound),
        (caused(WithResponse(boto(301))), NotFound),
        (OSError("Forbidden: https://host/b\nno access"), Denied),
        (ValueError("no such region"), NotFound),
        (NotImplementedError(), NotFound),
    ],
)
def test_an_answer_that_lasts_is_asked_for_once(error: Exception, kind: type[NotFound]) -> None:
    asked: list[int] = []

    def work() -> None:
        asked.append(1)
        raising(error)()

    with pytest.raises(NotFound) as caught:
        retry(QUICK, "s3://b/m", work)
    assert type(caught.value) is kind
    assert len(asked) == 1


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        ConnectionResetError(),
        WithStatus(503),
        WithCode(429),
        WithResponse(Answer(500)),
        caused(WithResponse(boto(503))),
        WithStatus(None),
        WithStatus("grpc"),
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
def test_a_slip_of_our_own_is_no_answer(error: Exception) -> None:
    ours: dict[str, Any] = {"__name__": "ckptool.storage.store", "error": error}
    exec("def work():\n    raise error", ours)
    with pytest.raises(type(error), match="a slip"):
        retry(QUICK, "s3://b/m", ours["work"])


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (WithResponse(Answer(503, Retry_After="7")), 7),
        (caused(WithResponse(boto(503, **{"retry-after": "3"}))), 3),
        (WithResponse(Answer(429, Retry_After="86400")), 120),
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
