"""Small text files that options name: plans, maps, shapes."""

from __future__ import annotations

from pathlib import Path

from ckptool.errors import UsageError


def text_of(path: Path, option: str) -> str:
    """The text of a file; UsageError, beginning with the option, where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{option} {path}: no such file") from None
    except OSError as error:
        reason = (error.strerror or "unknown reason").lower()
        raise UsageError(f"{option} {path}: cannot be read: {reason}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{option} {path}: no UTF-8 text: {error.reason}") from None
