"""The loopback S3 server of the benchmark, whose answers can go wrong as a test chooses.

``S3Server.fail(fault, OPERATION, ...)`` adds a rule; operations have the names of S3's own API.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

from benchmarks.loopback import server
from benchmarks.loopback.messages import Answer, Dropped, Request, make_error
from msgspec.structs import replace

READS = ("GetObject", "HeadObject", "ListObjectsV2")
WRITES = (
    "PutObject",
    "CopyObject",
    "CreateMultipartUpload",
    "UploadPart",
    "CompleteMultipartUpload",
)
REMOVALS = ("DeleteObject", "DeleteObjects", "AbortMultipartUpload")

Fault = Callable[[Request, Callable[[Request], Answer]], Answer]
"""Answers a request; the second argument answers as the server would, which carries it out."""


def refuse(status: int, code: str, retry_after: int | None = None) -> Fault:
    """An error as S3 says it; nothing is carried out."""
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

    def fault(request: Request, carry_out: Callable[[Request], Answer]) -> Answer:
        return make_error(status, code, headers)

    return fault


DENIED = refuse(403, "AccessDenied")
EXPIRED = refuse(400, "ExpiredToken")
SKEWED = refuse(403, "RequestTimeTooSkewed")
SLOW_DOWN = refuse(503, "SlowDown")
INTERNAL = refuse(500, "InternalError")


def reset(request: Request, carry_out: Callable[[Request], Answer]) -> Answer:
    """The connection is reset; nothing is carried out."""
    raise Dropped


def lost(request: Request, carry_out: Callable[[Request], Answer]) -> Answer:
    """The request is carried out, and its answer never arrives."""
    carry_out(request)
    raise Dropped


def stall(release: threading.Event) -> Fault:
    """Nothing is answered until the event is set."""

    def fault(request: Request, carry_out: Callable[[Request], Answer]) -> Answer:
        release.wait(60)
        raise Dropped

    return fault


def whole(request: Request, carry_out: Callable[[Request], Answer]) -> Answer:
    """The whole object, as of a proxy that does not know ranges."""
    return carry_out(replace(request, range=None))


def shifted(request: Request, carry_out: Callable[[Request], Answer]) -> Answer:
    """The bytes that begin one later, as the answer says."""
    first, last = request.span()
    return carry_out(replace(request, range=f"bytes={first + 1}-{last}"))


def shifted_unsaid(request: Request, carry_out: Callable[[Request], Answer]) -> Answer:
    """Bytes of which nobody says where they lie."""
    answer = carry_out(request)
    answer.headers.pop("Content-Range", None)
    return answer


def fewer(request: Request, carry_out: Callable[[Request], Answer]) -> Answer:
    """Fewer bytes than requested, as if that were all."""
    answer = carry_out(request)
    answer.body = answer.body[:3]
    return answer


def cut(request: Request, carry_out: Callable[[Request], Answer]) -> Answer:
    """Half of what was promised; then the connection is gone."""
    answer = carry_out(request)
    answer.length, answer.body = len(answer.body), answer.body[: len(answer.body) // 2]
    return answer


def altered(at: int) -> Fault:
    """What is written is stored with a bit of its byte ``at`` flipped, and nobody is told."""

    def fault(request: Request, carry_out: Callable[..., Answer]) -> Answer:
        body = bytearray(carry_out.keywords["body"])  # type: ignore[attr-defined]
        body[at] ^= 0x20
        return carry_out(request, body=bytes(body))

    return fault


def call(function: Callable[[Request], object]) -> Fault:
    """Something happens before the server answers as always."""

    def fault(request: Request, carry_out: Callable[[Request], Answer]) -> Answer:
        function(request)
        return carry_out(request)

    return fault


@dataclass
class Rule:
    """Which requests a fault answers: those chosen, from the ``start``-th on, ``times`` of them."""

    fault: Fault
    operations: tuple[str, ...]
    key: str = "*"
    times: int = 1 << 30
    start: int = 1
    every: int = 1
    where: Callable[[Request], bool] = lambda request: True
    seen: int = 0
    """Requests that were chosen so far."""

    def matches(self, request: Request) -> bool:
        """Count a request that is chosen, and return whether its answer is the fault's."""
        if self.operations and request.operation not in self.operations:
            return False
        if not fnmatchcase(request.key, self.key) or not self.where(request):
            return False
        self.seen += 1
        number = self.seen - self.start
        return number >= 0 and number % self.every == 0 and number // self.every < self.times


class S3Server(server.S3Server):
    """The server, with rules by which faults answer."""

    def __init__(self) -> None:
        super().__init__()
        self._rules: list[Rule] = []

    def fail(self, fault: Fault, *operations: str, **chosen: object) -> Rule:
        """Let a fault answer requests of these operations, of all where none is named.

        ``key`` is a pattern, ``where`` a predicate; of the requests so chosen the ``start``-th, and
        each ``every``-th from there on, is answered so, ``times`` of them.
        """
        rule = Rule(fault, operations, **chosen)  # type: ignore[arg-type]
        with self.lock:
            self._rules.insert(0, rule)
        return rule

    def heal(self) -> None:
        """Answer as a server should."""
        with self.lock:
            self._rules.clear()

    def answer(self, request: Request, body: bytes) -> Answer:
        """Answer one request, or let a fault do so; the first that matches."""
        with self.lock:
            rules = [rule for rule in self._rules if rule.matches(request)]
        if not rules:
            return super().answer(request, body)
        time.sleep(self.latency)
        return rules[0].fault(request, partial(self.carry_out, body=body))


def names_of(requests: Iterable[Request]) -> list[str]:
    """The last parts of the keys of requests, in order."""
    return [one.name for one in requests]
