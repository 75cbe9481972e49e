"""The process itself: its error messages, and how it ends if nobody reads it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckptool.cli import _run
from ckptool.cli.app import SUMMARIES, app, load_command
from ckptool.cli.parameters import parse_place
from ckptool.cli.process import _writes_to_sockets
from ckptool.commands import detect as detect_checkpoint
from ckptool.commands.open import open_checkpoint
from ckptool.core.options import parse_dims
from ckptool.engine.ranks import read_launch
from ckptool.errors import CkptoolError, Damaged, NotFound, UsageError, damaged
from ckptool.render.messages import show_error

DCP = Path(__file__).parents[2] / "fixtures" / "dcp_base" / "ckpt"
HF = Path(__file__).parents[2] / "fixtures" / "hf_full" / "ckpt"


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


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("path", "code"), [(str(DCP), 0), ("nowhere", 3)])
def test_closed_streams_change_no_answer(path: str, code: int, closed: str) -> None:
    line = ["sh", "-c", f'exec "$0" -m ckptool verify "$1" {closed}', sys.executable, path]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert "bug in ckptool" not in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("inspect", "nowhere"), 3, "nowhere: no such file or folder"),
        (("inspect", "--bogus"), 2, "No such option: --bogus"),
        (("inspect", str(DCP), "--shards", "q"), 2, "--shards 'q' matches no tensors"),
    ],
)
def test_an_error_is_an_answer_with_json(words: tuple[str, ...], code: int, message: str) -> None:
    line = [sys.executable, "-m", "ckptool", *words, "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    told = json.loads(done.stdout)
    assert done.returncode == told["exit_code"] == code
    assert told["schema"] == "ckptool.error/2"
    assert told["message"].startswith(message)
    assert message in done.stderr
    assert [one["code"] for one in told["problems"]] == [None]


@pytest.mark.parametrize(
    ("words", "renamed"),
    [
        (["inspect", "--map", "w"], "--shards"),
        (["inspect", "--ranks"], "--rank-bytes"),
        (["convert", "a", "b", "--one-rank"], "--single-rank"),
        (["reshard", "--unstack"], "--split-stacked"),
        (["verify", "--finite"], "--fail-nonfinite"),
        (["verify", "--against-from", "dcp"], "--other-format"),
    ],
)
def test_a_former_name_is_answered_with_the_new_one(words: list[str], renamed: str) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert f"Did you mean {renamed}?" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["convert", DCP, "out", "--to", "safetensor"], "did you mean safetensors?"),
        (["convert", DCP, "out.pt", "--dtype", "bfloat61"], "did you mean bfloat16?"),
        (["reshard", DCP, "out", "--mesh", "2", "--to", "dpc"], "did you mean dcp?"),
        (["reshard", DCP, "out", "--mesh", "2", "--policy", "fspd"], "did you mean fsdp?"),
        (["verify", DCP, "--format", "juint"], "did you mean junit?"),
        (["verify", DCP, "--from", "torch-svae"], "did you mean torch-save?"),
        (["verify", DCP, "--ignore", "crc-mismach"], "did you mean crc-mismatch?"),
        (["bench", "--strategies", "torch-svae"], "did you mean torch-save?"),
        (["maps", "meta-lama"], "did you mean meta-llama?"),
        (["inspect", DCP, "--shards", "plian"], "did you mean plain?"),
        (["inspect", DCP, "--stats", "plian"], "did you mean plain?"),
        (["extract", DCP, "plian"], "did you mean plain?"),
        (["verify", DCP, "--format", "42"], "one of text, json, junit, github"),
    ],
)
def test_every_misspelled_word_is_answered_alike(words: list[object], hint: str) -> None:
    error = CliRunner().invoke(app, list(map(str, words))).exception
    assert isinstance(error, UsageError)
    assert error.hint == hint


def test_damage_without_a_hint_of_its_own_has_that_of_its_code(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    file.write_bytes(b"\x10" + bytes(7) + b'{"w":')
    done = subprocess.run(
        [sys.executable, "-m", "ckptool", "inspect", str(file), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    hint = "use another copy of the file, or the previous checkpoint"
    assert (done.returncode, json.loads(done.stdout)["hint"]) == (3, hint), done.stderr
    assert done.stderr.splitlines()[-1] == f"hint: {hint}"


def test_an_option_without_its_word_is_not_suggested_for_itself() -> None:
    said = CliRunner().invoke(app, ["inspect", str(DCP), "--html"]).output
    assert "requires an argument" in said
    assert "Did you mean" not in said


def test_a_word_that_is_neither_a_command_nor_a_file() -> None:
    done = CliRunner().invoke(app, ["elsewhere"])
    assert done.exit_code == 2
    assert "No such command, file or folder: 'elsewhere'." in done.output


def test_a_screen_is_exported_as_a_picture_and_a_page_has_its_own_option(tmp_path: Path) -> None:
    page = tmp_path / "screen.html"
    error = CliRunner().invoke(app, ["inspect", str(DCP), "--export", str(page)]).exception
    assert isinstance(error, UsageError)
    assert error.hint == f"--html {page} writes a page"
    assert not page.exists()


@pytest.mark.parametrize("words", [["verify", "--ranks"], ["formats", "--map"]])
def test_no_option_of_another_command_is_suggested(words: list[str]) -> None:
    assert "Did you mean" not in CliRunner().invoke(app, words).output


@pytest.mark.parametrize("command", SUMMARIES)
def test_the_list_of_commands_says_what_each_says_of_itself(command: str) -> None:
    text = load_command(command).help or ""
    assert " ".join(text.partition("\n\n")[0].split()) == SUMMARIES[command]


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_list_of_commands_imports_none(option: str) -> None:
    code = (
        "import sys, runpy; sys.argv = ['ckptool', sys.argv[1]]\n"
        "try: runpy.run_module('ckptool.cli.app').get('app')()\n"
        "except SystemExit: sys.exit(str([m for m in sys.modules if 'ckptool.commands' in m]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, option], capture_output=True, text=True, check=False
    )
    assert done.stdout
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("checkpoint", [DCP, HF], ids=["dcp", "hf"])
def test_inspecting_imports_nothing_that_only_others_need(checkpoint: Path) -> None:
    names = (
        *("numpy", "torch", "html", "logging", "concurrent.futures", "xml"),
        *("ckptool.engine", "ckptool.commands.verify.verify", "ckptool.formats.megatron.optimizer"),
        *(("ckptool.formats.deepspeed",) if checkpoint == DCP else ("hashlib",)),
    )
    code = (
        "import sys; from ckptool.cli import _run; sys.argv = ['ckptool', 'inspect', sys.argv[1]]\n"
        f"code = _run(); sys.exit(str([code, *(m for m in {names} if m in sys.modules)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(checkpoint)], capture_output=True, text=True, check=False
    )
    assert done.stderr.strip() == "[0]"


@pytest.mark.parametrize("words", [("verify", "--quick"), ("diff",)], ids=lambda words: words[0])
@pytest.mark.parametrize("checkpoint", [DCP, HF], ids=["dcp", "hf"])
def test_numpy_is_imported_only_to_look_at_elements(
    words: tuple[str, ...], checkpoint: Path
) -> None:
    """Importing it takes a fifth of the time of these commands."""
    code = (
        "import sys; from ckptool.cli import _run; sys.argv = ['ckptool', *sys.argv[1:]]\n"
        "code = _run(); sys.exit(str([code, 'numpy' in sys.modules]))"
    )
    paths = [str(checkpoint)] * (2 if words == ("diff",) else 1)
    done = subprocess.run(
        [sys.executable, "-c", code, *words, *paths], capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines()[-1] == "[0, False]"


@pytest.mark.parametrize(
    "words", [("convert", "m.safetensors"), ("reshard", "m", "--mesh", "2")], ids=lambda w: w[0]
)
def test_a_quiet_transfer_imports_no_screen_no_store_and_no_other_format(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    names = (
        *("rich", "tomllib", "ckptool.storage.planned_ranges", "ckptool.formats.deepspeed"),
        *("ckptool.formats.rank_files", "ckptool.formats.megatron.optimizer"),
        *("ckptool.commands.keymap.maps", "ckptool.commands.keymap.library"),
    )
    code = (
        "import sys; from ckptool.cli import _run\n"
        "sys.argv = ['ckptool', sys.argv[1], '--quiet', '--no-verify', *sys.argv[2:]]\n"
        f"code = _run(); sys.exit(str([code, *(m for m in {names} if m in sys.modules)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, words[0], str(DCP), str(tmp_path / words[1]), *words[2:]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.strip() == "[0]"


# Words


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Damaged("a\nb\x1b[31m: [bold]"), "error: a\\nb\\x1b[31m: [bold]\n"),
        (damaged(["a", "b"], subject="w"), "error: 2 problems in w:\n  - a\n  - b\n"),
        (damaged(["a", "a"], subject="w", hint="c"), "error: a\nhint: c\n"),
    ],
)
def test_an_error_on_the_screen(
    error: CkptoolError, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show_error(error)
    assert capsys.readouterr().err == said


def test_an_empty_path_is_not_the_current_folder() -> None:
    with pytest.raises(UsageError, match="SRC: empty path"):
        parse_place("", "SRC")


def test_a_link_to_nothing_says_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("step-9")
    with pytest.raises(NotFound, match="latest: link to step-9: no such file"):
        open_checkpoint(tmp_path / "latest")


def test_dims_said_twice_must_agree() -> None:
    assert parse_dims(["a=2", "b = 0", "a=2"]) == {"a": 2, "b": 0}
    with pytest.raises(UsageError, match="--dim a: conflicting sizes 2 and 3"):
        parse_dims(["a=2", "a=3"])


# Faults of our own, and what the machine does not have


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


# Ranks


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
    assert read_launch(JOB) == (0, 2, 0, "localhost:1")
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
        [sys.executable, "-c", ALONE, *words],
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
