"""Killed or failed at any call that changes the file system: the old or the new one is in place.

``make test`` tries a few calls of Python's own in each command; ``make faults`` lets strace hit
every system call.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import on_ranks
from fault_runs import FAULTS, Call, Ended, Trial, fresh, run
from traced_runs import require_strace, run_traced
from typer.testing import CliRunner

from ckptool.cli.app import app

EVERY = int(os.environ.get("CKPTOOL_FAULTS", "0"))
"""1 for every system call, n for each n-th; 0 for the sample."""
TRACED = ("KILL", "EIO", "ENOSPC", "EXDEV", "EMFILE", "EIO+", "ENOSPC+")
"""The faults of a sweep: with ``+`` each further call of the kind fails as well."""
THERE = {True: "over an old one"} | ({False: "afresh"} if EVERY else {})
LIST = ".salvage.json"
FOREIGN = {"run/train.py": b"import torch", "run/src/notes.txt": b"remember"}

COMMANDS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "convert to a folder": (["convert", "{new}", "run", "--to", "dcp"], ("run",)),
    "convert to Hugging Face": (["convert", "{new}", "run", "--to", "safetensors"], ("run",)),
    "convert to a file": (["convert", "{new}", "m.pt", "--to", "torch-save"], ("m.pt",)),
    "convert to a pair": (
        ["convert", "{new}", "m.safetensors", "--to", "safetensors"],
        ("m.safetensors",),
    ),
    "reshard": (["reshard", "{new}", "run", "--mesh", "2"], ("run",)),
    "salvage": (["verify", "{new}", "--salvage", "run"], ("run", "run.salvage.json")),
    "salvage to a pair": (
        ["verify", "{new}", "--salvage", "m.safetensors"],
        ("m.safetensors", "m.safetensors.salvage.json"),
    ),
    "manifest": (["verify", "{new}", "--write-manifest", "m.json"], ("m.json",)),
    "export": (["inspect", "{new}", "--export", "m.svg"], ("m.svg",)),
    "page": (["inspect", "{new}", "--html", "m.html"], ("m.html",)),
}
"""The words of a command, and what it writes."""


SAVE = """
import sys, torch, torch.distributed.checkpoint as dcp
for name, value in (("old", 1.0), ("new", 5.0)):
    state = {f"w{n}": torch.full((4, 8), value + n) for n in range(3)} | {"step": int(value)}
    dcp.save(state, checkpoint_id=f"{sys.argv[1]}/{name}", no_dist=True)
"""
"""Run elsewhere: a process that has torch is slow to fork, and this one may not have it."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    (saved,) = on_ranks(1, ["-c", SAVE, folder])
    assert saved.code == 0, saved.stderr
    found = {"old": folder / "old", "new": folder / "new"}
    for kind in COMMANDS:  # imported once, every process that is forked from here has it
        words = words_of(kind, found["old"], folder, overwrite=True)
        assert CliRunner().invoke(app, words).exit_code == 0
    gc.freeze()
    return found


def words_of(kind: str, source: Path, place: Path, *, overwrite: bool) -> list[str]:
    words, targets = COMMANDS[kind]
    line = [str(source) if word == "{new}" else word for word in words]
    line = [str(place / word) if word in targets else word for word in line]
    if line[0] == "inspect":
        return line
    line += ["-q", "--workers", "1"]
    return [*line, "--overwrite"] if overwrite else line


class Bench:
    """One command's trial: what stood before, what must stand after, which calls it makes."""

    def __init__(
        self,
        kind: str,
        sources: dict[str, Path],
        folder: Path,
        *,
        there: bool,
        always: tuple[str, ...] = (),
    ) -> None:
        self.always = always
        self.first: Call | None = None
        self.kind, self.base, self.log = kind, folder / "base", folder / "log"
        self.base.mkdir()
        if there:
            first = words_of(kind, sources["old"], self.base, overwrite=False)
            assert run(first, self.log).code == 0, self.log.read_text()
        self.foreign = FOREIGN if there and "run" in COMMANDS[kind][1] else {}
        for name, data in self.foreign.items():
            (self.base / name).parent.mkdir(exist_ok=True)
            (self.base / name).write_bytes(data)
        place = folder / "place"
        self.trial = Trial(
            words_of(kind, sources["new"], place, overwrite=True),
            place,
            COMMANDS[kind][1],
            self.foreign,
        )
        fresh(self.base, place)
        self.old = self.trial.seen()
        ended = self.run(self.trial.words)
        assert ended.code == 0, ended.words
        self.new, self.calls = self.trial.seen(), ended.calls
        assert self.calls
        assert self.old != self.new
        assert self.trial.leftovers() == []

    def run(self, words: list[str], fault: str | None = None, call: Call | None = None) -> Ended:
        """Run a command, in a sweep under strace."""
        if EVERY:
            return run_traced(words, self.log, self.trial.place, fault, call, self.always)
        return run(words, self.log, fault, call)

    def kill_first(self, call: Call) -> list[Call]:
        """Begin each strike with a run killed at ``call``; the calls that --resume then makes."""
        self.first = call
        self.begin()
        self.trial = replace(self.trial, words=resuming(self.trial.words))
        ended = self.run(self.trial.words)
        if ended.code == 4:  # killed before anything was staged: on each machine at another call
            assert "already exist" in ended.words
            assert self.trial.seen() == self.old
            self.end(f"killed at {call}")
            return []
        assert ended.code == 0, ended.words
        return ended.calls

    def begin(self) -> None:
        """What stands before a strike: made anew, for a commit knows folders by their inodes."""
        fresh(self.base, self.trial.place)
        if self.first is not None:
            words = resuming(self.trial.words, not_any_more=True)
            assert self.run(words, "KILL", self.first).code == -9

    def strike(self, fault: str, call: Call, *, resumes: bool = False) -> None:
        """Let one call meet a fault, look what stands, run again, look again."""
        trial = self.trial
        self.begin()
        ended = self.run(trial.words, fault, call)
        what = f"{self.kind}, {fault} at {call}: exit {ended.code}: {ended.words}"
        assert "Traceback" not in ended.words, what
        if not ended.elsewhere:
            self.look(fault, ended, what)
        assert sorted(trial.strangers()) == sorted(Path(name).name for name in self.foreign), what
        self.end(what, resumes=resumes)

    def look(self, fault: str, ended: Ended, what: str) -> None:
        """The old one stands or the new one, as the command says."""
        seen, old, new = self.trial.seen(), without_list(self.old), without_list(self.new)
        allowed = [self.old, self.new]
        if fault == "KILL" or LIST in ended.words:  # a list may be missing, and is never another's
            allowed += [old, new]
        if self.always and (fault == "KILL" or "neither" in ended.words):  # as the remark says
            allowed.append({})
        assert seen in allowed, f"neither old nor new: {what}"
        if fault != "KILL":
            assert ended.code in (0, 4, 5), what
            stands = ended.code == 0 or "the new one" in ended.words.replace("nor the new one", "")
            is_new = without_list(seen) == new
            assert stands == is_new or (self.first and is_new), what  # the killed run put it there

    def end(self, what: str, *, resumes: bool = False) -> None:
        trial = self.trial
        words = resuming(trial.words) if resumes else trial.words
        again = run(words, self.log)
        if again.code == 4 and "--resume" in words:  # nothing begun, or all done
            again = run(resuming(words, not_any_more=True), self.log)
        assert again.code == 0, f"{what}\nthen: {again.words}"
        assert trial.seen() == self.new, what
        assert trial.leftovers() == [], what
        for name, data in self.foreign.items():
            assert (trial.place / name).read_bytes() == data, what

    def sweep(self, calls: Sequence[Call], faults: Sequence[str], *, resumes: bool = False) -> None:
        """Strike each call with each fault; the failures of all, at the end."""
        failures, struck = [], 0
        for number, fault in enumerate(faults):
            for call in picked(calls, 2 * number):
                struck += 1
                try:
                    self.strike(fault, call, resumes=resumes)
                except AssertionError as error:
                    failures.append(str(error).partition("\nassert")[0])
        print(f"{struck} faults met")
        assert not failures, f"{len(failures)} of {struck} failed:\n" + "\n\n".join(failures)


def resuming(words: list[str], *, not_any_more: bool = False) -> list[str]:
    """The same command, that goes on with what it began, or starts over."""
    old, new = ("--resume", "--overwrite") if not_any_more else ("--overwrite", "--resume")
    return [new if word == old else word for word in words]


def without_list(seen: dict[str, bytes]) -> dict[str, bytes]:
    """What stands, but for the list of a salvage."""
    return {name: data for name, data in seen.items() if not name.endswith(LIST)}


def picked(calls: Sequence[Call], seed: int) -> Sequence[Call]:
    """Calls to strike: every n-th, or in the sample one that is always the same."""
    return calls[::EVERY] if EVERY else [calls[-1 - seed % len(calls)]]


@pytest.fixture(autouse=True)
def _traceable() -> None:
    why = require_strace() if EVERY else None
    if why is not None:
        pytest.fail(why, pytrace=False)


@pytest.mark.parametrize("faults", [[one] for one in TRACED] if EVERY else [FAULTS], ids="/".join)
@pytest.mark.parametrize("there", THERE, ids=THERE.get)
@pytest.mark.parametrize("kind", COMMANDS)
def test_the_old_one_stands_or_the_new_one(
    kind: str, there: bool, faults: Sequence[str], sources: dict[str, Path], tmp_path: Path
) -> None:
    bench = Bench(kind, sources, tmp_path, there=there)
    bench.sweep(bench.calls, faults)


STAGED = [kind for kind in COMMANDS if kind.startswith(("convert", "reshard"))]


@pytest.mark.skipif(not EVERY, reason="a part of make faults")
@pytest.mark.parametrize("kind", STAGED)
def test_resumed_it_ends_as_the_new_one(
    kind: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    bench = Bench(kind, sources, tmp_path, there=True)
    bench.sweep(bench.calls, ("KILL", "EIO"), resumes=True)


@pytest.mark.skipif(not EVERY, reason="a part of make faults")
@pytest.mark.parametrize("late", [1, 3, 5, 8, 12, 18])
@pytest.mark.parametrize("kind", STAGED)
def test_killed_and_killed_again_it_ends_as_the_new_one(
    kind: str, late: int, sources: dict[str, Path], tmp_path: Path
) -> None:
    bench = Bench(kind, sources, tmp_path, there=True)
    bench.sweep(bench.kill_first(bench.calls[-late]), ("KILL", "EIO"))


@pytest.mark.skipif(not EVERY, reason="a part of make faults")
@pytest.mark.parametrize("fault", TRACED)
def test_where_two_folders_cannot_be_exchanged(
    fault: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    always = ("renameat2:error=EINVAL",)
    bench = Bench("convert to a folder", sources, tmp_path, there=True, always=always)
    bench.sweep([call for call in bench.calls if call.name != "renameat2"], [fault])
