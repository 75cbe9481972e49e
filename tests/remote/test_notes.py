"""Notes in a store that others wrote: nothing but an unfinished output is touched."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from note_mutations import NAMES, mutate
from places import file_system, in_store
from store_server import S3, s3, server

from ckptool.commands.convert import prepare
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import MAX_SHARD_SIZE, ConvertOptions, TransferOptions
from ckptool.engine.share import Share
from ckptool.engine.write import send, store_notes
from ckptool.engine.write.removal import leftovers
from ckptool.engine.write.store_target import StoreTarget
from ckptool.errors import CkptoolError, Unsupported
from ckptool.storage import multipart
from ckptool.storage.commit_note import UNFINISHED
from ckptool.storage.url import RemotePath, location

CASES = 500
QUICK = RunOptions(workers=1, fsync=False)
MINE = ("victim/thesis.txt", "run/x", "run/.other.partial.journal", "run/m/train.py", "run/m/src/a")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "m.pt"
    torch.save({n: torch.arange(240.0) + at for at, n in enumerate("abcd")} | {"step": 3}, path)
    return path


def planned(source: Path, target: RemotePath, to: str, **more: Any) -> Any:
    transfer = TransferOptions(run=QUICK, **more)
    size = 1_200 if to == "hf" else MAX_SHARD_SIZE.default
    return prepare(source, target, ConvertOptions(to, max_shard_size=size, transfer=transfer))


class Bucket:
    """A store in memory in which a run was interrupted, as often as it is needed."""

    def __init__(self, source: Path, name: str, to: str) -> None:
        self.name = uuid.uuid4().hex
        self.target = in_store(f"memory://{self.name}/run/{name}")
        self._source, self._to = source, to
        self._work: dict[str, Any] = {}
        self._saved: dict[str, Any] = {}

    def work(self, **more: Any) -> Any:
        """The run of an option, which is planned once."""
        vars(self.target).pop("listing", None)
        key = repr(more)
        if key not in self._work:
            self._work[key] = planned(self._source, self.target, self._to, **more)
        return self._work[key]

    def write(self, name: str, data: bytes) -> None:
        file_system(self.target).pipe_file(f"/{self.name}/{name}", data)

    def keys(self) -> dict[str, Any]:
        head = f"/{self.name}/"
        store = MemoryFileSystem.store
        return {key: file for key, file in store.items() if key.startswith(head)}

    def content(self) -> dict[str, bytes]:
        head = len(f"/{self.name}/")
        return {key[head:]: file.getvalue() for key, file in self.keys().items()}

    def save(self) -> None:
        self._saved = self.keys()

    def restore(self) -> None:
        """Put back what was saved: the same objects, as their times are noted."""
        for key in self.keys():
            del MemoryFileSystem.store[key]
        MemoryFileSystem.store.update(self._saved)

    @property
    def notes(self) -> list[str]:
        return [n for n in self.content() if UNFINISHED in n or f"{self.target.name}.partial" in n]


def killed(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed at its third file, or its last."""
    begun: list[RemotePath] = []

    def upload(place: RemotePath, *more: Any) -> None:
        begun.append(place)
        if len(begun) == (1 if bucket.target.name != "m" else 3):
            raise KeyboardInterrupt
        multipart.upload(place, *more)

    monkeypatch.setattr(send, "upload", upload)
    with pytest.raises(KeyboardInterrupt):
        bucket.work().run()


def parts_done(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for position in range(3):
        bucket.work(part=Share(position, 3)).run()


def parts_half_committed(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    parts_done(bucket, monkeypatch)

    def publish(target: StoreTarget) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StoreTarget, "publish", publish)
    with pytest.raises(KeyboardInterrupt):
        bucket.work(finish=True).run()


State = tuple[str, str, Callable[..., None], list[dict[str, Any]]]
STATES: dict[str, State] = {
    "folder": ("m", "hf", killed, [{"resume": True}, {}, {"overwrite": True}]),
    "file": ("m.safetensors", "safetensors", killed, [{"resume": True}, {}, {"overwrite": True}]),
    "parts": ("m", "hf", parts_done, [{"finish": True}, {"part": Share(1, 3)}, {}]),
    "ended parts": ("m", "hf", parts_half_committed, [{"finish": True}, {"overwrite": True}]),
}


@pytest.fixture(scope="module", params=STATES)
def interrupted(
    request: pytest.FixtureRequest, source: Path
) -> Iterator[tuple[Bucket, list[dict[str, Any]], dict[str, bytes]]]:
    name, to, interrupt, then = STATES[request.param]
    bucket = Bucket(source, name, to)
    bucket.work().run()
    truth = bucket.content()
    bucket.restore()
    with pytest.MonkeyPatch.context() as patched:
        interrupt(bucket, patched)
    bucket.save()
    yield bucket, then, truth
    bucket.save()


def go_on(bucket: Bucket, how: dict[str, Any], truth: dict[str, bytes]) -> str:
    """What follows: it refuses, or ends with the right output and nothing left."""
    mine = {name: data for name, data in bucket.content().items() if name in MINE}
    work, refusal = bucket.work(**how), None
    requests = bucket.target.store.traffic.requests
    try:
        work.run()
    except CkptoolError as error:
        refusal = error
    after = bucket.content()
    assert {name: data for name, data in after.items() if name in MINE} == mine
    assert bucket.target.store.traffic.requests - requests < 200
    if refusal is not None:
        assert refusal.exit_code in (3, 4, 5)
        return f"{refusal.message} hint: {refusal.hint}"
    if "part" not in how:
        assert {name: data for name, data in after.items() if name not in MINE} == truth
    return ""


def test_the_notes_themselves_are_followed(interrupted: Any) -> None:
    bucket, then, truth = interrupted
    for how in then:
        bucket.restore()
        said = go_on(bucket, how, truth)
        assert not said or "--part K/N continues" in said


@pytest.mark.parametrize("seed", range(2))
def test_a_mutated_note_reaches_nothing_else(seed: int, interrupted: Any) -> None:
    bucket, then, truth = interrupted
    rng = random.Random(seed)
    names = [*NAMES, *MINE, f"/{bucket.name}/victim/thesis.txt", "src/a", bucket.target.name]
    refused = 0
    for _ in range(CASES // 2):
        bucket.restore()
        for name in MINE if bucket.target.name == "m" and rng.random() < 0.7 else MINE[:3]:
            bucket.write(name, b"precious")
        for name in rng.sample(bucket.notes, 1):
            bucket.write(name, mutate(bucket.content()[name], rng, names))
        refused += go_on(bucket, rng.choice(then), truth) != ""
    assert refused > CASES // 20


def test_files_that_only_a_note_knows_stay(source: Path) -> None:
    """A folder that was copied to a store with a note; it names all files there."""
    bucket = Bucket(source, "m", "hf")
    bucket.work().run()
    bucket.write("run/m/train.py", b"mine")
    names = [name.removeprefix("run/m/") for name in bucket.content()]
    note = {"schema": "ckptool.journal/1", "plan": "p", "source": "s", "files": names}
    bucket.write(f"run/m/{UNFINISHED}", json.dumps(note).encode())
    before = bucket.content()
    with pytest.raises(Unsupported, match="already exists"):
        bucket.work().run()
    with pytest.raises(Unsupported, match=r"unfinished\.json: speaks of train.py"):
        bucket.work(overwrite=True).run()
    assert bucket.content() == before


def test_no_number_in_a_note_makes_requests(source: Path, s3: S3) -> None:
    target = in_store(s3.url("m"))
    note = {"schema": "ckptool.journal/1", "plan": "p", "source": "s", "parts": 999_999}
    choices: list[dict[str, Any]] = [{}, {"overwrite": True}, {"finish": True}]
    choices.append({"part": Share(0, 2)})
    for parts in (999_999, 10**9):
        s3.write(f"m/{UNFINISHED}", json.dumps(note | {"parts": parts}).encode())
        for more in choices:
            s3.requests.clear()
            with suppress(CkptoolError):
                planned(source, target, "hf", **more).run()
            assert len(s3.requests) < 60
            s3.write(f"m/{UNFINISHED}", json.dumps(note | {"parts": parts}).encode())


def test_a_removal_is_only_ended_where_its_note_says_nothing_else(source: Path) -> None:
    bucket = Bucket(source, "step-2", "hf")
    bucket.work().run()
    real = json.dumps({"schema": "ckptool.removal/1"}).encode()
    place, rng, obeyed = f"run/step-2/{UNFINISHED}", random.Random(1), 0
    for _ in range(CASES):
        data = mutate(real, rng)
        bucket.write(place, data)
        if [*leftovers(location(str(bucket.target.parent)))]:
            assert json.loads(data) == json.loads(real)  # with more space between its words
            obeyed += 1
    assert obeyed < CASES // 5
    bucket.write(place, real)
    with pytest.raises(Unsupported, match="removal was interrupted") as caught:
        bucket.work().run()
    assert "ckptool prune" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["m", "m.safetensors"])
def test_a_note_of_any_size_is_not_fetched(
    name: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a single file nothing is listed: there it is fetched, and refused."""
    bucket = Bucket(source, name, "hf" if name == "m" else "safetensors")
    note = f"run/m/{UNFINISHED}" if name == "m" else f"run/.{name}.partial.journal"
    bucket.write(note, b"0" * 2_000)
    monkeypatch.setattr(store_notes, "LARGEST", 1_000)
    fetched: list[str] = []
    real = RemotePath.read_bytes

    def read_bytes(path: RemotePath) -> bytes:
        fetched.append(path.name)
        return real(path)

    monkeypatch.setattr(RemotePath, "read_bytes", read_bytes)
    for more in ({}, {"overwrite": True}, {"resume": True}, {"part": Share(0, 2)}):
        with pytest.raises(Unsupported, match="is not as ckptool writes it"):
            bucket.work(**more).run()
    assert bool(fetched) == (name != "m")
