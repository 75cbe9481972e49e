"""Cold data is requested early; bytes never differ."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ckptool.errors import Damaged
from ckptool.storage import read_ahead
from ckptool.storage.files import ReadSpan
from ckptool.storage.local import LocalSource
from ckptool.storage.read_ahead import cached_bytes

MIB = 1 << 20
SIZE = 24 * MIB + 4321


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(1).randbytes(SIZE)


@pytest.fixture
def file(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "f"
    path.write_bytes(data)
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def cached(path: Path, start: int = 0, nbytes: int = SIZE) -> int:
    with open(path, "rb") as stream:
        found = cached_bytes(stream.fileno(), start, nbytes)
    if found is None:
        pytest.skip("this kernel does not say what is cached")
    return found


def require_cold(path: Path) -> None:
    if cached(path):
        pytest.skip("this file system keeps its pages")


def read_all(path: Path, data: bytes, step: int = MIB) -> None:
    with closing(LocalSource.folder(path.parent).reader()) as reader:
        for start in range(0, SIZE, step):
            buffer = memoryview(bytearray(min(step, SIZE - start)))
            reader.read_into("f", start, buffer)
            assert buffer == data[start : start + len(buffer)]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("step", [MIB, 700_001])
def test_every_byte_is_read(
    known: bool, step: int, file: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known:
        monkeypatch.setattr(read_ahead, "_CACHESTAT", -1)
    read_all(file, data, step)


def test_who_takes_no_advice_reads_all_the_same(
    file: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: int) -> None:
        raise OSError(errno.ENOSYS, "not implemented")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    read_all(file, data)


def test_what_follows_is_asked_for(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the kernel reads ahead by itself, and when."""
    asked: list[int] = []
    monkeypatch.setattr(read_ahead, "cached_bytes", lambda *_: 0)
    monkeypatch.setattr(read_ahead, "will_need", lambda _, start, n: asked.append(start + n))
    with closing(LocalSource.folder(file.parent).reader()) as reader:
        for start in range(4):
            reader.read_into("f", start * MIB, memoryview(bytearray(MIB)))
    assert max(asked) >= 8 * MIB


def test_a_single_read_asks_for_nothing_more(file: Path) -> None:
    require_cold(file)
    with closing(LocalSource.folder(file.parent).reader()) as reader:
        for start in (20 * MIB, 3 * MIB, 9 * MIB):
            reader.read_into("f", start, memoryview(bytearray(2048)))
    assert cached(file) < 2 * MIB


def test_a_plan_asks_ahead_and_ends(file: Path) -> None:
    require_cold(file)
    source = LocalSource.folder(file.parent)
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    asked = threading.Event()

    def runs() -> Iterator[ReadSpan]:
        yield "f", 0, SIZE
        asked.set()

    end = source.plan_reads(runs())
    assert asked.wait(60)
    end()
    assert cached(file) >= SIZE
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)


def test_a_plan_asks_no_further_than_a_little_ahead(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much is planned: a disk answers what is far ahead before what is needed."""
    reached, going_on = [0], threading.Event()

    def will_need(_: int, start: int, nbytes: int) -> None:
        reached[0] = max(reached[0], start + nbytes)
        if start + nbytes >= 6 * MIB:
            going_on.set()

    monkeypatch.setattr(read_ahead, "_FURTHEST", 4 * MIB)
    monkeypatch.setattr(read_ahead, "cached_bytes", lambda *_: 0)
    monkeypatch.setattr(read_ahead, "will_need", will_need)
    source = LocalSource.folder(file.parent)
    end = source.plan_reads(("f", start * MIB, MIB) for start in range(20))
    assert not going_on.wait(0.05)
    assert reached[0] <= 5 * MIB
    with closing(source.reader()) as reader:
        reader.read_into("f", 21 * MIB, memoryview(bytearray(2 * MIB)))
    assert going_on.wait(60)
    end()
    assert reached[0] >= 6 * MIB


def test_what_cannot_be_asked_for_is_left_to_its_reader(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "f").write_bytes(b"x")
    source = LocalSource.folder(tmp_path)
    source.expect([("f", 1 << 63, 1), ("f", 0, 1 << 64)])
    source.plan_reads([("f", 1 << 63, 1)])()
    assert not capfd.readouterr().err
    (tmp_path / "f").unlink()
    source.expect([("f", 0, 1)])
    source.plan_reads([("f", 0, 1)])()


def test_a_file_that_ends_early_is_damaged(file: Path) -> None:
    with (
        closing(LocalSource.folder(file.parent).reader()) as reader,
        pytest.raises(Damaged, match="truncated"),
    ):
        reader.read_into("f", SIZE - 100, memoryview(bytearray(MIB)))
