"""Whatever call of a target fails, dies or lies: the output is there whole, or not at all.

Then the same command, with --resume where that helps, makes it; and nothing foreign is touched.
``make faults`` tries every call of a disk and of a store, too; else a few of them are tried.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from conftest import case
from engine.write.fake_target import FAULTS, Died, FakeTarget, Faults, FaultyTarget, Shelf

from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ReshardOptions, TransferOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.commands.transfer import transfer
from ckptool.core.sharding.placement import parse_mesh
from ckptool.engine.share import Share
from ckptool.engine.write.disk_target import DiskTarget
from ckptool.engine.write.stage import Stage, Target
from ckptool.engine.write.store_target import StoreTarget
from ckptool.errors import CkptoolError
from ckptool.storage.commit_note import UNFINISHED
from ckptool.storage.url import Location, RemotePath, location

EVERY = bool(int(os.environ.get("CKPTOOL_FAULTS", "0")))
NEW, OLD = case("dcp_base").path, case("dcp_fsdp2_tp").path
FOREIGN = {"train.py": b"import torch", "notes/today.txt": b"remember"}


Command = Callable[[], object]


class World:
    """A target of one kind, what stands there, and commands of which calls may meet faults."""

    step = 1 if EVERY else 9
    """Of so many faults one is tried."""
    honest: tuple[str, ...] = ()
    """Calls that cannot lie: what they do is seen at once by the process that does it."""
    removes_first = False
    """Whether the old checkpoint goes before the new one is written, as --overwrite says."""

    def __init__(self, folder: Path) -> None:
        self.target: Location = folder / "m"
        self.faults = Faults()
        self.targets: list[Target] = []
        self.ended = ""

    def stage_at(self, *words: Any) -> Stage:
        """Return a stage over a target that may be faulty."""
        self.targets.append(self.real(*words))
        faulty: Any = FaultyTarget(self.targets[-1], self.faults)
        return Stage(faulty, *words[1:])

    def real(self, *words: Any) -> Target:
        """Return the target whose calls meet faults."""
        raise NotImplementedError

    def reshard(self, source: Path, **more: Any) -> Command:
        """Return the command that writes to the target."""
        command: Command = self.plan(source, **more).run
        return command

    def plan(self, source: Path, **more: Any) -> Any:
        """Plan what is written to the target."""
        run = TransferOptions(run=RunOptions(workers=1, fsync=False), **more)
        options = ReshardOptions(parse_mesh("2"), rank_state="drop", transfer=run)
        return prepare_reshard(source, self.target, options)

    def run(self, works: list[Command], at: dict[int, str] | None = None) -> bool:
        """Run commands one after the other until one ends early; return whether none does."""
        self.faults, self.ended = Faults(at), ""
        try:
            for work in works:
                work()
        except (CkptoolError, OSError, Died) as error:
            self.ended = repr(error)
        for target in self.targets:
            target.close()  # as the end of a process does
        self.targets.clear()
        return not self.ended

    def content(self) -> dict[str, bytes]:
        """Return the files at the target, without notes."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        """Return what says that something is unfinished."""
        raise NotImplementedError

    def is_whole(self) -> bool:
        """Return whether readers are not told that the target is unfinished."""
        return True

    def put(self, name: str, data: bytes) -> None:
        """Put a file into the target that no checkpoint owns."""
        raise NotImplementedError

    def clear(self) -> None:
        """Remove everything."""
        raise NotImplementedError


class InMemory(World):
    """The fake target."""

    step = 1

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        self._shelf = Shelf(folder)

    def real(self, target: Any, *words: Any) -> Target:
        return FakeTarget(self._shelf, *words)

    def content(self) -> dict[str, bytes]:
        return dict(self._shelf.there)

    def notes(self) -> list[str]:
        return [*self._shelf.staged, *map(str, self._shelf.notes)]

    def put(self, name: str, data: bytes) -> None:
        self._shelf.there[name] = data

    def clear(self) -> None:
        self._shelf = Shelf(self._folder)


class OnDisk(World):
    """A folder of a disk."""

    target: Path
    honest = ("claim",)

    def real(self, *words: Any) -> Target:
        return DiskTarget(*words)

    def content(self) -> dict[str, bytes]:
        found = (path for path in self.target.rglob("*") if path.is_file())
        return {str(path.relative_to(self.target)): path.read_bytes() for path in found}

    def notes(self) -> list[str]:
        return [path.name for path in self.target.parent.iterdir() if path.name[0] == "."]

    def put(self, name: str, data: bytes) -> None:
        (self.target / name).parent.mkdir(exist_ok=True)
        (self.target / name).write_bytes(data)

    def clear(self) -> None:
        shutil.rmtree(self.target.parent)
        self.target.parent.mkdir()


class InStore(World):
    """A folder of a store that cannot rename."""

    target: RemotePath
    removes_first = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.url = f"memory://{uuid.uuid4().hex}/m"
        self.clear()

    def real(self, *words: Any) -> Target:
        return StoreTarget(*words)

    def clear(self) -> None:
        self._renew()
        keys = [(self.target / name).key for name in self._names()]
        self.target.store.remove(keys, self.url)

    def _renew(self) -> None:
        place = location(self.url)
        assert isinstance(place, RemotePath)
        self.target = place

    def reshard(self, source: Path, **more: Any) -> Command:
        """Plan it each time: what was listed once by one process is not listed again."""

        def command() -> object:
            self._renew()
            return self.plan(source, **more).run()

        return command

    def _names(self) -> list[str]:
        with suppress(CkptoolError):
            return [*self.target.store.find(self.target.key, self.url)]
        return []

    def content(self) -> dict[str, bytes]:
        names = [name for name in self._names() if not name.startswith(UNFINISHED)]
        return {name: (self.target / name).read_bytes() for name in names}

    def notes(self) -> list[str]:
        return [name for name in self._names() if name.startswith(UNFINISHED)]

    def is_whole(self) -> bool:
        return not self.notes()

    def put(self, name: str, data: bytes) -> None:
        (self.target / name).write_bytes(data)


WORLDS: dict[str, type[World]] = {"memory": InMemory, "disk": OnDisk, "store": InStore}


@pytest.fixture(params=WORLDS)
def world(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    folder = tmp_path / "out"
    folder.mkdir()
    made = WORLDS[request.param](folder)
    monkeypatch.setattr(transfer, "stage_at", made.stage_at)
    return made


class Trial:
    """Commands, how they are continued, and what stands before them."""

    def __init__(
        self, world: World, old: list[Command], works: list[Command], again: list[Command]
    ) -> None:
        self.world, self.old, self.works, self.again = world, old, works, again
        self.start()
        assert world.run(works), f"without a fault: {world.ended}"
        self.calls = world.faults.calls
        self.new = world.content()
        assert not world.notes()

    def start(self) -> None:
        """Put in place what stands before."""
        self.world.clear()
        if self.old:
            assert self.world.run(self.old)
            for name, data in FOREIGN.items():
                self.world.put(name, data)
        self.before = self.world.content()

    def faults(self, first: int, calls: list[str]) -> Iterator[tuple[int, str]]:
        """Yield the faults to be tried: each of some calls with each fault, or a sample."""
        numbers = range(first, len(calls) + 1)
        for number, (at, fault) in enumerate(product(numbers, FAULTS)):
            lies = fault == "lies" and calls[at - 1] in self.world.honest
            if number % self.world.step == first % self.world.step and not lies:
                yield at, fault

    def meet(self, at: dict[int, str]) -> None:
        """Let faults happen, and require that all is well, then and after the next command."""
        world = self.world
        self.start()
        world.run(self.works, at)
        now, told = world.content(), [(world.faults.calls[n - 1], at[n]) for n in at]
        if world.is_whole():
            gone = FOREIGN if self.old and world.removes_first else self.before
            assert now in (self.before, self.new, gone), told
        for name, data in FOREIGN.items() if self.old else ():
            assert now[name] == data, told
        if self.old and now == FOREIGN and world.is_whole():
            assert not world.run(self.works), told
            assert "not a checkpoint, and is not replaced" in world.ended, told
            return
        if now != self.new or world.notes():
            assert world.run(self.again) or world.run(self.works), (told, world.ended)
        assert world.content() == self.new, told
        assert not world.notes(), told


def afresh(world: World) -> Trial:
    return Trial(world, [], [world.reshard(NEW)], [world.reshard(NEW, resume=True)])


def over_an_old_one(world: World) -> Trial:
    old = [world.reshard(OLD)]
    works = [world.reshard(NEW, overwrite=True)]
    return Trial(world, old, works, [world.reshard(NEW, resume=True)])


def in_parts(world: World) -> Trial:
    parts = [world.reshard(NEW, part=Share(number, 2)) for number in range(2)]
    works = [*parts, world.reshard(NEW, finish=True)]
    return Trial(world, [], works, works)


TRIALS: dict[str, Callable[[World], Trial]] = {
    "afresh": afresh,
    "over an old one": over_an_old_one,
    "in parts": in_parts,
}


@pytest.mark.parametrize("kind", TRIALS)
def test_one_call_that_fails_dies_or_lies(kind: str, world: World) -> None:
    trial = TRIALS[kind](world)
    for at, fault in trial.faults(1, trial.calls):
        trial.meet({at: fault})


@pytest.mark.parametrize("kind", TRIALS)
def test_another_that_meets_a_fault_once_the_first_has_lied(kind: str, world: World) -> None:
    """Nothing was written: it is found out, and what there is is discarded."""
    trial = TRIALS[kind](world)
    lie = trial.calls.index("write") + 1
    trial.start()
    assert not world.run(trial.works, {lie: "lies"})
    calls = world.faults.calls
    assert "discard" in calls
    for at, fault in trial.faults(lie + 1, calls):
        trial.meet({lie: "lies", at: fault})
