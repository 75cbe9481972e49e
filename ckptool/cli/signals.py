"""Clean ends of commands on signals."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import NoReturn

_GRACE = 20.0
"""Seconds to unwind. Threads may wait longer for a disk or a store that does not respond."""


def end_on_signals() -> None:
    """Unwind on SIGTERM as on Ctrl-C, so that what is written can be resumed.

    An ignored Ctrl-C stays ignored, as nohup needs.
    """
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _terminate(number: int, frame: object) -> NoReturn:
    _end_at_last(128 + number)
    sys.exit(128 + number)


def _interrupt(number: int, frame: object) -> NoReturn:
    _end_at_last(128 + number)
    raise KeyboardInterrupt


def _end_at_last(code: int) -> None:
    """End the process after a while even if something blocks its unwinding."""
    timer = threading.Timer(_GRACE, os._exit, [code])
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:
        os._exit(code)
