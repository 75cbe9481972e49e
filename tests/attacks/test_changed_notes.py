"""Hidden notes beside a target that others wrote: nothing outside is touched, nothing wrong counts.

Each real note of an interrupted run is changed in hundreds of ways; what follows either refuses or
ends with the right output.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from note_mutations import KINDS, NAMES, mutate
from trials import trials

from ckptool.commands.convert import prepare
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import MAX_SHARD_SIZE, ConvertOptions, TransferOptions
from ckptool.commands.runs.prune.strip import finish_strips
from ckptool.engine.share import Share
from ckptool.engine.write import commit
from ckptool.engine.write.journal import Journal
from ckptool.errors import CkptoolError

pytestmark = pytest.mark.trials
CASES = trials(80)
"""Mutations of the notes of each interrupted run."""
MEMORY = "/dev/shm"
"""Where thousands of small files cost no time of a disk."""
QUICK = RunOptions(workers=1, fsync=False)
MINE = {"train.py": "mine", "model.py": "also mine"}


class Stop(BaseException):
    """The end of a process that is killed."""


def stop(*words: Any, **more: Any) -> Any:
    raise Stop


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "m.pt"
    torch.save({n: torch.arange(240.0) + at for at, n in enumerate("abcd")} | {"step": 3}, path)
    return path


class Place:
    """A folder in which a run was interrupted, as often as it is needed, and what lies around."""

    def __init__(self, folder: Path, source: Path, name: str, to: str) -> None:
        self.folder, self.target, self.outside = folder / "place", folder / "place" / name, folder
        self._source, self._to = source, to
        self._work: dict[str, Any] = {}
        self._notes: dict[Path, bytes] = {}
        self._restored: list[tuple[Any, ...]] = []
        self.folder.mkdir()
        (folder / "victim").mkdir()
        (folder / "victim" / "thesis.txt").write_text("precious")
        (folder / "x").write_text("precious too")
        self._around = self.around()

    def work(self, **more: Any) -> Any:
        """The run of an option, which is planned once."""
        key = repr(more)
        if key not in self._work:
            transfer = TransferOptions(run=QUICK, **more)
            size = 1_200 if self._to == "hf" else MAX_SHARD_SIZE.default
            options = ConvertOptions(self._to, max_shard_size=size, transfer=transfer)
            self._work[key] = prepare(self._source, self.target, options)
        return self._work[key]

    def around(self) -> dict[str, Any]:
        """All that lies outside the folder."""
        tops = [
            path for path in self.outside.iterdir() if path.name not in ("place", "saved", "note")
        ]
        found = {path: path.lstat() for top in tops for path in (top, *top.rglob("*"))}
        return {str(p): (now.st_mode, now.st_mtime_ns, now.st_size) for p, now in found.items()}

    def put_mine(self) -> None:
        """What is nobody's business: beside the target, and in a folder also within it."""
        (self.folder / "notes.txt").write_text("mine")
        (self.folder / ".other.partial").mkdir()
        (self.folder / ".other.partial" / "draft.txt").write_text("mine")
        if self.target.is_dir():
            (self.target / "train.py").write_text("mine")
            (self.target / "src").mkdir()
            (self.target / "src" / "model.py").write_text("also mine")

    def save(self) -> None:
        self.saved = self.outside / "saved"
        self._inodes = {p.lstat().st_ino: p.relative_to(self.folder) for p in self._all()}
        shutil.copytree(self.folder, self.saved, symlinks=True)

    def _all(self) -> Iterator[Path]:
        return self.folder.rglob("*")

    def restore(self) -> None:
        """Put back what was saved; the notes have the inodes and times of these copies."""
        if self._restored and self._restored == self._now():
            for note, data in self._notes.items():
                note.write_bytes(data)
            return
        shutil.rmtree(self.folder)
        shutil.copytree(self.saved, self.folder, symlinks=True)
        for note in self.folder.glob(".*.journal.*"):
            lines = note.read_bytes().splitlines(keepends=True)
            with suppress(ValueError):
                note.write_bytes(b"".join(map(self._renewed, lines)))
        self._notes = {note: note.read_bytes() for note in notes_of(self)}
        self._restored = self._now()

    def _now(self) -> list[tuple[Any, ...]]:
        """What is in the folder, whatever the notes say."""
        notes, found = {*self._notes}, sorted(self._all())
        found_as: list[tuple[Any, ...]] = []
        for path in found:
            now = path.lstat()
            content = (0, 0) if path in notes else (now.st_mtime_ns, now.st_size)
            found_as.append((path, now.st_ino, now.st_uid, now.st_mode, now.st_nlink, *content))
        return found_as

    def _renewed(self, line: bytes) -> bytes:
        value = json.loads(line)
        if not isinstance(value, dict):
            return line
        for key in ("new", "old"):
            if value.get(key) in self._inodes:
                value[key] = (self.folder / self._inodes[value[key]]).lstat().st_ino
        for name, mark in value.get("part", {}).get("files", {}).items():
            staged = self.target.with_name(f".{self.target.name}.partial") / name
            mark[2] = staged.lstat().st_ctime_ns
        return json.dumps(value).encode() + b"\n" * line.endswith(b"\n")

    def content(self) -> dict[str, bytes]:
        """What the target holds, without what is mine."""
        files = [p for p in self.target.rglob("*") if p.is_file()] or [self.target]
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in files
            if path.name not in MINE
        }

    def require_sound(self, before: dict[str, str]) -> None:
        assert self.around() == self._around
        assert self.mine() == before

    def mine(self) -> dict[str, str]:
        """What is not ckptool's, wherever it lies in the folder, by its last name."""
        names = (*MINE, "notes.txt", "draft.txt")
        found = (p for p in self._all() if p.name in names and not p.is_symlink())
        return {path.name: path.read_text() for path in found}


def staged_files(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed once it has finished a file, over an older output."""
    done = Journal.done

    def once(self: Journal, *words: Any) -> None:
        done(self, *words)
        raise Stop

    monkeypatch.setattr(Journal, "done", once)
    with pytest.raises(Stop):
        place.work(overwrite=True).run()


def noted_commit(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that is killed once it is noted."""
    monkeypatch.setattr(commit, "keep_modes", stop)
    monkeypatch.setattr(commit, "keep_mode", stop)
    with pytest.raises(Stop):
        place.work(overwrite=True).run()


def half_commit(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that is killed once the new one is in place."""
    monkeypatch.setattr(commit.FolderCommit, "clear", stop)
    monkeypatch.setattr(commit.FileCommit, "clear", stop)
    with pytest.raises(Stop):
        place.work(overwrite=True).run()


def finished_parts(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for position in range(3):
        place.work(part=Share(position, 3), overwrite=True).run()


STATES: dict[str, tuple[str, str, Callable[..., None], list[dict[str, Any]]]] = {
    "journal": ("m", "hf", staged_files, [{"resume": True}, {}]),
    "commit": ("m", "hf", noted_commit, [{"resume": True}, {}]),
    "half a commit": ("m", "hf", half_commit, [{"resume": True}, {}]),
    "commit of a file": ("m.safetensors", "safetensors", noted_commit, [{"resume": True}, {}]),
    "half of a file": ("m.safetensors", "safetensors", half_commit, [{"resume": True}, {}]),
    "parts": ("m", "hf", finished_parts, [{"finish": True}, {"part": Share(1, 3)}, {}]),
}


@pytest.fixture(scope="module", params=STATES)
def interrupted(
    request: pytest.FixtureRequest, source: Path
) -> Iterator[tuple[Place, list[dict[str, Any]], dict[str, bytes]]]:
    name, to, interrupt, then = STATES[request.param]
    with TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as folder:
        place = Place(Path(folder), source, name, to)
        place.work().run()
        truth = place.content()
        place.put_mine()
        with pytest.MonkeyPatch.context() as patched:
            interrupt(place, patched)
        place.save()
        yield place, then, truth


def notes_of(place: Place) -> list[Path]:
    own = f".{place.target.name}.partial.journal."
    return sorted(p for p in place.folder.iterdir() if p.name.startswith(own))


def go_on(place: Place, how: dict[str, Any], truth: dict[str, bytes]) -> str:
    """What follows: it refuses, or ends with the right output and nothing left."""
    before, refusal = place.mine(), None
    try:
        place.work(**({"overwrite": True, **how} if "resume" not in how else how)).run()
    except CkptoolError as error:
        refusal = error
    place.require_sound(before)
    if refusal is not None:
        assert refusal.exit_code in (3, 4, 5)
        return refusal.message
    if "part" not in how:
        assert place.content() == truth
        assert not notes_of(place)
    return ""


def test_the_notes_themselves_are_followed(interrupted: Any) -> None:
    """What is mutated below is not refused for another reason."""
    place, then, truth = interrupted
    for how in then:
        place.restore()
        assert go_on(place, how, truth) == ""


@pytest.mark.parametrize("seed", range(4))
def test_a_mutated_note_reaches_nothing_else(seed: int, interrupted: Any) -> None:
    place, then, truth = interrupted
    rng = random.Random(seed)
    names = [*NAMES, str(place.outside / "victim" / "thesis.txt"), place.target.name]
    refused = 0
    for _ in range(CASES // 4):
        place.restore()
        notes = notes_of(place)
        for note in rng.sample(notes, min(len(notes), rng.choice([1, 1, 2]))):
            note.write_bytes(mutate(note.read_bytes(), rng, names))
        if rng.random() < 0.1:
            with suppress(OSError):
                staged = place.target.with_name(f".{place.target.name}.partial")
                (staged / "link").symlink_to(place.outside / "victim")
        if rng.random() < 0.2:
            before = place.mine()
            with suppress(CkptoolError):
                finish_strips(place.folder)
            place.require_sound(before)
        refused += go_on(place, rng.choice(then), truth) != ""
    assert refused > CASES // 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_note_that_is_not_ones_own_file_is_refused_with_its_path(
    kind: Callable[[Path, Path], None], interrupted: Any
) -> None:
    place, then, truth = interrupted
    place.restore()
    for name in [note.name for note in notes_of(place)]:
        place.restore()
        kind(place.folder / name, place.outside)
        kept = stat.S_IFMT((place.folder / name).lstat().st_mode)
        assert str(place.folder / name) in go_on(place, then[0], truth)
        assert stat.S_IFMT((place.folder / name).lstat().st_mode) == kept
        (place.outside / "note").unlink(missing_ok=True)
