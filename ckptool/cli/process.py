"""The process of a command: its streams, signals and memory, and unexpected errors."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NoReturn

from ckptool.errors import CkptoolError, Damaged, InternalError, Unsupported, failure_of
from ckptool.version import __version__

_GRACE = 20.0
"""Seconds to unwind. Threads may wait longer for a disk or a store that does not respond."""
_AGAIN = 0.01
"""Seconds after which a signal that Python ignored is sent again."""
_MMAP_THRESHOLD = -3
"""``M_MMAP_THRESHOLD`` of glibc's malloc.h."""
_NO_ROOM = "failed to map segment"
"""What the dynamic linker says of a library that memory does not suffice for."""


def set_up(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Prepare the process for a command line: closed streams, signals, memory."""
    _open_closed_streams()
    _keep_unwritten_lines()
    end_on_signals()
    if not _writes_to_sockets(arguments, environment):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if any("://" in argument for argument in arguments):
        _give_memory_back()


def _open_closed_streams() -> None:
    """Redirect closed standard streams (``>&-``) to nowhere.

    Otherwise the next opened file gets their number, and messages are written into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _keep_unwritten_lines() -> None:
    """Buffer each line of stdout where Python buffers nothing (PYTHONUNBUFFERED).

    What a full disk does not take is then still there, which shows that stdout is what is full.
    """
    stdout: Any = sys.stdout
    if isinstance(getattr(stdout, "buffer", None), io.RawIOBase):
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(stdout.buffer), stdout.encoding, stdout.errors, line_buffering=True
        )


def _writes_to_sockets(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether the process connects to stores or other ranks.

    A connection closed by the other side must then be an error, to be retried or reported:
    SIGPIPE would end the process without a message.
    """
    return any("://" in argument for argument in arguments) or "WORLD_SIZE" in environment


def _give_memory_back() -> None:
    """Return memory of received data to the kernel as soon as it is freed.

    Otherwise glibc keeps it, in one arena per thread: 70 MB beyond the budget were measured.
    """
    import ctypes

    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, 128 << 10)


def end_on_signals() -> None:
    """Unwind on SIGTERM as on Ctrl-C, so that what is written can be resumed.

    An ignored Ctrl-C stays ignored, as nohup needs. One signal is enough: another would break the
    unwinding off, in the middle of a message, or where Python releases a lock.
    """
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _send_again


def _terminate(number: int, frame: object) -> NoReturn:
    _take_no_more()
    _end_at_last(128 + number)
    sys.exit(128 + number)


def _interrupt(number: int, frame: object) -> NoReturn:
    _take_no_more()
    _end_at_last(128 + number)
    raise KeyboardInterrupt


def _take_no_more() -> None:
    """Let further signals do nothing; SIG_IGN would make Python complain of one that has come."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: None)


def _send_again(ignored: sys.UnraisableHookArgs) -> None:
    """Repeat a signal whose exception was raised where Python ignores exceptions.

    A handler runs between any two instructions, even within a weak reference's callback or a
    ``__del__``: the command would go on as if the signal had never come.
    """
    number = {SystemExit: signal.SIGTERM, KeyboardInterrupt: signal.SIGINT}.get(ignored.exc_type)
    if number is None:
        sys.__unraisablehook__(ignored)
        return
    signal.signal(number, _terminate if number == signal.SIGTERM else _interrupt)
    leaving = threading.Event()

    def send() -> None:
        leaving.wait()  # starting a thread may take long, and a signal would be lost here too
        time.sleep(_AGAIN)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    leaving.set()


def _end_at_last(code: int) -> None:
    """End the process after a while even if something blocks its unwinding."""
    timer = threading.Timer(_GRACE, os._exit, [code])
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:
        os._exit(code)


# Errors


def known_error(error: BaseException) -> CkptoolError:
    """Return the error to show: the user's, the machine's, or else an internal one."""
    if isinstance(error, CkptoolError):
        return error
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return Unsupported(
            "cannot start a thread: the limit of processes or memory is reached",
            hint="raise it (ulimit -u, ulimit -v, the container's pids limit), or --workers 1",
        )
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return Unsupported("not enough memory", hint="use a smaller --budget")
    if isinstance(error, ImportError) and _NO_ROOM in str(error):
        hint = "raise the limit of memory (ulimit -v, the container's)"
        return Unsupported("not enough memory to load a package", hint=hint)
    if isinstance(error, OSError):
        return failure_of(error)
    if isinstance(error, RecursionError):
        return Damaged("the source is nested too deep to be read")
    if isinstance(error, ValueError) and "integer string conversion" in str(error):
        return Damaged("the source has a number of thousands of digits")
    if isinstance(error, ImportError):
        return Unsupported(f"cannot import a package: {error}", hint="reinstall ckptool")
    return _internal(error)


def _internal(error: BaseException) -> InternalError:
    """Return an error with the exception and its place in one line, for a bug report."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({PurePath(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    message = " ".join(str(error).split())[:300]
    what = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return InternalError(
        f"bug in ckptool {__version__}: {what}{where}",
        hint="report this line and the traceback that --debug shows",
    )
