"""The command line: parse, call a command, show its report. Errors become exit codes here alone."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from ckptool.errors import CannotDo, CkptoolError, Damaged, TransferError, UsageError


def main() -> NoReturn:
    """Run the command line and exit with the documented code.

    Catalogs hold millions of objects and no cycles: neither collecting garbage nor taking them
    apart at the end is worth its time. numpy only copies here: threads for its linear algebra
    would wait in loops beside those that work.
    """
    signal.signal(signal.SIGTERM, _terminate)
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
    if "torch" in sys.modules:
        sys.exit(code)
    os._exit(code)


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
    except KeyboardInterrupt:
        return _interrupted(128 + signal.SIGINT, writes=False)
    except SystemExit as done:
        if isinstance(done.__context__, BrokenPipeError):
            raise
        if done.code in _INTERRUPTED:
            return _interrupted(done.code, writes=bool(_WRITING & set(sys.argv)))
        said = getattr(done.__context__, "format_message", None)
        if said is not None:
            _answer(UsageError(said()))
        return done.code if isinstance(done.code, int) else 0
    except BrokenPipeError:
        raise
    except (CkptoolError, OSError, RecursionError, MemoryError) as error:
        if "--debug" in sys.argv:
            raise
        from ckptool.render.messages import show_error

        known = error if isinstance(error, CkptoolError) else _known(error)
        show_error(known)
        _answer(known)
        return known.exit_code
    return 0


def _answer(error: CkptoolError) -> None:
    """With --json an error is an answer too: one object, from the first of several ranks."""
    if "--json" in sys.argv and os.environ.get("RANK", "0") == "0":
        from ckptool.render.messages import error_json, print_json

        print_json(error_json(error))


def _interrupted(code: int, *, writes: bool) -> int:
    from ckptool.render.messages import show_interrupted

    show_interrupted(writes=writes)
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


def _terminate(number: int, frame: object) -> NoReturn:
    """Unwind as on Ctrl-C, so that what is written can be resumed."""
    sys.exit(128 + number)


def _known(error: BaseException) -> CkptoolError:
    if isinstance(error, OSError):
        return TransferError(error.strerror or str(error))
    if isinstance(error, RecursionError):
        return Damaged("the source is nested too deep to be read")
    return CannotDo("there is not enough memory for this", hint="a smaller --budget needs less")
