"""Calls to an accelerator, recorded by a fake one: no test machine has a real one."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptool.commands.bench.machine import measure_limits, require_room
from ckptool.commands.bench.run import _count_ranks
from ckptool.commands.bench.save_folders import DiskFolder
from ckptool.commands.bench.worker.device import Accelerators, Device, Memory, gather
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
    module = SimpleNamespace(
        mem_get_info=lambda index: (free[index], 141 * GIB),
        host_memory_stats=lambda: {"allocated_bytes.peak": 5, "allocated_bytes.current": 4},
        reset_peak_host_memory_stats=lambda: fake.told.append("pinned forgotten"),
    )
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
    assert _train_before(training, RankTimes(), UNHEARD) == Memory(7, 61 * GIB, 5)
    steps = accelerator.told.count("step")
    peak = ["peak asked", "peak forgotten", "pinned forgotten"]
    assert accelerator.told == [*peak, *steps * ["step"], *peak]


def test_it_is_durable_when_the_last_has_written_and_the_slowest_fsync_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = [
        RankTimes([1.0], [2.0], [0.5], loaded=[3.0], memory=Memory(3, None, 1)),
        RankTimes([1.5], [4.0], [0.0], loaded=[2.0], memory=Memory(2, 9, 0)),
    ]

    monkeypatch.setattr("ckptool.commands.bench.worker.loop.gather", lambda own: ranks)
    found = _slowest(ranks[0])
    assert (found["blocked"], found["written"], found["durable"]) == ([1.5], [4.0], [4.5])
    assert (found["device_peak"], found["device_used"], found["pinned"]) == (3, 9, 1)
    assert found["loaded"] == [3.0]


def test_what_workers_use_of_the_device_is_counted_while_they_run(accelerator: Accelerator) -> None:
    """It is gone at the end, when what the allocator held can still be asked."""
    times = RankTimes()
    times.look(CUDA)
    assert times.most_used == 61 * GIB
    assert Memory(9, 61 * GIB, 5).above(Memory(7, 60 * GIB, 8)) == Memory(2, GIB, 0)
    assert Memory(9, None, None).above(Memory(7, 60 * GIB, 8)) == Memory(2, None, None)


def test_a_device_that_tells_nothing_of_memory(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    assert Device("xpu", 0).peak_memory() == Memory(7, None, None)
    assert Device("cpu", 0).peak_memory() == Memory()


# What copies between device and host can do


class Runtime:
    """CUDA's, as far as memory is registered."""

    def __init__(self, code: int) -> None:
        self.code, self.registered = code, set[int]()

    def cudaHostRegister(self, place: int, nbytes: int, flags: int) -> int:
        self.registered.add(place)
        return self.code

    def cudaHostUnregister(self, place: int) -> int:
        self.registered.remove(place)
        return 0


@pytest.mark.parametrize("code", [0, 2])
def test_shared_memory_is_registered_and_no_more_afterwards(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime(code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with CUDA.registered_memory(4096) as memory:
        assert (memory is None) == (code != 0)
        if memory is not None:
            assert memory.is_shared()
            assert (memory.numel(), memory.data_ptr()) == (4096, *runtime.registered)
    assert code or not runtime.registered
    with Device("xpu", 0).registered_memory(4096) as memory:
        assert memory is None


@pytest.mark.parametrize("registered", [True, False])
def test_copies_are_measured_both_ways_with_memory_of_each_kind(
    registered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = torch.device("cpu")
    shared = nullcontext(torch.ones(1000, dtype=torch.uint8) if registered else None)
    device: Any = SimpleNamespace(is_accelerator=True, torch_device=place, synchronize=list)
    device.registered_memory = lambda nbytes: shared
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        limits = measure_limits(1000, device, DiskFolder(tmp_path))
    finally:
        torch.distributed.destroy_process_group()
    copies = {name: rate for name, rate in limits.items() if "host" in name}
    kinds = ("pageable", "pinned", "registered")
    ways = ("device_to_host", "host_to_device")
    assert copies.keys() == {f"{way}_{kind}" for kind in kinds for way in ways}
    told = {name for name, rate in copies.items() if rate is None}
    assert told == (set() if registered else {f"{way}_registered" for way in ways})
