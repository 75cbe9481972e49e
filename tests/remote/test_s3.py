"""Checkpoints in S3: the same commands on either side, and the same bytes."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import case, convert_to
from safetensors.torch import save_file
from store_server import S3, s3, server  # the fixtures

from ckptool.commands.convert import prepare
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ConvertOptions, ReshardOptions, TransferOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.core.sharding.placement import parse_mesh
from ckptool.storage.commit_note import UNFINISHED
from ckptool.storage.multipart import PART
from ckptool.storage.url import RemotePath, location

SOURCES = ["dcp_fsdp2_tp", "hf_shards", "rank_experimental", "zip_zoo", "dcp_zstd"]
TARGETS = {"safetensors": "", "torch-save": ".pt", "dcp": "", "dcp-safetensors": ""}
PAIRS = [
    (source, target)
    for n, source in enumerate(SOURCES)
    for m, target in enumerate(TARGETS)
    if (n + m) % 2 == 0
]
"""Each source with two of the targets, in turns: what reads one knows nothing of the other."""


def files_of(path: Path) -> dict[str, bytes]:
    """All files of a folder, or of a file with what lies beside it."""
    found = [path] if path.is_file() else path.rglob("*")
    return {
        "" if path.is_file() else str(one.relative_to(path)): one.read_bytes()
        for one in found
        if one.is_file()
    }


@pytest.mark.parametrize(("name", "target"), PAIRS)
def test_convert_writes_the_same_bytes_wherever_it_reads_and_writes(
    name: str, target: str, s3: S3, out: Path
) -> None:
    source, suffix = case(name).path, TARGETS[target]
    convert_to(target, source, out / f"m{suffix}")
    url = s3.put(source, "source/" + source.name)
    options = ConvertOptions(target)
    (out / "other").mkdir()
    for here, there in (
        (source, location(s3.url(f"a/m{suffix}"))),
        (location(url), location(s3.url(f"b/m{suffix}"))),
        (location(url), out / "other" / f"m{suffix}"),
    ):
        prepare(here, there, options).run()
    wanted = files_of(out / f"m{suffix}")
    assert files_of(out / "other" / f"m{suffix}") == wanted
    assert s3.get(f"a/m{suffix}") == wanted
    assert s3.get(f"b/m{suffix}") == wanted
    assert not [name for name in s3.get("") if "partial" in name]


def resharded(source: str | Path, target: str | Path, mesh: str, **more: Any) -> None:
    options = ReshardOptions(
        parse_mesh(mesh), transfer=TransferOptions(verify=True, **more), rank_state="drop"
    )
    prepare_reshard(location(source), location(target), options).run()


@pytest.mark.parametrize("mesh", ["2x2", "8", "1"])
@pytest.mark.parametrize("name", ["dcp_fsdp2_tp", "rank_experimental"])
def test_reshard_writes_the_same_bytes(name: str, mesh: str, s3: S3, out: Path) -> None:
    source = s3.put(case(name).path, "source")
    resharded(case(name).path, out / "m", mesh)
    resharded(source, s3.url("run/m"), mesh)
    assert s3.get("run/m") == files_of(out / "m")


def test_what_commits_is_written_last_and_data_before_it(s3: S3) -> None:
    resharded(case("dcp_fsdp2_tp").path, s3.url("m"), "2x2")
    written = [one.name for one in s3.of("PutObject")]
    assert written[0] == UNFINISHED
    assert written[-1] == ".metadata"
    assert sorted(written[1:-1]) == [f"__{rank}_0.distcp" for rank in range(4)]


def test_overwrite_keeps_what_no_checkpoint_writer_made(s3: S3, out: Path) -> None:
    source, target = case("dcp_fsdp2_tp").path, s3.url("run/m")
    resharded(source, target, "4")
    foreign = {
        "train.py": b"import torch",
        "src/model/net.py": b"class Net: ...",
        "wandb/run.bin": bytes(range(256)),
        "__2_0.distcp.bak": b"a copy",
        "notes/.metadata": b"of another folder",
    }
    for name, data in foreign.items():
        place = location(f"{target}/{name}")
        assert isinstance(place, RemotePath)
        place.write_bytes(data)
    resharded(source, target, "2", overwrite=True)
    resharded(source, out / "m", "2")
    assert s3.get("run/m") == files_of(out / "m") | foreign


def big(path: Path, count: int) -> Path:
    """A DCP checkpoint of ``count`` tensors of 8 MiB on two ranks."""
    path = path / str(count)
    path.mkdir()
    tensors = {f"layer.{n}": torch.arange(1 << 21, dtype=torch.int32) + n for n in range(count)}
    save_file({n: t.view(2048, 1024) for n, t in tensors.items()}, path / "m.safetensors")
    unproved = TransferOptions(verify=False, run=RunOptions(fsync=False))
    options = ReshardOptions(parse_mesh("2"), to="dcp", transfer=unproved)
    prepare_reshard(path / "m.safetensors", path / "big", options).run()
    return path / "big"


def peak_memory(*arguments: object) -> int:
    """Bytes of memory that a command took at most, as a process of its own."""
    command = [sys.executable, "-m", "ckptool", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    most = 0
    while process.poll() is None:
        found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
        most = int(found[1]) << 10 if found else most
        time.sleep(0.01)
    assert process.returncode == 0
    return most


def test_reshard_of_ten_times_the_memory_budget(s3: S3, out: Path) -> None:
    small, large = s3.put(case("dcp_hsdp").path, "small"), s3.put(big(out, 50), "large")
    budget, nbytes = 40 << 20, 400 << 20
    options = ("--mesh", "3", "--budget", budget)
    least = peak_memory("reshard", small, s3.url("other"), *options)
    s3.requests.clear()
    most = peak_memory("reshard", large, s3.url("target"), *options)
    assert most - least < budget
    bodies = [one.received for one in s3.of("PutObject", "UploadPart")]
    assert sum(bodies) > nbytes
    assert max(bodies) < PART + 4096
    assert not s3.uploads
