"""Storage options and settings that a client is made of: what is wrong is a mistake of use."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptool.errors import UsageError
from ckptool.storage.clients.amazon import Amazon
from ckptool.storage.clients.answers import Answer
from ckptool.storage.clients.client import ObjectVersion
from ckptool.storage.clients.fsspec_client import FsspecClient
from ckptool.storage.clients.service import fsspec_settings
from ckptool.storage.store import Store

pytest.importorskip("obstore")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"client_kwargs": {"nonsense": 1}}, "does not accept"),
        ({"config_kwargs": {"nonsense": 1}}, "does not accept"),
        ({"client_kwargs": "x"}, "does not accept"),
        ({"region": 3}, "does not accept"),
        ({"profile": "nosuch"}, "nosuch"),
        ({"client_kwargs": {"verify": "/nosuch.pem"}}, "/nosuch.pem"),
    ],
)
def test_options_of_s3_that_are_wrong(
    options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("boto3")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    with pytest.raises(UsageError, match=text):
        Store("s3://box/m", {"key": "k", "secret": "s", **options}).read(
            ObjectVersion("box/m", ""), 0, 10
        )


def test_a_bucket_has_moved_from_the_region_that_was_asked() -> None:
    """Also if another thread has noted that already."""
    service = Amazon("s3://box/m", {})
    asked: Any = SimpleNamespace(config={"region": "us-east-1"})
    for _ in range(2):
        assert service.has_moved("box", Answer("moved", 301, region="eu-west-1"), asked)
    assert not service.has_moved("box", Answer("moved", 301, region="us-east-1"), asked)


def test_settings_of_fsspec_count_for_all_schemes_of_a_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = pytest.importorskip("fsspec.config")
    monkeypatch.setattr(config, "conf", {"gcs": {"token": "t"}, "gs": {"project": "p"}, "s3": {}})
    assert fsspec_settings("gs") == fsspec_settings("gcs") == {"token": "t", "project": "p"}
    assert fsspec_settings("s3a") == {}


def test_a_small_file_that_cannot_be_sent_leaves_nothing(tmp_path: Path) -> None:
    """Like huggingface_hub's (2.4) stream, which keeps what it sends in a file."""
    fsspec = pytest.importorskip("fsspec")
    kept = tmp_path / "kept"

    class Stream:
        temp_file = SimpleNamespace(name=str(kept))

        def write(self, data: bytes) -> None:
            kept.write_bytes(data)

        def close(self) -> None:
            raise OSError("503")

    class Hub(fsspec.AbstractFileSystem):  # type: ignore[misc, name-defined]
        def open(self, path: str, mode: str = "rb", **_: Any) -> Any:
            return Stream()

    client = FsspecClient.__new__(FsspecClient)
    client.fs, client.atomic_put = Hub(), True
    with pytest.raises(OSError, match="503"):
        client.put("m.json", b"{}")
    assert not kept.exists()
