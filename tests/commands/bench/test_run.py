"""The whole benchmark on two CPU ranks: true results, planted faults found, nothing left.

Ranks are forked from a process that has torch imported, whoever starts them; but for those of the
interrupted command, which are its children, to be found and ended.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fork_server import Forked, forking_python

from ckptool.commands.bench.files import list_shared_memory, unused_shared_memory

pytest.importorskip("torch")

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SIZE = "2MB"
REAL = ["torch-save", "dcp-sync", "dcp-async-thread/async+cached"]
OWN = "bench_savers:"
BENCH = ("-m", "ckptool", "bench")
PLANTED = [OWN + name for name in ("Dirty", "HalfDirty", "Failing", "Dying", "Impossible")]


@dataclass(frozen=True)
class Ran:
    """A finished run of the command, with the folders it worked in."""

    code: int
    stdout: str
    stderr: str
    work: Path
    temporary: Path
    processes: list[str]
    shared: list[Path]

    @property
    def told(self) -> dict[str, Any]:
        return json.loads(self.stdout)

    def row(self, name: str) -> dict[str, Any]:
        return next(row for row in self.told["strategies"] if row["name"] == name)


def start(folder: Path, *words: str, command: tuple[str, ...] = BENCH) -> Forked:
    """The command as a process of its own; its TMPDIR and its folder to work in are below."""
    for name in ("work", "tmp"):
        (folder / name).mkdir()
    paths = (ROOT, HERE, os.environ.get("PYTHONPATH", ""))
    environment = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "TMPDIR": str(folder / "tmp")}
    size = () if "--like" in words else ("--size", SIZE)
    line = [*command, *size, "--repeat", "1", "--out", str(folder / "work"), *words]
    return Forked(line, os.environ | environment, Path.cwd())


def finish(process: Forked, folder: Path, shared: set[str]) -> Ran:
    """Wait for its end, and look what it leaves."""
    try:
        stdout, stderr = process.communicate(timeout=600)
    finally:
        process.kill()
    left = list(commands_about(folder))
    found = unused_shared_memory(shared)
    return Ran(process.returncode, stdout, stderr, folder / "work", folder / "tmp", left, found)


def commands_about(folder: Path) -> Iterator[str]:
    """The command lines of running processes that name a folder."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if str(folder) in line or "sleep 654" in line:
                yield line


def bench(folder: Path, *words: str, command: tuple[str, ...] = BENCH) -> Ran:
    shared = list_shared_memory()
    return finish(start(folder, *words, command=command), folder, shared)


def names(ran: Ran) -> set[str]:
    return {row["name"] for row in ran.told["strategies"]}


# One run with real strategies and planted faults


@pytest.fixture
def folder() -> Iterator[Path]:
    """One with a short path: sockets lie below."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture(scope="module")
def ran() -> Iterator[Ran]:
    wanted = ",".join(REAL + PLANTED)
    command = ("-m", "torch.distributed.run", "--nproc-per-node", "2", *BENCH)
    with tempfile.TemporaryDirectory() as path, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHON_EXEC", str(forking_python(Path(path))))  # starts the ranks
        yield bench(Path(path), "--strategies", wanted, "--json", command=command)


def test_every_strategy_runs_to_a_true_table(ran: Ran) -> None:
    assert ran.code == 0, ran.stderr
    assert names(ran) == {*REAL, OWN + "Dirty", OWN + "HalfDirty"}
    assert ran.told["settings"]["ranks"] == 2
    assert ran.told["settings"]["device"] == "cpu"
    for row in ran.told["strategies"]:
        assert len(row["blocked"]["samples"]) == len(row["durable"]["samples"]) == 2
        assert row["blocked"]["median"] > 0
        assert row["durable"]["median"] >= row["written"]["median"] > 0
        assert row["blocked"]["of_limit"] > 0
        assert row["durable"]["of_limit"] > 0
        assert row["steps"]["before"]
        assert row["host_memory"]["peak"] >= row["host_memory"]["base"] > 0


def test_the_bytes_of_all_ranks_are_on_disk(ran: Ran) -> None:
    nbytes = ran.told["settings"]["nbytes"]
    for name in REAL:
        disk = ran.row(name)["disk"]
        assert nbytes <= disk["bytes"] < 1.5 * nbytes, name
    assert ran.row("torch-save")["disk"]["files"] == 2
    assert ran.row("dcp-sync")["disk"]["files"] == 3


def test_limits_are_measured_or_named_as_not_there(ran: Ran) -> None:
    limits = ran.told["limits"]
    assert limits["memory_copy"] > 0
    assert limits["write"] > 0
    assert limits["device_to_host_pinned"] is None


def test_real_strategies_are_consistent(ran: Ran) -> None:
    assert {ran.row(name)["consistency"]["verdict"] for name in REAL} == {"consistent"}
    assert ran.row("dcp-async-thread/async+cached")["consistency"]["changed"] == "once staged"
    assert ran.row("dcp-sync")["consistency"]["changed"] == "after the call"


def test_a_saver_that_writes_live_parameters_is_caught(ran: Ran) -> None:
    found = ran.row(OWN + "Dirty")["consistency"]
    assert found["verdict"] == "DIRTY"
    assert len(found["tensors"]) == found["of"] == ran.told["settings"]["tensors"]


def test_one_wrong_element_of_one_rank_is_caught_and_named(ran: Ran) -> None:
    found = ran.row(OWN + "HalfDirty")["consistency"]
    assert found["verdict"] == "DIRTY"
    assert found["tensors"] == ["model.norm.weight"]


def test_what_is_dirty_is_never_the_best(ran: Ran) -> None:
    assert ran.told["best"] in REAL


def test_what_fails_or_cannot_run_is_listed_with_its_reason(ran: Ran) -> None:
    assert ran.told["failed"][OWN + "Failing"] == "rank 1: ValueError: no such luck"
    assert ran.told["failed"][OWN + "Dying"].startswith("rank ")
    assert ran.told["skipped"] == {OWN + "Impossible": "not on cpu, not with 2 ranks"}


def test_nothing_is_left_behind(ran: Ran) -> None:
    assert list(ran.work.iterdir()) == []
    # torch 2.13 leaves the empty folder of torchrun's logs
    assert [p.name for p in ran.temporary.iterdir() if p.name[:13] != "torchelastic_"] == []
    assert ran.processes == []
    assert ran.shared == []


# Killed in mid-save


MAIN = "from ckptool.cli import main; main()"


def test_what_a_killed_loop_leaves_is_found_and_removed(folder: Path, tmp_path: Path) -> None:
    wanted = f"{OWN}Leaking,dcp-sync"
    program = f"import sys; sys.executable = {str(forking_python(tmp_path))!r}\n" + MAIN
    words = ("--ranks", "2", "--strategies", wanted, "--abort", "--json")
    ran = bench(folder, *words, command=("-c", program, "bench"))
    assert ran.code == 0, ran.stderr
    assert ran.told["settings"]["ranks"] == 2
    left = ran.row(OWN + "Leaking")["abort"]
    assert left["folder"] == "PASSES, NOT WHOLE"
    assert left["finished"] is False
    assert left["processes"] == ["sleep 654"]
    assert [name.rpartition("-")[0] for name in left["shared"]] == ["ckptool-leak"]
    assert [Path(file).name for file in left["files"]] == ["leaked.tmp"]
    clean = ran.row("dcp-sync")["abort"]
    assert (clean["processes"], clean["shared"]) == ([], [])
    assert clean["folder"] in ("nothing there", "does not pass") or clean["finished"]
    test_nothing_is_left_behind(ran)


def test_interrupted_it_leaves_nothing(folder: Path) -> None:
    """Ctrl-C while a worker process of the library runs."""
    shared = list_shared_memory()
    process = start(folder, "--ranks", "1", "--strategies", "dcp-async-process/pinned")
    deadline = time.monotonic() + 300
    while not list(folder.glob("work/*/*/save-0/*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    ran = finish(process, folder, shared)
    assert ran.code == 130
    assert "Traceback" not in ran.stderr
    assert ran.stderr.rstrip().splitlines()[-1].startswith("interrupted")
    test_nothing_is_left_behind(ran)


# Asked wrongly


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--strategies", "dcp-asink"], 2, "no such strategy"),
        (["--compare", "none.json"], 3, "none.json"),
        (["--tolerance", "much"], 2, "not a fraction"),
        (["--plot", "bars.jpg"], 2, ".svg or .png"),
        (["--like", "none"], 3, "none"),
        (["--transfer", "--abort"], 2, "--transfer can only be combined with"),
        (["--stores", "--ranks", "2"], 2, "--stores can only be combined with"),
        (["--stores", "--transfer"], 2, "can only be combined with"),
        (["some.json"], 2, "unexpected argument"),
    ],
)
def test_what_cannot_be_is_reported_before_anything_runs(
    words: list[str], code: int, said: str, folder: Path
) -> None:
    ran = bench(folder, *words)
    assert ran.code == code
    assert said in ran.stderr
    assert ran.stdout == ""
