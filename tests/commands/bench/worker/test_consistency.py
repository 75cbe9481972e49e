"""Savers that stage honestly, and those that say so too early: what is said of each, and where."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptool.commands.bench.report import Consistency
from ckptool.commands.bench.save_folders import DiskFolder
from ckptool.commands.bench.specs import TensorSpec
from ckptool.commands.bench.strategies.base import Handle, State
from ckptool.commands.bench.strategies.torch_savers import TorchSave
from ckptool.commands.bench.worker import consistency
from ckptool.commands.bench.worker.consistency import check_consistency, find_differences, snapshot
from ckptool.commands.bench.worker.device import Device
from ckptool.commands.bench.worker.training import Training, make_state, shards

torch = pytest.importorskip("torch")
CPU = Device("cpu", 0)
SPECS = [
    TensorSpec(("model", "w"), (10, 10), "float32"),
    TensorSpec(("model", "codes"), (7,), "int8"),
    TensorSpec(("model", "empty"), (0, 3), "bfloat16"),
    TensorSpec(("optimizer", "step"), (), "float32"),
]
Wait = Callable[[], None]
LATER = "it holds later parameters: it read them after it had let them be changed"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Copying(TorchSave):
    """Copies in the background what ``copy`` does, and lets the state change when it says."""

    background = must_wait = True

    def __init__(self, copy: Callable[[State, State, Wait], None], honest: bool) -> None:
        self._copy, self._honest = copy, honest

    def save(self, state: State, path: Path) -> Any:
        return Copies(self, state, path)


class Copies(Handle):
    def __init__(self, strategy: Copying, state: State, path: Path) -> None:
        self._strategy, self._path = strategy, path
        self._begun, self._changed = threading.Event(), threading.Event()
        self._staged = {
            key: {name: value.clone().zero_() for name, value in state[key].items()}
            for key in ("model", "optimizer")
        }

        def wait() -> None:
            self._begun.set()
            self._changed.wait()

        words = (state, self._staged, wait)
        self._thread = threading.Thread(target=strategy._copy, args=words)
        self._thread.start()
        self._begun.wait()

    def staged(self) -> None:
        if self._strategy._honest:
            self._changed.set()
            self._thread.join()

    def done(self) -> bool:
        """Asked once the parameters have changed."""
        self._changed.set()
        self._thread.join()
        return True

    def commit(self) -> float:
        TorchSave.save(self._strategy, self._staged, self._path)
        return 0.0


def tensors(state: State) -> Iterator[tuple[str, Any]]:
    yield from ((name, local.reshape(-1)) for name, local in shards(state).items())


def copy_slowly(state: State, staged: State, wait: Wait) -> None:
    """The first 30 elements of each tensor, and the others later."""
    targets = dict(tensors(staged))
    for name, source in tensors(state):
        targets[name][:30].copy_(source[:30])
    wait()
    for name, source in tensors(state):
        targets[name][30:].copy_(source[30:])


def copy_never(state: State, staged: State, wait: Wait) -> None:
    """As if the buffers were written before the copies are there."""
    wait()


def copy_two_runs(state: State, staged: State, wait: Wait) -> None:
    """Elements 3 to 5 later, 8 to 10 never."""
    (_, w), (_, target) = next(tensors(state)), next(tensors(staged))
    for name, source in tensors(state):
        dict(tensors(staged))[name].copy_(source)
    target[8:10].zero_()
    wait()
    target[3:5].copy_(w[3:5])


def check(copy: Any, folder: Path, *, honest: bool = False) -> Consistency:
    state = make_state(SPECS, CPU)
    training = Training(CPU, state, None)
    strategy = Copying(copy, honest)
    if copy is copy_two_runs:
        strategy.must_wait = False
    saves = DiskFolder(folder / "saves")
    found, loads = check_consistency(strategy, training, saves, lambda word, value: None)
    assert len(loads) == 1 + strategy.must_wait
    assert min(loads) > 0
    return found


def test_an_honest_saver_is_consistent_once_staged(tmp_path: Path) -> None:
    found = check(copy_slowly, tmp_path, honest=True)
    assert (found.verdict, found.changed) == ("consistent", "once staged")
    assert (found.cause, found.differences, found.tensors) == (None, (), ())
    assert found.at_once == 1  # had training not waited


def test_one_whose_future_is_done_before_its_copies_is_dirty_where_these_were_late(
    tmp_path: Path,
) -> None:
    found = check(copy_slowly, tmp_path)
    assert (found.verdict, found.cause) == ("DIRTY", LATER)
    assert found.tensors == ("model.w",)
    (w,) = found.differences
    assert (w.tensor, w.rank, w.elements, w.of, w.changed) == ("model.w", 0, 70, 100, 70)
    assert w.ranges == ((30, 100),)


def test_one_that_writes_its_memory_before_the_copies_are_there_holds_neither_state(
    tmp_path: Path,
) -> None:
    found = check(copy_never, tmp_path)
    assert found.verdict == "DIRTY"
    assert (found.cause or "").startswith("it holds neither state: it wrote memory before")
    assert {"model.w", "optimizer.step"} <= {*found.tensors}
    assert "model.empty" not in found.tensors
    assert found.differences[-1].changed == 0


def test_both_faults_are_told_apart_and_their_elements_named(tmp_path: Path) -> None:
    found = check(copy_two_runs, tmp_path)
    assert (found.cause or "").startswith("of 4 elements, 2 are later ones, the rest neither state")
    (w,) = found.differences
    assert (w.elements, w.changed, w.ranges) == (4, 2, ((3, 5), (8, 10)))


def test_only_the_first_differences_are_told_but_every_tensor_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consistency, "_MOST_DIFFERENCES", 1)
    monkeypatch.setattr(consistency, "_MOST_RANGES", 2)
    state = make_state(SPECS, CPU)
    before = snapshot(state)
    state["model"]["w"].to_local().view(-1)[::2] += 1
    state["optimizer"]["step"] += 1
    del state["model"]["codes"]
    found = find_differences(before, state)
    assert found.names == ["model.codes", "model.w", "optimizer.step"]
    assert found.elements == 7 + 50 + 1
    (codes,) = found.first
    assert (codes.tensor, codes.elements, codes.ranges) == ("model.codes", 7, ((0, 7),))
    assert consistency._ranges(torch.tensor([True, False] * 5)) == ((0, 1), (2, 3))
