"""``ckptool bench --out URL``: saves to a store are measured, and nothing of them stays there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fork_server import Forked, forking_python
from store_server import S3, Environ, answer, s3, server, some  # the fixtures

from ckptool.commands.bench.files import list_uploaded, scratch_in_store
from ckptool.errors import CkptoolError
from ckptool.storage.url import RemotePath

KEPT = {"run/mine": b"mine", "run/work-too/mine": b"mine"}


def test_saves_to_a_store_are_measured_and_removed(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    s3.fs.pipe({f"{s3.bucket}/{key}": data for key, data in KEPT.items()})
    chosen = "dcp-async-thread/default,torch-save"
    monkeypatch.setenv("PYTHON_EXEC", str(forking_python(tmp_path)))  # starts the ranks
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "ckptool", "bench"]
    words = ["--out", s3.url("run"), "--size", "1MB", "--repeat", "1", "--strategies", chosen]
    process = Forked([*torchrun, *words, "--json"], os.environ, Path.cwd())
    try:
        stdout, stderr = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    told = json.loads(stdout)
    assert told["skipped"] == {"torch-save": "saves to disks only"}
    assert told["failed"] == {}
    assert told["settings"]["folder"] == s3.url("run")
    assert {"fsspec", "s3fs"} <= set(told["versions"])
    assert told["limits"]["write"] is None
    assert told["limits"]["upload"] > 0
    [row] = told["strategies"]
    assert row["name"] == "dcp-async-thread/default"
    assert row["consistency"]["verdict"] == "consistent"
    assert told["settings"]["nbytes"] <= row["disk"]["bytes"] < 2 * told["settings"]["nbytes"]
    assert row["disk"]["files"] == 3
    assert row["durable"]["median"] >= row["written"]["median"] > 0
    assert row["durable"]["of_limit"] > 0
    written = {one.path.rpartition("/")[2] for one in s3.requests if one.method == "PUT"}
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} <= written
    assert s3.get("") == KEPT
    # torch 2.13 leaves the empty folder of torchrun's logs
    assert {path.name for path in tmp_path.glob("[!t]*")} == {"python"}
    assert all(path.name[:13] == "torchelastic_" for path in tmp_path.glob("t*"))


def test_what_was_saved_and_what_was_begun_is_removed_after_an_interruption(s3: S3) -> None:
    s3.fs.pipe({f"{s3.bucket}/{key}": data for key, data in KEPT.items()})
    mine = s3.fs.call_s3("create_multipart_upload", Bucket=s3.bucket, Key="run/work-too/begun")
    with pytest.raises(KeyboardInterrupt):
        save_until_interrupted(s3)
    assert s3.get("") == KEPT
    assert [one["UploadId"] for one in s3.uploads()] == [mine["UploadId"]]


def save_until_interrupted(s3: S3) -> None:
    with scratch_in_store(RemotePath.parse(s3.url("run/work"))) as place:
        (place / "save-0" / "__0_0.distcp").write_bytes(b"half")
        s3.fs.call_s3("create_multipart_upload", Bucket=s3.bucket, Key="run/work/save-0/begun")
        assert list_uploaded(place) == {"save-0/__0_0.distcp": 4}
        raise KeyboardInterrupt


def is_write(environ: Environ) -> bool:
    return environ["REQUEST_METHOD"] == "PUT"


def is_removal(environ: Environ) -> bool:
    return environ["REQUEST_METHOD"] == "DELETE" or "delete" in environ["QUERY_STRING"]


@pytest.mark.parametrize(
    ("denied", "said"), [(is_write, "cannot be written to"), (is_removal, "cannot be removed")]
)
def test_a_place_that_cannot_be_written_or_emptied_is_refused_first(
    denied: Callable[[Environ], bool], said: str, s3: S3
) -> None:
    s3.fault = some(answer("403 Forbidden", "AccessDenied"), denied)
    with (
        pytest.raises(CkptoolError, match=said),
        scratch_in_store(RemotePath.parse(s3.url("run/work"))),
    ):
        pytest.fail("began to measure")
