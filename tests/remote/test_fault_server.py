"""The server that tests rely on does what it is told."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from http.client import IncompleteRead

import pytest
from fault_server import SLOW_DOWN, cut
from store_server import S3, s3, server


def get(s3: S3, key: str, range_: str) -> bytes:
    url = f"{s3.server.endpoint}/{s3.bucket}/{key}"
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Range": range_})) as answer:
        data: bytes = answer.read()
        return data


def test_the_log_says_what_was_asked_and_answered(s3: S3) -> None:
    s3.write("a b/ü", b"0123456789")
    assert get(s3, "a%20b/%C3%BC", "bytes=2-4") == b"234"
    [one] = s3.requests
    assert (one.operation, one.key, one.range) == ("GetObject", "a b/ü", "bytes=2-4")
    assert (one.status, one.received, one.sent) == (206, 0, 3)


def test_a_rule_counts_the_requests_that_it_is_for(s3: S3) -> None:
    for name in ("a", "b"):
        s3.write(name, b"0123456789")
    rule = s3.fail(SLOW_DOWN, "GetObject", key="a", start=2, every=2, times=2)
    answered = []
    for name in ("a", "b", "a", "a", "a", "b", "a", "a"):
        try:
            get(s3, name, "bytes=0-3")
            answered.append(200)
        except urllib.error.HTTPError as error:
            answered.append(error.code)
    assert answered == [200, 200, 503, 200, 503, *[200] * 3]
    assert rule.seen == 6


def test_a_body_that_is_cut_is_not_whole(s3: S3) -> None:
    s3.write("a", bytes(1000))
    s3.fail(cut, "GetObject")
    with pytest.raises((IncompleteRead, ConnectionResetError)):
        get(s3, "a", "bytes=0-999")


def test_latency_and_a_cap_take_their_time(s3: S3) -> None:
    s3.write("a", bytes(1 << 20))
    s3.server.latency, s3.server.bandwidth = 0.05, float(10 << 20)
    started = time.monotonic()
    assert len(get(s3, "a", "bytes=0-1048575")) == 1 << 20
    assert time.monotonic() - started >= 0.14


def test_listings_come_in_pages(s3: S3) -> None:
    for number in range(2100):
        s3.write(f"m/{number}", b"")
    s3.write("n", b"")
    assert len(s3.fs.find(f"{s3.bucket}/m")) == 2100
    assert len(s3.of("ListObjectsV2")) == 3
