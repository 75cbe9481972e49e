"""Names of files: those that data is stored under, and those that cannot be listed.

What cannot be listed are links to nothing, and what cannot be looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ckptool.errors import Changed, NotFound, Problem


def unlisted_problems(unlisted: Mapping[str, Problem]) -> list[Problem]:
    """Return the problems of what is not listed and may be part of a checkpoint.

    A link to nothing may be where its name is one that data is stored under, anything else
    unless it is hidden.
    """
    return [_problem(name, why) for name, why in unlisted.items() if _may_belong(name, why)]


def unlisted_notes(unlisted: Mapping[str, Problem]) -> list[Problem]:
    """Return a note for each link to nothing that is no part of a checkpoint."""
    return [
        _problem(name, why).recoded("note")
        for name, why in unlisted.items()
        if why.code == "file-missing" and not _may_belong(name, why)
    ]


def require_listed(problems: Iterable[Problem]) -> None:
    """Raise NotFound for what cannot be read, Changed for what vanished."""
    problems = list(problems)
    lasting = [problem for problem in problems if problem.code != "file-changed"]
    if not problems:
        return
    first, *others = lasting or problems
    message = f"{first}(and {len(others):,} more)" if others else str(first)
    shown = Problem(message, first.code, file=first.file)
    if not lasting:
        raise Changed(shown, hint="retry when nothing is writing to the source")
    hint = (
        "if it is not part of the checkpoint, pass the checkpoint's own path or move the file away"
    )
    error = NotFound(shown, hint=hint)
    error.problems = tuple(lasting)
    raise error


def _problem(name: str, why: Problem) -> Problem:
    return Problem(f"{name}: {why}", why.code, file=name)


def _may_belong(name: str, why: Problem) -> bool:
    if why.code == "file-missing":
        return is_data(name)
    *folders, last = name.split("/")
    is_hidden = any(part.startswith(".") for part in folders)
    return not (is_hidden or last == "lost+found" or (last[:1] == "." and last not in MARKS))


_DATA = (
    *(".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".safetensors", ".distcp", ".npz", ".npy"),
    *(".gguf", ".onnx", ".h5", ".hdf5", ".keras", ".msgpack", ".pt2", ".nemo", ".ot", ".zarr"),
)
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".tar", ".tgz")
MARKS = (".metadata", ".snapshot_metadata", "_METADATA", "manifest.ocdbt", ".zarray")
_RANKED = re.compile(
    r"(?:.*[._-])?(?:(?:[a-z]+_)?rank|world_size|shard|stage)[._-]?[0-9]+(?:[._-].*)?",
    re.IGNORECASE,
)
_UNFINISHED = re.compile(r"(?P<whole>.*?)(?:\.tmp|\.dirty|\.incomplete|\.partial|\.part)")


def unfinished_file(file: str) -> Problem | None:
    """Return that a file was never finished, where its name says so."""
    if not (_UNFINISHED.fullmatch(file) or file.endswith(".dirty.pt")):
        return None
    message = f"{file}: unfinished write (temporary file name)"
    return Problem(message, "file-incomplete", file=file)


def is_data(file: str) -> bool:
    """Return whether a name is one that tensors, or a part of a checkpoint, are stored under."""
    *folders, name = file.split("/")
    if any(folder.startswith(".") for folder in folders):
        return False
    match = _UNFINISHED.fullmatch(name)
    name = match["whole"] if match else name
    plain = name.lower()
    for suffix in _PACKED:
        plain = plain.removesuffix(suffix)
    is_bare = "." not in plain or plain != name.lower()
    return name in MARKS or plain.endswith(_DATA) or (is_bare and bool(_RANKED.fullmatch(plain)))
