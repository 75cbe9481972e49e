"""The command line: parse, call a command, show its report. Errors become exit codes here alone."""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import NoReturn

from ckptool.cli.last_resort import known_error
from ckptool.cli.signals import end_on_signals
from ckptool.errors import CkptoolError, UsageError


def main() -> NoReturn:
    """Run the command line and exit with the documented code.

    Catalogs hold millions of objects and no cycles: neither collecting garbage nor taking them
    apart at the end is worth its time. numpy only copies here: threads for its linear algebra
    would wait in loops beside those that work. Only a command that is done leaves the rest to the
    interpreter, as torch needs it: after an error a thread may wait for ranks that never come.
    """
    _open_closed_streams()
    end_on_signals()
    if not _writes_to_sockets(sys.argv, os.environ):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if any("://" in argument for argument in sys.argv):
        _give_memory_back()
    gc.disable()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        code = _run()
        sys.stdout.flush()
        sys.stderr.flush()
    except (BrokenPipeError, SystemExit):
        os._exit(_PIPE_CLOSED)
    if "torch" in sys.modules and code == 0:
        sys.exit(code)
    os._exit(code)


def _open_closed_streams() -> None:
    """Let standard streams that were closed (``>&-``) lead nowhere.

    Else the next file that is opened has their number, and what is said goes into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _writes_to_sockets(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether stores or other ranks are talked to.

    Then a connection that the other side has closed must be an error, to be tried again or told:
    SIGPIPE would end the process without a word.
    """
    return any("://" in one for one in arguments) or "WORLD_SIZE" in environment


def _run() -> int:
    """The exit code of the command that was asked for.

    Raises BrokenPipeError, or the SystemExit that rich and typer make of it, where nobody reads
    what is said.
    """
    try:
        from ckptool.cli.app import app

        app()
    except KeyboardInterrupt as error:
        return _interrupted(128 + signal.SIGINT, error)
    except SystemExit as done:
        if isinstance(done.__context__, BrokenPipeError):
            raise
        if done.code in _INTERRUPTED:
            return _interrupted(done.code, done)
        said = getattr(done.__context__, "format_message", None)
        if said is not None:
            _answer(UsageError(said()))
        return done.code if isinstance(done.code, int) else 0
    except BrokenPipeError:
        raise
    except Exception as error:
        return _failed(error)
    return 0


def _failed(error: Exception) -> int:
    """Say what went wrong, in plain text where there is no memory for more; the exit code."""
    known = known_error(error)
    try:
        if "--debug" in sys.argv:
            traceback.print_exception(error)
        from ckptool.render.messages import show_error

        show_error(known)
        _answer(known)
    except BrokenPipeError:
        raise
    except (Exception, RecursionError):
        os.write(2, f"error: {ascii(str(known.message))[1:-1]}\n".encode())
    return known.exit_code


def _answer(error: CkptoolError) -> None:
    """With --json an error is an answer too: one object, from the first of several ranks."""
    if "--json" in sys.argv and os.environ.get("RANK", "0") == "0":
        from ckptool.render.messages import error_json, print_json

        print_json(error_json(error))


def _interrupted(code: int, error: BaseException | None) -> int:
    """Say what an interruption left, as is noted on it or on what it was raised for."""
    from ckptool.render.messages import show_interrupted

    notes: list[str] = []
    while error is not None and not notes:
        notes = getattr(error, "__notes__", [])
        error = error.__cause__ or error.__context__
    show_interrupted(notes if _WRITING & set(sys.argv) else ())
    return code


_PIPE_CLOSED = 128 + signal.SIGPIPE
_WRITING = {"convert", "reshard"}
_INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def _give_memory_back() -> None:
    """Let what a store sent go back to the kernel at once when it is freed.

    glibc else keeps it, an arena a thread: 70 MB beyond the budget were measured.
    """
    import ctypes

    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, 128 << 10)


_MMAP_THRESHOLD = -3
"""``M_MMAP_THRESHOLD`` of glibc's malloc.h."""
