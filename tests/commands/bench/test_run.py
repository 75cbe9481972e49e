"""The whole benchmark on two CPU ranks: true results, planted faults found, nothing left.

Ranks are forked from a process that has torch imported, whoever starts them; but for those of the
interrupted command, which are its children, to be found and ended.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from fork_server import Forked, forking_python

pytest.importorskip("torch")

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SIZE = "2MB"
REAL = ["torch-save", "dcp-sync", "dcp-async-thread/async+cached"]
OWN = "bench_savers:"
BENCH = ("-m", "ckptool", "bench")
FORKING = "import sys; sys.executable = {!r}\n"
MAIN = "from ckptool.cli import main; main()"
WITHOUT_ACCELERATORS = f"""
from ckptool.commands.bench import run
from ckptool.commands.bench.worker.device import Accelerators
run.find_accelerators = Accelerators
{MAIN}
"""
"""Asks no other Python, which imports torch to answer."""
BESIDE_ANOTHER_CHILD = f"""
import subprocess
child = subprocess.Popen(["sleep", "600"])
try:
    {MAIN}
finally:
    if child.poll() is None:
        print("the other child runs", file=sys.stderr)
    child.kill()
"""
PLANTED = ["Dirty", "HalfDirty", "Failing", "Dying", "Widowed", "Impossible"]
PLANTED = [OWN + name for name in PLANTED]


@dataclass(frozen=True)
class Ran:
    """A finished run of the command, with the folders it worked in."""

    code: int
    stdout: str
    stderr: str
    work: Path
    temporary: Path
    processes: list[str]
    shared: list[str]

    @property
    def told(self) -> dict[str, Any]:
        return json.loads(self.stdout)

    def row(self, name: str) -> dict[str, Any]:
        return next(row for row in self.told["strategies"] if row["name"] == name)


HOSTILE = ("ckptool", "json", "torch", "msgspec", "multiprocessing", "sitecustomize", "typing")
"""Modules that lie in the folder that the command runs in."""


def start(folder: Path, *words: str, command: tuple[str, ...] = BENCH) -> Forked:
    """The command as a process of its own; its TMPDIR and its folder to work in are below."""
    for name in ("work", "tmp", "model"):
        (folder / name).mkdir()
    for name in HOSTILE:
        (folder / "model" / f"{name}.py").write_text(f"open('{folder}/ran-{name}', 'w')")
    paths = (ROOT, HERE, os.environ.get("PYTHONPATH", ""))
    environment = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "TMPDIR": str(folder / "tmp")}
    size = () if "--like" in words else ("--size", SIZE)
    line = [*command, *size, "--repeat", "1", "--out", str(folder / "work"), *words]
    return Forked(line, os.environ | environment, folder / "model")


def finish(process: Forked, folder: Path, shared: set[str]) -> Ran:
    """Wait for its end, and look what it leaves."""
    try:
        stdout, stderr = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode is not None
    left = list(commands_about(folder))
    found = sorted(shared_memory() - shared)
    assert list(folder.glob("ran-*")) == []
    return Ran(process.returncode, stdout, stderr, folder / "work", folder / "tmp", left, found)


def shared_memory() -> set[str]:
    """The names in shared memory of the kinds that savers make."""
    kinds = ("ckptool-leak", "psm_", "torch_")
    return {name for name in os.listdir("/dev/shm") if name.startswith(kinds)}


def commands_about(folder: Path) -> Iterator[str]:
    """The command lines of running processes that name a folder."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if str(folder) in line or "sleep 654" in line:
                yield line


def bench(folder: Path, *words: str, command: tuple[str, ...] = BENCH) -> Ran:
    shared = shared_memory()
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
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    with tempfile.TemporaryDirectory() as path, pytest.MonkeyPatch.context() as patch:
        python = forking_python(Path(path))
        patch.setenv("PYTHON_EXEC", str(python))  # starts the ranks
        program = Path(path, "program.py")
        program.write_text(FORKING.format(str(python)) + MAIN)
        command = (*torchrun, str(program), "bench")
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
        assert row["loaded"]["of_limit"] > 0
        assert row["steps"]["before"]
        assert row["host_memory"]["peak"] >= row["host_memory"]["base"] > 0


def test_a_later_wait_is_measured_beside_the_one_at_once(ran: Ran) -> None:
    late = {row["name"]: row["overlapped"] for row in ran.told["strategies"] if row["overlapped"]}
    assert list(late) == ["dcp-async-thread/async+cached"]
    (times,) = late.values()
    assert len(times["samples"]) == 2
    assert times["median"] >= 0


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
    widowed = ran.told["failed"][OWN + "Widowed"]
    assert widowed[len("rank 0") :].startswith(": a process of the save ended before it was saved")
    assert ran.told["skipped"] == {OWN + "Impossible": "not on cpu, not with 2 ranks"}


def test_nothing_is_left_behind(ran: Ran) -> None:
    assert list(ran.work.iterdir()) == []
    # torch 2.13 leaves the empty folder of torchrun's logs
    assert [p.name for p in ran.temporary.iterdir() if p.name[:13] != "torchelastic_"] == []
    assert ran.processes == []
    assert ran.shared == []


# Killed in mid-save


def test_what_a_killed_loop_leaves_is_found_and_removed(folder: Path, tmp_path: Path) -> None:
    """And what others leave meanwhile is not."""
    wanted = f"{OWN}Leaking,dcp-sync"
    program = FORKING.format(str(forking_python(tmp_path))) + BESIDE_ANOTHER_CHILD
    words = ("--ranks", "2", "--strategies", wanted, "--abort", "--json")
    shared = shared_memory()
    process = start(folder, *words, command=("-c", program, "bench"))
    wait_until(lambda: bool(list(folder.glob("work/*/*"))))
    others = Path(f"/dev/shm/torch_{process.pid}_staged"), Path(f"/dev/shm/psm_{process.pid}")
    others[0].mkdir()
    try:
        for file in (others[0] / "model.pt", others[1]):
            file.write_bytes(b"the only copy")
        ran = finish(process, folder, shared)
        assert ran.shared == sorted(path.name for path in others)
        assert [*others[0].iterdir()] == [others[0] / "model.pt"]
    finally:
        shutil.rmtree(others[0])
        others[1].unlink(missing_ok=True)
    assert ran.code == 0, ran.stderr
    assert ran.stderr.endswith("the other child runs\n")
    assert ran.told["settings"]["ranks"] == 2
    left = ran.row(OWN + "Leaking")["abort"]
    assert left["folder"] == "PASSES, NOT WHOLE"
    assert left["finished"] is False
    assert left["processes"] == ["sleep 654"]
    leaked = [name.rpartition("-")[0] for name in left["shared"]]
    assert leaked == ["ckptool-leak-mapped", "ckptool-leak-open"]
    assert [Path(file).name for file in left["files"]] == ["leaked.tmp"]
    clean = ran.row("dcp-sync")["abort"]
    assert (clean["processes"], clean["shared"]) == ([], [])
    assert clean["folder"] in ("nothing there", "does not pass") or clean["finished"]
    test_nothing_is_left_behind(dataclasses.replace(ran, shared=[]))


def test_interrupted_it_leaves_nothing(folder: Path) -> None:
    """Ctrl-C while a worker process of the library runs; until then all listen on loopback."""
    shared = shared_memory()
    words = ("--ranks", "1", "--strategies", "dcp-async-process/pinned")
    process = start(folder, *words, command=("-c", WITHOUT_ACCELERATORS, "bench"))
    places: set[str] = set()
    looks = itertools.count()

    def saves() -> bool:
        if next(looks) % 10 == 0:  # to look costs more than to wait
            places.update(listening_below(process.pid))
        return bool(list(folder.glob("work/*/*/save-0/*")))

    wait_until(saves)
    os.kill(process.pid, signal.SIGINT)
    ran = finish(process, folder, shared)
    assert places == {"127.0.0.1"}
    assert ran.code == 130
    assert "Traceback" not in ran.stderr
    assert ran.stderr.rstrip().splitlines()[-1].startswith("interrupted")
    test_nothing_is_left_behind(ran)


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.1)


def listening_below(pid: int) -> Iterator[str]:
    """The addresses at which a process and those below it listen."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                found = one.net_connections("inet")
                yield from (at.laddr.ip for at in found if at.status == psutil.CONN_LISTEN)


# Asked wrongly


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--strategies", "dcp-asink"], 2, "no such strategy"),
        (["--compare", "none.json"], 3, "none.json"),
        (["--tolerance", "much"], 2, "not a fraction"),
        (["--plot", "bars.jpg"], 2, ".svg or .png"),
        (["--like", "none"], 3, "none"),
        (["some.json"], 2, "unexpected words: some.json"),
    ],
)
def test_what_cannot_be_is_reported_before_anything_runs(
    words: list[str], code: int, said: str, folder: Path
) -> None:
    ran = bench(folder, *words)
    assert ran.code == code
    assert said in ran.stderr
    assert ran.stdout == ""
