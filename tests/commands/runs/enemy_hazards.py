"""What happens to runs: saves cut off, links, pointers, other runs, strangers' files."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

from enemy_model import Saved
from enemy_samples import Samples
from enemy_trainers import Layout
from msgspec import Struct, field


class World(Struct):
    """A sandbox with one or several runs in ``root``, which prune is given as ``asked``."""

    sandbox: Path
    samples: Samples
    random: Random
    root: Path
    asked: Path
    runs: dict[str, list[Saved]] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    nested: list[str] = field(default_factory=list)

    @property
    def steps(self) -> list[Saved]:
        return [step for steps in self.runs.values() for step in steps]

    def any_run(self) -> str:
        return self.random.choice(sorted(self.runs))

    def any_step(self, run: str | None = None) -> Saved:
        return self.random.choice(self.runs[run or self.any_run()])

    def text(self, path: str, text: str, encoding: str = "utf-8") -> None:
        file = self.sandbox / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(file):
            file.write_text(text, encoding=encoding)


def save(world: World, run: str, layout: Layout, at: int, **how: object) -> Saved:
    """Write the step of a number, or its beginning, as the trainer does."""
    cut, nan = how.get("cut"), bool(how.get("nan"))
    parts = layout.step(at)
    entries = [f"{run}/{entry}" for entry in layout.entries_of(at)]
    step = Saved(layout.number(at), at, entries)
    for path, kind in parts[: int(cut)] if isinstance(cut, int) else parts:
        world.samples.put(kind, at, world.sandbox / run / path, nan=nan)
    if cut == "last":  # within the last part
        path, kind = parts[-1]
        _cut(world.sandbox / run / path, world.random)
    step.entries = [entry for entry in entries if os.path.lexists(world.sandbox / entry)]
    step.state = "nan" if nan else "half" if cut is not None else "whole"
    return step


def _cut(path: Path, random: Random) -> None:
    """Leave what a save had written when it was killed; text of any length is whole YAML."""
    if path.suffix == ".yaml":
        path.unlink()
        return
    if path.is_file():
        os.truncate(path, random.randrange(path.stat().st_size))
        return
    last = [".metadata", "metadata.json", "metadata.pkl", "mp_rank_00_model_states.pt"]
    found = [file for name in last for file in path.rglob(name)]
    if found:
        found[0].unlink()
    else:
        largest = max(_files(path), key=lambda file: file.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)


def damage(world: World) -> None:
    """Cut the largest file of a step."""
    step = world.any_step()
    files = [f for e in step.entries for f in _files(world.sandbox / e) if not f.is_symlink()]
    if files and step.state == "whole":
        largest = max(files, key=lambda file: file.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)
        step.state = "damaged"


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]


SPELLINGS: tuple[tuple[str, str, str], ...] = (
    ("latest", "{name}", "utf-8"),
    ("latest.txt", '"{name}"\n', "utf-8"),
    ("best.json", '{{"best": "{name}", "score": 0.5}}', "utf-8"),
    ("checkpoint", 'model_checkpoint_path: "{name}"\n', "utf-8"),
    ("keep.txt", "# these stay\n{name}\n", "utf-8"),
    ("pinned", "\ufeff{name}\n", "utf-8"),
    ("released", "{name}\r\n", "utf-16"),
    ("resume.yaml", "resume_from: ./{name}/\n", "utf-8"),
    ("last_checkpoint", "/mnt/old-machine/run/{name}", "utf-8"),
    ("resume.sh", "RESUME={name} torchrun train.py\n", "utf-8"),
)


def point(world: World) -> None:
    """Name a step in a file beside it, in one of the spellings that people and trainers use."""
    step = world.any_step()
    folder, _, name = step.entries[0].rpartition("/")
    file, text, encoding = world.random.choice(SPELLINGS)
    if not os.path.lexists(world.sandbox / folder / file):
        world.text(f"{folder}/{file}", text.format(name=name), encoding)
        step.reason = f"{file} names it"


def point_from_above(world: World) -> None:
    """Name a step in a file of the folder that prune is given, by the path from there."""
    step = world.any_step()
    path = os.path.relpath(world.sandbox / step.entries[0], world.root)
    file = world.root / "chosen"
    if not file.exists() and not path.startswith(".."):
        file.write_text(f"{path}\n")
        step.reason = "chosen names it"


def point_from_another_run(world: World) -> None:
    """Name a step of one run in another run."""
    first, *others = sorted(world.runs)
    if not others:
        return
    step = world.any_step(first)
    path = os.path.relpath(world.sandbox / step.entries[0], world.sandbox / others[0])
    world.text(f"{others[0]}/resumed_from", path)
    step.reason = "another run was begun from it"


def point_in_trainer_state(world: World) -> None:
    """Let the newest ``trainer_state.json`` name the best step, by a path of another machine."""
    run = world.any_run()
    whole = [step for step in world.runs[run] if step.state == "whole"]
    state = world.sandbox / whole[-1].entries[0] / "trainer_state.json" if whole else None
    if state is not None and state.exists():
        best = world.any_step(run)
        path = f"/home/other/out/{best.entries[0].rpartition('/')[2]}"
        state.write_text(json.dumps({"global_step": 1, "best_model_checkpoint": path}))
        best.reason = "trainer_state.json names it as the best"


def point_by_number(world: World) -> None:
    """Let the trainer's record, a tensor in a pickle, name a step."""
    run = world.any_run()
    record = world.layouts[run].record
    if record:
        step = world.any_step(run)
        world.samples.put("bridge", step.order, world.sandbox / run / record)
        step.reason = f"{record} names it"


def mark_unfinished(world: World) -> None:
    """Leave the marker of a save that did not finish at the newest step."""
    run = world.any_run()
    step = max(world.runs[run], key=lambda step: step.order)
    marker = world.layouts[run].marker
    if marker and not step.reason:
        world.text(f"{step.entries[0].removesuffix('.ckpt')}{marker}", "")
        step.state = "half"


def link_to(world: World) -> None:
    """Put a link to a step beside it, or to a file in it somewhere in the run."""
    step = world.any_step()
    target = world.sandbox / step.entries[0]
    link = target.parent / world.random.choice(("best", "current", "deep/er/link"))
    if os.path.lexists(link):
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    inner = [file for file in _files(target) if not file.is_symlink()]
    at = world.random.choice([target, *inner])
    link.symlink_to(os.path.relpath(at, link.parent))
    step.reason = f"{link.name} leads to it"


def link_out_of(world: World) -> None:
    """Make files of steps links to those of the step before, in a chain."""
    run = world.any_run()
    steps = sorted(world.runs[run], key=lambda step: step.order)
    if len({len(step.entries) for step in steps} | {1}) > 1:
        return
    folders = [world.sandbox / step.entries[0] for step in steps]
    names = [{str(f.relative_to(folder)) for f in _files(folder)} for folder in folders]
    common = sorted(set.intersection(*names)) if all(f.is_dir() for f in folders) else []
    shared = [n for n in common if n.endswith((".distcp", ".safetensors", "_states.pt"))]
    if not shared or any(step.state != "whole" for step in steps):
        return
    name = world.random.choice(shared)
    last = list(zip(folders, steps, strict=True))[-3:]
    for (older, step), (newer, _) in itertools.pairwise(last):
        (newer / name).unlink()
        (newer / name).symlink_to(os.path.relpath(older / name, (newer / name).parent))
        step.reason = "a file of the next step leads to it"


def nest(world: World) -> None:
    """Put another run into a step, at some depth: it must stay, and so must the step."""
    run = world.any_run()
    step = world.any_step(run)
    folder = world.sandbox / step.entries[0]
    if not folder.is_dir() or not world.layouts[run].told:
        return
    depth = "/".join("abcdef"[: world.random.randrange(7)])
    inner = folder / depth / "finetune"
    for number in (3, 7):
        world.samples.put("dcp", number, inner / f"step-{number}")
    step.reason = "another run is in it"


def put_strangers(world: World) -> None:
    """Put files and folders that are no step's, some of which are named like steps."""
    run = world.any_run()
    step = world.any_step(run)
    beside = step.entries[0]
    for path in world.random.sample(
        [
            f"{run}/notes.txt",
            f"{run}/wandb/run-3/logs/debug.log",
            f"{run}/events.out.tfevents.1700000000.host",
            f"{run}/.git/HEAD",
            f"{beside}.txt",
            f"{beside}.log",
            f"{beside}-eval/results.json",
            f"{beside}_samples/0.png",
            f"{run}/checkpoint-final/README.md",
            f"{run}/.hidden/step-3/x",
        ],
        4,
    ):
        world.text(path, "of somebody else\n")


def stage(world: World) -> None:
    """Put the staging entries that an unfinished save of this trainer leaves."""
    run = world.any_run()
    for name in world.layouts[run].staging:
        path, kind = world.layouts[run].step(8)[0]
        tail = path.partition("/")[2].partition("/")[2] if "/" in name else path.partition("/")[2]
        world.samples.put(kind, 8, world.sandbox / run / name / tail)


def put_run_outside(world: World) -> None:
    """Put a run beside the one that is pruned, and a link to it into that."""
    for number in (1, 2, 3):
        world.samples.put("dcp", number, world.sandbox / f"other-team/run/step-{number}")
    link = world.root / "shared"
    if not os.path.lexists(link):
        link.symlink_to(os.path.relpath(world.sandbox / "other-team/run", world.root))


def hard_link(world: World) -> None:
    """Give the newest step's file a second name, as timm does for ``last``."""
    run = world.any_run()
    step = max(world.runs[run], key=lambda step: step.order)
    path = world.sandbox / step.entries[0]
    if path.is_file():
        last = path.with_name(f"last{''.join(path.suffixes[-2:])}")
        if not last.exists():
            os.link(path, last)


def rotate(world: World) -> None:
    """The trainer's own clean-up, or a full disk, has left some of an older step."""
    run = world.any_run()
    step = min(world.runs[run], key=lambda step: step.order)
    parts = world.layouts[run].step(step.order)
    if len(parts) > 1 and step.state == "whole":
        for path, _ in parts[: world.random.randrange(1, len(parts))]:
            place = world.sandbox / run / path
            if place.exists():  # else it went with the folder around it
                (shutil.rmtree if place.is_dir() else os.unlink)(place)
        step.state = "half"
        step.entries = [e for e in step.entries if os.path.lexists(world.sandbox / e)]
        if not step.entries:
            world.runs[run].remove(step)


def put_final_model(world: World) -> None:
    """Put what a trainer exports at the end into the run's folder itself."""
    run = world.any_run()
    for kind, name in (("config", "config.json"), ("safetensors", "model.safetensors")):
        if not (world.sandbox / run / name).exists():
            world.samples.put(kind, 8, world.sandbox / run / name)


def shuffle_times(world: World) -> None:
    """Give everything times of no meaning, as a copy does; only names that count are in order."""
    if all(world.layouts[run].told for run in world.runs):
        for path in world.sandbox.rglob("*"):
            when = world.random.randrange(1_600_000_000, 1_700_000_000)
            os.utime(path, (when, when), follow_symlinks=False)


def leave_a_copy(world: World) -> None:
    """Copy a step under a name that says that it is a copy."""
    step = world.any_step()
    path = world.sandbox / step.entries[0]
    copy = path.with_name(f"backup of {path.name}")
    if not copy.exists() and len(step.entries) == 1:
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, copy)


HAZARDS: tuple[Callable[[World], None], ...] = (
    damage,
    point,
    point,
    point_from_above,
    point_from_another_run,
    point_in_trainer_state,
    point_by_number,
    mark_unfinished,
    link_to,
    link_out_of,
    nest,
    put_strangers,
    rotate,
    put_final_model,
    stage,
    put_run_outside,
    hard_link,
    shuffle_times,
    leave_a_copy,
)
