"""The command line: parse, run a command, show its report. Only here errors become exit codes."""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from contextlib import suppress
from typing import NoReturn

from ckptool.cli.process import known_error, set_up
from ckptool.errors import CkptoolError, InternalError


def main() -> NoReturn:
    """Run the command line and exit with the documented code.

    Catalogs hold millions of objects and no cycles, so neither garbage collection nor freeing them
    at exit is worth its time. numpy is used only to copy: its linear algebra threads would spin
    beside the working ones. Only a successful command leaves the exit to the interpreter, as torch
    needs it: after an error a thread may wait for ranks that never come.
    """
    set_up(sys.argv, os.environ)
    gc.disable()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        code = _run()
        sys.stdout.flush()
        sys.stderr.flush()
    except KeyboardInterrupt as error:
        code = _show_interruption(128 + signal.SIGINT, error)
    except BrokenPipeError:
        os._exit(_PIPE_CLOSED)
    except OSError as error:
        code = _show_failure(error)
    except SystemExit as done:
        if done.code not in _INTERRUPTED:
            os._exit(_PIPE_CLOSED)
        code = _show_interruption(done.code, done)
    if "torch" in sys.modules and code == 0:
        sys.exit(code)
    os._exit(code)


def _run() -> int:
    """Run the command and return its exit code.

    If nobody reads the output, raises BrokenPipeError, or the SystemExit that rich and typer turn
    it into.
    """
    try:
        from ckptool.cli.app import app

        app()
    except KeyboardInterrupt as error:
        return _show_interruption(128 + signal.SIGINT, error)
    except SystemExit as done:
        if isinstance(done.__context__, BrokenPipeError):
            raise
        if done.code in _INTERRUPTED:
            return _show_interruption(done.code, done)
        return done.code if isinstance(done.code, int) else 0
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 (whatever it is becomes words and an exit code)
        return _show_failure(error)
    return 0


def _show_failure(error: Exception) -> int:
    """Show an error, as plain text if memory is exhausted, and return its exit code.

    An unexpected one that an interruption brought about is one: a signal may come where Python
    takes or releases a lock, and the lock is then not as the code around it left it.
    """
    if isinstance(error, OSError) and error.filename is None and not _can_print():
        error.filename = "stdout"
    failure = known_error(error)
    if isinstance(failure, InternalError) and (code := _interruption_behind(error)) is not None:
        return _show_interruption(code, error)
    try:
        if "--debug" in sys.argv:
            traceback.print_exception(error)
        from ckptool.render.messages import show_error

        show_error(failure)
        _print_json_error(failure)
    except BrokenPipeError:
        raise
    except Exception:  # noqa: BLE001 (no memory or no stack for more than plain text)
        with suppress(OSError):  # nothing can be said; the exit code still tells
            os.write(2, f"error: {ascii(str(failure.message))[1:-1]}\n".encode())
    return failure.exit_code


def _can_print() -> bool:
    """Return whether what was printed can be written; if not, print no more of it."""
    try:
        sys.stdout.flush()
    except OSError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the end)
        return False
    return True


def _print_json_error(error: CkptoolError) -> None:
    """Print an error as one JSON object if requested, on the first rank only."""
    words = " ".join(sys.argv).replace("--format=", "--format ")
    is_json = "--json" in sys.argv or "--format json" in words
    if is_json and os.environ.get("RANK", "0") == "0":
        from ckptool.render.data import print_json
        from ckptool.render.messages import error_json

        print_json(error_json(error))


def _interruption_behind(error: BaseException | None) -> int | None:
    """Return the exit code of the interruption that brought an error about; None if none did."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return 128 + signal.SIGINT
        if isinstance(error, SystemExit) and error.code in _INTERRUPTED:
            return int(error.code)
        error = error.__cause__ or error.__context__
    return None


def _show_interruption(code: int, error: BaseException | None) -> int:
    """Show what an interruption left behind, from its notes or those of one that caused it."""
    from ckptool.render.messages import show_interrupted

    notes: list[str] = []
    while error is not None and not notes:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            notes = getattr(error, "__notes__", [])
        error = error.__cause__ or error.__context__
    with suppress(OSError):  # nothing can be said; the exit code still tells
        show_interrupted(notes)
    return code


_PIPE_CLOSED = 128 + signal.SIGPIPE
_INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
