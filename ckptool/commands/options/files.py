"""Files that options name: their text, that as TOML, and the shapes of ``--flat-params``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ckptool.core.text import nearest
from ckptool.errors import UsageError
from ckptool.storage.disk import read_at_most

_LARGEST = 64 << 20
"""Bytes of a file: millions of names."""
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def text_of(path: Path, option: str) -> str:
    """Read the text of a file; UsageError, starting with the option, if it cannot be read."""
    try:
        data = read_at_most(path, _LARGEST + 1)
    except FileNotFoundError:
        raise UsageError(f"{option} {path}: no such file", hint=_meant(path, option)) from None
    except OSError as error:
        reason = (error.strerror or "unknown reason").lower()
        raise UsageError(f"{option} {path}: cannot be read: {reason}") from None
    if len(data) > _LARGEST:
        raise UsageError(f"{option} {path}: more than {_LARGEST:,} bytes")
    try:
        return data.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"{option} {path}: not UTF-8 text: {error.reason}") from None


def table_of(path: Path, option: str, hint: str | None = None) -> dict[str, Any]:
    """Read a TOML file; UsageError, starting with the option, if it is none."""
    import tomllib

    try:
        return tomllib.loads(text_of(path, option))
    except (ValueError, RecursionError) as error:
        why = "nested too deep" if isinstance(error, RecursionError) else error
        raise UsageError(f"{option} {path}: not TOML: {why}", hint=hint) from None


def _meant(path: Path, option: str) -> str:
    """Return the file of a similar name and the same suffix, or else what the option takes."""
    siblings = path.parent.glob(f"*{path.suffix}") if path.parent.is_dir() else ()
    close = nearest(path.stem, (file.stem for file in siblings))
    usage = f"{option} takes the path of a file that exists"
    return usage if close is None else f"did you mean {path.with_name(close + path.suffix)}?"


def flat_param_shapes(path: Path) -> Shapes:
    """Read names and shapes, in order, from a JSON file; UsageError if it has none."""
    try:
        content = json.loads(text_of(path, "--flat-params"))
        shapes = tuple((name, tuple(shape)) for name, shape in content.items())
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise UsageError(f"--flat-params {path}: {error}") from None
    if not all(type(n) is int and n >= 0 for _, shape in shapes for n in shape):
        raise UsageError(f"--flat-params {path}: each shape must be a list of sizes")
    return shapes
