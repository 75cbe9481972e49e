"""The parts of the benchmark: what is saved, which strategies, room, processes, leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import case

from ckptool.commands.bench.files import (
    has_bytes,
    list_shared_memory,
    unused_shared_memory,
    usage,
)
from ckptool.commands.bench.machine import installed_version, require_room
from ckptool.commands.bench.processes import (
    Child,
    command_line,
    descendants,
    orphans,
    proportional_memory,
)
from ckptool.commands.bench.specs import specs_like, specs_of_size, total
from ckptool.commands.bench.strategies import (
    STRATEGIES,
    load_strategy,
    nvrx,
    select_strategies,
    torch_checkpointing,
)
from ckptool.commands.bench.strategies.base import Place
from ckptool.commands.bench.strategies.nvrx import Nvrx
from ckptool.commands.bench.worker.device import Accelerators, Device
from ckptool.errors import Unsupported, UsageError

MIB = 1 << 20


# What is saved


@pytest.mark.parametrize("nbytes", [10 * MIB, 256 * MIB, 4096 * MIB, 512 * 1024 * MIB])
def test_the_state_is_of_the_size_asked(nbytes: int) -> None:
    specs = specs_of_size(nbytes)
    assert total(specs) == pytest.approx(nbytes, rel=0.15)
    assert len({spec.path for spec in specs}) == len(specs)


def test_every_parameter_has_two_moments_and_a_step() -> None:
    specs = specs_of_size(10 * MIB)
    model = {spec.path[1]: spec.shape for spec in specs if spec.path[0] == "model"}
    for key in ("exp_avg", "exp_avg_sq"):
        assert {s.path[2]: s.shape for s in specs if s.path[-1] == key} == model
    assert sum(spec.path[-1] == "step" for spec in specs) == len(model)


def test_the_state_may_be_shaped_like_a_checkpoint() -> None:
    source = case("torch_checkpointing")
    found = sorted((spec.dtype, spec.shape) for spec in specs_like(source.path))
    assert found == sorted(source.shapes.values())


def test_a_model_alone_gets_the_state_of_adamw() -> None:
    source = case("hf_full")
    found = specs_like(source.path)
    assert len(found) == 4 * len(source.shapes)
    assert sum(spec.path[0] == "model" for spec in found) == len(source.shapes)


# Which strategies


def test_all_unless_told() -> None:
    assert select_strategies(()) == list(STRATEGIES)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["torch-save"], ["torch-save"]),
        (["dcp-sync", "torch-save", "dcp-sync"], ["dcp-sync", "torch-save"]),
        (["experimental-*"], ["experimental-sync", "experimental-async"]),
        (["dcp-async-thread/default"], ["dcp-async-thread/default"]),
        (["bench_savers:Dirty"], ["bench_savers:Dirty"]),
    ],
)
def test_names_families_globs_and_own_savers(words: list[str], names: list[str]) -> None:
    assert select_strategies(words) == names


def test_a_family_is_all_its_variants() -> None:
    found = [name.partition("/")[2] for name in select_strategies(["dcp-async-process"])]
    stagings = ("default", "pinned", "async")
    assert found == [f"{staging}{cache}" for staging in stagings for cache in ("", "+cached")]


@pytest.mark.parametrize("word", ["dcp-asink", "dcp-async-thread/never", ""])
def test_what_is_no_strategy_is_refused_with_those_there_are(word: str) -> None:
    with pytest.raises(UsageError, match="no such strategy") as refused:
        select_strategies([word])
    assert "dcp-async-process" in (refused.value.hint or "")


@pytest.mark.parametrize("name", ["no_such_module:Saver", "json:Saver"])
def test_an_own_saver_that_is_not_there(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        load_strategy(name)


def test_names_are_unique_and_every_strategy_says_what_it_is() -> None:
    assert all(name == item.name and item.says for name, item in STRATEGIES.items())


def place(shared_free: int, device: str = "cpu") -> Place:
    return Place(Device(device, 0), 2, 1000 * MIB, shared_free, Path("/tmp"))


def test_staging_in_shared_memory_wants_room_there() -> None:
    pytest.importorskip("torch")
    process = STRATEGIES["dcp-async-process/default"]
    reason = process.unavailable(place(64 * MIB))
    assert reason == "/dev/shm has 67,108,864 bytes free, staging needs 1,048,576,000"
    assert process.unavailable(place(2000 * MIB)) is None
    assert STRATEGIES["dcp-async-thread/default"].unavailable(place(0)) is None


def test_what_is_not_installed_is_not_available() -> None:
    for name, package in (("torch-checkpointing/buffered", "torch_checkpointing"),
                          ("nvrx/persistent+multi-process", "nvidia-resiliency-ext")):  # fmt: skip
        reason = STRATEGIES[name].unavailable(place(2000 * MIB))
        assert (reason is None) == (installed_version(package) is not None)
        assert reason is None or "is not installed" in reason


class OldWriter:
    """As in nvidia-resiliency-ext 0.4: it writes by processes, and is not told how."""

    def __init__(self, path: str, *words: object, **options: object) -> None: ...


class NewWriter:
    """As in later ones: by threads unless told otherwise."""

    def __init__(
        self, path: str, *words: object, is_multiproc_io: bool = False, **options: object
    ) -> None: ...


@pytest.mark.parametrize(
    ("writer", "told", "threads"),
    [
        (OldWriter, {}, "writes files by processes alone"),
        (NewWriter, {"is_multiproc_io": True}, None),
    ],
)
def test_nvrx_is_told_how_to_write_where_it_can_be(
    writer: type, told: dict[str, bool], threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrx, "_writer", lambda: writer)
    monkeypatch.setattr(nvrx, "installed_version", lambda name: "0.x")
    assert Nvrx(persistent=True, files=2)._io == told
    reason = Nvrx(persistent=True, files=2, threaded=True).unavailable(place(2000 * MIB))
    assert reason is None if threads is None else threads in (reason or "")


def test_direct_io_needs_a_file_system_that_accepts_unaligned_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_checkpointing, "installed_version", lambda name: "0.1.1")
    monkeypatch.setattr(torch_checkpointing, "_accepts_unaligned", lambda folder: False)
    direct = STRATEGIES["torch-checkpointing/direct"].unavailable(place(2000 * MIB))
    assert "O_DIRECT" in (direct or "")
    assert STRATEGIES["torch-checkpointing/buffered"].unavailable(place(2000 * MIB)) is None
    monkeypatch.undo()
    torch_checkpointing._accepts_unaligned(tmp_path)
    assert list(tmp_path.iterdir()) == []


# Room


def test_what_does_not_fit_is_refused_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"[\d,]+ bytes of disk are needed, [\d,]+ are free"):
        require_room(tmp_path, 10**18, 2, Accelerators())
    with pytest.raises(Unsupported, match="no such folder"):
        require_room(tmp_path / "none", 1, 2, Accelerators())


def test_too_little_memory_is_refused_with_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SimpleNamespace(available=1000 * MIB)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    with pytest.raises(
        Unsupported, match=r"1,887,436,800 bytes of memory are needed .*1,048,576,000"
    ):
        require_room(tmp_path, 200 * MIB, 2, Accelerators())


# Processes and what they leave


def test_descendants_and_the_memory_they_hold() -> None:
    line = "import time; held = bytearray(64 << 20); print('ready', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", line], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        found = {item.pid: item for item in descendants()}
        assert "bytearray" in command_line(found[process.pid])
        assert 64 * MIB < proportional_memory([found[process.pid]]) < 200 * MIB
    finally:
        process.kill()
        process.wait()
    assert process.pid not in {item.pid for item in descendants()}


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = {process.pid for process in descendants()}
    yield
    assert {process.pid for process in orphans(0.0)} <= before


def watched(work: Any, log: Path, **options: Any) -> Any:
    child = Child(work, log, options.pop("timeout", 60.0))
    ended = child.watch(options.pop("stop", lambda: None), lambda word, value: None, **options)
    child.kill()
    return ended


def test_a_process_returns_what_its_work_does(tmp_path: Path) -> None:
    assert watched(lambda tell: {"pid": 1}, tmp_path / "log").value == {"pid": 1}


def _raise(tell: Any) -> None:
    raise ValueError("several words\nand the last")


def _die(tell: Any) -> None:
    os.write(2, b"dying words\n")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("work", "reason"), [(_raise, "ValueError: and the last"), (_die, "dying words")]
)
def test_a_process_that_fails_says_why(work: Any, reason: str, tmp_path: Path) -> None:
    assert watched(work, tmp_path / "log").failure == reason


def test_a_process_that_hangs_is_ended(tmp_path: Path) -> None:
    ended = watched(lambda tell: time.sleep(600), tmp_path / "log", timeout=0.2)
    assert ended.failure.startswith("hung: no progress")


def test_a_process_is_ended_when_it_shall(tmp_path: Path) -> None:
    ended = watched(lambda tell: time.sleep(600), tmp_path / "log", stop=lambda: "enough")
    assert ended.failure == "enough"


_MEMORY = """
import mmap
from pathlib import Path
from ckptool.commands.bench.processes import Child

def pages():
    filled = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    filled.write(bytes(64 << 20))
    return filled

def train(tell):
    tell("training", None)
    first = pages()
    tell("checking", None)
    second = pages()

child = Child(train, Path("log"))
memory = child.watch(lambda: None, lambda word, value: None, measure=True).memory
child.kill()
print(memory.peak - memory.base)
"""
"""In a small process: what a large one shares with its child counts half until either writes it."""


def test_memory_is_watched_from_the_first_step_to_the_check(tmp_path: Path) -> None:
    run = [sys.executable, "-c", _MEMORY]
    ended = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert 60 * MIB < int(ended.stdout) < 100 * MIB


def test_shared_memory_that_nobody_holds_is_found() -> None:
    before = list_shared_memory()
    path = Path(f"/dev/shm/ckptool-test-{os.getpid()}")
    try:
        with open(path, "wb"):
            assert path not in unused_shared_memory(before)
            assert path in unused_shared_memory(before, {os.getpid()})
        assert path in unused_shared_memory(before)
    finally:
        path.unlink()


def test_files_of_a_folder(tmp_path: Path) -> None:
    assert not has_bytes(tmp_path / "none")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "empty").touch()
    assert not has_bytes(tmp_path)
    (tmp_path / "b").write_bytes(b"xyz")
    assert has_bytes(tmp_path)
    assert usage(tmp_path) == {"nbytes": 3, "files": 2, "names": ["a/empty", "b"]}
