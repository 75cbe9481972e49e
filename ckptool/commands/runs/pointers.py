"""What names a step of a run: small files beside the steps, links, and a trainer's best.

A file that cannot be read, or ends too early, may name any step: that is an error, never silence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from msgspec import Struct

from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.runs.links import linked_steps
from ckptool.commands.runs.names import parse_name
from ckptool.commands.runs.records import recorded_best
from ckptool.commands.runs.steps import Run, Step
from ckptool.commands.runs.trainers import POINTERS
from ckptool.core.box import Box
from ckptool.errors import CkptoolError, TransferError
from ckptool.formats import single_file_suffixes
from ckptool.formats.companions import TRAINER_STATE
from ckptool.storage.url import Location

_SMALL = 4096
_LARGEST = 64 << 20
_PIECE = 1 << 20
_LIGHTNING = ".ckpt"
_INDEX = ".index.json"
_SAYS_POINTER = re.compile(
    r"(?i)(?:.*[^a-z])?(?:latest|last|newest|current|best|resumed?|checkpoints?|ckpts?|keep|pinned)"
    r"(?:[^a-z].*)?"
)
_BEST = re.compile(rb'"best_model_checkpoint"\s*:\s*')
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"')
_COUNTS = re.compile(r"(?i).*(?:step|iter|epoch|latest|last|best|checkpoint|ckpt|resume|keep).*")
_COUNTED = re.compile(r"""(?m)^\s*(?:["']?([\w. -]+?)["']?\s*[:=]\s*)?["']?(\d{1,19})["']?,?\s*$""")
_PATH = re.compile(r"""(?m)^\s*["']?(?:\S*[/\\])?([^\s/\\"']+?)[/\\]*["']?\s*$""")


def find_pointers(run: Run) -> dict[Location, list[str]]:
    """Return the steps that something in the run, or right above it, names; with what does.

    A pointer is a link, a small file such as ``latest`` (DeepSpeed, Megatron-LM), an index of
    shards, or the best of a trainer. Raises TransferError if one cannot be read.
    """
    pointers: dict[Location, list[str]] = {}
    found: Iterator[tuple[str, Step]] = linked_steps(run)
    for source, step in (*found, *_named_by_files(run), *_best(run)):
        sources = pointers.setdefault(step.path, [])
        if source not in sources:
            sources.append(source)
    return pointers


def _named_by_files(run: Run) -> Iterator[tuple[str, Step]]:
    names = _Names(run)
    for file, size in _pointer_files(run):
        data = _read(run.path / file, size)
        folder = file.rpartition("/")[0]
        for step in names.in_data(file, folder, data):
            yield file, step
    for path in _files_above(run):
        for step in names.in_text(_decode(_read(path, None)) or "", ""):
            yield str(path), step


def _pointer_files(run: Run) -> Iterator[tuple[str, int]]:
    """Yield the files that may name a step, relative to the run, with their sizes in bytes."""
    entries = {run.relative(entry) for step in run.steps for entry in step.entries}
    around = {""}
    for entry in entries:
        around |= {str(parent) for parent in PurePosixPath(entry).parents}
    binary = tuple(single_file_suffixes())
    for file, size in run.source.files.items():
        folder, _, name = file.rpartition("/")
        inside = file in entries or not entries.isdisjoint(map(str, PurePosixPath(file).parents))
        is_known = POINTERS.fullmatch(name) is not None
        if inside:
            is_pointer = name.endswith(_INDEX)
        elif is_known or name.endswith(_INDEX):
            is_pointer = name != TRAINER_STATE
        else:
            may_name = (
                (folder or ".") in around or folder in around or _SAYS_POINTER.fullmatch(name)
            )
            is_pointer = bool(may_name) and size <= _SMALL and not name.endswith(binary)
        if is_pointer and size <= _LARGEST and "" not in entries:
            yield file, size


def _files_above(run: Run) -> Iterator[Path]:
    """Yield the small files right above a run on a disk whose names say that they name a step."""
    if not isinstance(run.path, Path):
        return
    try:
        beside = sorted(run.path.absolute().parent.iterdir())
    except OSError:
        return
    binary = tuple(single_file_suffixes())
    for path in beside:
        is_named = _SAYS_POINTER.fullmatch(path.name) and not path.name.endswith(binary)
        if is_named and path.is_file() and path.stat().st_size <= _SMALL:
            yield path


def _read(path: Location, size: int | None) -> bytes:
    """Return a pointer's bytes, nothing if it is gone; TransferError if it cannot be read."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return b""
    except (CkptoolError, OSError) as error:
        if isinstance(error, CkptoolError) and not path.exists():
            return b""
        raise _unreadable(path, getattr(error, "strerror", None) or str(error)) from None
    if size is not None and len(data) < size:
        raise _unreadable(path, f"ends after {len(data):,} of {size:,} bytes")
    return data


def _unreadable(path: Location | str, why: str) -> TransferError:
    return TransferError(
        f"{path}: cannot be read: {why}; it may name any step",
        hint="make it readable, or move it away if nothing resumes by it",
    )


def _decode(data: bytes) -> str | None:
    """Return the text of a file in UTF-8, UTF-16 or UTF-32; None if it is no text."""
    for mark, encoding in (
        (b"\xff\xfe\0\0", "utf-32"),
        (b"\0\0\xfe\xff", "utf-32"),
        (b"\xff\xfe", "utf-16"),
        (b"\xfe\xff", "utf-16"),
    ):
        if data.startswith(mark):
            return data.decode(encoding, "replace")
    if b"\0" in data:
        encoding = "utf-16-le" if data[1::2].count(0) * 2 >= len(data[1::2]) else "utf-16-be"
        text = data.decode(encoding, "replace")
        return text if text.isprintable() or text.strip().isprintable() else None
    return data.decode("utf-8-sig", "replace")


class _Names:
    """The names of a run's steps, and which of these a text has."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._steps: dict[str, list[Step]] = {}
        for step in run.steps:
            for entry in step.entries:
                stem = re.sub(r"\.[a-z]\w*(?:\.tar)?$", "", entry.name)
                for name in dict.fromkeys(
                    [entry.name.strip(), stem] if step.parts else [entry.name]
                ):
                    self._steps.setdefault(name, []).append(step)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        names = sorted(filter(None, self._steps), key=len, reverse=True)
        return re.compile(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, names))})(?![\w=-])")

    def in_data(self, file: str, folder: str, data: bytes) -> Iterator[Step]:
        """Yield the steps that a file names; TransferError if it seems to be cut off."""
        name = file.rpartition("/")[2]
        if name.endswith(tuple(single_file_suffixes())):
            yield from self._counted(_recorded_step(self._run.path / file), folder)
            return
        text = _decode(data)
        if text is None:
            return
        found = list(self.in_text(text, folder, is_json=name.endswith(".json")))
        is_pointer = POINTERS.fullmatch(name) or _SAYS_POINTER.fullmatch(name)
        if not found and is_pointer and self._is_cut(text.strip()):
            raise _unreadable(self._run.path / file, f"it ends early, with {text.strip()[-40:]!r}")
        yield from found

    def in_text(self, text: str, folder: str, *, is_json: bool = False) -> Iterator[Step]:
        """Yield the steps that a text of a file in a folder of the run names or counts."""
        try:
            value: Any = json.loads(text)
        except (ValueError, RecursionError):
            if is_json and text.strip():
                raise _unreadable(
                    f"{self._run.path / folder}", "a JSON file in it is cut off"
                ) from None
        else:
            if not isinstance(value, int):
                text += "\n" + "\n".join(_strings(value))
            for number in _numbers(value):
                yield from self._counted(number, folder)
        matches = list(self._pattern.finditer(text))
        for match in matches:
            yield from self._placed(match, text, folder)
        for name in () if matches else _PATH.findall(text):  # as with other zeros in front
            yield from self._counted(parse_name(name, is_folder=True).position.number, folder)
        for key, number in _COUNTED.findall(text):
            if not key.strip() or _COUNTS.fullmatch(key):
                yield from self._counted(int(number), folder)

    def _counted(self, number: int | None, folder: str) -> Iterator[Step]:
        """Yield the steps of a number below a folder."""
        below = self._run.path / folder if folder else self._run.path
        for step in self._run.steps:
            if step.number == number is not None and below in step.path.parents:
                yield step

    def _placed(self, match: re.Match[str], text: str, folder: str) -> Iterable[Step]:
        """Return the steps that a name in a text may mean, by the path that it is part of."""
        head = re.split(r"[\s\"',;:=()\[\]{}<>]", text[: match.start()])[-1].replace("\\", "/")
        steps = self._steps[match[0]]
        for start in (folder, ""):
            place = _normal(f"{start}/{head}{match[0]}")
            exact = [s for s in steps if self._run.relative(s.path) == place]
            if exact and head:
                return exact
        if head:
            tail = _normal(f"{head}{match[0]}").split("/")
            shared = {s.path: _shared(self._run.relative(s.path).split("/"), tail) for s in steps}
            most = max(shared.values())
            return [s for s in steps if shared[s.path] == most]
        below = self._run.path / folder if folder else self._run.path
        return [s for s in steps if below in s.path.parents] or steps

    def _is_cut(self, text: str) -> bool:
        """Return whether a text is empty, or the beginning of a step's name."""
        last = re.split(r"[/\\\s\"']", text)[-1]
        return not text or any(name.startswith(last) for name in self._steps if last)


def _normal(path: str) -> str:
    parts: list[str] = []
    for part in path.split("/"):
        if part == ".." and parts:
            parts.pop()
        elif part not in ("", ".", ".."):
            parts.append(part)
    return "/".join(parts)


def _shared(path: Collection[str], tail: Collection[str]) -> int:
    """Return how many of their last parts two paths have in common."""
    count = 0
    for one, other in zip(reversed([*path]), reversed([*tail]), strict=False):
        if one != other:
            break
        count += 1
    return count


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _numbers(value: Any, key: str = "step") -> Iterator[int]:
    """Yield the integers of a JSON value that count steps, by their keys."""
    if type(value) is int and _COUNTS.fullmatch(key):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(inner, str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, key)


def _recorded_step(file: Location) -> int | None:
    """Return the step in a file of torch.save such as Megatron-Bridge's ``latest_train_state.pt``.

    Raises TransferError if it cannot be read.
    """
    from ckptool.engine.read.tensors import TensorSource

    try:
        opened = open_checkpoint(file)
        value = opened.catalog.objects.get("step")
        if value is not None and type(value.value) is int:
            return value.value
        entry = opened.catalog.tensors.get("step")
        if entry is None or entry.elements != 1:
            return None
        reader = TensorSource(opened.source).reader()
        return int(reader.read_values(entry, Box.whole(entry.shape)).reshape(-1)[0])
    except (CkptoolError, OSError) as error:
        raise _unreadable(file, str(error)) from None


def recorded_pointers(run: Run, options: ReadOptions) -> Iterator[tuple[str, Step]]:
    """Yield the best steps according to Lightning's newest checkpoint of each folder."""
    names = _Names(run)
    told: set[object] = set()
    for step in reversed(run.steps):
        if step.path.suffix != _LIGHTNING or step.home in told:
            continue
        for best in recorded_best(step, options):
            told.add(step.home)
            for named in names.in_text(best, "/".join(step.home.parts)):
                yield step.path.name, named


class _State(Struct, frozen=True):
    """A ``trainer_state.json``, relative to the run, and the step that it lies in, if any."""

    file: str
    step: Step | None


def _best(run: Run) -> Iterator[tuple[str, Step]]:
    """Yield the steps that transformers' Trainer calls its best, with the file that says so.

    Of a folder's steps only the newest that names one counts, beside the run's own file.
    """
    names = _Names(run)
    homes: dict[object, bool] = {}
    states = [_State(f, None) for f in run.source.files if _is_state_of_run(f, run)]
    states += [
        _State(f"{run.relative(step.path)}/{TRAINER_STATE}", step) for step in reversed(run.steps)
    ]
    for state in states:
        size = run.source.files.get(state.file)
        if size is None or (state.step is not None and homes.get(state.step.home)):
            continue
        best = _best_in(run.path / state.file, size)
        if best is None:
            continue
        if state.step is not None:
            homes[state.step.home] = True
        folder = state.file.rpartition("/")[0]
        around = folder if state.step is None else folder.rpartition("/")[0]
        for step in names.in_text(best, around):
            yield state.file, step


def _is_state_of_run(file: str, run: Run) -> bool:
    folder, _, name = file.rpartition("/")
    return name == TRAINER_STATE and all(run.relative(step.path) != folder for step in run.steps)


def _best_in(path: Location, size: int) -> str | None:
    """Return the best checkpoint that a state names; TransferError if it ends too early.

    It is searched, not parsed: it may be large, and what it says holds even if its end is missing.
    """
    tail, has_end = b"", False
    for piece in _pieces(path, size):
        data = tail + piece
        match = _BEST.search(data)
        if match is not None:
            value = _TEXT.match(data, match.end())
            if value is not None:
                return str(json.loads(value[0]))
            if data[match.end() : match.end() + 4] == b"null":
                return None
            if len(data) - match.end() > _SMALL:
                return None
        tail = data[match.start() if match else -_SMALL :]
        has_end = piece.rstrip().endswith(b"}")
    if not has_end:
        raise _unreadable(path, "it ends early, before the best checkpoint")
    return None


def _pieces(path: Location, size: int) -> Iterator[bytes]:
    if not isinstance(path, Path):
        yield _read(path, size)
        return
    try:
        with open(path, "rb") as file:
            while piece := file.read(_PIECE):
                yield piece
    except FileNotFoundError:
        yield b"}"
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
