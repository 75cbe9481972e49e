"""The same against an independent server (moto), which implements S3 from its manual."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import case, convert_to
from store_server import S3, s3, server
from test_s3 import big, files_of, resharded

from ckptool.commands.convert import prepare
from ckptool.commands.options.target import ConvertOptions
from ckptool.storage.url import location


@pytest.fixture
def bucket(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    app = pytest.importorskip("moto.moto_server.werkzeug_app")
    serving = pytest.importorskip("werkzeug.serving")
    logging.getLogger("werkzeug").disabled = True
    main = app.DomainDispatcherApplication(app.create_backend_app)
    running = serving.make_server("127.0.0.1", 0, main, threaded=True)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{running.server_port}")
    s3.fs.clear_instance_cache()
    name = f"bucket-{uuid.uuid4().hex[:8]}"
    s3.fs.mkdir(name)
    yield name
    running.shutdown()
    assert not s3.requests  # of the first server


def stored(fs: Any, folder: str) -> dict[str, bytes]:
    fs.invalidate_cache()
    return {name.removeprefix(f"{folder}/"): fs.cat_file(name) for name in fs.find(folder)}


@pytest.mark.parametrize("versions", [False, True])
def test_what_is_written_and_read_is_the_same(
    versions: bool, bucket: str, s3: S3, out: Path
) -> None:
    """Old versions, and marks of what was removed, are there and not seen."""
    if versions:
        status = {"Status": "Enabled"}
        s3.fs.call_s3("put_bucket_versioning", Bucket=bucket, VersioningConfiguration=status)
    source = case("dcp_fsdp2_tp").path
    convert_to("safetensors", source, out / "m")
    resharded(source, f"s3://{bucket}/source", "4")
    resharded(source, f"s3://{bucket}/source", "2", overwrite=True)
    resharded(source, out / "two", "2")
    assert stored(s3.fs, f"{bucket}/source") == files_of(out / "two")
    place = location(f"s3://{bucket}/source")
    prepare(place, location(f"s3://{bucket}/m"), ConvertOptions("safetensors")).run()
    assert stored(s3.fs, f"{bucket}/m") == files_of(out / "m")
    kept = s3.fs.call_s3("list_object_versions", Bucket=bucket).get("DeleteMarkers", [])
    assert bool(kept) == versions


def test_uploads_in_parts(bucket: str, s3: S3, out: Path) -> None:
    source = big(out, 3)
    resharded(source, f"s3://{bucket}/m", "1")
    resharded(source, out / "m", "1")
    assert stored(s3.fs, f"{bucket}/m") == files_of(out / "m")
    assert not s3.fs.list_multipart_uploads(bucket)
