"""Messages for errors that no command expects."""

from __future__ import annotations

import errno
import traceback
from pathlib import PurePath

from ckptool import __version__
from ckptool.errors import CkptoolError, Damaged, InternalError, TransferError, Unsupported


def known_error(error: BaseException) -> CkptoolError:
    """Return the error as users meet it: their own, the machine's, or else ckptool's fault."""
    if isinstance(error, CkptoolError):
        return error
    if _lacks_threads(error):
        return Unsupported(
            "cannot start a thread: the limit of processes or memory is reached",
            hint="raise it (ulimit -u, ulimit -v, the container's pids limit), or --workers 1",
        )
    if isinstance(error, MemoryError) or _is(error, errno.ENOMEM):
        return Unsupported("not enough memory", hint="use a smaller --budget")
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        return TransferError(f"{where}{error.strerror or error or type(error).__name__}")
    if isinstance(error, RecursionError):
        return Damaged("the source is nested too deep to be read")
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


def _lacks_threads(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


def _is(error: BaseException, number: int) -> bool:
    return isinstance(error, OSError) and error.errno == number
