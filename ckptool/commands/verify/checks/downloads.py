"""Whether files are what the Hugging Face Hub sent, by the hashes that huggingface_hub keeps.

In its cache, a file is a link to ``models--ORG--NAME/blobs/HASH``. A ``--local-dir`` has
``.cache/huggingface/download/FILE.metadata``, or before 0.24 ``.huggingface/download/``, of three
lines: the commit, the hash and the time (huggingface_hub 2.4). The hash is the SHA-256 of a file in
LFS or Xet, and git's SHA-1 of any other.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from ckptool.engine.check.digest import file_digests
from ckptool.errors import CkptoolError, Problem
from ckptool.serialization.source import file_digest
from ckptool.storage.files import Files
from ckptool.storage.place import on_disk
from ckptool.storage.url import Location

_REPOSITORY = re.compile(r"(models|datasets|spaces)--.+")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_BESIDE = (".cache/huggingface/download", ".huggingface/download")
_LONGEST = 1024
_AGAIN = "download it again"


class KeptHash(Struct, frozen=True):
    """The hash in hexadecimal digits that a file should have, and ``where`` it is kept."""

    digits: str
    where: str

    @property
    def is_sha256(self) -> bool:
        return len(self.digits) == 64

    @property
    def is_beside(self) -> bool:
        """Whether it is a ``--local-dir``'s, whose small files people edit, not the cache's."""
        return self.where.endswith(".metadata")

    def problem(self, file: str, digits: str) -> Problem | None:
        """Return the problem of a file whose hash has these digits; None if it is the same."""
        if digits == self.digits:
            return None
        kind = "sha256" if self.is_sha256 else "sha1"
        message = f"{file}: {kind} {digits[:16]}..., but the Hub sent {self.digits[:16]}..., as"
        message += f" {self.where} says"
        if not self.is_beside:
            code = "sha256-mismatch" if self.is_sha256 else "sha1-mismatch"
            return Problem(message, code, file=file).with_hint(_AGAIN)
        code = "sha256-mismatch" if self.is_sha256 else "download-changed"
        hint = f"{_AGAIN}, or remove {self.where} if it was changed on purpose"
        return Problem(message, code, file=file).with_hint(hint)


def kept_hashes(path: Location, files: Iterable[str]) -> dict[str, KeptHash]:
    """Return the hashes that are kept of files of a checkpoint at ``path``, by file."""
    if (disk := on_disk(path)) is None:
        return {}
    folder = disk if disk.is_dir() else disk.parent
    found = {}
    for file in files:
        try:
            kept = _kept(folder / file)
        except (OSError, ValueError, RuntimeError):
            continue  # what cannot be found keeps nothing
        if kept is not None:
            found[file] = kept
    return found


def _kept(path: Path) -> KeptHash | None:
    blob = path.resolve(strict=True)
    if blob.parent.name == "blobs" and _REPOSITORY.fullmatch(blob.parents[1].name):
        is_hash = _HASH.fullmatch(blob.name)
        return KeptHash(blob.name, "the name of its blob") if is_hash else None
    whole = path.absolute()
    for folder in whole.parents:
        for beside in _BESIDE:
            name = f"{whole.relative_to(folder)}.metadata"
            if (folder / beside / name).is_file():
                return _of_lines(folder / beside / name, f"{beside}/{name}")
    return None


def _of_lines(path: Path, shown: str) -> KeptHash | None:
    with path.open("rb") as stream:
        lines = stream.read(_LONGEST).decode("ascii", "replace").splitlines()
    is_record = len(lines) >= 2 and _COMMIT.fullmatch(lines[0].strip())
    digits = lines[1].strip() if is_record else ""
    return KeptHash(digits, shown) if _HASH.fullmatch(digits) else None


def download_problems(
    kept: Mapping[str, KeptHash], digests: Mapping[str, str], hashed: Collection[str], source: Files
) -> Iterator[Problem]:
    """Yield the files that are not what was sent.

    ``digests`` are SHA-256 of files that were read, as far as they could be of those ``hashed``;
    all others are read here.
    """
    for file, each in kept.items():
        if file in hashed and file not in digests:
            continue
        try:
            if not each.is_sha256:
                git = f"blob {source.files[file]}\0".encode()  # before what git hashes
                digits = file_digest(source, file, "sha1", git)
            else:
                digits = digests.get(file) or file_digests([file], source, 1)[file]
        except CkptoolError as error:
            yield from error.problems
            continue
        if (problem := each.problem(file, digits)) is not None:
            yield problem
