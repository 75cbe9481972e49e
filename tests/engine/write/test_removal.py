"""Removal from a disk and from a store, what an interrupted one leaves, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from engine.write.trees import content, fill
from fault_server import DENIED, REMOVALS
from places import in_store
from store_server import S3, s3, server

from ckptool.engine.write.removal import clear, is_leftover, leftovers, remove, remove_file
from ckptool.errors import TransferError, Unsupported
from ckptool.storage.commit_note import UNFINISHED

__all__ = ["s3", "server"]
FILES = {"a": b"1", "sub/b": b"22"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with two steps, and another folder beside it."""
    fill(tmp_path / "elsewhere", FILES)
    for number in (1, 2):
        fill(tmp_path / "run" / f"step-{number}", FILES)
    return tmp_path / "run"


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def left_of(step: Path) -> Path:
    """What a removal that was killed leaves of a step."""
    return step.with_name(f".{step.name}.ckptool-removed")


# On a disk


def test_a_folder_is_removed(run: Path) -> None:
    remove(run / "step-1")
    assert names(run) == ["step-2"]


def test_a_file_goes_with_the_one_beside_it(run: Path) -> None:
    fill(run, {"m.safetensors": b"", "m.extra.pt": b"", "n.extra.pt": b""})
    remove(run / "m.safetensors", run / "m.extra.pt")
    assert names(run) == ["n.extra.pt", "step-1", "step-2"]


def test_one_file_of_a_checkpoint_goes_alone(run: Path) -> None:
    remove_file(run / "step-1" / "sub" / "b")
    assert content(run / "step-1") == {"a": b"1"}


def test_of_a_link_only_the_link_goes(run: Path) -> None:
    (run / "latest").symlink_to("../elsewhere")
    (run / "step-1" / "around").symlink_to(run.parent / "elsewhere")
    remove(run / "latest")
    remove(run / "step-1")
    assert names(run) == ["step-2"]
    assert content(run.parent / "elsewhere") == FILES


@pytest.mark.parametrize("work", [remove, remove_file])
def test_what_is_not_there_cannot_be_removed(work: Callable[[Path], None], run: Path) -> None:
    with pytest.raises(TransferError, match="step-3: cannot be removed: No such file"):
        work(run / "step-3")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may remove everything")
def test_what_may_not_be_removed_stays_under_its_name(run: Path) -> None:
    run.chmod(0o500)
    with pytest.raises(TransferError, match="step-1: cannot be removed: Permission denied"):
        remove(run / "step-1")
    assert content(run / "step-1") == FILES


def test_what_a_killed_removal_left_is_found_and_cleared(run: Path) -> None:
    (run / "step-1").rename(left_of(run / "step-1"))
    (left_of(run / "step-1") / "a").unlink()
    fill(run, {".m.safetensors.ckptool-removed": b""})
    found = list(leftovers(run))
    assert found == [run / ".m.safetensors.ckptool-removed", left_of(run / "step-1")]
    for path in found:
        clear(path)
    assert names(run) == ["step-2"]
    clear(found[0])


def test_what_an_earlier_removal_left_of_the_same_name_goes_first(run: Path) -> None:
    fill(left_of(run / "step-1"), {"of the earlier": b""})
    remove(run / "step-1")
    assert names(run) == ["step-2"]


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        (".step-1.ckptool-removed", True),
        ("step-1.ckptool-removed", False),
        (".step-1", False),
        (".step-1.ckptool-removed.txt", False),
    ],
)
def test_the_name_tells_what_a_removal_has_left(name: str, is_one: bool) -> None:
    assert is_leftover(name) is is_one


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_folder_of_another_user_under_such_a_name_stays(run: Path) -> None:
    left = fill(left_of(run / "step-1"), FILES)
    os.chown(left, 1234, 1234)
    with pytest.raises(Unsupported, match="belongs to another user"):
        clear(left)
    assert content(left) == FILES


# In a store


@pytest.fixture
def stored(s3: S3) -> S3:
    """A store with two steps."""
    for number in (1, 2):
        for name, data in FILES.items():
            s3.write(f"run/step-{number}/{name}", data)
    s3.requests.clear()
    return s3


STEP_2 = {f"step-2/{name}": data for name, data in FILES.items()}


def test_a_note_keeps_readers_away_until_all_is_removed(stored: S3) -> None:
    remove(in_store(stored.url("run/step-1")))
    assert stored.get("run") == STEP_2
    changes = [
        (one.operation, one.key.removeprefix("run/step-1/"))
        for one in stored.of("PutObject", *REMOVALS)
    ]
    assert changes == [
        ("DeleteObject", f".{UNFINISHED}.partial"),
        ("PutObject", UNFINISHED),
        ("DeleteObject", "a"),
        ("DeleteObject", "sub/b"),
        ("DeleteObject", UNFINISHED),
    ]


def test_one_object_goes_with_the_one_beside_it(stored: S3) -> None:
    for name in ("m.safetensors", "m.extra.pt", "n.extra.pt"):
        stored.write(f"run/{name}", b"")
    place = in_store(stored.url("run/m.safetensors"))
    remove(place, place.with_name("m.extra.pt"))
    assert {name for name in stored.get("run") if "/" not in name} == {"n.extra.pt"}
    assert not stored.of("PutObject")


def test_one_object_of_a_checkpoint_goes_alone(stored: S3) -> None:
    remove_file(in_store(stored.url("run/step-1/sub/b")))
    assert stored.get("run/step-1") == {"a": b"1"}


def test_a_store_that_lets_nothing_go_keeps_a_checkpoint_that_can_be_read(stored: S3) -> None:
    """No note stays on it for ever."""
    stored.fail(DENIED, *REMOVALS)
    with pytest.raises(TransferError, match=r"step-1: cannot be removed: .*a test removal"):
        remove(in_store(stored.url("run/step-1")))
    assert stored.get("run/step-1") == FILES


@pytest.mark.parametrize("number", [2, 3, 4])
def test_what_an_interrupted_removal_left_is_found_and_cleared(number: int, stored: S3) -> None:
    """From each removal after the first, which is a test, on."""
    stored.fail(DENIED, *REMOVALS, start=number)
    with pytest.raises(TransferError, match="step-1: cannot be removed"):
        remove(in_store(stored.url("run/step-1")))
    stored.heal()
    left = stored.get("run/step-1")
    assert left.keys() == {UNFINISHED, *[*FILES][number - 2 :]}
    assert json.loads(left[UNFINISHED]) == {"schema": "ckptool.removal/1"}
    (found,) = leftovers(in_store(stored.url("run")))
    assert str(found) == stored.url("run/step-1")
    clear(found)
    assert stored.get("run") == STEP_2
    assert not list(leftovers(in_store(stored.url("run"))))


@pytest.mark.parametrize(
    "note", [b'{"schema": "ckptool.journal/1", "plan": "p", "source": "s"}', b"{}", b"\xff"]
)
def test_a_note_of_another_kind_says_of_no_removal(note: bytes, stored: S3) -> None:
    stored.write(f"run/step-1/{UNFINISHED}", note)
    assert not list(leftovers(in_store(stored.url("run"))))


def test_nothing_is_left_in_a_folder_that_is_not_there(stored: S3) -> None:
    assert not list(leftovers(in_store(stored.url("elsewhere"))))
