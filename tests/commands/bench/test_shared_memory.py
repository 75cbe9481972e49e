"""Shared memory that the benchmark's processes held, and what others made meanwhile."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ckptool.commands.bench.shared_memory import SharedMemory


@pytest.fixture
def head() -> Iterator[str]:
    """Begins the names of a test's files."""
    head = f"/dev/shm/ckptool-test-{os.getpid()}-"
    yield head
    for path in Path("/dev/shm").glob(f"{Path(head).name}*"):
        path.unlink()


def test_only_what_a_process_was_seen_to_hold_is_its_own(head: str) -> None:
    Path(head + "before").touch()
    shared, me = SharedMemory(), psutil.Process()
    Path(head + "closed").write_bytes(b"of another program, for all that is known")
    with open(head + "open", "wb"), open(head + "before"), open(head + "mapped", "w+b") as stream:
        stream.write(b"mapped")
        stream.flush()
        mapped = mmap.mmap(stream.fileno(), 6)
        stream.close()
        shared.look([me])
        assert shared.left() == []  # held
        held = [Path(head + "mapped"), Path(head + "open")]
        assert shared.left({me.pid}) == held
    mapped.close()
    assert shared.left() == held
    shared.remove_left()
    assert sorted(Path("/dev/shm").glob(f"{Path(head).name}*")) == [
        Path(head + "before"),
        Path(head + "closed"),
    ]


def test_what_another_made_under_the_same_name_is_not(head: str) -> None:
    shared, path = SharedMemory(), Path(head + "again")
    with open(path, "wb"):
        shared.look([psutil.Process()])
        path.unlink()
        path.write_bytes(b"another")
    shared.remove_left()
    assert path.read_bytes() == b"another"


def test_what_another_process_has_open_stays(head: str) -> None:
    shared, path = SharedMemory(), Path(head + "used")
    program = "import sys; held = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
    with open(path, "wb"):
        shared.look([psutil.Process()])
        line, pipe = [sys.executable, "-c", program, str(path)], subprocess.PIPE
        user = subprocess.Popen(line, stdin=pipe, stdout=pipe)
    with user:
        assert user.stdout is not None
        user.stdout.readline()
        assert shared.left() == []
        user.communicate()
    assert shared.left() == [path]
