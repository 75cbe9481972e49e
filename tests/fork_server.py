"""Python commands in processes forked from one that has imported torch.

A separate process that imports torch costs seconds, and most processes in tests do so. The commands
run as ``python`` runs them; they share the state that the import leaves behind, and the hash seed.
One that ends by itself does everything that ``python`` does at exit but tear down the interpreter,
which takes 0.4 seconds for torch's modules.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import itertools
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

IMPORTED = (
    "ckptool.api.commands",
    "ckptool.cli.app",
    "ckptool.cli.transfer",
    "ckptool.cli.verify",
    "ckptool.dcp",
    "ckptool.formats.dcp.write",
    "ckptool.formats.megatron",
    "ckptool.render.reshard",
    "safetensors.torch",
    "torch._dynamo",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.nn",
    "torch.distributed.tensor.parallel",
)
"""What the commands of tests use that is slow to import."""
FORKING = "import sys; sys.executable = {!r}; from ckptool.cli import main; main()"
"""The command line as a program, with the Python that it and its ranks start others with."""
_FOLDER = "CKPTOOL_TEST_FORKS"
"""Names the folder of the server's socket."""
_FLAGS = ("-u", "-I", "-B")
"""Options of ``python`` that change nothing of what a test looks at."""
_LARGEST = 1 << 17
"""Bytes of the longest request."""


class Forked:
    """A command that a fork of the server runs, as a connection to the server.

    It says the process and then its exit code; where it is closed before, the process is killed.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], cwd: Path) -> None:
        self._said = [os.memfd_create(name) for name in ("stdout", "stderr")]
        self._connection = _ask(_server(), words, environment, cwd, self._said)
        self.pid = int(self._connection.recv(16))
        self.returncode: int | None = None

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end; what the command wrote."""
        self._connection.settimeout(timeout)
        self.returncode = int(self._connection.recv(16))
        return self._text(self._said[0]), self._text(self._said[1])

    def _text(self, file: int) -> str:
        return os.pread(file, os.fstat(file).st_size, 0).decode()

    def kill(self) -> None:
        """End the command if it runs, and let go of all that is its."""
        self._connection.close()
        for file in self._said:
            os.close(file)


def forking_python(folder: Path) -> Path:
    """Make a program that is used as ``python`` is, and lets the server run what it is given."""
    program = folder / "python"
    lines = (
        f"#!{sys.executable} -IS",
        "import sys",
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})",
        "import fork_server",
        f"fork_server.forward({_server()!r})",
    )
    program.write_text("\n".join(lines))
    program.chmod(0o755)
    return program


def forward(place: str) -> None:
    """Let the server at ``place`` run what this program was given, and end as that does."""
    words = list(itertools.dropwhile(_FLAGS.__contains__, sys.argv[1:]))
    connection = _ask(place, words, os.environ, Path.cwd(), [1, 2])
    process = int(connection.recv(16))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(process, number))
    code = int(connection.recv(16))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _ask(
    place: str, words: Sequence[str], environment: Mapping[str, str], cwd: Path, given: list[int]
) -> socket.socket:
    request = {"words": words, "environment": dict(environment), "cwd": str(cwd)}
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(place)
    socket.send_fds(connection, [json.dumps(request).encode()], given)
    return connection


def share() -> None:
    """Let this process and its workers have one server between them."""
    os.environ[_FOLDER] = tempfile.mkdtemp(prefix="forks-")
    atexit.register(shutil.rmtree, os.environ[_FOLDER], ignore_errors=True)


@cache
def _server() -> str:
    """The address of the server, which the first that asks for it starts; it ends with the run."""
    folder = Path(os.environ[_FOLDER])
    place = folder / "socket"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            worker = "PYTEST_XDIST_WORKER" in os.environ
            _start(place, os.getppid() if worker else os.getpid())
    return str(place)


def _start(place: Path, run: int) -> None:
    """Start a server that ends when the process ``run`` does."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(str(place))
    listening.listen()
    ended = os.pidfd_open(run)
    subprocess.Popen(
        [sys.executable, __file__, str(listening.fileno()), str(ended)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[listening.fileno(), ended],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    os.close(ended)


def _serve(listening: socket.socket, ended: int) -> dict[str, Any]:
    """Fork a process for each request; the request, in that process alone."""
    running: dict[int, socket.socket] = {}
    wake, wakened = os.pipe()
    os.set_blocking(wakened, False)
    signal.set_wakeup_fd(wakened)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        readable = wait([listening, ended, wake, *running.values()])
        if ended in readable:
            os._exit(0)
        if wake in readable:
            os.read(wake, 512)
            _reap(running)
        for process in [process for process, asked in running.items() if asked in readable]:
            os.kill(process, signal.SIGKILL)  # who asked for it is gone
            os.waitpid(process, 0)
            running.pop(process).close()
        if listening in readable:
            asked = listening.accept()[0]
            data, given, _, _ = socket.recv_fds(asked, _LARGEST, 2)
            process = os.fork()
            if process == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for connection in (listening, asked, *running.values()):
                    connection.close()
                _become(given, [wake, wakened, ended])
                return json.loads(data)
            asked.send(str(process).encode())
            running[process] = asked
            for file in given:
                os.close(file)


def _reap(running: dict[int, socket.socket]) -> None:
    """Tell the ends of processes."""
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if not process:
            return
        with running.pop(process) as asked, suppress(BrokenPipeError):
            asked.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(given: list[int], unused: list[int]) -> None:
    """Take the files given as stdout and stderr, and let go of what is the server's."""
    for number in (1, 2):
        os.dup2(given[number - 1], number)
    for number in (*given, *unused):
        os.close(number)
    # the streams at hand believe that they still are what the server began with
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    vars(sys).update(__stdout__=sys.stdout, __stderr__=sys.stderr)


def _prepare(request: dict[str, Any]) -> tuple[str, str]:
    """Make this process one that ``python`` started: what is to run, and how it is given."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in given if path and path not in sys.path[1:]]
    way, *words = request["words"]
    if way not in ("-m", "-c"):
        sys.path[0], sys.argv = str(Path(way).parent), [way, *words]
        return "script", way
    sys.path[0] = request["cwd"] if way == "-m" else ""
    sys.argv = [way, *words[1:]]
    return way, words[0]


def _run(way: str, what: str) -> int:
    """Run a command; its exit code, where that is not for the interpreter to make of an error."""
    try:
        if way == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        elif way == "script":
            runpy.run_path(what, run_name="__main__")
        else:
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), main.__dict__)
    except SystemExit as done:
        if not isinstance(done.code, int | None):
            raise
        return done.code or 0
    return 0


if __name__ == "__main__":
    _listening, _ended = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    for _name in IMPORTED:
        import_module(_name)
    for _one in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        _one.atexit = False  # what is imported is not undone
    gc.collect()
    gc.freeze()
    _code = _run(*_prepare(_serve(_listening, _ended)))
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_code & 0xFF)
