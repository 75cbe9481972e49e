"""Writing commands, killed or failed at every call that changes a file system."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHANGING = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync", "pwrite", "write", "open")
"""What of ``os`` changes a file system; ``open`` only where it makes or empties a file."""
FAULTS = ("KILL", "EIO", "ENOSPC")
_MAKES = os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Call:
    """One call of a run: the ``number``-th of its ``name``."""

    name: str
    number: int


@dataclass
class Ended:
    """How a run ended: its exit code (negative for a signal), its words, and calls it made.

    ``elsewhere`` says that a fault befell the call of another thread, of no file that is written.
    """

    code: int
    words: str
    calls: list[Call]
    elsewhere: bool = False


def run(words: list[str], log: Path, fault: str | None = None, call: Call | None = None) -> Ended:
    """Run a command in a process of its own; ``fault`` befalls its changing ``call``."""
    counted = log.with_suffix(".count")
    counted.unlink(missing_ok=True)
    log.write_text("")
    process = os.fork()
    if process == 0:
        be_child(
            words, os.open(log, os.O_WRONLY), counted, Faults(fault, call.number if call else 0)
        )
    _, status = os.waitpid(process, 0)
    calls = int(counted.read_text()) if counted.exists() else 0
    return ended(status, log, [Call("call", number + 1) for number in range(calls)])


def ended(status: int, log: Path, calls: list[Call]) -> Ended:
    """How a process ended that ``wait`` gave this status of."""
    code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    return Ended(code, log.read_text(), calls)


def be_child(
    words: list[str], log: int, counted: Path | None = None, faults: Faults | None = None
) -> None:
    """Run a command in this process, and end it."""
    code = 99
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # no write of its own meets a fault
    try:
        sys.stdout = sys.stderr = said
        sys.argv = ["ckptool", *words]
        from ckptool.cli import _run

        if faults is not None:
            faults.install()
        code = _run()
        if counted is not None and faults is not None:
            calls = faults.calls
            counted.write_text(str(calls))
    except BaseException as error:
        said.write(f"Traceback: {error!r}")
    finally:
        with suppress(OSError):
            said.flush()
            os.writev(log, [said.buffer.getvalue()])
        os._exit(code)


class Faults:
    """The calls of this process that change a file system, one of which meets a fault."""

    def __init__(self, fault: str | None, at: int) -> None:
        self.calls = 0
        self._fault, self._at = fault, at

    def install(self) -> None:
        """Befall the calls of this process from now on."""
        from ckptool.storage import disk

        for name in CHANGING:
            setattr(os, name, self._wrapped(getattr(os, name), name))
        disk._rename = self._wrapped(disk._rename, "renameat2")

    def _wrapped(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if name != "open" or args[1] & _MAKES:
                self.calls += 1
                if self._fault is not None and self.calls == self._at:
                    self._strike(name, args)
            return real(*args, **more)

        return call

    def _strike(self, name: str, args: tuple[Any, ...]) -> None:
        if self._fault == "KILL":
            os.kill(os.getpid(), signal.SIGKILL)
        number = getattr(errno, str(self._fault))
        raise OSError(number, os.strerror(number), str(args[0]))


@dataclass(frozen=True)
class Trial:
    """A command over an old output: what stands before it, and what must stand after it."""

    words: list[str]
    place: Path
    targets: tuple[str, ...]
    foreign: dict[str, bytes]

    def seen(self) -> dict[str, bytes]:
        """The targets as they are, but for what is foreign in them."""
        return {
            name: data
            for target in self.targets
            for name, data in _content(self.place, self.place / target)
            if name not in self.foreign
        }

    def strangers(self) -> dict[str, bytes]:
        """All that is foreign, wherever it now lies, by the last part of its path."""
        names = {Path(name).name for name in self.foreign}
        found = (path for path in self.place.rglob("*") if path.name in names and path.is_file())
        return {path.name: path.read_bytes() for path in found}

    def leftovers(self) -> list[str]:
        """What ckptool hid beside the targets."""
        return sorted(path.name for path in self.place.iterdir() if path.name.startswith("."))


def _content(root: Path, target: Path) -> Iterator[tuple[str, bytes]]:
    if target.name.endswith(".safetensors"):
        from ckptool.storage.local import LocalSource

        if target.exists():  # with the side file that belongs to it, wherever that lies
            source = LocalSource.file(target)
            for name, size in source.files.items():
                yield name, source.read(name, 0, size)
        return
    paths = [target] if target.is_file() else sorted(target.rglob("*"))
    for path in paths:
        if path.is_file():
            yield str(path.relative_to(root)), _told(path)


def _told(path: Path) -> bytes:
    """The bytes of a file; of a salvage's list not what stays at the target, which a kill hides."""
    data = path.read_bytes()
    if path.name.endswith(".salvage.json"):
        data = json.dumps(json.loads(data) | {"notes": []}).encode()
    return data


def fresh(base: Path, place: Path) -> None:
    """Put a copy of ``base`` at ``place``."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(base, place, symlinks=True)
