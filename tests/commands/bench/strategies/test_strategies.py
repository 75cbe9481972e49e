"""Which strategies there are, and what each needs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckptool.commands.bench.machine import installed_version
from ckptool.commands.bench.strategies import (
    STRATEGIES,
    experimental,
    load_strategy,
    nvrx,
    select_strategies,
    torch_checkpointing,
)
from ckptool.commands.bench.strategies.base import Environment
from ckptool.commands.bench.strategies.experimental import Experimental
from ckptool.commands.bench.strategies.nvrx import Nvrx
from ckptool.commands.bench.worker.device import Device
from ckptool.errors import UsageError

MIB = 1 << 20


def test_all_unless_told() -> None:
    assert select_strategies(()) == list(STRATEGIES)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["torch-save"], ["torch-save"]),
        (["dcp-sync", "torch-save", "dcp-sync"], ["dcp-sync", "torch-save"]),
        (["experimental-*"], ["experimental-sync", "experimental-async"]),
        (["dcp-async-thread/default"], ["dcp-async-thread/default"]),
        (["bench.bench_savers:Dirty"], ["bench.bench_savers:Dirty"]),
    ],
)
def test_names_families_globs_and_own_savers(words: list[str], names: list[str]) -> None:
    assert select_strategies(words) == names


def test_a_family_is_all_its_variants() -> None:
    found = [name.partition("/")[2] for name in select_strategies(["dcp-async-process"])]
    stagings = ("default", "pinned", "async")
    assert found == [f"{staging}{cache}" for staging in stagings for cache in ("", "+cached")]


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("dcp-asink", "did you mean dcp-sync?"),
        ("dcp-async-thread/never", "did you mean dcp-async-thread?"),
        ("", "dcp-async-process"),
    ],
)
def test_what_is_not_a_strategy_is_refused_with_the_nearest_or_all(word: str, hint: str) -> None:
    with pytest.raises(UsageError, match="no such strategy") as refused:
        select_strategies([word])
    assert hint in (refused.value.hint or "")


@pytest.mark.parametrize("name", ["no_such_module:Saver", "json:Saver"])
def test_an_own_saver_that_is_not_there(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        load_strategy(name)


def test_an_own_saver_in_the_current_folder_is_found_where_the_environment_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "saver_of_mine.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(UsageError, match="there is no module 'saver_of_mine'"):
        select_strategies(["saver_of_mine:Saver"])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert select_strategies(["saver_of_mine:Saver"]) == ["saver_of_mine:Saver"]


def test_names_are_unique_and_every_strategy_says_what_it_is() -> None:
    assert all(name == item.name and item.says for name, item in STRATEGIES.items())


def environment(shared_free: int, device: str = "cpu") -> Environment:
    return Environment(Device(device, 0), 2, 1000 * MIB, shared_free, Path("/tmp"))


def test_staging_in_shared_memory_wants_room_there() -> None:
    pytest.importorskip("torch")
    process = STRATEGIES["dcp-async-process/default"]
    reason = process.unavailable(environment(64 * MIB))
    assert reason == "/dev/shm has 67,108,864 bytes free, staging needs 1,048,576,000"
    assert process.unavailable(environment(2000 * MIB)) is None
    assert STRATEGIES["dcp-async-thread/default"].unavailable(environment(0)) is None


def test_what_is_not_installed_is_not_available() -> None:
    for name, package in (("torch-checkpointing/buffered", "torch_checkpointing"),
                          ("nvrx/persistent+multi-process", "nvidia-resiliency-ext")):  # fmt: skip
        reason = STRATEGIES[name].unavailable(environment(2000 * MIB))
        assert (reason is None) == (installed_version(package) is not None)
        assert reason is None or "is not installed" in reason


GONE = "torch.distributed.checkpoint._experimental"


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_torch_is_to_remove_is_said_and_where_it_is_gone_what_follows_is_used(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    strategy, here = STRATEGIES[f"experimental-{kind}"], environment(2000 * MIB)
    assert strategy.unavailable(here) is None
    assert "torch is to remove it (pytorch/pytorch#195683)" in (strategy.remark(here) or "")
    monkeypatch.setitem(sys.modules, GONE, None)
    monkeypatch.setattr(experimental, "installed_version", lambda name: None)
    reason = "this torch has it no more, and torch_checkpointing is not installed"
    assert strategy.unavailable(here) == reason
    monkeypatch.setattr(experimental, "installed_version", lambda name: "0.1.1")
    assert strategy.unavailable(here) is None
    assert "torch_checkpointing's builders made it" in (strategy.remark(here) or "")


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_builders_that_follow_save_and_load_the_same(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch_checkpointing.schema")
    monkeypatch.setitem(sys.modules, GONE, None)
    strategy = Experimental(background=kind == "async")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        strategy.set_up(Device("cpu", 0))
        saved = strategy.save({"model": {"w": torch.arange(6.0)}, "step": 3}, tmp_path / "save")
        saved.staged()
        saved.commit()
        empty = {"model": {"w": torch.zeros(6)}, "step": 0}
        loaded = strategy.load(empty, tmp_path / "save")
        assert loaded["model"]["w"].tolist() == [0, 1, 2, 3, 4, 5]
        assert loaded["step"] == 3
        strategy.finish()
    finally:
        torch.distributed.destroy_process_group()


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
        (OldWriter, {}, "writes files only from processes"),
        (NewWriter, {"is_multiproc_io": True}, None),
    ],
)
def test_nvrx_is_told_how_to_write_where_it_can_be(
    writer: type, told: dict[str, bool], threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrx, "_writer", lambda: writer)
    monkeypatch.setattr(nvrx, "installed_version", lambda name: "0.x")
    assert Nvrx(persistent=True, files=2)._io == told
    reason = Nvrx(persistent=True, files=2, threaded=True).unavailable(environment(2000 * MIB))
    assert reason is None if threads is None else threads in (reason or "")


def test_direct_io_needs_a_file_system_that_accepts_unaligned_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_checkpointing, "installed_version", lambda name: "0.1.1")
    monkeypatch.setattr(torch_checkpointing, "_accepts_unaligned", lambda folder: False)
    direct = STRATEGIES["torch-checkpointing/direct"].unavailable(environment(2000 * MIB))
    assert "O_DIRECT" in (direct or "")
    assert STRATEGIES["torch-checkpointing/buffered"].unavailable(environment(2000 * MIB)) is None
    monkeypatch.undo()
    torch_checkpointing._accepts_unaligned(tmp_path)
    assert list(tmp_path.iterdir()) == []
