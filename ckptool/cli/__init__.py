"""The command line: parse, call a command, show its report. Errors become exit codes here alone."""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import NoReturn

from ckptool.errors import CannotDo, CkptoolError, Damaged


def main() -> NoReturn:
    """Run the command line and exit with the documented code.

    Catalogs hold millions of objects and no cycles: neither collecting garbage nor taking them
    apart at the end is worth its time. numpy only copies here: threads for its linear algebra
    would wait in loops beside those that work.
    """
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    gc.disable()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    code = _run()
    if "torch" in sys.modules:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run() -> int:
    """The exit code of the command that was asked for."""
    try:
        from ckptool.cli.app import app

        app()
    except KeyboardInterrupt:
        return _interrupted(128 + signal.SIGINT, writes=False)
    except SystemExit as done:
        if done.code in _INTERRUPTED:
            return _interrupted(done.code, writes=bool(_WRITING & set(sys.argv)))
        return done.code if isinstance(done.code, int) else 0
    except (CkptoolError, RecursionError, MemoryError) as error:
        if "--debug" in sys.argv:
            raise
        from ckptool.render.messages import show_error

        known = error if isinstance(error, CkptoolError) else _out_of_bounds(error)
        show_error(known)
        return known.exit_code
    return 0


def _interrupted(code: int, *, writes: bool) -> int:
    from ckptool.render.messages import show_interrupted

    show_interrupted(writes=writes)
    return code


_WRITING = {"convert", "reshard"}
_INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def _terminate(number: int, frame: object) -> NoReturn:
    """Unwind as on Ctrl-C, so that what is written can be resumed."""
    sys.exit(128 + number)


def _out_of_bounds(error: BaseException) -> CkptoolError:
    if isinstance(error, RecursionError):
        return Damaged("the source is nested too deep to be read")
    return CannotDo("there is not enough memory for this", hint="a smaller --budget needs less")
