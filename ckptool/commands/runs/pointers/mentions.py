"""Which steps of a run a text names or counts, and whether the text seems to be cut off."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing
from functools import cached_property
from typing import Any

from ckptool.commands.model.adapter_config import ADAPTER_CONFIG
from ckptool.commands.open import open_checkpoint
from ckptool.commands.runs.names import parse_name
from ckptool.commands.runs.steps import Run, Step
from ckptool.commands.runs.trainers import POINTERS
from ckptool.core.box import Box
from ckptool.errors import CkptoolError, TransferError
from ckptool.formats import single_file_suffixes
from ckptool.storage.url import Location

SAYS_POINTER = re.compile(
    r"(?i)(?:.*[^a-z])?(?:latest|last|newest|current|best|resumed?|checkpoints?|ckpts?|keep|pinned)"
    r"(?:[^a-z].*)?"
)
MUST_NAME = re.compile(
    r"(?i)(?:.*[^a-z])?(?:latest|last|newest|best|resumed?)(?:[^a-z].*?)?"
    r"(?<!\.lock)(?<!\.done)(?<!\.log)(?<!\.success)(?<!\.pid)"
)
"""Names of files that are nothing if they name no step; an empty marker need not."""
_COUNTS = re.compile(r"(?i).*(?:step|iter|epoch|latest|last|best|checkpoint|ckpt|resume|keep).*")
_LENGTH = re.compile(
    r"(?i)(?:.*[^a-z])?epochs|.*(?:max|total|num|warmup|cooldown|decay|accum(?:ulation)?|save|eval"
    r"|logging|train(?:ing)?)[-_ ](?:steps|iters|iterations)"
    r"|.*[-_](?:hist|interval|every|freq|frequency)|.*[-_](?:on|off)[-_](?:step|epoch|iter)"
)
"""Keys of settings, as in timm's args.yaml: how long something takes, or how often it is done."""
_COUNTED = re.compile(r"""(?m)^\s*(?:["']?([\w. -]+?)["']?\s*[:=]\s*)?["']?(\d{1,19})["']?,?\s*$""")
_PATH = re.compile(r"""(?m)^\s*["']?(?:\S*[/\\])?([^\s/\\"']+?)[/\\]*["']?\s*$""")


def unreadable(path: Location | str, why: str) -> TransferError:
    """Return the error for a file that may name a step, and does not say which."""
    return TransferError(
        f"{path}: cannot be read: {why}; it may name any step",
        hint="make it readable, or move it away if nothing resumes by it",
    )


def decode(data: bytes) -> str | None:
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


class StepNames:
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
            yield from self._by_number(_recorded_step(self._run.path / file), folder)
            return
        text = decode(data)
        if text is None:
            return
        steps = list(self.in_text(_base_in(text) if name == ADAPTER_CONFIG else text, folder))
        if (re.fullmatch(POINTERS, name) or MUST_NAME.fullmatch(name)) and (
            _is_broken_json(name, text) or (not steps and self._is_cut(text.strip()))
        ):
            raise unreadable(self._run.path / file, f"it ends early, with {text.strip()[-40:]!r}")
        yield from steps

    def in_text(self, text: str, folder: str) -> Iterator[Step]:
        """Yield the steps that a text of a file in a folder of the run names or counts."""
        try:
            value: Any = json.loads(text)
        except (ValueError, RecursionError):
            pass
        else:
            if not isinstance(value, int):
                text += "\n" + "\n".join(_strings(value))
            for number in _numbers(value):
                yield from self._by_number(number, folder)
        matches = list(self._pattern.finditer(text))
        for match in matches:
            yield from self._by_name(match, text, folder)
        for name in () if matches else _PATH.findall(text):  # as with other zeros in front
            yield from self._by_number(parse_name(name, is_folder=True).position.number, folder)
        for key, number in _COUNTED.findall(text):
            if not key.strip() or _counts(key):
                yield from self._by_number(int(number), folder)

    def _by_number(self, number: int | None, folder: str) -> Iterator[Step]:
        """Yield the steps of a number below a folder."""
        below = self._run.path / folder if folder else self._run.path
        for step in self._run.steps:
            if step.number == number is not None and below in step.path.parents:
                yield step

    def _by_name(self, match: re.Match[str], text: str, folder: str) -> Iterable[Step]:
        """Return the steps that a name in a text may mean, by the path that it is part of."""
        head = re.split(r"[\s\"',;:=()\[\]{}<>]", text[: match.start()])[-1].replace("\\", "/")
        steps = self._steps[match[0]]
        for start in (folder, ""):
            place = _normalize(f"{start}/{head}{match[0]}")
            exact = [s for s in steps if self._run.relative(s.path) == place]
            if exact and head:
                return exact
        if head:
            tail = _normalize(f"{head}{match[0]}").split("/")
            shared = {s.path: _overlap(self._run.relative(s.path).split("/"), tail) for s in steps}
            most = max(shared.values())
            return [s for s in steps if shared[s.path] == most]
        below = self._run.path / folder if folder else self._run.path
        return [s for s in steps if below in s.path.parents] or steps

    def _is_cut(self, text: str) -> bool:
        """Return whether a text is empty, or the beginning of a step's name."""
        last = re.split(r"[/\\\s\"']", text)[-1]
        return not text or any(name.startswith(last) for name in self._steps if last)


def _base_in(config: str) -> str:
    """Return what the config of an adapter calls its base; nothing if it cannot be loaded."""
    try:
        value: Any = json.loads(config)
    except (ValueError, RecursionError):
        return ""
    base = value.get("base_model_name_or_path") if isinstance(value, Mapping) else None
    return base if isinstance(base, str) else ""


def _is_broken_json(name: str, text: str) -> bool:
    try:
        return name.endswith(".json") and json.loads(text) is None
    except (ValueError, RecursionError):
        return True


def _normalize(path: str) -> str:
    parts: list[str] = []
    for part in path.split("/"):
        if part == ".." and parts:
            parts.pop()
        elif part not in ("", ".", ".."):
            parts.append(part)
    return "/".join(parts)


def _overlap(path: Collection[str], tail: Collection[str]) -> int:
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


def _counts(key: str) -> bool:
    """Return whether a number under a key may be that of a step."""
    return _COUNTS.fullmatch(key) is not None and _LENGTH.fullmatch(key) is None


def _numbers(value: Any, key: str = "step") -> Iterator[int]:
    """Yield the integers of a JSON value that count steps, by their keys."""
    if type(value) is int and _counts(key):
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
        with closing(TensorSource(opened.source).reader()) as reader:
            return int(reader.elements.read_values(entry, Box.whole(entry.shape)).reshape(-1)[0])
    except (CkptoolError, OSError) as error:
        raise unreadable(file, str(error)) from None
