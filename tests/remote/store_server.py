"""A real S3 server on loopback, with what can go wrong on the way to it."""

from __future__ import annotations

import functools
import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

Environ = dict[str, Any]
Fault = Callable[[Environ, Callable[..., Any]], Iterable[bytes] | None]


@dataclass(frozen=True)
class Request:
    """One request as the server saw it, and the bytes of its answer."""

    method: str
    path: str
    query: str
    range: str | None
    received: int
    sent: int

    @property
    def lists(self) -> bool:
        return self.method == "GET" and "list-type" in self.query


@dataclass
class S3:
    """A server with one bucket a test. ``fault`` may answer in the server's place."""

    bucket: str = ""
    requests: list[Request] = field(default_factory=list)
    fault: Fault | None = None

    def url(self, path: str = "") -> str:
        return f"s3://{self.bucket}/{path}".rstrip("/")

    def put(self, folder: Path, path: str) -> str:
        """Upload a folder or file by the store's own client, not by what is tested."""
        for file in [folder] if folder.is_file() else folder.rglob("*"):
            if file.is_file():
                inside = "" if folder.is_file() else f"/{file.relative_to(folder)}"
                self.fs.pipe_file(f"{self.bucket}/{path}{inside}", file.read_bytes())
        self.requests.clear()
        return self.url(path)

    def get(self, path: str) -> dict[str, bytes]:
        """All objects below a path, as the store's own client gets them."""
        self.fs.invalidate_cache()
        root = f"{self.bucket}/{path}"
        found = self.fs.find(root)
        return {n.removeprefix(root).lstrip("/"): self.fs.cat_file(n) for n in found}

    @property
    def fs(self) -> Any:
        import s3fs

        return s3fs.S3FileSystem()

    def uploads(self) -> list[Any]:
        """Multipart uploads that were begun and neither completed nor aborted."""
        return list(self.fs.list_multipart_uploads(self.bucket))

    @property
    def reads(self) -> list[Request]:
        return [one for one in self.requests if one.method == "GET" and not one.lists]


def answer(status: str, code: str) -> Fault:
    """An error as S3 says it."""

    def give(environ: Environ, start: Callable[..., Any]) -> Iterable[bytes]:
        if environ.get("CONTENT_LENGTH") or environ.get("HTTP_TRANSFER_ENCODING") == "chunked":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or -1))
        body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    return give


def some(fault: Fault, chosen: Callable[[Environ], bool], times: int = 1 << 30) -> Fault:
    """A fault for the first requests that are chosen."""
    left = [times]
    lock = threading.Lock()

    def give(environ: Environ, start: Callable[..., Any]) -> Iterable[bytes] | None:
        with lock:
            if not chosen(environ) or not left[0]:
                return None
            left[0] -= 1
        return fault(environ, start)

    return give


def of_data(environ: Environ) -> bool:
    """Whether a request reads an object."""
    return environ["REQUEST_METHOD"] == "GET" and "HTTP_RANGE" in environ


class _Front:
    """Counts requests, and lets a fault answer some."""

    def __init__(self, app: Any, s3: S3) -> None:
        self.app, self.s3 = app, s3

    def __call__(self, environ: Environ, start: Callable[..., Any]) -> Iterable[bytes]:
        answered = self.s3.fault(environ, start) if self.s3.fault else None
        body = answered if answered is not None else self.app(environ, start)
        data = list(body) if answered is None else body
        sent = sum(map(len, data)) if isinstance(data, list) else 0
        self.s3.requests.append(
            Request(
                environ["REQUEST_METHOD"],
                environ["PATH_INFO"],
                environ.get("QUERY_STRING", ""),
                environ.get("HTTP_RANGE"),
                int(environ.get("CONTENT_LENGTH") or 0),
                sent,
            )
        )
        return data


@pytest.fixture(scope="session")
def server() -> Iterator[tuple[S3, str]]:
    pytest.importorskip("s3fs")
    app = pytest.importorskip("moto.moto_server.werkzeug_app")
    serving = pytest.importorskip("werkzeug.serving")
    logging.getLogger("werkzeug").disabled = True
    session = pytest.importorskip("botocore.session")
    loader = session.create_loader  # each client of a test would parse the whole of S3's API anew
    session.create_loader = functools.cache(loader)
    s3 = S3()
    main = _Front(app.DomainDispatcherApplication(app.create_backend_app), s3)
    running = serving.make_server("127.0.0.1", 0, main, threaded=True)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield s3, f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    thread.join()
    session.create_loader = loader


@pytest.fixture
def s3(server: tuple[S3, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    import s3fs
    from fsspec.asyn import get_loop

    from ckptool.storage.retry import RetryPolicy
    from ckptool.storage.store import Store

    found, endpoint = server
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "very-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    get_loop()
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    monkeypatch.setattr(Store, "policy", RetryPolicy(attempts=4, pause=0.01, longest_pause=0.05))
    s3fs.S3FileSystem.clear_instance_cache()
    found.fault = None
    found.bucket = f"bucket-{uuid.uuid4().hex[:8]}"
    found.fs.mkdir(found.bucket)
    found.requests.clear()
    yield found
    found.fault = None
    s3fs.S3FileSystem.clear_instance_cache()
