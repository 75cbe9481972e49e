"""The other commands take URLs too: verify in all its ways, dry runs, and torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import case, read_back
from fault_server import READS, call
from fork_server import forking_python
from places import in_store
from store_server import S3, s3, server
from test_s3 import big, files_of, resharded
from typer.testing import CliRunner

from ckptool.cli.app import app
from ckptool.commands.convert import prepare
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.target import ConvertOptions
from ckptool.storage.url import location

SOURCE = case("dcp_fsdp2_tp").path


def told(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(one) for one in arguments])


def test_a_whole_checkpoint_is_sound_and_a_flipped_one_is_not(s3: S3) -> None:
    url = s3.put(SOURCE, "m")
    assert told("verify", url).exit_code == 0
    data = bytearray((SOURCE / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    s3.write("m/__0_0.distcp", bytes(data))
    found = told("verify", url, "--json")
    assert found.exit_code == 1
    assert "very-secret" not in found.output


def test_two_checkpoints_are_compared_wherever_they_lie(s3: S3, out: Path) -> None:
    resharded(SOURCE, out / "m", "8")
    url = s3.put(SOURCE, "m")
    assert told("verify", url, "--against", out / "m").exit_code == 0
    assert told("verify", out / "m", "--against", url).exit_code == 0
    other = s3.put(case("hf_shards").path, "other")
    assert told("verify", url, "--against", other).exit_code == 1


def test_an_archive_is_read_in_place(s3: S3, out: Path) -> None:
    one = case("nemo_archive")
    url = s3.put(one.path, "nemo") + "/model.nemo"
    assert told("verify", url, "--against", one.path / "model.nemo").exit_code == 0
    assert told("convert", url, out / "m.pt").exit_code == 0
    assert read_back("torch-save", out / "m.pt") == one.truth


def test_a_manifest_proves_a_copy_and_may_lie_in_the_store(s3: S3) -> None:
    url = s3.put(SOURCE, "m")
    manifest = s3.url("m.json")
    assert told("verify", SOURCE, "--write-manifest", manifest).exit_code == 0
    again = told("verify", SOURCE, "--write-manifest", manifest)
    assert "m.json already exists" in str(again.exception)
    assert told("verify", url, "--manifest", manifest).exit_code == 0


def test_the_newest_whole_step_of_a_run(s3: S3) -> None:
    s3.put(SOURCE, "run/step-100")
    s3.put(SOURCE, "run/step-200")
    s3.remove("run/step-200/__1_0.distcp")
    command = [sys.executable, "-m", "ckptool", "verify", s3.url("run"), "--latest-good"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == s3.url("run/step-100") + "\n"


def test_what_is_whole_of_a_damaged_checkpoint_is_salvaged(s3: S3, out: Path) -> None:
    url = s3.put(SOURCE, "m")
    s3.remove("m/__1_0.distcp")
    assert told("verify", url, "--salvage", s3.url("saved")).exit_code == 1
    assert ".metadata" in s3.get("saved")
    assert json.loads(s3.get("saved.salvage.json")[""])["complete"] is False


@pytest.mark.parametrize(
    "command", [["convert", "--to", "safetensors"], ["reshard", "--mesh", "2"]]
)
def test_a_dry_run_writes_nothing(command: list[str], s3: S3) -> None:
    url = s3.put(SOURCE, "m")
    done = told(command[0], url, s3.url("other"), *command[1:], "--dry-run")
    assert done.exit_code == 0, done.output
    assert " free" not in done.output
    assert {one.operation for one in s3.requests} <= set(READS)
    assert s3.get("other") == {}


def test_inspect_reads_tensors_and_values_where_asked(s3: S3) -> None:
    url = s3.put(SOURCE, "m")
    for option in (["--stats", "*"], ["--values"], ["--rank-bytes"], ["--tensors", "*"]):
        here, there = told("inspect", SOURCE, *option), told("inspect", url, *option)
        assert there.exit_code == 0
        assert there.stdout == here.stdout


def test_under_torchrun_both_sides_may_be_urls(
    s3: S3, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = str(forking_python(tmp_path))
    monkeypatch.setenv("PYTHON_EXEC", python)  # starts the ranks
    resharded(SOURCE, out / "m", "2")
    url = s3.put(SOURCE, "m")
    command = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "ckptool"]
    command += ["reshard", url, s3.url("other"), "--mesh", "2", "--rank-state", "drop"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert s3.get("other") == files_of(out / "m")


def test_loading_through_torch_is_for_disks(s3: S3) -> None:
    done = told("reshard", SOURCE, s3.url("m"), "--mesh", "1", "--check")
    assert "needs a target on local disk" in str(done.exception)
    assert s3.get("m") == {}


def test_reads_go_together_where_nobody_says_how_many(s3: S3, out: Path) -> None:
    source = s3.put(big(out, 4), "m")
    place = in_store(source)
    prepared = prepare(place, out / "m.safetensors", ConvertOptions("safetensors"))
    place.store.blocks.clear()
    meeting = threading.Barrier(4)

    s3.fail(call(lambda request: meeting.wait(timeout=30)), "GetObject", times=4)
    prepared.run()
    assert not meeting.broken


def test_ranks_beside_one_another_share_cores_and_no_answers(
    s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_a_disk = open_checkpoint(SOURCE).source.policy
    for ranks, cores, threads in [("64", 2, 1), ("8", 128, 16), ("8", 32, 4), ("0", 8, 8)]:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        monkeypatch.setattr("ckptool.storage.files.count_cores", lambda cores=cores: cores)
        assert of_a_disk.load_workers == threads
    assert open_checkpoint(location(s3.put(SOURCE, "m"))).source.policy.load_workers >= 4


def test_the_python_interface_takes_urls(s3: S3) -> None:
    import ckptool

    url = s3.put(SOURCE, "m")
    here, there = ckptool.open(SOURCE), ckptool.open(url)
    assert list(here.tensors) == list(there.tensors)
    for name in here.tensors:
        assert torch.equal(here.read(name), there.read(name))
