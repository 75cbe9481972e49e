"""The fault server as tests of commands use it: one bucket a test, and environment variables."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from benchmarks.loopback.messages import Request
from benchmarks.loopback.objects import PartialUpload
from fault_server import Fault, Rule, S3Server

from ckptool.storage.clients.retry import RetryPolicy
from ckptool.storage.store import Store

QUICK = RetryPolicy(attempts=4, pause=0.01, longest_pause=0.05)


@dataclass
class S3:
    """One bucket of the server."""

    server: S3Server
    bucket: str

    def url(self, path: str = "") -> str:
        return f"s3://{self.bucket}/{path}".rstrip("/")

    def put(self, folder: Path, path: str) -> str:
        """Store a folder or file, not by what is tested."""
        for file in [folder] if folder.is_file() else folder.rglob("*"):
            if file.is_file():
                inside = "" if folder.is_file() else f"/{file.relative_to(folder)}"
                self.server.put(self.bucket, f"{path}{inside}", file.read_bytes())
        return self.url(path)

    def write(self, path: str, data: bytes) -> None:
        """Store one object, not by what is tested."""
        self.server.put(self.bucket, path, data)

    def remove(self, path: str) -> None:
        """Remove one object, not by what is tested."""
        del self.server.buckets[self.bucket][path]

    def get(self, path: str = "") -> dict[str, bytes]:
        """All objects below a path, or the object itself under ``""``."""
        head = f"{path}/" if path else ""
        return {
            "" if key == path else key.removeprefix(head): stored.data
            for key, stored in sorted(self.server.buckets[self.bucket].items())
            if key == path or key.startswith(head)
        }

    def fail(self, fault: Fault, *operations: str, **chosen: Any) -> Rule:
        """Let a fault answer some requests."""
        return self.server.fail(fault, *operations, **chosen)

    def heal(self) -> None:
        """Answer as a server should."""
        self.server.heal()

    @property
    def fs(self) -> Any:
        """The store's own client."""
        import s3fs

        return s3fs.S3FileSystem()

    @property
    def uploads(self) -> dict[str, PartialUpload]:
        """Multipart uploads that were begun and neither completed nor aborted, by their number."""
        return {n: one for n, one in self.server.partial.items() if one.bucket == self.bucket}

    @property
    def requests(self) -> list[Request]:
        return self.server.log

    def of(self, *operations: str) -> list[Request]:
        """The requests of some operations."""
        return [one for one in self.requests if one.operation in operations]


@pytest.fixture(scope="session")
def server() -> Iterator[S3Server]:
    session = pytest.importorskip("botocore.session")
    loader = session.create_loader  # each client of a test would parse the whole of S3's API anew
    session.create_loader = functools.cache(loader)
    running = S3Server()
    yield running
    running.close()
    session.create_loader = loader


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    s3fs = pytest.importorskip("s3fs")
    for name, value in {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "very-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    monkeypatch.setattr(Store, "policy", QUICK)
    s3fs.S3FileSystem.clear_instance_cache()
    found = S3(server, f"bucket-{uuid.uuid4().hex[:8]}")
    server.buckets[found.bucket] = {}
    server.log.clear()
    yield found
    server.heal()
    server.latency = server.bandwidth = 0.0
    server.buckets.clear()
    server.partial.clear()
    s3fs.S3FileSystem.clear_instance_cache()
