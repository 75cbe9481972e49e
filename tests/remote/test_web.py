"""Reads of the web by obstore: which URL is asked for, and which answers are taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from web_server import WebServer

from ckptool.errors import NoAnswer, Unsupported, UsageError
from ckptool.storage.clients.client import ObjectVersion
from ckptool.storage.clients.retry import RetryPolicy
from ckptool.storage.store import Store

pytest.importorskip("obstore")

DATA = bytes(range(256)) * 40
Fault = Callable[[int, int], tuple[int, str, bytes]]
"""Answers bytes from ``start`` to ``end``: a status, a Content-Range, and a body."""


class Web(WebServer):
    def __init__(self) -> None:
        super().__init__(Handler)
        self.asked: list[tuple[str, str]] = []
        """The path of each request, and who asks."""
        self.fault: Fault = right


class Handler(BaseHTTPRequestHandler):
    server: Web

    def log_message(self, *said: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["Authorization"] or ""))
        wanted = self.headers["Range"] or f"bytes=0-{len(DATA) - 1}"
        start, last = map(int, wanted.removeprefix("bytes=").split("-"))
        status, content_range, body = self.server.fault(start, min(last + 1, len(DATA)))
        self.send_response(status)
        self.send_header("Content-Range", content_range)
        if status == 302:
            self.send_header("Location", self.path)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def right(start: int, end: int) -> tuple[int, str, bytes]:
    return 206, f"bytes {start}-{end - 1}/{len(DATA)}", DATA[start:end]


def shifted(start: int, end: int) -> tuple[int, str, bytes]:
    return 206, f"bytes {start + 1}-{end}/{len(DATA)}", DATA[start + 1 : end + 1]


def whole(start: int, end: int) -> tuple[int, str, bytes]:
    return 200, "", DATA


def fewer(start: int, end: int) -> tuple[int, str, bytes]:
    return 206, f"bytes {start}-{end - 1}/{len(DATA)}", DATA[start : end - 1]


def unsized(start: int, end: int) -> tuple[int, str, bytes]:
    return 206, f"bytes {start}-{end - 1}/*", DATA[start:end]


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr(Store, "policy", RetryPolicy(attempts=2, pause=0.01))
    running = Web()
    running.start()
    yield running
    running.close()


def read(store: Store, url: str, start: int, end: int) -> bytes:
    return bytes(store.read(ObjectVersion(url, ""), start, end))


PATHS = {
    "m.safetensors": "m.safetensors",
    "run/step-1/m.safetensors": "run/step-1/m.safetensors",
    "run/.metadata": "run/.metadata",
    "run/m.pt?X-Sig=a%2Fb&y=/z": "run/m.pt?X-Sig=a%2Fb&y=/z",
    "run/m.pt?a=1&b=c": "run/m.pt?a=1&b=c",
    "a b/ü%20+/ä.bin": "a%20b/%C3%BC%20+/%C3%A4.bin",
    "a%2Fb/m.bin": "a%2Fb/m.bin",
    "a//b.bin": "a//b.bin",
    "a/./b.bin": "a/b.bin",
    "a/../b.bin": "b.bin",
    "a/%2e%2e/b.bin": "b.bin",
    "a/b.bin#part": "a/b.bin",
}


@pytest.mark.parametrize("path", PATHS)
def test_a_url_is_asked_for_as_it_is(path: str, web: Web) -> None:
    url = f"{web.base}/{path}"
    for start, end in ((0, 10), (5, 5000), (10_200, len(DATA))):
        assert read(Store(url, {}), url, start, end) == DATA[start:end]
    assert {path for path, _ in web.asked} == {f"/{PATHS[path]}"}


@pytest.mark.parametrize("fault", [shifted, fewer, unsized])
def test_other_bytes_than_were_asked_for_are_never_taken(fault: Fault, web: Web) -> None:
    url = f"{web.base}/m.bin"
    store = Store(url, {})
    web.fault = fault
    with pytest.raises((NoAnswer, Unsupported)):
        read(store, url, 5, 50)
    web.fault = right
    assert read(store, url, 5, 50) == DATA[5:50]


def test_a_small_file_is_read_from_a_server_that_sends_all_of_it(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{web.base}/m.bin"
    web.fault = whole
    assert read(Store(url, {}), url, 5, 50) == DATA[5:50]
    monkeypatch.setattr("ckptool.storage.clients.web._SMALL", len(DATA) - 1)
    secret = f"{url.replace('http://', 'http://me:hidden@')}?sig=hidden"
    with pytest.raises(Unsupported, match="for a part of a file") as caught:
        read(Store(secret, {}), secret, 5, 50)
    assert "hidden" not in str(caught.value)


def test_the_size_is_what_a_read_says_if_head_does_not(web: Web) -> None:
    url = f"{web.base}/m.bin"
    web.fault = whole
    info = Store(url, {}).client.info(url)
    assert info is not None
    assert info.nbytes == len(DATA)


def redirected(start: int, end: int) -> tuple[int, str, bytes]:
    return 302, "", b""


def test_a_loop_of_redirects_lasts(web: Web) -> None:
    web.fault = redirected
    url = f"{web.base}/m.bin"
    with pytest.raises(NoAnswer, match=r"cannot be read: .*too many redirects"):
        read(Store(url, {}), url, 5, 50)


@pytest.mark.parametrize("host", ["h:99999", "user@:9", "h:x", "exa mple", "xn--", "[h"])
def test_what_is_no_host_is_a_mistake_of_use(host: str) -> None:
    url = f"http://{host}/m.bin"
    with pytest.raises(UsageError, match="cannot be asked for"):
        read(Store(url, {}), url, 0, 10)


@pytest.mark.parametrize("options", [{"headers": "x"}, {"headers": {"A": 3}}, {"client_kwargs": 3}])
def test_headers_that_are_none_are_a_mistake_of_use(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="http:// does not accept"):
        read(Store("http://h/m.bin", options), "http://h/m.bin", 0, 10)


def test_headers_and_users_are_sent(web: Web) -> None:
    url = f"{web.base}/m.bin"
    bearer = {"headers": {"Authorization": "Bearer x"}}
    choices: list[dict[str, Any]] = [bearer, {"client_kwargs": bearer, "ssl": False}]
    for options in choices:
        assert read(Store(url, options), url, 0, 10) == DATA[:10]
    url = url.replace("http://", "http://me:p%40ss@")
    assert read(Store(url, {}), url, 0, 10) == DATA[:10]
    assert [who for _, who in web.asked] == ["Bearer x"] * 2 + ["Basic bWU6cEBzcw=="]


def test_settings_that_are_not_understood_are_a_mistake_of_use(web: Web) -> None:
    with pytest.raises(UsageError, match="does not accept: trust_env"):
        assert Store(f"{web.base}/m.bin", {"client_kwargs": {"trust_env": False}}).client


def test_proxies_of_the_environment_are_used(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", web.base)
    url = "http://elsewhere.invalid/m.bin"
    assert read(Store(url, {}), url, 0, 10) == DATA[:10]
    assert web.asked[0][0] == url


def busy(start: int, end: int) -> tuple[int, str, bytes]:
    return 503, "", b"later"


def test_a_server_that_cannot_answer_gets_one_request_an_attempt(web: Web) -> None:
    url = f"{web.base}/m.bin"
    store = Store(url, {})
    assert read(store, url, 0, 10) == DATA[:10]
    web.fault = busy
    with pytest.raises(NoAnswer, match="2 attempts"):
        read(store, url, 10, 20)
    assert len(web.asked) == 3
