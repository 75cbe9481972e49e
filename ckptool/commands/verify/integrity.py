"""The checksums that Megatron-core keeps of a checkpoint's files, where it was asked to.

``integrity.json`` is ``{"algorithm": "sha256", "files": {name: hexadecimal digest}}`` and names all
files beside it but itself (megatron-core 0.20, ``--verify-integrity``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from ckptool.errors import CkptoolError, Problem
from ckptool.formats.base import Source, read_metadata, require

LISTED = "integrity.json"
_ALGORITHM = "sha256"
_BLOCK = 1 << 22


def integrity_problems(source: Source) -> list[Problem]:
    """The files that are missing, or whose bytes are not those that were listed.

    Every listed file is read once. Nothing where the list names another algorithm: it is not known.
    """
    if LISTED not in source.files:
        return []
    try:
        listed = json.loads(read_metadata(source, LISTED))
    except (ValueError, RecursionError):
        listed = None
    files = listed.get("files") if isinstance(listed, dict) else None
    if not isinstance(files, dict) or not isinstance(listed, dict):
        return [Problem(f"{LISTED}: no list of files", "index-unreadable", file=LISTED)]
    return list(_differing(source, files)) if listed.get("algorithm") == _ALGORITHM else []


def _differing(source: Source, files: dict[str, Any]) -> Iterator[Problem]:
    for file, digest in files.items():
        try:
            size = require(source, file, wanted_by=LISTED)
            found = _digest(source, file, size)
        except CkptoolError as error:
            yield from error.problems
            continue
        if found != digest:
            message = f"{file}: SHA-256 {found[:16]}..., {LISTED} says {str(digest)[:16]}..."
            yield Problem(message, "crc-mismatch", file=file)


def _digest(source: Source, file: str, size: int) -> str:
    total = hashlib.sha256()
    for start in range(0, size, _BLOCK):
        total.update(source.read(file, start, min(_BLOCK, size - start)))
    return total.hexdigest()
