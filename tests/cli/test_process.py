"""The process itself: how it ends if nobody reads, something is missing or a signal comes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fork_server import forking_python

from ckptool.cli import _run
from ckptool.cli.process import _writes_to_sockets
from ckptool.commands import detect as detect_checkpoint
from ckptool.engine.ranks import Launch, read_launch
from ckptool.engine.write.stage import Stage
from ckptool.errors import UsageError

DCP = Path(__file__).parents[2] / "fixtures" / "dcp_base" / "ckpt"


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        (["inspect", "runs/1"], {}, False),
        (["inspect", "s3://bucket/1"], {}, True),
        (["reshard", "runs/1", "--mesh", "2"], {"WORLD_SIZE": "2"}, True),
    ],
)
def test_sigpipe_ends_only_what_has_no_sockets(
    words: list[str], environment: dict[str, str], expected: bool
) -> None:
    assert _writes_to_sockets(words, environment) is expected


@pytest.mark.parametrize("said", ["--json", "--values", "--bogus"])
def test_nobody_reads(said: str) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    line = [sys.executable, "-m", "ckptool", "inspect", str(DCP), said]
    environment = {**os.environ, "WORLD_SIZE": "1"}
    with os.fdopen(writes) as nobody:
        done = subprocess.run(line, stdout=nobody, stderr=nobody, env=environment, check=False)
    assert done.returncode == 141


@pytest.mark.parametrize("full", [">/dev/full", ">/dev/full 2>/dev/full"])
@pytest.mark.parametrize(("path", "code"), [(str(DCP), 5), ("nowhere", 3)])
def test_a_report_that_finds_no_room_is_no_answer(path: str, code: int, full: str) -> None:
    """Else exit code 1 would say that something is wrong with a sound checkpoint."""
    line = ["sh", "-c", f'exec "$0" -m ckptool verify "$1" {full}', sys.executable, path]
    assert subprocess.run(line, stderr=subprocess.DEVNULL, check=False).returncode == code


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["verify $1", "verify --json $1", "inspect $1"])
def test_a_full_stdout_is_named_once(words: str, unbuffered: str) -> None:
    line = ["sh", "-c", f'exec "$0" -m ckptool {words} >/dev/full', sys.executable, str(DCP)]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(line, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    first, *rest = done.stderr.splitlines()
    assert (done.returncode, first) == (5, "error: stdout: No space left on device")
    assert [line for line in rest if line.startswith("error")] == []


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("path", "code"), [(str(DCP), 0), ("nowhere", 3)])
def test_closed_streams_change_no_answer(path: str, code: int, closed: str) -> None:
    line = ["sh", "-c", f'exec "$0" -m ckptool verify "$1" {closed}', sys.executable, path]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert "bug in ckptool" not in done.stderr


def ran(words: list[str], error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a command in whose midst an error is raised."""

    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(detect_checkpoint, "folder_at", fail)
    monkeypatch.setattr(sys, "argv", ["ckptool", *words])
    return _run()


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyError("x\ny"), 70, r"bug in ckptool \S+: KeyError: 'x\\ny' \(test_process"),
        (IndexError(), 70, r"bug in ckptool \S+: IndexError \(test_process.py:\d+\)"),
        (AttributeError("no b"), 70, "AttributeError: no b"),
        (RuntimeError("can't start new thread"), 4, "cannot start a thread"),
        (MemoryError(), 3, "not enough memory to read the metadata"),
        (OSError(12, "Cannot allocate memory"), 4, "not enough memory"),
        (OSError(116, "Stale file handle", "/runs/1"), 5, "/runs/1: Stale file handle"),
        (ImportError("no numpy"), 4, "cannot import a package: no numpy"),
        (ImportError("x.so: failed to map segment"), 4, "not enough memory to load a package"),
    ],
)
def test_no_error_ends_in_a_traceback(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ran(["inspect", str(DCP), "--json"], error, monkeypatch) == code
    told = capsys.readouterr()
    assert re.search(message, told.err)
    assert told.err.startswith("error: ")
    assert all(line.startswith(("error: ", "hint: ")) for line in told.err.splitlines())
    assert ("--debug" in told.err) == (code == 70)
    assert json.loads(told.out)["exit_code"] == code


@pytest.mark.parametrize(
    "words", [["convert", str(DCP), "o.pt"], ["merge", "o.pt", "--average", str(DCP), str(DCP)]]
)
def test_an_interruption_says_what_continues(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(self: Stage) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Stage, "commit", interrupt)
    monkeypatch.setattr(sys, "argv", ["ckptool", *words])
    monkeypatch.chdir(tmp_path)
    assert _run() == 130
    assert "with --resume continues" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ending", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143), (SystemExit(3), 70)]
)
def test_what_an_interruption_brought_about_is_one(
    ending: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken_lock() -> None:
        lock = threading.Lock()
        with lock:
            lock.release()
            raise ending

    monkeypatch.setattr("ckptool.cli.app.app", broken_lock)
    assert _run() == code
    assert (capsys.readouterr().err == "interrupted\n") == (code != 70)


def test_debug_shows_the_traceback_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(["inspect", str(DCP), "--debug"], KeyError("x"), monkeypatch) == 70
    told = capsys.readouterr().err
    assert told.startswith("Traceback (most recent call last)")
    assert "error: bug in ckptool" in told


def test_an_error_is_reported_where_there_is_not_a_memory_for_color(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def none_left(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr("ckptool.render.messages.show_error", none_left)
    assert ran(["inspect", str(DCP)], OSError(12, "no memory"), monkeypatch) == 4
    assert capfd.readouterr().err == "error: not enough memory\n"


JOB = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "abc"}, "RANK='abc': not a number"),
        ({"RANK": "-1"}, "RANK='-1': not a number"),
        ({"RANK": "2"}, "RANK=2 of WORLD_SIZE=2: no such rank"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE='': not a number"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK='x': not a number"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not"),
        ({"MASTER_PORT": "9" * 5}, "MASTER_PORT=99999: not a port number"),
    ],
)
def test_what_torchrun_sets_is_checked(changes: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        read_launch(JOB | changes)
    assert "unset RANK and WORLD_SIZE" in (caught.value.hint or "")


def test_a_process_by_itself_is_not_a_rank() -> None:
    assert read_launch({"WORLD_SIZE": "2"}) is None
    assert read_launch(JOB) == Launch(0, 2, 0, "localhost:1")
    with pytest.raises(UsageError, match="MASTER_PORT is not"):
        read_launch({name: JOB[name] for name in JOB if name != "MASTER_PORT"})


ALONE = """
import sys
from ckptool.engine import ranks
ranks.MEETING = float(sys.argv.pop(1))
wait_for = ranks.wait_for
def telling(work, *seconds):
    print("waits", flush=True)
    return wait_for(work, *seconds)
ranks.wait_for = telling
from ckptool.cli import main
main()
"""
"""A rank whose peers never come. It says when it begins to wait for them."""


def start_alone(seconds: float, out: Path) -> subprocess.Popen[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [str(seconds), "reshard", str(DCP), str(out / "m"), "--mesh", "2"]
    job = JOB | {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [forking_python(out.parent), "-c", ALONE, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | job,
    )


def test_ranks_that_never_come_are_not_waited_for_long(out: Path) -> None:
    process = start_alone(0.2, out)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 4, told
    assert "error: rank 1 of 2 reached no other rank at 127.0.0.1:" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_rank_that_waits(number: int, out: Path) -> None:
    process = start_alone(600, out)
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    process.send_signal(number)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 128 + number, told
    assert list(out.iterdir()) == []


STUCK = """
import os, sys, threading
from ckptool.cli import process
process._GRACE = 0.2
process.end_on_signals()
try:
    print("waits", flush=True)
    threading.Event().wait()
finally:
    while True:
        try:
            threading.Event().wait()
        except BaseException:
            pass
"""
"""What does not let itself be unwound."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_always_ends(number: int) -> None:
    line = [sys.executable, "-c", STUCK]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    process.send_signal(number)
    assert process.wait(timeout=30) == 128 + number


IGNORED = """
import threading, time
from ckptool.cli import process
process.end_on_signals()

class Slow:
    def __del__(self):
        print("waits", flush=True)
        time.sleep(10)

Slow()
threading.Event().wait()
"""
"""What takes a signal where Python ignores exceptions."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_not_lost_in_a_finalizer(number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", IGNORED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    process.send_signal(number)
    _, told = process.communicate(timeout=30)
    assert process.returncode == (143 if number == signal.SIGTERM else -signal.SIGINT), told
    assert "Exception ignored" not in told


FLUSHING = """
import os, sys
from ckptool import cli
number = int(sys.argv.pop(1))
run = cli._run
def ran():
    code = run()
    flush = sys.stdout.flush
    class Stdout:
        def flush(self):
            os.kill(os.getpid(), number)
            flush()
    sys.stdout = Stdout()
    return code
cli._run = ran
cli.main()
"""
"""A command whose output is all written, and is interrupted while it is flushed."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_output_is_flushed_ends_as_any_other(number: int) -> None:
    words = [sys.executable, "-c", FLUSHING, str(int(number)), "inspect", str(DCP)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 128 + number
    assert done.stderr.endswith("interrupted\n")
    assert "Traceback" not in done.stderr


AGAIN = """
import os, sys
from ckptool import cli
from ckptool.cli import app
from ckptool.render import messages
numbers = [int(number) for number in sys.argv.pop(1).split(",")]
show = messages.show_interrupted
def interrupt():
    for number in numbers:
        os.kill(os.getpid(), number)
def run():
    try:
        interrupt()
    finally:
        interrupt()
        print("unwound", flush=True)
def show_late(left):
    interrupt()
    show(left)
app.app = run
messages.show_interrupted = show_late
cli.main()
"""
"""A command that is interrupted again while it unwinds, and while it says that it was."""


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_again_and_again_is_one(first: int) -> None:
    numbers = ",".join(map(str, map(int, (first, signal.SIGINT, signal.SIGTERM))))
    words = [sys.executable, "-c", AGAIN, numbers]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 128 + first, done.stderr
    assert (done.stdout, done.stderr) == ("unwound\n", "interrupted\n")
