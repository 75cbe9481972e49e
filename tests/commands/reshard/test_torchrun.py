"""Several processes as torchrun starts them: one result, one error, one end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import case, on_ranks, read_back
from fork_server import Forked, forking_python

from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ReshardOptions, TransferOptions
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.commands.verify.verify import verify
from ckptool.core.catalog import Extent
from ckptool.core.sharding.placement import parse_mesh
from ckptool.engine.checksum import crc32

WORKERS = Path(__file__).with_name("reshard_workers.py")
CHECKED = ("dcp", "dcp-safetensors", "rank-local")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "ckpt"
    generator = torch.Generator().manual_seed(11)
    state: dict[str, Any] = {
        f"layer.{n}.w": torch.randn(12, 9, generator=generator) for n in range(4)
    }
    state |= {
        "rows": torch.randn(9, 2, generator=generator),
        "cube": torch.randn(5, 4, 6, generator=generator).to(torch.bfloat16),
        "short": torch.arange(3),
        "none": torch.empty(0, 4),
        "seen": torch.tensor(3),
        "mask": torch.arange(11) % 3 == 0,
        "lr": 0.125,
    }
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


RESHARD = ("-m", "ckptool", "reshard")


def alone(source: Path, target: Path, mesh: str, policy: str = "fsdp") -> dict[str, bytes]:
    """The files that one process writes."""
    transfer = TransferOptions(run=RunOptions(workers=1, fsync=False))
    options = ReshardOptions(parse_mesh(mesh), policy=policy, transfer=transfer)
    prepare_reshard(source, target, options).run()
    return files(target)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# One result


def test_torchrun_writes_what_one_process_writes(
    source: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", str(forking_python(tmp_path)))  # starts the ranks
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "4"]
    words = [source, out / "r", "--mesh", "2x2", "--policy", "fsdp", "--check", "--json"]
    process = Forked([*torchrun, *RESHARD, *map(str, words)], os.environ, Path.cwd())
    try:
        stdout, stderr = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    assert json.loads(stdout)["written"] is True
    assert files(out / "r") == alone(source, out / "alone", "2x2")
    assert sorted(path.name for path in out.iterdir()) == ["alone", "r"]


@pytest.mark.parametrize("mesh", ["3x2", "1"])
def test_the_number_of_ranks_need_not_be_that_of_the_mesh(
    mesh: str, source: Path, out: Path
) -> None:
    words = (source, out / "r", "--mesh", mesh, "--policy", "fsdp")
    ended = on_ranks(2, (*RESHARD, *words))
    assert [one.code for one in ended] == [0, 0], ended[0].stderr
    assert "wrote" in ended[0].stdout
    assert ended[1].stdout == ""
    assert files(out / "r") == alone(source, out / "alone", mesh)
    assert sorted(path.name for path in out.iterdir()) == ["alone", "r"]


# What torch loads, rank by rank

UNEVEN = ("rows=StridedShard(0,2),Shard(0)", "layer.0.w=StridedShard(1,2),Shard(1)",
          "layer.1.w=Replicate(),StridedShard(0,3)", "cube=Shard(2),Shard(-3)",
          "layer.2.w=Replicate(),Replicate()", "short=Shard(0),Replicate()")  # fmt: skip


def test_torch_loads_what_was_written(source: Path, out: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"name": f"{to} {what}", "to": to, "mesh": "dp=2,tp=2"} | more
        for to in CHECKED
        for what, more in (
            ("fsdp", {}),
            ("uneven", {"rules": UNEVEN}),
            ("flipped", {"flip": "layer.3.w"}),
            ("flipped replica", {"rules": UNEVEN, "flip": "layer.2.w"}),
        )
    ]
    ended = on_ranks(4, (WORKERS, source, out, json.dumps(rows)))
    assert [one.code for one in ended] == [0] * 4, ended[0].stderr
    told = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(4)]
    assert told == [told[0]] * 4, "every rank ends alike"
    for row in rows:
        end = told[0][row["name"]]
        if "flip" in row:
            assert end.startswith("TransferError: rank "), row
            assert f"{row['flip']}: rank" in end
            assert "loads values different from the source, first at [" in end
        else:
            assert end == "equal", row


# One error


def break_bytes(source: Path, name: str) -> None:
    """Change a bit of a tensor; its checksum does not fit any more."""
    opened = open_checkpoint(source)
    at = opened.open_containers(opened.catalog).tensors[name].chunks[0].at
    assert isinstance(at, Extent)
    data = bytearray((source / at.file).read_bytes())
    data[at.offset] ^= 1
    (source / at.file).write_bytes(data)


def test_one_ranks_error_ends_all_with_it(source: Path, out: Path) -> None:
    """Replicated tensors are spread over the files; just one rank reads the damaged one."""
    shutil.copytree(source, out / "s")
    break_bytes(out / "s", "layer.1.w")
    words = (out / "s", out / "r", "--mesh", "2", "--policy", "replicate", "-q")
    ended = on_ranks(2, (*RESHARD, *words))
    assert [one.code for one in ended] == [3] * 2, ended[0].stderr
    assert all("layer.1.w" in one.stderr and "CRC-32" in one.stderr for one in ended)
    assert all("Traceback" not in one.stderr for one in ended)
    assert [path.name for path in out.iterdir()] == ["s"]


def differing_replica(source: Path) -> None:
    """Give rank 1's copy of ``model.mask`` another value, and a checksum that fits it."""
    opened = open_checkpoint(source)
    at = opened.open_containers(opened.catalog).tensors["model.mask"].chunks[0].copies[0].at
    assert isinstance(at, Extent)
    assert at.record is not None
    record, path = at.record, source / at.file
    data = bytearray(path.read_bytes())
    data[at.offset] ^= 1
    crc = crc32(data[record.offset : record.offset + record.nbytes])
    old, new = (value.to_bytes(4, "little") for value in (record.crc32, crc))
    path.write_bytes(bytes(data).replace(old, new))


def test_a_replica_that_differs_ends_all_ranks(out: Path) -> None:
    """Each rank compares a share of the replicas, so that one alone finds it."""
    shutil.copytree(case("dcp_no_collectives").path, out / "s")
    differing_replica(out / "s")
    words = (out / "s", out / "r", "--mesh", "2", "-q")
    assert subprocess.run([sys.executable, *map(str, (*RESHARD, *words))]).returncode == 3
    ended = on_ranks(2, (*RESHARD, *words))
    assert [one.code for one in ended] == [3] * 2, ended[0].stderr + ended[1].stderr
    assert all("hold different values" in one.stderr for one in ended)
    assert [path.name for path in out.iterdir()] == ["s"]


def test_ranks_that_see_different_sources(source: Path, out: Path) -> None:
    folders = [out / "node0", out / "node1"]
    for folder in folders:
        shutil.copytree(source, folder / "s")
    os.utime(folders[1] / "s" / "__0_0.distcp")
    words = ("s", out / "r", "--mesh", "2", "-q")
    ended = on_ranks(2, (*RESHARD, *words), folders)
    assert [one.code for one in ended] == [4, 4], ended[0].stderr
    assert all("different sources" in one.stderr for one in ended)
    assert not (out / "r").exists()


# Nodes with a disk each


@pytest.fixture
def nodes(out: Path) -> list[Path]:
    folders = [out / f"node{rank}" for rank in range(2)]
    for folder in folders:
        folder.mkdir()
    return folders


@pytest.mark.parametrize("before", ["nothing", "a killed run"])
def test_each_node_has_the_whole(before: str, source: Path, out: Path, nodes: list[Path]) -> None:
    again = ["--resume"] if before == "a killed run" else []
    words = [str(source), "r", "--mesh", "2", "--policy", "fsdp", "--no-verify"]
    if again:
        killed_before_commit(words, nodes)
    ended = on_ranks(2, (*RESHARD, *words, *again), nodes)
    assert [one.code for one in ended] == [0] * 2, ended[0].stderr
    whole = alone(source, out / "alone", "2")
    for node in nodes:
        assert files(node / "r") == whole
        assert [path.name for path in node.iterdir()] == ["r"]
    assert "note: r is on 2 disks, one per node, each with a full copy" in ended[0].stderr


def killed_before_commit(words: list[Any], nodes: list[Path]) -> None:
    """A run on all nodes that ends at once where it would make its files the target."""
    ending = (
        "import os, sys\n"
        "from ckptool.cli import main\n"
        "from ckptool.engine.write.stage import Stage\n"
        "def die(self, *rest):\n"
        "    os._exit(9)\n"
        "Stage.commit = die\n"
        "main()\n"
    )
    ended = on_ranks(2, ("-c", ending, "reshard", *words), nodes)
    assert all(one.code for one in ended)
    assert not any((node / "r").exists() for node in nodes)
    assert all((node / ".r.partial").is_dir() for node in nodes)


def test_each_node_can_load_and_prove_what_it_has(source: Path, nodes: list[Path]) -> None:
    ended = on_ranks(2, (*RESHARD, source, "r", "--mesh", "2", "-q"), nodes)
    assert [one.code for one in ended] == [0] * 2, ended[0].stderr
    for node in nodes:
        assert not verify(node / "r", VerifyOptions(strict=True)).findings
        assert read_back("dcp", node / "r") == read_back("dcp", source)


def test_two_nodes_of_two_ranks(source: Path, nodes: list[Path]) -> None:
    folders = [nodes[0], nodes[0], nodes[1], nodes[1]]
    words = (source, "r", "--mesh", "4", "-q")
    ended = on_ranks(4, (*RESHARD, *words), folders)
    assert [one.code for one in ended] == [0] * 4, ended[0].stderr
    assert files(nodes[0] / "r") == files(nodes[1] / "r")
    assert verify(nodes[1] / "r", VerifyOptions()).ok


def test_a_byte_that_turns_on_one_node_is_found(source: Path, nodes: list[Path]) -> None:
    turning = (
        "from ckptool.cli import main\n"
        "from ckptool.commands.transfer.transfer import Transfer\n"
        "move = Transfer._move\n"
        "def move_and_turn(self, stage, *how):\n"
        "    move(self, stage, *how)\n"
        "    for file in stage.target.folder.glob('__1_0.distcp'):\n"
        "        data = bytearray(file.read_bytes())\n"
        "        data[data.index(b'data/0') + 100] ^= 1\n"
        "        file.write_bytes(data)\n"
        "Transfer._move = move_and_turn\n"
        "main()\n"
    )
    words = ("reshard", source, "r", "--mesh", "2", "--policy", "fsdp", "-q")
    ended = on_ranks(2, ("-c", turning, *words), nodes)
    assert [one.code for one in ended] == [5] * 2, ended[0].stderr
    assert all("between source (A) and output (B)" in e.stderr for e in ended), ended[0].stderr
    assert not any((node / "r").exists() for node in nodes)
