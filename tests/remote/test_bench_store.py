"""``ckptool bench --out URL``: saves to a store are measured, and nothing of them is left there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from fault_server import DENIED, REMOVALS, WRITES
from fork_server import FORKING, Forked, forking_python
from store_server import S3, s3, server  # the fixtures

from ckptool.commands.bench.save_folders import StoreFolder
from ckptool.commands.bench.scratch import scratch_in_store
from ckptool.errors import CkptoolError
from ckptool.storage.url import RemotePath

KEPT = {"run/mine": b"mine", "run/work-too/mine": b"mine"}


def test_saves_to_a_store_are_measured_and_removed(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for key, data in KEPT.items():
        s3.write(key, data)
    chosen = "dcp-async-thread/default,torch-save"
    python = str(forking_python(tmp_path))
    monkeypatch.setenv("PYTHON_EXEC", python)  # starts the ranks
    program = tmp_path / "program.py"
    program.write_text(FORKING.format(python))
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(program), "bench"]
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
    written = {one.name for one in s3.of("PutObject", "CopyObject")}
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} <= written
    assert s3.get("") == KEPT
    # torch 2.13 leaves the empty folder of torchrun's logs, and at times its compiler's
    left = {path.name for path in tmp_path.iterdir()} - {"python", "program.py"}
    assert all(name.startswith(("torchelastic_", "torchinductor_")) for name in left), left


def test_what_was_saved_is_removed_after_an_interruption(s3: S3) -> None:
    for key, data in KEPT.items():
        s3.write(key, data)
    with pytest.raises(KeyboardInterrupt):
        save_until_interrupted(s3)
    assert s3.get("") == KEPT


def save_until_interrupted(s3: S3) -> None:
    folder = StoreFolder(RemotePath.parse(s3.url("run/work")))
    with scratch_in_store(folder):
        (folder.place / "save-0" / "__0_0.distcp").write_bytes(b"half")
        assert folder.sizes() == {"save-0/__0_0.distcp": 4}
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("denied", "said"), [(WRITES, "cannot be written to"), (REMOVALS, "cannot be removed")]
)
def test_a_place_that_cannot_be_written_or_emptied_is_refused_first(
    denied: tuple[str, ...], said: str, s3: S3
) -> None:
    s3.fail(DENIED, *denied)
    with (
        pytest.raises(CkptoolError, match=said),
        scratch_in_store(StoreFolder(RemotePath.parse(s3.url("run/work")))),
    ):
        pytest.fail("began to measure")
