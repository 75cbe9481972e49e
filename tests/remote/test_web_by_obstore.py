"""Reads of the web by obstore: aiohttp's requests, the same bytes, or aiohttp itself reads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ckptool.errors import NoAnswer, Unsupported
from ckptool.storage.block_cache import ObjectVersion
from ckptool.storage.clients import obstore_others
from ckptool.storage.retry import RetryPolicy
from ckptool.storage.store import Store

pytest.importorskip("obstore")
pytest.importorskip("aiohttp")

DATA = bytes(range(256)) * 40
Fault = Callable[[int, int], tuple[int, str, bytes]]
"""Answers bytes from ``start`` to ``end``: a status, a Content-Range, and a body."""


class Web(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.base = f"http://127.0.0.1:{self.server_port}"
        self.asked: list[tuple[str, str]] = []
        """The client and the path of each request."""
        self.fault: Fault = right
        self.faulty = ("obstore", "aiohttp")


class Handler(BaseHTTPRequestHandler):
    server: Web

    def log_message(self, *said: Any) -> None:
        pass

    def do_GET(self) -> None:
        client = "obstore" if "object_store" in self.headers["User-Agent"] else "aiohttp"
        self.server.asked.append((client, self.path))
        start, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        answer = self.server.fault if client in self.server.faulty else right
        status, content_range, body = answer(start, min(last + 1, len(DATA)))
        self.send_response(status)
        self.send_header("Content-Range", content_range)
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
    monkeypatch.setattr(obstore_others, "has_proxies", lambda: False)
    monkeypatch.setattr(Store, "policy", RetryPolicy(attempts=2, pause=0.01))
    running = Web()
    threading.Thread(target=running.serve_forever, args=(0.05,), daemon=True).start()
    yield running
    running.shutdown()
    running.server_close()


def read(store: Store, url: str, start: int, end: int) -> bytes:
    return bytes(store.read(ObjectVersion(url, ""), start, end))


PATHS = {
    "m.safetensors": "obstore",
    "run/step-1/m.safetensors": "obstore",
    "run/.metadata": "obstore",
    "run/m.pt?X-Sig=a%2Fb&y=/z": "obstore",
    "run/m.pt?a=1&b=c": "obstore",
    "a b/ü%20+/ä.bin": "obstore",
    "a%2Fb/m.bin": "obstore",
    "a//b.bin": "obstore",
    "a/./b.bin": "obstore",  # aiohttp's URL, which obstore is given, has no dots
    "a/../b.bin": "obstore",
    "a/%2e%2e/b.bin": "obstore",
    "a/b.bin#part": "aiohttp",
}


@pytest.mark.parametrize("path", PATHS)
def test_both_ask_for_the_same(path: str, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{web.base}/{path}"
    for start, end in ((0, 10), (5, 5000), (10_200, len(DATA))):
        assert read(Store(url, {}), url, start, end) == DATA[start:end]
    monkeypatch.setattr(obstore_others, "is_available", lambda: False)
    assert read(Store(url, {}), url, 0, 10) == DATA[:10]
    clients, paths = zip(*web.asked, strict=True)
    assert len(set(paths)) == 1
    assert clients == (PATHS[path],) * 3 + ("aiohttp",)


@pytest.mark.parametrize("fault", [shifted, whole, fewer, unsized])
def test_other_bytes_than_were_asked_for_are_never_taken(fault: Fault, web: Web) -> None:
    url = f"{web.base}/m.bin"
    store = Store(url, {})
    web.fault = fault
    web.faulty = ("obstore",)
    assert read(store, url, 5, 50) == DATA[5:50]
    if fault is not unsized:
        web.faulty = ("obstore", "aiohttp")
        with pytest.raises((NoAnswer, Unsupported)):
            read(store, url, 5, 50)


def test_where_obstore_never_reads_it_is_left_alone(web: Web) -> None:
    url = f"{web.base}/m.bin"
    store = Store(url, {})
    web.fault, web.faulty = shifted, ("obstore",)
    for start in range(6):
        assert read(store, url, start, 50) == DATA[start:50]
    assert [client for client, _ in web.asked] == ["obstore", "aiohttp"] * 3 + ["aiohttp"] * 3


@pytest.mark.parametrize("options", [{"client_kwargs": {"trust_env": False}}, {"ssl": False}])
def test_settings_of_aiohttp_hold(options: dict[str, Any], web: Web) -> None:
    url = f"{web.base}/m.bin"
    assert read(Store(url, options), url, 0, 10) == DATA[:10]
    assert [client for client, _ in web.asked] == ["aiohttp"]


def test_proxies_that_aiohttp_does_not_ask_are_not_asked(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstore_others, "has_proxies", lambda: True)
    url = f"{web.base}/m.bin"
    assert read(Store(url, {}), url, 0, 10) == DATA[:10]
    assert [client for client, _ in web.asked] == ["aiohttp"]


def busy(start: int, end: int) -> tuple[int, str, bytes]:
    return 503, "", b"later"


def test_a_server_that_cannot_answer_gets_one_request_an_attempt(web: Web) -> None:
    url = f"{web.base}/m.bin"
    store = Store(url, {})
    assert read(store, url, 0, 10) == DATA[:10]
    web.fault = busy
    with pytest.raises(NoAnswer, match="2 attempts"):
        read(store, url, 10, 20)
    assert [client for client, _ in web.asked] == ["obstore", "obstore", "aiohttp"]
