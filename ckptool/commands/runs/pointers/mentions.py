"""Which steps of a run a text names or counts, and whether the text seems to be cut off."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing
from functools import cached_property
from itertools import chain
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
_OF_ANOTHER = re.compile(r"(?i)latest|last|best|keep|pinned|resume")
"""What a file that describes a step may count of another."""
_COUNTS = re.compile(r"(?i).*(?:step|iter|epoch|latest|last|best|checkpoint|ckpt|resume|keep).*")
_LENGTH = re.compile(
    r"(?i)(?:.*[^a-z])?epochs|.*(?:max|total|num|warmup|cooldown|decay|accum(?:ulation)?|save|eval"
    r"|logging|train(?:ing)?)[-_ ](?:steps|iters|iterations)"
    r"|.*[-_](?:hist|interval|every|freq|frequency)|.*[-_](?:on|off)[-_](?:step|epoch|iter)"
)
"""Keys of settings, as in timm's args.yaml: how long something takes, or how often it is done."""
_KEY = re.compile(r"""["']?([\w. -]*)["']?""")
_NUMBER = re.compile(r"""["']?(\d{1,19})["']?,?""")
_SEPARATOR = re.compile(r"[\s\"',;:=()\[\]{}<>]")
_LONGEST = 255
"""As many characters as a file's name may have; of a path before a name no more are looked at."""


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
                names = [entry.name.strip(), _stem(entry.name)] if step.parts else [entry.name]
                for name in dict.fromkeys(names):
                    self._steps.setdefault(name, []).append(step)
        self._numbered: dict[int | None, list[Step]] = {}
        for step in run.steps:
            self._numbered.setdefault(step.number, []).append(step)

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
        text_of_steps = _base_in(text) if name == ADAPTER_CONFIG else text
        own_steps = [*self._described_by(file)]
        counts = not own_steps or _OF_ANOTHER.search(text) is not None
        named_steps = self.in_text(text_of_steps, folder, counts=counts)
        steps = [step for step in named_steps if step not in own_steps]
        if (re.fullmatch(POINTERS, name) or MUST_NAME.fullmatch(name)) and (
            _is_broken_json(name, text) or (not steps and self._is_cut(text.strip()))
        ):
            raise unreadable(self._run.path / file, f"it ends early, with {text.strip()[-40:]!r}")
        yield from steps

    def _described_by(self, file: str) -> Iterator[Step]:
        """Yield the numbered steps that a file describes, what it counts being theirs.

        It lies beside each under its name, as wenet's ``epoch_3.yaml`` beside ``epoch_3.pt``.
        """
        beside = self._run.path / file
        is_pointer = MUST_NAME.fullmatch(beside.name) is not None
        if beside.suffix in (".yaml", ".yml", ".json") and not is_pointer:
            for step in self._steps.get(_stem(beside.name), ()):
                is_beside = any(entry.parent == beside.parent for entry in step.entries)
                if is_beside and step.number is not None:
                    yield step

    def in_text(self, text: str, folder: str, *, counts: bool = True) -> Iterator[Step]:
        """Yield the steps that a text of a file in a folder of the run names, or also counts."""
        try:
            leaves = list(_leaves(json.loads(text)))
        except (ValueError, RecursionError):
            leaves = []
        text = "\n".join([text, *(leaf for _, leaf in leaves if isinstance(leaf, str))])
        names = dict.fromkeys(self._find_names(text))
        numbers = [leaf for key, leaf in leaves if type(leaf) is int and _counts(key)]
        if not names:  # as with other zeros in front
            parsed = (parse_name(name, is_folder=True) for name in _last_names(text))
            counted = (name.position.number for name in parsed)
            numbers += (number for number in counted if number is not None)
        numbers += (number for key, number in _counted(text) if not key or _counts(key))
        for head, name in names:
            yield from self._by_name(head, name, folder)
        for number in dict.fromkeys(numbers) if counts else ():
            yield from self._by_number(number, folder)

    def _find_names(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield the names of steps in a text, each behind the path that it is part of."""
        separators = chain((m.end() for m in _SEPARATOR.finditer(text)), [len(text) + 1])
        begin, following = 0, next(separators)
        for match in self._pattern.finditer(text):
            end = match.start()
            while following <= end:
                begin, following = following, next(separators)
            yield text[max(begin, end - _LONGEST) : end].replace("\\", "/"), match[0]

    def _by_number(self, number: int | None, folder: str) -> Iterator[Step]:
        """Yield the steps of a number below a folder."""
        below = self._run.path / folder if folder else self._run.path
        for step in () if number is None else self._numbered.get(number, ()):
            if below in step.path.parents:
                yield step

    def _by_name(self, head: str, name: str, folder: str) -> Iterable[Step]:
        """Return the steps that a name in a text may mean, by the path before it."""
        steps = self._steps[name]
        for start in (folder, ""):
            place = _normalize(f"{start}/{head}{name}")
            exact = [s for s in steps if self._run.relative(s.path) == place]
            if exact and head:
                return exact
        if head:
            tail = _normalize(f"{head}{name}").split("/")
            shared = {s.path: _overlap(self._run.relative(s.path).split("/"), tail) for s in steps}
            most = max(shared.values())
            return [s for s in steps if shared[s.path] == most]
        below = self._run.path / folder if folder else self._run.path
        return [s for s in steps if below in s.path.parents] or steps

    def _is_cut(self, text: str) -> bool:
        """Return whether a text is empty, or the beginning of a step's name."""
        last = re.split(r"[/\\\s\"']", text)[-1]
        return not text or any(name.startswith(last) for name in self._steps if last)


def _stem(name: str) -> str:
    return re.sub(r"\.[a-z]\w*(?:\.tar)?$", "", name)


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


def _last_names(text: str) -> Iterator[str]:
    """Yield the last part of each path that is alone on a line."""
    for words in map(str.split, text.splitlines()):
        path = words[0].strip("\"'").rstrip("/\\") if len(words) == 1 else ""
        name = re.split(r"[/\\]", path)[-1]
        if 0 < len(name) <= _LONGEST and not {*"\"'"} & {*name}:
            yield name


def _counted(text: str) -> Iterator[tuple[str, int]]:
    """Yield the number of each line that has no more than that, and a key in front of it."""
    for line in text.splitlines():
        *keys, value = re.split(r"[:=]", line, maxsplit=1)
        number = _NUMBER.fullmatch(value.strip())
        key = [_KEY.fullmatch(key.strip()) for key in keys]
        if number is not None and None not in key:
            yield "".join(match[1].strip() for match in key if match is not None), int(number[1])


def _leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of a JSON value by their keys, and the keys themselves as texts."""
    todo = [("step", value)]
    while todo:
        key, value = todo.pop()
        if isinstance(value, Mapping):
            yield from ((key, name) for name in value)
            todo += reversed([*value.items()])
        elif isinstance(value, list):
            todo += ((key, inner) for inner in reversed(value))
        else:
            yield key, value


def _counts(key: str) -> bool:
    """Return whether a number under a key may be that of a step."""
    return _COUNTS.fullmatch(key) is not None and _LENGTH.fullmatch(key) is None


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
