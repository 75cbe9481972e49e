"""Emulators of Google Cloud Storage and of Azure's blobs, and a proxy before each that lets
requests fail as a test chooses.
"""

from __future__ import annotations

import base64
import email.utils
import hmac
import http.client
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from fault_server import S3Server
from web_server import WebServer

from ckptool.storage.url import RemotePath, location

KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of ``devstoreaccount1``, as azurite's documentation has it."""
_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}

_OWN = {*_HOP, "date", "server"}


@dataclass
class Said:
    """An answer: of the emulator, or a fault's."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Asked:
    """A request; its headers are in small letters."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def kind(self) -> str:
        """What it asks for: LIST, READ (of bytes), HEAD, WRITE or DELETE.

        obstore (0.12) removes Azure's files by a batch, which is a POST.
        """
        if "comp=batch" in self.target:
            return "DELETE"
        if self.method in ("PUT", "POST", "PATCH"):
            return "WRITE"
        if self.method != "GET":
            return self.method
        return "LIST" if re.search(r"[?&](?:comp=list|list-type=2)", self.target) else "READ"

    @property
    def key(self) -> str:
        """The path and query, unquoted."""
        return urllib.parse.unquote(self.target)


Fault = Callable[[Asked, Callable[[Asked], Said]], Said]
"""Answers a request; the second argument asks the emulator."""


@dataclass
class Rule:
    """Which requests a fault answers: those of these kinds, from the ``start``-th on."""

    fault: Fault
    kinds: tuple[str, ...]
    key: str = ""
    start: int = 1
    seen: int = 0

    def matches(self, asked: Asked) -> bool:
        if (self.kinds and asked.kind not in self.kinds) or not re.search(self.key, asked.key):
            return False
        self.seen += 1
        return self.seen >= self.start


class Proxy:
    """Hands all requests on to an emulator, but those for which there is a rule."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.log: list[Asked] = []
        self._rules: list[Rule] = []
        self._http = WebServer(lambda *words: _Handler(self, *words))
        self._http.start()
        self.endpoint = self._http.base

    def close(self) -> None:
        self._http.close()

    def fail(self, fault: Fault, *kinds: str, key: str = "", start: int = 1) -> Rule:
        """Let a fault answer requests of these kinds, of all where none is named."""
        rule = Rule(fault, kinds, key, start)
        self._rules.append(rule)
        return rule

    def heal(self) -> None:
        self._rules.clear()

    def answer(self, asked: Asked) -> Said:
        self.log.append(asked)
        rules = [rule for rule in self._rules if rule.matches(asked)]
        return rules[0].fault(asked, self.ask) if rules else self.ask(asked)

    def ask(self, asked: Asked) -> Said:
        """Answer as the store would: ask the emulator."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {name: text for name, text in asked.headers.items() if name not in _HOP}
        headers["content-Length"] = str(len(asked.body))
        try:
            connection.request(asked.method, asked.target, asked.body, headers)
            answer = connection.getresponse()
            kept = {name: text for name, text in answer.getheaders() if name.lower() not in _OWN}
            if asked.method == "HEAD":
                kept["Content-Length"] = answer.getheader("Content-Length", "0")
            return Said(answer.status, answer.read(), kept)
        finally:
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16

    def __init__(self, proxy: Proxy, *words: object) -> None:
        self._proxy = proxy
        super().__init__(*words)  # type: ignore[arg-type]

    def log_message(self, *words: object) -> None:
        """Write nothing."""

    def _serve(self) -> None:
        body = b""
        if "chunked" in (self.headers["Transfer-Encoding"] or ""):
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        headers = {name.lower(): text for name, text in self.headers.items()}
        said = self._proxy.answer(Asked(self.command, self.path, headers, body))
        self.send_response(said.status)
        for name, text in said.headers.items():
            self.send_header(name, text)
        if "Content-Length" not in said.headers and said.status != http.client.NO_CONTENT:
            self.send_header("Content-Length", str(len(said.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(said.body)
        self.wfile.flush()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = _serve  # noqa: N815


@dataclass
class Emulator:
    """A running emulator, behind its proxy."""

    scheme: str
    proxy: Proxy
    environment: dict[str, str]

    def refuse(self, status: int, code: str, message: str = "refused") -> Fault:
        """An error as the store says it: ``code`` is Azure's; nothing is carried out."""
        body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
        said = Said(status, body.encode(), {"Content-Type": "application/xml"})
        return lambda asked, ask: said


@contextmanager
def google() -> Iterator[Emulator]:
    """A server of Google's XML API, which is S3's as far as a client of checkpoints goes."""
    running = S3Server()
    running.buckets["box"] = {}
    proxy = Proxy(int(running.endpoint.rpartition(":")[2]))
    yield Emulator("gs", proxy, {"STORAGE_EMULATOR_HOST": proxy.endpoint, "NO_GCE_CHECK": "true"})
    proxy.close()
    running.close()


@contextmanager
def azure() -> Iterator[Emulator]:
    """An emulator of Azure's blobs."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("no azurite-blob here")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--disableTelemetry"]
    running = subprocess.Popen([program, "--blobPort", str(port), *words])
    proxy = Proxy(port)
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        make_container(port, "box")
        endpoint = f"BlobEndpoint={proxy.endpoint}/devstoreaccount1"
        account = f"AccountName=devstoreaccount1;AccountKey={KEY}"
        connection = f"DefaultEndpointsProtocol=http;{account};{endpoint};"
        yield Emulator("az", proxy, {"AZURE_STORAGE_CONNECTION_STRING": connection})
    finally:
        proxy.close()
        running.kill()
        running.wait()


def make_container(port: int, name: str) -> None:
    """Make a container, which no client here does, signed as its reference says."""
    said = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = ["PUT", *[""] * 11, *(f"{header}:{text}" for header, text in said.items())]
    text = "\n".join([*lines, f"/devstoreaccount1/devstoreaccount1/{name}", "restype:container"])
    signature = hmac.digest(base64.b64decode(KEY), text.encode(), "sha256")
    said["Authorization"] = f"SharedKey devstoreaccount1:{base64.b64encode(signature).decode()}"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("PUT", f"/devstoreaccount1/{name}?restype=container", headers=said)
    assert connection.getresponse().status == http.client.CREATED
    connection.close()


_EMULATORS = {"gs": google, "az": azure}


@pytest.fixture(scope="module", params=_EMULATORS)
def emulator(request: pytest.FixtureRequest) -> Iterator[Emulator]:
    with _EMULATORS[request.param]() as found:
        yield found


@pytest.fixture
def box(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a folder where nothing is."""
    for name, value in emulator.environment.items():
        monkeypatch.setenv(name, value)
    url = f"{emulator.scheme}://box/{uuid.uuid4().hex[:8]}"
    emulator.proxy.log.clear()
    yield url
    emulator.proxy.heal()


def place(url: str) -> RemotePath:
    found = location(url)
    assert isinstance(found, RemotePath)
    return found


def stored(url: str) -> dict[str, bytes]:
    """All that lies below a URL."""
    folder = place(url)
    return {name: (folder / name).read_bytes() for name in folder.listing}


def put(folder: Path, url: str) -> None:
    """Store a folder."""
    at = place(url)
    for file in folder.rglob("*"):
        if file.is_file():
            (at / str(file.relative_to(folder))).write_bytes(file.read_bytes())
