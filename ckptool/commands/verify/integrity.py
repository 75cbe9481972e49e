"""The checksums that lie beside a checkpoint's files.

``integrity.json`` is ``{"algorithm": "sha256", "files": {name: hexadecimal digest}}`` and names all
files beside it but itself (megatron-core 0.20, ``--verify-integrity``). ``checklist.chk``, which
Meta's llama weights come with, is what ``md5sum`` prints: a digest and a name a line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

from ckptool.errors import CkptoolError, Problem
from ckptool.formats.base import Source, read_metadata, require

LISTED = "integrity.json"
CHECKLIST = "checklist.chk"
_MD5_LINE = re.compile(r"([0-9a-fA-F]{32})\s+\*?(\S+)")
_ALGORITHM = "sha256"
_BLOCK = 1 << 22


def integrity_problems(source: Source) -> list[Problem]:
    """The files that are missing, or whose bytes are not those that were listed.

    Every listed file is read once. A remark where the list names another algorithm: it is unknown.
    """
    return [*_listed_by_megatron(source), *_listed_by_md5sum(source)]


def _listed_by_md5sum(source: Source) -> list[Problem]:
    if CHECKLIST not in source.files:
        return []
    text = read_metadata(source, CHECKLIST).decode("utf-8", "replace")
    lines = [_MD5_LINE.fullmatch(line.strip()) for line in text.splitlines() if line.strip()]
    if not all(lines):
        return [Problem(f"{CHECKLIST}: no list of MD5s", "index-unreadable", file=CHECKLIST)]
    files = {line[2]: line[1].lower() for line in lines if line is not None}
    return list(_differing(source, files, CHECKLIST, "md5"))


def _listed_by_megatron(source: Source) -> list[Problem]:
    if LISTED not in source.files:
        return []
    try:
        listed = json.loads(read_metadata(source, LISTED))
    except (ValueError, RecursionError):
        listed = None
    files = listed.get("files") if isinstance(listed, dict) else None
    if not isinstance(files, dict) or not isinstance(listed, dict):
        return [Problem(f"{LISTED}: no list of files", "index-unreadable", file=LISTED)]
    if listed.get("algorithm") != _ALGORITHM:
        message = f"{LISTED}: {str(listed.get('algorithm'))[:40]!r} is unknown; nothing is compared"
        return [Problem(message, "note", file=LISTED)]
    return list(_differing(source, files, LISTED, _ALGORITHM))


def _differing(
    source: Source, files: dict[str, Any], listed: str, algorithm: str
) -> Iterator[Problem]:
    for file, digest in files.items():
        try:
            size = require(source, file, wanted_by=listed)
            found = _digest(source, file, size, algorithm)
        except CkptoolError as error:
            yield from error.problems
            continue
        if found != digest:
            message = f"{file}: {algorithm} {found[:16]}..., {listed} says {str(digest)[:16]}..."
            yield Problem(message, f"{algorithm}-mismatch", file=file)


def _digest(source: Source, file: str, size: int, algorithm: str) -> str:
    total = hashlib.new(algorithm, usedforsecurity=False)
    for start in range(0, size, _BLOCK):
        total.update(source.read(file, start, min(_BLOCK, size - start)))
    return total.hexdigest()
