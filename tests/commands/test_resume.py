"""Stopped and resumed in this process: the target is complete or absent."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import read_back
from layered import save

from ckptool.commands.convert import ConvertReport, prepare
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ConvertOptions, ReshardOptions, TransferOptions
from ckptool.commands.reshard.reshard import Reshard, prepare_reshard
from ckptool.commands.transfer.transfer import Transfer
from ckptool.core.sharding.placement import parse_mesh
from ckptool.engine.progress import Progress
from ckptool.engine.write.disk_target import DiskTarget
from ckptool.engine.write.stage import Stage, StageOptions
from ckptool.errors import CkptoolError, Unsupported, UsageError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(tmp_path / "ckpt", 6, 96)


class Stop(Exception):
    """The end of a run that is cut short."""


def stop_after(nbytes: int) -> Progress:
    def stop(done: int, total: int) -> None:
        if done > nbytes:
            raise Stop

    return Progress(stop)


def ready(source: Path, target: Path, mesh: str = "4", **more: Any) -> Reshard:
    transfer = TransferOptions(run=RunOptions(workers=1, fsync=False), **more)
    return prepare_reshard(
        source, target, ReshardOptions(parse_mesh(mesh), policy="fsdp", transfer=transfer)
    )


def ready_to_convert(source: Path, target: Path, to: str, **more: Any) -> Transfer[ConvertReport]:
    transfer = TransferOptions(run=RunOptions(workers=1, fsync=False), **more)
    return prepare(source, target, ConvertOptions(to=to, transfer=transfer))


@pytest.fixture
def stopped(source: Path, out: Path) -> Path:
    """The staged files of a reshard that ended before the last of its data files did."""
    one = ready(source, out / "r")
    layout = one.plan.layout
    with pytest.raises(Stop):
        one.run(stop_after(layout.nbytes - layout.files[-1].nbytes - 1))
    assert not (out / "r").exists()
    return out / ".r.partial"


def test_finished_files_are_not_written_again(source: Path, out: Path, stopped: Path) -> None:
    journal = out / ".r.partial.journal.0"
    done = [name for name in os.listdir(stopped) if f'"done": "{name}"' in journal.read_text()]
    assert 0 < len(done) < len(os.listdir(stopped))
    before = {name: (stopped / name).stat().st_mtime_ns for name in done}
    ready(source, out / "r", resume=True).run()
    assert {name: (out / "r" / name).stat().st_mtime_ns for name in done} == before
    assert read_back("dcp", out / "r") == read_back("dcp", source)
    assert os.listdir(out) == ["r"]


def test_a_run_that_was_to_overwrite_is_continued_without_saying_so_again(
    source: Path, out: Path
) -> None:
    ready(source, out / "r", mesh="2").run()
    old = read_back("dcp", out / "r")
    files = sorted(os.listdir(out / "r"))
    one = ready(source, out / "r", overwrite=True)
    with pytest.raises(Stop):
        one.run(stop_after(one.plan.layout.nbytes // 2))
    assert sorted(os.listdir(out / "r")) == files
    assert ready(source, out / "r", resume=True).obstacle() is None
    ready(source, out / "r", resume=True).run()
    assert read_back("dcp", out / "r") == old
    assert len(os.listdir(out / "r")) > len(files)
    assert os.listdir(out) == ["r"]


TARGETS = pytest.mark.parametrize(("to", "suffix"), [("dcp", ""), ("safetensors", ".safetensors")])
CHANGES = pytest.mark.parametrize("change", ["moved there", "copied", "written to", "came"])


@TARGETS
@CHANGES
def test_only_what_was_there_when_it_was_asked_to_overwrite_is_replaced(
    change: str, to: str, suffix: str, tmp_path: Path, out: Path
) -> None:
    source, target, other = to_be_replaced(change, to, suffix, tmp_path, out)
    one = ready_to_convert(source, target, to, overwrite=True)
    with pytest.raises(Stop):
        one.run(stop_after(one.plan.layout.nbytes // 2))
    change_at(target, other, change)
    before = stamps_of(out)
    again = ready_to_convert(source, target, to, resume=True)
    assert "not the checkpoint that --overwrite was to replace" in (again.obstacle() or "")
    with pytest.raises(Unsupported, match="it came, or changed, since the run began") as caught:
        again.run()
    assert "--overwrite starts over" in (caught.value.hint or "")
    assert stamps_of(out) == before
    if target.is_dir():
        shutil.rmtree(target)  # nothing is lost by what replaces nothing
    else:
        target.unlink()
    ready_to_convert(source, target, to, resume=True).run()
    assert not [name for name in os.listdir(out) if name.startswith(".")]


@TARGETS
@CHANGES
def test_what_changes_at_the_target_while_it_is_overwritten_stays(
    change: str, to: str, suffix: str, tmp_path: Path, out: Path
) -> None:
    source, target, other = to_be_replaced(change, to, suffix, tmp_path, out)
    stamps: list[dict[str, tuple[int, int]]] = []

    def change_once(done: int, total: int) -> None:
        if not stamps:
            change_at(target, other, change)
            stamps.append(stamps_of(target))

    one = ready_to_convert(source, target, to, overwrite=True)
    with pytest.raises(Unsupported, match="it came, or changed, since the run began"):
        one.run(Progress(change_once))
    assert stamps == [stamps_of(target)]
    assert not [name for name in os.listdir(out) if name.startswith(".")]
    ready_to_convert(source, target, to, overwrite=True).run()
    assert read_back(to, target) == read_back("torch-save", source)


def to_be_replaced(
    change: str, to: str, suffix: str, tmp_path: Path, out: Path
) -> tuple[Path, Path, Path]:
    """Save a source, and convert it to a target and to another place beside that."""
    source, target, other = tmp_path / "s.pt", out / f"r{suffix}", out / f"other{suffix}"
    torch.save({str(number): torch.ones(96, 96) for number in range(4)}, source)
    for path in (other,) if change == "came" else (target, other):
        ready_to_convert(source, path, to).run()
    return source, target, other


def change_at(target: Path, other: Path, change: str) -> None:
    """Change what is at the target, or put something else there."""
    away = target.parent / "away"
    if change == "written to":
        os.utime(target / ".metadata" if target.is_dir() else target)
    elif change == "copied":  # with its times, as archives do
        target.rename(away)
        (shutil.copytree if away.is_dir() else shutil.copy2)(away, target)
    else:
        if target.exists():
            target.rename(away)
        other.rename(target)


def stamps_of(folder: Path) -> dict[str, tuple[int, int]]:
    """The inodes and times of a file, or of all files below a folder."""
    paths = [path for path in (folder, *folder.rglob("*")) if path.is_file()]
    found = {str(path): path.lstat() for path in paths}
    return {path: (status.st_ino, status.st_mtime_ns) for path, status in found.items()}


def test_what_came_to_the_target_of_another_run_meanwhile_stays(
    source: Path, out: Path, stopped: Path
) -> None:
    ready(source, out / "s").run()
    (out / "s").rename(out / "r")
    with pytest.raises(Unsupported, match="r already exists"):
        ready(source, out / "r", resume=True).run()


def test_overwriting_and_resuming_are_one_at_a_time(source: Path, out: Path) -> None:
    with pytest.raises(UsageError, match="--overwrite and --resume: one at a time"):
        ready(source, out / "r", overwrite=True, resume=True).run()


@pytest.mark.parametrize("change", ["cut", "flipped"])
def test_a_finished_file_that_was_changed_is(
    change: str, source: Path, out: Path, stopped: Path
) -> None:
    file = stopped / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[:100] if change == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    ready(source, out / "r", resume=True).run()
    assert read_back("dcp", out / "r") == read_back("dcp", source)


@pytest.mark.parametrize("left", [0, 1, 30, 200, 400])
def test_a_journal_that_ends_anywhere(left: int, source: Path, out: Path, stopped: Path) -> None:
    """Cut short it either serves or is refused; starting afresh always works."""
    journal = out / ".r.partial.journal.0"
    journal.write_bytes(journal.read_bytes()[:left])
    try:
        ready(source, out / "r", resume=True).run()
    except Unsupported:
        assert not (out / "r").exists()
        ready(source, out / "r").run()
    assert read_back("dcp", out / "r") == read_back("dcp", source)


@pytest.mark.parametrize("stopped_at", [0.0, 0.3, 0.6, 0.9, 1.5, 2.5])
def test_stopped_anywhere_even_while_verifying(stopped_at: float, source: Path, out: Path) -> None:
    one = ready(source, out / "r")
    with pytest.raises(Stop):
        one.run(stop_after(int(stopped_at * one.plan.read_bytes)))
    assert not (out / "r").exists()
    ready(source, out / "r", resume=True).run()
    assert read_back("dcp", out / "r") == read_back("dcp", source)


def test_a_rank_that_had_not_begun_stops_no_resume(source: Path, out: Path, stopped: Path) -> None:
    """A journal without a first line names no file; so does that of a rank that is new."""
    (out / ".r.partial.journal.1").touch()
    ready(source, out / "r", resume=True).run()
    assert read_back("dcp", out / "r") == read_back("dcp", source)
    assert os.listdir(out) == ["r"]


def test_stopped_before_the_first_byte(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: DiskTarget, rank: int) -> None:
        raise Stop

    monkeypatch.setattr(DiskTarget, "join", stop)
    with pytest.raises(Stop):
        ready(source, out / "r").run()
    monkeypatch.undo()
    ready(source, out / "r", resume=True).run()
    assert read_back("dcp", out / "r") == read_back("dcp", source)


def test_a_run_without_resume_starts_afresh(source: Path, out: Path, stopped: Path) -> None:
    (stopped / "stale").write_text("put there by hand")
    before = sorted(os.listdir(stopped))
    with pytest.raises(Unsupported, match="holds stale, which ckptool did not write"):
        ready(source, out / "r", "2").run()
    assert sorted(os.listdir(stopped)) == before
    (stopped / "stale").unlink()
    ready(source, out / "r", "2").run()
    assert sorted(os.listdir(out / "r")) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert os.listdir(out) == ["r"]


@pytest.mark.parametrize("mesh", ["2", "3x2", "1"])
def test_another_mesh_is_refused(mesh: str, source: Path, out: Path, stopped: Path) -> None:
    before = sorted(os.listdir(stopped))
    with pytest.raises(Unsupported, match="cannot resume: the plan"):
        ready(source, out / "r", mesh, resume=True).run()
    assert sorted(os.listdir(stopped)) == before
    ready(source, out / "r", resume=True).run()


def touch(source: Path) -> None:
    later = time.time_ns() + 10**9
    os.utime(source / "__0_0.distcp", ns=(later, later))


def rewrite(source: Path) -> None:
    shutil.rmtree(source)
    save(source, 6, 96)


@pytest.mark.parametrize("change", [touch, rewrite], ids=lambda change: change.__name__)
def test_a_changed_source_is_refused(
    change: Callable[[Path], None], source: Path, out: Path, stopped: Path
) -> None:
    change(source)
    with pytest.raises(Unsupported, match="cannot resume: the source"):
        ready(source, out / "r", resume=True).run()
    assert not (out / "r").exists()
    assert stopped.is_dir()


def test_a_source_of_the_same_size_and_time_is_compared_or_refused(
    source: Path, out: Path, stopped: Path
) -> None:
    file = source / "__0_0.distcp"
    before = file.stat()
    with open(file, "r+b") as stream:
        stream.write(file.read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(Unsupported, match="cannot resume: the source was written to, or touched"):
        ready(source, out / "r", resume=True, verify=False).run()
    assert stopped.is_dir()
    ready(source, out / "r", resume=True).run()


@pytest.mark.parametrize("make", [ready, lambda s, t, **m: ready_to_convert(s, t, "dcp", **m)])
def test_nothing_to_resume(make: Callable[..., Any], source: Path, out: Path) -> None:
    with pytest.raises(Unsupported, match="no partial output to resume"):
        make(source, out / "r", resume=True).run()
    assert os.listdir(out) == []


def test_a_target_that_is_there_is_not_resumed(source: Path, out: Path) -> None:
    ready(source, out / "r").run()
    with pytest.raises(Unsupported, match="already exists"):
        ready(source, out / "r", resume=True).run()


@pytest.mark.parametrize("to", ["torch-save", "safetensors", "dcp", "dcp-safetensors"])
def test_a_convert_resumes(to: str, source: Path, out: Path) -> None:
    name = "m.pt" if to == "torch-save" else "m"
    one = ready_to_convert(source, out / name, to)
    with pytest.raises(Stop):
        one.run(stop_after(one.nbytes // 2))
    assert not (out / name).exists()
    ready_to_convert(source, out / name, to, resume=True).run()
    assert read_back(to, out / name) == read_back("dcp", source)


class Held:
    """A run in another thread that stops at its first bytes until it is released."""

    def __init__(self, prepared: Any) -> None:
        self._prepared = prepared
        self._begun, self._free = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._begun.wait(10)

    def _run(self) -> None:
        try:
            self._prepared.run(Progress(self._wait))
        except BaseException as error:
            self._error = error

    def _wait(self, done: int, total: int) -> None:
        self._begun.set()
        self._free.wait(10)

    def release(self) -> None:
        self._free.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("more", [{}, {"resume": True}, {"overwrite": True}], ids=str)
@pytest.mark.parametrize("mesh", ["4", "2"])
def test_the_second_is_refused_and_the_first_unharmed(
    mesh: str, more: dict[str, Any], source: Path, out: Path
) -> None:
    first = Held(ready(source, out / "r"))
    with pytest.raises(Unsupported, match="another ckptool is writing this target"):
        ready(source, out / "r", mesh, **more).run()
    first.release()
    assert read_back("dcp", out / "r") == read_back("dcp", source)
    assert os.listdir(out) == ["r"]


def test_they_do_not_meet_between_the_first_steps_either(source: Path, out: Path) -> None:
    """From the moment one has begun, another is refused and takes nothing away."""
    layout = ready(source, out / "r").plan.layout
    options = StageOptions("plan", "source")
    targets = [DiskTarget(out / "r", layout, options) for _ in range(2)]
    first, second = (Stage(target, layout, options) for target in targets)
    first.begin()
    try:
        second.begin()
        second.target.join(0)
        second.discard()
    except CkptoolError:
        second.discard()
    targets[0].join(0)
    assert targets[0].folder.is_dir()
