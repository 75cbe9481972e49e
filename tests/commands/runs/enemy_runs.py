"""One generated case: a sandbox with runs, and what prune makes of it."""

from __future__ import annotations

import codecs
import ctypes
import os
import pkgutil
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from encodings.aliases import aliases
from importlib import import_module
from pathlib import Path
from random import Random
from unittest import mock

from conftest import Bits, bits
from enemy_hazards import HAZARDS, World, save
from enemy_model import (
    Promise,
    Rules,
    Saved,
    Snapshot,
    find_losses,
    gone,
    owner_of,
    promise,
    snapshot,
)
from enemy_samples import Samples
from enemy_trainers import LAYOUTS
from msgspec import Struct, field

import ckptool
from ckptool.commands.options.prune import PruneOptions
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.runs.prune.prune import prune
from ckptool.errors import CkptoolError

NOBODY = 65534


class Case(Struct):
    """The outcome of a seed: what was lost, what went, and what was made for somebody to read."""

    seed: int
    losses: list[str]
    gone: int
    text: str
    stayed: list[str] = field(default_factory=list)


def run_case(seed: int, samples: Samples, sandbox: Path) -> Case:
    """Make the runs of a seed, prune them, and compare what is left with what was promised."""
    random = Random(seed)
    world = _make(random, samples, sandbox)
    rules = Rules(random.choice((1, 1, 1, 2, 3)), random.choice((None, None, 1, 2, 20, 100)))
    rules.drop = rules.keep_every is not None and random.random() < 0.5
    hazards = random.sample(HAZARDS, random.choice((0, 1, 1, 2, 3, 4)))
    for hazard in sorted(hazards, key=HAZARDS.index):
        hazard(world)
    stuck = _make_unwritable(world, random) if random.random() < 0.1 else None
    hidden = stuck is None and random.random() < 0.05 and _hide_pointer(world, random)
    as_nobody = stuck is not None or hidden
    race = random.choice(RACES) if not as_nobody and random.random() < 0.3 else None
    before, models = snapshot(sandbox), _read_models(world) if rules.drop else {}
    promised = _promise(world, rules)
    observer = _Observer(world, rules, race, before)
    with _as_nobody(sandbox) if as_nobody else nullcontext():
        errors = [_prune(world, rules, observer) for _ in range(random.choice((1, 1, 2)))]
    if as_nobody:
        _make_accessible(sandbox)
    after = {path: what for path, what in snapshot(sandbox).items() if path not in observer.made}
    promised.stay = [step for step in promised.stay if step not in observer.moved]
    promised.strip = [step for step in promised.strip if step not in observer.moved]
    losses = find_losses(before, after, world.steps, promised, strips=rules.drop)
    losses = [loss for loss in losses if stuck is None or not loss.startswith(stuck)]
    losses += _new_paths(before, after, stuck) + observer.losses(after)
    losses += _lost_models(world, promised, models)
    names = [hazard.__name__ for hazard in hazards]
    text = f"seed {seed}: {', '.join(world.runs)}; {rules}; {names}; race"
    text += f" {race and race.__name__}; unwritable {stuck}; hidden {hidden}; errors {errors}"
    case = Case(seed, losses, len(gone(after, world.steps)), text)
    if not names and race is None and not as_nobody:
        case.stayed = _needless(world, promised, after)
    return case


def _needless(world: World, promised: Promise, after: Snapshot) -> list[str]:
    """Return the whole steps of clear names that stayed although nothing keeps them."""
    clear = [run for run, layout in world.layouts.items() if layout.told and not layout.beside]
    told = [step for run in clear for step in world.runs[run]]
    kept = (*promised.stay, *promised.strip, *gone(after, told))
    return [step.entries[0] for step in told if step.state == "whole" and step not in kept]


def _make(random: Random, samples: Samples, sandbox: Path) -> World:
    """Make one or two runs of random trainers, with saves that were cut off and NaNs."""
    world = World(sandbox, samples, random, sandbox / "run", sandbox / "run")
    if random.random() < 0.1:
        world.asked = sandbox / "link"
        world.asked.symlink_to("run")
    names = ["run"] if random.random() < 0.8 else ["run/A", "run/B"]
    for run in names:
        layout = LAYOUTS[random.choice(sorted(LAYOUTS))]
        numbers = sorted(random.sample(range(1, 8), random.randrange(2, 6)))
        steps = []
        for number in numbers:
            how: dict[str, object] = {}
            is_newest = number == numbers[-1]
            if random.random() < (0.35 if is_newest else 0.1):
                how["cut"] = random.choice(["last", *range(1, len(layout.step(number)))])
            elif layout.takes_nan and random.random() < 0.1:
                how["nan"] = True
            steps.append(save(world, run, layout, number, **how))
            when = 1_700_000_000 + 1000 * number
            for entry in steps[-1].entries:
                _age(sandbox / entry, when)
        for path, kind in layout.beside:
            if not os.path.lexists(sandbox / run / path):
                samples.put(kind, 1, sandbox / run / path)
        whole = [step for step in steps if step.state == "whole"]
        if layout.pointer is not None and whole and random.random() < 0.8:
            _point(sandbox / run, *layout.pointer(whole[-1].order))
            whole[-1].reason = "its trainer names it"
        world.runs[run], world.layouts[run] = steps, layout
    return world


def _age(path: Path, when: int) -> None:
    for one in (*path.rglob("*"), path) if path.is_dir() else (path,):
        if one.exists():
            os.utime(one, (when, when))


def _point(run: Path, file: str, text: str) -> None:
    if text.startswith("->"):
        (run / file).symlink_to(text[2:])
    else:
        (run / file).write_text(text)


def _promise(world: World, rules: Rules) -> Promise:
    whole = Promise()
    for steps in world.runs.values():
        one = promise(steps, rules)
        whole.stay += one.stay
        whole.strip += one.strip
    return whole


def _prune(world: World, rules: Rules, observer: _Observer) -> str:
    options = PruneOptions(
        keep_last=rules.keep_last,
        keep_every=rules.keep_every,
        no_optimizer=rules.drop,
        yes=True,
        verify=VerifyOptions(workers=1),
    )
    try:
        prune(world.asked, options, observer)
    except CkptoolError as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return ""


# Races

Race = Callable[[World, list[Saved]], None]


class _Observer:
    """Is told what prune does next, and meddles once, while it decides or when it removes."""

    def __init__(self, world: World, rules: Rules, race: Race | None, before: Snapshot) -> None:
        self._world, self._rules, self._race, self._before = world, rules, race, before
        self._word = world.random.choice(("verifying", "removing", "removing", "dropping"))
        self._wait = world.random.randrange(3)
        self._late = Promise()
        self.made: set[str] = set()
        self.moved: list[Saved] = []

    def __call__(self, text: str) -> None:
        if self._race is None or not text.startswith(self._word):
            return
        if self._wait > 0:
            self._wait -= 1
            return
        race, self._race = self._race, None
        self._before = there = snapshot(self._world.sandbox)  # steps were stripped until now
        inside = {id(s): [e.removeprefix("run") for e in s.entries] for s in self._world.steps}
        others = [s for s in self._world.steps if not text.endswith(tuple(inside[id(s)]))]
        left = [s for s in others if all(entry in there for entry in s.entries)]
        race(self._world, left)
        now = snapshot(self._world.sandbox)
        self.made = {path for path in now if there.get(path) != now[path]}
        self.moved = [s for s in left if not all(entry in now for entry in s.entries)]
        for steps in self._world.runs.values():
            known = promise([step for step in steps if step not in self.moved], self._rules)
            self._late.stay += [step for step in known.stay if step in left]

    def losses(self, after: Snapshot) -> list[str]:
        """Return what was removed although after the race it had to stay."""
        late = self._late.stay
        owned = {
            path: content
            for path, content in self._before.items()
            if path not in self.made and owner_of(path, late) is not None
        }
        return [f"after the race: {loss}" for loss in find_losses(owned, after, late, self._late)]


def name_one(world: World, left: list[Saved]) -> None:
    """Somebody names a step in a new file beside it."""
    if left:
        step = world.random.choice(left)
        folder, _, name = step.entries[0].rpartition("/")
        (world.sandbox / folder / "resume_next").write_text(name)
        step.reason = step.reason or "it was named meanwhile"


def link_one(world: World, left: list[Saved]) -> None:
    """Somebody links to a step."""
    if left:
        step = world.random.choice(left)
        path = world.sandbox / step.entries[0]
        path.with_name("released").symlink_to(path.name)
        step.reason = step.reason or "it was linked meanwhile"


def lose_the_newest(world: World, left: list[Saved]) -> None:
    """Somebody moves away the newest whole step of each run; the next one is all that is left."""
    for steps in world.runs.values():
        whole = [step for step in steps if step.state == "whole" and step in left]
        for entry in whole[-1].entries if len(whole) > 1 else ():
            (world.sandbox / entry).rename(world.sandbox / f"moved {entry.replace('/', ' ')}")


def rotate_one(world: World, left: list[Saved]) -> None:
    """The trainer removes its oldest step at the same time."""
    for entry in min(left, key=lambda step: step.order).entries if left else ():
        path = world.sandbox / entry
        (shutil.rmtree if path.is_dir() else os.unlink)(path)


def save_another(world: World, left: list[Saved]) -> None:
    """The trainer begins its next save."""
    run = world.any_run()
    save(world, run, world.layouts[run], 9, cut="last")


RACES: tuple[Race, ...] = (name_one, link_one, lose_the_newest, rotate_one, save_another)


# Permissions


def _make_unwritable(world: World, random: Random) -> str | None:
    """Give a step's folder to somebody who lets nobody write; return its entry."""
    folders = [s.entries[0] for s in world.steps if (world.sandbox / s.entries[0]).is_dir()]
    if not folders:
        return None
    stuck = random.choice(sorted(folders))
    for path in (world.sandbox / stuck, *(world.sandbox / stuck).rglob("*")):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o555)
    return stuck


def _hide_pointer(world: World, random: Random) -> bool:
    """Put a pointer that nobody can read beside a run's steps: it may name any of them."""
    folder = (world.sandbox / random.choice(world.steps).entries[0]).parent
    if (folder / "latest").exists():
        return False
    (folder / "latest").write_text("step-1")
    (folder / "latest").chmod(0)
    for step in world.steps:
        step.reason = step.reason or "a pointer cannot be read"
    return True


def _make_accessible(sandbox: Path) -> None:
    for head, folders, files in os.walk(sandbox):
        for name in (*folders, *files):
            path = Path(head, name)
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | stat.S_IRUSR | stat.S_IWUSR)


@contextmanager
def _as_nobody(sandbox: Path) -> Iterator[None]:
    """Access files without root's rights, which permissions do not bind."""
    if os.geteuid() != 0:
        yield
        return
    for encoding in sorted({"ascii", "utf_8_sig", *aliases.values()}):
        with suppress(LookupError):
            codecs.lookup(encoding)
    for module in pkgutil.walk_packages(ckptool.__path__, "ckptool."):
        if module.name.startswith(("ckptool.formats", "ckptool.commands")):
            import_module(module.name)  # whose files are perhaps root's alone
    for head, folders, files in os.walk(sandbox):
        for name in (".", *folders, *files):
            os.chown(Path(head, name), NOBODY, NOBODY, follow_symlinks=False)
    set_user = ctypes.CDLL(None).setfsuid
    set_user(NOBODY)
    try:
        with mock.patch.object(os, "geteuid", return_value=NOBODY):
            yield
    finally:
        set_user(0)


def _new_paths(before: Snapshot, after: Snapshot, stuck: str | None) -> list[str]:
    """Return what prune left behind: nothing, but what it could not remove."""
    new = [path for path in after if path not in before]
    if stuck is not None:
        folder, _, name = stuck.rpartition("/")
        new = [path for path in new if not path.startswith(f"{folder}/.{name}.")]
    return [f"{path} is new" for path in new]


# What is left of a stripped step


def _read_models(world: World) -> dict[str, dict[str, Bits]]:
    return {s.entries[0]: _model(world.sandbox / s.entries[0]) for s in world.steps
            if s.state == "whole" and len(s.entries) == 1}  # fmt: skip


def _model(path: Path) -> dict[str, Bits]:
    """Return the bits of a checkpoint's model; nothing if it cannot be opened by itself."""
    try:
        opened = ckptool.open(path, model_only=True)
        return {name: bits(opened.read(name)) for name in opened.tensors}
    except CkptoolError:
        return {}


def _lost_models(world: World, promised: Promise, models: dict[str, dict[str, Bits]]) -> list[str]:
    """Return the stripped steps whose model is not what it was."""
    losses = []
    for step in promised.strip:
        wanted = models.get(step.entries[0])
        if wanted and _model(world.sandbox / step.entries[0]) != wanted:
            losses.append(f"{step.entries[0]}: its model is lost with its optimizer")
        if not all(os.path.lexists(world.sandbox / entry) for entry in step.entries):
            losses.append(f"{step.entries[0]} is gone: keep_every keeps it")
    return losses
