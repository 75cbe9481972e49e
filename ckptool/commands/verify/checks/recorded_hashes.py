"""Whether files have the hashes that are recorded of them: in a list beside them, or by the Hub.

``integrity.json`` is ``{"algorithm": "sha256", "files": {name: hexadecimal digest}}`` and names all
files beside it but itself (megatron-core 0.20, ``--verify-integrity``). ``checklist.chk``, which
comes with Meta's llama weights, is the output of ``md5sum``: a digest and a name per line.

In the cache of huggingface_hub, a file is a link to ``models--ORG--NAME/blobs/HASH``. A
``--local-dir`` has ``.cache/huggingface/download/FILE.metadata``, or before 0.24
``.huggingface/download/``, of three lines: the commit, the hash and the time (huggingface_hub 2.4).
The hash is the SHA-256 of a file in LFS or Xet, and git's SHA-1 of any other.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from ckptool.errors import CkptoolError, Damaged, Problem
from ckptool.serialization.source import (
    Source,
    file_digest,
    parse_json_object,
    read_metadata,
    require,
)
from ckptool.storage.place import on_disk
from ckptool.storage.url import Location

LISTS = ("integrity.json", "checklist.chk")
_REPOSITORY = re.compile(r"(models|datasets|spaces)--.+")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MD5_LINE = re.compile(r"([0-9a-fA-F]{32})\s+\*?(\S+)")
_CACHES = (".cache/huggingface/download", ".huggingface/download")
_LONGEST = 1024
_AGAIN = "download it again"
SHA256 = "sha256"


class RecordedHash(Struct, frozen=True):
    """The hash in hexadecimal digits that a file should have, and ``where`` it is recorded.

    The Hub's client keeps what ``was_sent``.
    """

    file: str
    algorithm: str
    digits: str
    where: str
    was_sent: bool = False

    @property
    def is_beside(self) -> bool:
        """Whether it is a ``--local-dir``'s, whose small files people edit, not the cache's."""
        return self.where.endswith(".metadata")

    @property
    def mismatch(self) -> str:
        """The code of a file that has another hash."""
        may_be_edited = self.is_beside and self.algorithm != SHA256
        return "download-changed" if may_be_edited else f"{self.algorithm}-mismatch"

    def problem(self, digits: str) -> Problem | None:
        """Return the problem of the file if its hash has these digits; None if it is the same."""
        if digits == self.digits:
            return None
        message = f"{self.file}: {self.algorithm} {digits[:16]}..., "
        if not self.was_sent:
            message += f"expected {self.digits[:16]}... by {self.where}"
            return Problem(message, self.mismatch, file=self.file)
        message += f"but the Hub sent {self.digits[:16]}..., as {self.where} says"
        edited = f", or remove {self.where} if it was changed on purpose" if self.is_beside else ""
        return Problem(message, self.mismatch, file=self.file).with_hint(f"{_AGAIN}{edited}")


def recorded_hashes(
    path: Location, source: Source, files: Iterable[str], problems: list[Problem]
) -> list[RecordedHash]:
    """Return the hashes recorded at ``path``: of all files in lists, and of ``files`` by the Hub.

    Why a list cannot be used is added to ``problems``.
    """
    hashes: list[RecordedHash] = []
    for name in LISTS:
        try:
            hashes += [*_parse_list(source, name)] if name in source.files else ()
        except CkptoolError as error:
            problems += error.problems
    return [*hashes, *_hub_hashes(path, files)]


def hash_problems(
    records: Iterable[RecordedHash],
    digests: Mapping[str, str],
    hashed: Collection[str],
    source: Source,
) -> Iterator[Problem]:
    """Yield the files that are missing, or have another hash than was recorded.

    ``digests`` are the SHA-256 of ``hashed`` files, as far as they could be read; all other files
    are read here.
    """
    for record in records:
        is_read = record.algorithm == SHA256 and record.file in hashed
        if is_read and record.file not in digests:
            continue  # the reader reports on it
        try:
            size = require(source, record.file, wanted_by=record.where)
            # before what git hashes
            head = f"blob {size}\0".encode() if record.algorithm == "sha1" else b""
            digits = digests[record.file] if is_read else None
            digits = digits or file_digest(source, record.file, record.algorithm, head)
        except CkptoolError as error:
            yield from error.problems
            continue
        if (problem := record.problem(digits)) is not None:
            yield problem


def _parse_list(source: Source, name: str) -> Iterator[RecordedHash]:
    """Yield the hashes in a list; Damaged if it is none, or names an unknown algorithm."""
    data = read_metadata(source, name)
    if name.endswith(".json"):
        yield from _parse_json(data, name)
        return
    lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines()]
    for match in map(_MD5_LINE.fullmatch, filter(None, lines)):
        if match is None:
            raise Damaged(f"{name}: not a list of MD5 digests", "index-unreadable", file=name)
        yield RecordedHash(match[2], "md5", match[1].lower(), name)


def _parse_json(data: bytes, name: str) -> Iterator[RecordedHash]:
    try:
        content = parse_json_object(data, name)
    except Damaged:
        content = {}
    if not isinstance(content.get("files"), dict):
        raise Damaged(f"{name}: no list of files", "index-unreadable", file=name)
    if (algorithm := content.get("algorithm")) != SHA256:
        message = f"{name}: {str(algorithm)[:40]!r} is not supported; not checked"
        raise Damaged(message, "note", file=name)
    for file, digits in content["files"].items():
        yield RecordedHash(file, SHA256, str(digits), name)


def _hub_hashes(path: Location, files: Iterable[str]) -> Iterator[RecordedHash]:
    """Yield the hashes that the Hub's client keeps of files of a checkpoint at ``path``."""
    if (disk := on_disk(path)) is None:
        return
    folder = disk if disk.is_dir() else disk.parent
    for file in files:
        try:
            digits, where = _hub_digits(folder / file)
        except (OSError, ValueError, RuntimeError):
            continue  # what cannot be found keeps nothing
        if _HASH.fullmatch(digits):
            algorithm = SHA256 if len(digits) == 64 else "sha1"
            yield RecordedHash(file, algorithm, digits, where, was_sent=True)


def _hub_digits(path: Path) -> tuple[str, str]:
    """Return the digits of a file's hash that the Hub's client keeps, and where; else nothing."""
    blob = path.resolve(strict=True)
    if blob.parent.name == "blobs" and _REPOSITORY.fullmatch(blob.parents[1].name):
        return blob.name, "the name of its blob"
    whole = path.absolute()
    for folder in whole.parents:
        for cache in _CACHES:
            name = f"{whole.relative_to(folder)}.metadata"
            if (folder / cache / name).is_file():
                return _second_line(folder / cache / name), f"{cache}/{name}"
    return "", ""


def _second_line(path: Path) -> str:
    """Return the second line of a record whose first is a commit; empty of another file."""
    with path.open("rb") as stream:
        lines = stream.read(_LONGEST).decode("ascii", "replace").splitlines()
    is_record = len(lines) >= 2 and _COMMIT.fullmatch(lines[0].strip())
    return lines[1].strip() if is_record else ""
