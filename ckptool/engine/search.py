"""Find a pattern in a file of any size."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ckptool.engine.sources import unreadable

_PIECE = 1 << 20


def occurrences(root: str, file: str, pattern: bytes) -> Iterator[int]:
    """The offsets in bytes at which ``pattern`` lies in a file below ``root``, ascending.

    Reads the file once, a MiB at a time. Raises NotFound where it cannot be read.
    """
    try:
        with open(os.path.join(root, file), "rb", buffering=0) as stream:
            kept, start = b"", 0
            while piece := stream.read(_PIECE):
                window = kept + piece
                at = window.find(pattern)
                while at >= 0:
                    yield start + at
                    at = window.find(pattern, at + 1)
                kept = window[len(window) - len(pattern) + 1 :]
                start += len(window) - len(kept)
    except OSError as error:
        raise unreadable(file, error) from None
