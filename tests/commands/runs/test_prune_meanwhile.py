"""prune: what is in place whenever it ends, what it reports, and steps of a store."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from places import file_system
from prune_runs import after_each_removal, damage, fates, hashes, names_in, pruned
from pruned_runs import SOURCE, run_of
from trials import trials
from typer.testing import CliRunner

import ckptool
from ckptool.cli.app import app
from ckptool.commands.options.prune import PruneOptions
from ckptool.commands.runs.prune.prune import prune
from ckptool.engine.write import removal
from ckptool.errors import Changed, TransferError
from ckptool.storage.commit_note import UNFINISHED
from ckptool.storage.url import RemotePath, location

KILLS = trials(6)


def test_a_step_to_be_kept_that_is_gone_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, 1, 2, 3)
    after_each_removal(monkeypatch, lambda: shutil.rmtree(run / "step-3"))
    with pytest.raises(Changed, match=r"step-3: was to be kept and is gone"):
        pruned(run, yes=True)
    assert names_in(run) == ["step-2"]


def test_what_another_removes_meanwhile_is_not_called_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, 1, 2, 3)
    after_each_removal(monkeypatch, lambda: shutil.rmtree(run / "step-2"))
    report = pruned(run, yes=True)
    assert fates(report) == {"step-3": "keep", "step-2": "leave", "step-1": "remove"}
    assert report.steps[1].reason == "it was removed meanwhile"
    assert report.freed == report.steps[2].nbytes


def test_a_step_that_is_pointed_to_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, 1, 2, 3)
    after_each_removal(monkeypatch, lambda: (run / "latest").write_text("step-2"))
    report = pruned(run, yes=True)
    assert fates(report)["step-2"] == "keep"
    assert names_in(run) == ["latest", "step-2", "step-3"]


def test_what_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path, 1, 2)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(removal, "_delete", refuse)
    with pytest.raises(TransferError, match=r"step-1: cannot be removed: Permission denied"):
        pruned(run, yes=True)


def killed(work: Callable[[], object], after: float) -> None:
    """Do the work in a forked process that is killed after so many seconds."""
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.trials
def test_killed_at_any_moment_it_never_leaves_fewer_than_promised(tmp_path: Path) -> None:
    whole = hashes(SOURCE)
    chance = random.Random(5)
    options = PruneOptions(keep_last=2, yes=True)
    run = run_of(tmp_path, *range(1, 9))
    begun = time.monotonic()
    prune(run, options)
    takes = time.monotonic() - begun
    for _ in range(KILLS):
        for number in range(1, 7):
            shutil.copytree(SOURCE, run / f"step-{number}", dirs_exist_ok=True)
        killed(lambda: prune(run, options), chance.uniform(0, takes * 1.2))
        standing = [path for path in run.iterdir() if not path.name.startswith(".")]
        assert {run / "step-7", run / "step-8"} <= set(standing)
        assert all(hashes(step) == whole for step in standing)
    report = prune(run, options)
    assert report.good == 2
    assert names_in(run) == ["step-7", "step-8"]


def test_quiet_shows_a_plan_and_nothing_of_what_is_done(tmp_path: Path) -> None:
    words = ["prune", str(run_of(tmp_path, 1, 2)), "--keep-last", "1", "--quiet"]
    assert "would remove 1 step" in CliRunner().invoke(app, words).output
    assert CliRunner().invoke(app, [*words, "--yes"]).output == ""


def test_the_report_answers_and_is_short(tmp_path: Path) -> None:
    run = run_of(tmp_path, 1, 2)
    report = ckptool.prune(run, keep_last=1)
    assert report
    assert repr(report).startswith(
        f"<ckptool.PruneReport path={str(run)!r}, removed=False, ok=True"
    )
    assert report.to_dict()["schema"] == "ckptool.prune/2"
    damage(run / "step-1")
    damage(run / "step-2")
    assert not ckptool.prune(run, keep_last=1)


def test_steps_of_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    run = location(f"memory://{uuid.uuid4().hex}/run")
    assert isinstance(run, RemotePath)
    for number in (1, 2, 3):
        for file in SOURCE.iterdir():
            (run / f"step-{number}" / file.name).write_bytes(file.read_bytes())
    (run / "latest").write_bytes(b"step-1")
    files = file_system(run)
    real = files.rm_file
    removed: list[str] = []

    def cut_short(key: str) -> None:
        if len(removed) == 2:
            raise KeyboardInterrupt
        removed.append(key)
        real(key)

    monkeypatch.setattr(files, "rm_file", cut_short)
    with pytest.raises(KeyboardInterrupt):
        prune(location(str(run)), PruneOptions(keep_last=1, yes=True))
    assert (location(str(run / "step-2")) / UNFINISHED).exists()
    with pytest.raises(Exception, match="unfinished"):
        ckptool.inspect(str(run / "step-2"))
    monkeypatch.setattr(files, "rm_file", real)
    again = prune(location(str(run)), PruneOptions(keep_last=1))
    assert list(map(str, again.leftovers)) == [str(run / "step-2")]
    assert fates(again) == {"step-3": "keep", "step-1": "keep"}
    report = prune(location(str(run)), PruneOptions(keep_last=1, yes=True))
    assert report.ok
    left = {name.partition("/")[0] for name in location(str(run)).listing}  # type: ignore[union-attr]
    assert left == {"latest", "step-1", "step-3"}


def test_a_step_of_a_store_that_lets_nothing_go_stays_readable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = location(f"memory://{uuid.uuid4().hex}/run")
    assert isinstance(run, RemotePath)
    for number in (1, 2):
        for file in SOURCE.iterdir():
            (run / f"step-{number}" / file.name).write_bytes(file.read_bytes())
    before = sorted(run.listing)

    def deny(key: str) -> None:
        raise PermissionError(13, "Permission denied", key)

    monkeypatch.setattr(file_system(run), "rm_file", deny)
    with pytest.raises(TransferError, match=r"step-1: cannot be removed: .*denied"):
        prune(location(str(run)), PruneOptions(keep_last=1, yes=True))
    assert sorted(location(str(run)).listing) == before  # type: ignore[union-attr]
    assert ckptool.verify(str(run / "step-1")).ok


def test_a_file_of_a_store_is_as_large_and_goes_as_on_a_disk(tmp_path: Path) -> None:
    run = location(f"memory://{uuid.uuid4().hex}/run")
    assert isinstance(run, RemotePath)
    for step in (1, 2):
        ckptool.convert(SOURCE, tmp_path / f"step-{step}.safetensors", to="safetensors")
    for file in tmp_path.iterdir():
        (run / file.name).write_bytes(file.read_bytes())
    stored = prune(location(str(run)), PruneOptions(keep_last=1))
    assert stored.freed == pruned(tmp_path).freed
    prune(location(str(run)), PruneOptions(keep_last=1, yes=True))
    assert sorted(location(str(run)).listing) == ["step-2.extra.pt", "step-2.safetensors"]  # type: ignore[union-attr]
