"""Say why nothing can be read at a path: it is not there, or is no file and no folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ckptool.core.text import nearest
from ckptool.errors import NotFound, Unrecognized
from ckptool.storage.url import Location


def require_there(path: Location) -> None:
    """Raise NotFound if there is no such file or folder, Unrecognized if it is another thing."""
    if not isinstance(path, Path):
        path.require_there()
        return
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        if path.is_symlink():
            target = os.readlink(path)
            raise NotFound(f"{path}: link to {target}: {_reason(error)}") from None
        raise NotFound(f"{path}: {_reason(error)}", hint=_similar(path)) from None
    except ValueError:
        raise NotFound(f"{str(path)!r}: invalid path: contains a null character") from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise Unrecognized(f"{path}: not a file or folder (pipe, socket or device)")


def _reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file or folder"
    return (error.strerror or "cannot be read").lower()


def _similar(path: Path) -> str | None:
    try:
        names = os.listdir(path.parent)
    except OSError:
        return None
    close = nearest(path.name, names)
    return f"did you mean {path.parent / close}?" if close else None
