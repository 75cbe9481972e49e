"""Python commands in processes that are forked from one that has torch imported.

A process of its own that imports torch costs seconds, and most of what tests start does so. The
commands run as ``python`` runs them, up to the end of the interpreter; what they have in common is
what the import leaves behind, and the seed of hashes.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

IMPORTED = (
    "ckptool.api.commands",
    "ckptool.cli.app",
    "ckptool.dcp",
    "safetensors.torch",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.nn",
    "torch.distributed.tensor.parallel",
)
"""What the commands of tests use that is slow to import."""
_LARGEST = 1 << 17
"""Bytes of the longest request."""


class Forked:
    """A command that a fork of the server runs, with a pipe on which its end is heard."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], cwd: Path) -> None:
        self._said = [os.memfd_create(name) for name in ("stdout", "stderr")]
        heard, told = os.pipe()
        request = {"words": words, "environment": dict(environment), "cwd": str(cwd)}
        socket.send_fds(_server(), [json.dumps(request).encode()], [*self._said, told])
        os.close(told)
        self._heard = os.fdopen(heard, "rb", buffering=0)
        self.pid = int(self._heard.read(8))
        self.returncode: int | None = None

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end; what the command wrote."""
        if not select.select([self._heard], [], [], timeout)[0]:
            raise TimeoutError(f"process {self.pid} runs for more than {timeout:g} s")
        self.returncode = int(self._heard.read(8))
        return self._text(self._said[0]), self._text(self._said[1])

    def _text(self, file: int) -> str:
        return os.pread(file, os.fstat(file).st_size, 0).decode()

    def kill(self) -> None:
        """End the command if it runs, and let go of all that is its."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._heard.close()
        for file in self._said:
            os.close(file)


@cache
def _server() -> socket.socket:
    """The way to a server of this process, which ends with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    theirs.close()
    return ours


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Fork a process for each request; the request, in that process alone."""
    running: dict[int, int] = {}
    wake, wakened = os.pipe()
    os.set_blocking(wakened, False)
    signal.set_wakeup_fd(wakened)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        readable, _, _ = select.select([requests, wake], [], [])
        if wake in readable:
            os.read(wake, 512)
            _reap(running)
        if requests in readable:
            data, given, _, _ = socket.recv_fds(requests, _LARGEST, 3)
            if not data:
                os._exit(0)
            process = os.fork()
            if process == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _become(given, [wake, wakened, requests.detach(), *running.values()])
                return json.loads(data)
            os.write(given[2], f"{process:8}".encode())
            running[process] = given[2]
            os.close(given[0])
            os.close(given[1])


def _reap(running: dict[int, int]) -> None:
    """Tell the ends of processes."""
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if not process:
            return
        told = running.pop(process)
        with suppress(BrokenPipeError):
            os.write(told, f"{os.waitstatus_to_exitcode(status):8}".encode())
        os.close(told)


def _become(given: list[int], unused: list[int]) -> None:
    """Take the files given as stdout and stderr, and let go of what is the server's."""
    for number in (1, 2):
        os.dup2(given[number - 1], number)
    for number in (*given, *unused):
        os.close(number)


def _prepare(request: dict[str, Any]) -> tuple[str, str]:
    """Make this process one that ``python`` started: what is to run, and how it is given."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    way, *words = request["words"]
    if way not in ("-m", "-c"):
        sys.path[0], sys.argv = str(Path(way).parent), [way, *words]
        return "script", way
    sys.path[0] = request["cwd"] if way == "-m" else ""
    sys.argv = [way, *words[1:]]
    return way, words[0]


if __name__ == "__main__":
    _requests = socket.socket(fileno=int(sys.argv[1]))
    for _name in IMPORTED:
        import_module(_name)
    gc.collect()
    gc.freeze()
    _way, _what = _prepare(_serve(_requests))
    if _way == "-m":
        runpy.run_module(_what, run_name="__main__", alter_sys=True)
    elif _way == "script":
        runpy.run_path(_what, run_name="__main__")
    else:
        _main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(_what, "<string>", "exec"), _main.__dict__)
