"""Calls to an accelerator, recorded by a fake one: no test machine has a real one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptool.commands.bench.machine import require_room
from ckptool.commands.bench.run import _count_ranks
from ckptool.commands.bench.save_folders import DiskFolder
from ckptool.commands.bench.worker.device import Accelerators, Device, gather
from ckptool.commands.bench.worker.loop import RankTimes, _save, _slowest, _train_before
from ckptool.commands.bench.worker.training import Training
from ckptool.errors import Unsupported

torch = pytest.importorskip("torch")
GIB = 1 << 30
CUDA = Device("cuda", 1)


class Accelerator:
    """Two CUDA devices that note what they are told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.available = True
        self.peaks = [7, 7]

    def is_available(self) -> bool:
        return self.available

    def current_accelerator(self) -> Any:
        return torch.device("cuda")

    def device_count(self) -> int:
        return 2

    def set_device_index(self, index: int) -> None:
        self.told.append(("device", index))

    def synchronize(self) -> None:
        self.told.append("synchronized")

    def current_stream(self) -> Any:
        return SimpleNamespace(synchronize=lambda: self.told.append("stream synchronized"))

    def reset_peak_memory_stats(self) -> None:
        self.told.append("peak forgotten")

    def max_memory_allocated(self) -> int:
        self.told.append("peak asked")
        return self.peaks.pop(0)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    fake = Accelerator()
    monkeypatch.setattr(torch, "accelerator", fake)
    free = {0: 90 * GIB, 1: 80 * GIB}
    module = SimpleNamespace(mem_get_info=lambda index: (free[index], 141 * GIB))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return fake


SPY = """
import torch
def never(*words, **more):
    raise SystemExit("the device was asked")
for name in ("is_available", "device_count", "current_device", "init", "_lazy_init"):
    setattr(torch.cuda, name, never)
for name in ("is_available", "device_count", "current_stream", "synchronize"):
    setattr(torch.accelerator, name, never)
from ckptool.commands.bench.worker.rank import import_torch
from ckptool.commands.bench.strategies import STRATEGIES
import_torch()
"""


@pytest.mark.parametrize(
    "value", [(0.5, 3), {"model.w", "ü"}, RankTimes([1.0], during=[[], [2.0]])]
)
def test_what_ranks_gather_goes_as_data(value: Any, tmp_path: Path) -> None:
    """Pickles would name code."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert gather(value) == [value]
    finally:
        torch.distributed.destroy_process_group()


def test_what_a_rank_loads_before_it_forks_starts_no_device() -> None:
    """CUDA, once started, does not survive a fork."""
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", SPY], stderr=subprocess.PIPE)
    assert (ran.returncode, ran.stderr) == (0, b"")


# Which devices


def test_the_accelerators_and_the_memory_of_the_fullest(accelerator: Accelerator) -> None:
    assert Accelerators.here() == Accelerators("cuda", 2, 80 * GIB)


def test_a_build_for_cuda_without_a_device_is_a_machine_without(accelerator: Accelerator) -> None:
    accelerator.available = False
    assert Accelerators.here() == Accelerators("cpu", 0, None)


def test_a_rank_takes_the_device_of_its_number_on_the_machine(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    device = Device.of_rank("cuda")
    assert accelerator.told == [("device", 1)]
    assert device.torch_device == torch.device("cuda:1")
    assert Device.of_rank("cpu").torch_device == torch.device("cpu")
    assert accelerator.told == [("device", 1)]


def test_ranks_speak_gloo_beside_the_devices_own() -> None:
    assert CUDA.backend == "cpu:gloo,cuda:nccl"
    assert Device("xpu", 0).backend == "cpu:gloo,xpu:xccl"
    assert Device("cpu", 0).backend == "gloo"


TWO = Accelerators("cuda", 2, 80 * GIB)


@pytest.mark.parametrize(
    ("asked", "here", "ranks"),
    [(None, TWO, 2), (1, TWO, 1), (None, Accelerators(), 2), (5, Accelerators(), 5)],
)
def test_one_rank_a_device_or_two_on_the_cpu(
    asked: int | None, here: Accelerators, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert _count_ranks(asked, here) == ranks


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(Unsupported, match="3 ranks: there are 2 devices of type cuda"):
        _count_ranks(3, TWO)


@pytest.mark.parametrize(("local", "fits"), [("2", True), ("4", False)])
def test_torchruns_ranks_each_need_a_device_of_their_machine(
    local: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in {**launch, "LOCAL_WORLD_SIZE": local}.items():
        monkeypatch.setenv(name, value)
    if fits:
        assert _count_ranks(None, TWO) == 8
    else:
        with pytest.raises(Unsupported, match="4 ranks: there are 2 devices"):
            _count_ranks(None, TWO)


# Room on the device


def test_a_share_that_no_device_holds_is_refused_with_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SimpleNamespace(available=10**15)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    usage = SimpleNamespace(free=10**15)
    monkeypatch.setattr("ckptool.commands.bench.machine.shutil.disk_usage", lambda path: usage)
    require_room(DiskFolder(tmp_path), 50 * GIB, 2, TWO)
    with pytest.raises(Unsupported, match=r"97,710,505,984 bytes .* cuda device .*85,899,345,920"):
        require_room(DiskFolder(tmp_path), 60 * GIB, 2, TWO)
    require_room(DiskFolder(tmp_path), 60 * GIB, 2, Accelerators("mps", 2, None))


# The clock and the memory


class Save:
    """A save that was complete when the call returned, and notes what is asked of it."""

    background = False

    def __init__(self, told: list[Any]) -> None:
        self._told = told

    def save(self, state: Any, path: Path) -> Save:
        self._told.append("save")
        path.mkdir()
        return self

    def staged(self) -> None:
        self._told.append("staged")

    def commit(self) -> float:
        return 0.0


UNHEARD: Any = lambda word, value: None  # noqa: E731


def test_the_device_is_waited_for_before_the_clock_starts_and_before_it_stops(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = accelerator.told
    monkeypatch.setattr("torch.distributed.barrier", lambda: told.append("barrier"))

    def clock() -> float:
        told.append("clock")
        return 0.0

    monkeypatch.setattr("ckptool.commands.bench.worker.loop.time.perf_counter", clock)
    training: Any = SimpleNamespace(device=CUDA, state={})
    saver: Any = Save(told)
    _save(saver, training, DiskFolder(tmp_path / "save"), RankTimes(), UNHEARD, late=False)
    begin, end = told.index("clock"), told.index("clock", told.index("save"))
    assert told[:begin] == ["synchronized", "barrier"]
    assert told[begin + 1 : end] == ["save", "staged", "stream synchronized"]


def test_a_late_wait_for_the_staging_comes_after_the_backward_pass(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Lost is what the call and that step take beyond the median of steps alone."""
    told = accelerator.told
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    clock = iter([100.0, 103.5, 200.0, 200.0, 300.0, 300.0])
    monkeypatch.setattr("ckptool.commands.bench.worker.loop.time.perf_counter", lambda: next(clock))

    def step(done: bool, before_update: Any) -> None:
        told.append("backward")
        before_update()
        told.append("update")

    training: Any = SimpleNamespace(device=CUDA, state={}, step=step)
    saver: Any = Save(told)
    times = RankTimes(before=[1.0, 2.0, 9.0])
    _save(saver, training, DiskFolder(tmp_path / "save"), times, UNHEARD, late=True)
    assert told[-4:] == ["save", "backward", "staged", "update"]
    assert times.blocked == [1.5]


def test_parameters_change_beside_the_stream_that_trains_which_is_not_waited_for(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy queued behind that stream's work reads them as they are then."""
    told = accelerator.told

    class Stream:
        def __init__(self, device: Any) -> None: ...

        def __enter__(self) -> None:
            told.append("another stream")

        def __exit__(self, *error: object) -> None:
            told.append("the stream that trains")

        def synchronize(self) -> None:
            told.append("the other stream synchronized")

    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(
        "ckptool.commands.bench.worker.training.invert", lambda local: told.append("inverted")
    )
    Training(CUDA, {"w": torch.ones(2)}, None).change_everything()
    assert told == [
        "another stream",
        "inverted",
        "the stream that trains",
        "the other stream synchronized",
    ]


def test_what_training_needs_of_the_device_is_not_what_saving_needs(
    accelerator: Accelerator,
) -> None:
    def step() -> tuple[None, bool]:
        accelerator.told.append("step")
        return None, True

    training: Any = SimpleNamespace(device=CUDA, step=step)
    assert _train_before(training, RankTimes(), lambda word, value: None) == 7
    steps = accelerator.told.count("step")
    peak = ["peak asked", "peak forgotten"]
    assert accelerator.told == [*peak, *steps * ["step"], *peak]


def test_it_is_durable_when_the_last_has_written_and_the_slowest_fsync_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = [
        RankTimes(blocked=[1.0], written=[2.0], synced=[0.5], device_peak=3),
        RankTimes(blocked=[1.5], written=[4.0], synced=[0.0], device_peak=2),
    ]

    monkeypatch.setattr("ckptool.commands.bench.worker.loop.gather", lambda own: ranks)
    found = _slowest(ranks[0])
    assert (found["blocked"], found["written"], found["durable"]) == ([1.5], [4.0], [4.5])
    assert found["device_peak"] == 3
