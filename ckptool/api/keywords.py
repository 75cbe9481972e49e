"""Keywords of the Python functions: named as the command line's options, typed, made values of."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from ckptool.commands.map_report import MapOptions
from ckptool.commands.read_options import ReadOptions
from ckptool.commands.selection import Selection
from ckptool.commands.transfer import TransferOptions
from ckptool.core.dtype import parse_dtype
from ckptool.core.placing import parse_mesh, parse_rule
from ckptool.core.tp_rules import parse_tp_rules
from ckptool.engine import remote_path
from ckptool.engine.remote_path import Location
from ckptool.engine.run import RunOptions

Options = TypeVar("Options")
AnyPath = str | os.PathLike[str]


def location(path: AnyPath) -> Location:
    """Where a checkpoint lies, or shall: a path or a URL."""
    return remote_path.location(os.fspath(path))


class Reading(TypedDict, total=False):
    """How to read: ``format_name`` is ``--from``, ``tp_rules`` are ``GLOB=RULE``."""

    format_name: str | None
    per_rank: bool
    flat_params: AnyPath | None
    tp_rules: Sequence[str]
    unstack: bool


class Selecting(TypedDict, total=False):
    """What to take, and how to call it: globs, and ``REGEX=REPLACEMENT`` in order."""

    select: Sequence[str]
    drop: Sequence[str]
    model_only: bool
    strip_prefix: str | None
    rename: Sequence[str]


class KeyMapping(TypedDict, total=False):
    """A key map: a built-in's name, a TOML file, or ``auto``; ``dims`` are its named sizes."""

    map: str | None
    dims: Mapping[str, int]
    inverse: bool | None


class Opening(Reading, Selecting, KeyMapping, total=False):
    """What ``open``, ``load`` and the DCP reader take."""


class Writing(TypedDict, total=False):
    """How to write. ``budget`` in bytes; ``assets`` is ``--hf-assets``; ``dry_run`` only plans."""

    assets: AnyPath | None
    overwrite: bool
    resume: bool
    workers: int
    budget: int
    fsync: bool
    dry_run: bool


class Converting(Opening, Writing, total=False):
    """What ``convert`` takes. ``max_shard_size`` in bytes, ``dtype`` such as ``"bf16"``."""

    dtype: str | None
    dequantize: bool
    max_shard_size: int
    one_rank: bool


class Resharding(Reading, KeyMapping, Writing, total=False):
    """What ``reshard`` takes: ``mesh`` such as ``"2x4"``, ``shard`` such as ``"*=Shard(0)"``."""

    mesh: str | None
    shard: Sequence[str]
    plan: AnyPath | None
    tp_plan: AnyPath | None
    policy: str | None
    to: str | None
    rank_state: str
    verify: bool


class Verifying(Reading, total=False):
    """What ``verify`` takes: how deep to look, and what counts."""

    quick: bool
    sample: float
    seed: int
    finite: bool
    strict: bool
    ignore: Sequence[str]
    workers: int


class Comparing(Verifying, Selecting, total=False):
    """What ``compare`` takes; without a tolerance bits are compared."""

    rtol: float | None
    atol: float | None
    cast: bool


_FIELDS = {"map": "name", "shard": "rules", "plan": "plan_file"}
"""Keywords that the options' fields call otherwise."""

_PARSED: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("select", "drop", "rename", "ignore"), tuple),
    **dict.fromkeys(("flat_params", "assets", "plan", "tp_plan"), Path),
    "tp_rules": parse_tp_rules,
    "mesh": parse_mesh,
    "shard": lambda texts: tuple(map(parse_rule, texts)),
    "dtype": parse_dtype,
}


class Keywords:
    """The keywords of one call, taken one kind of options after another.

    Raises TypeError for a keyword that the function does not have.
    """

    def __init__(self, function: str, keywords: Mapping[str, Any], known: type) -> None:
        unknown = next((name for name in keywords if name not in known.__annotations__), None)
        if unknown is not None:
            raise TypeError(f"{function}() got an unexpected keyword argument {unknown!r}")
        self._said = {
            _FIELDS.get(name, name): _PARSED.get(name, lambda value: value)(value)
            for name, value in keywords.items()
            if value is not None
        }

    def get(self, name: str) -> Any:
        """One value by itself, None where it is not given."""
        return self._said.get(name)

    def options(self, kind: Callable[..., Options], **more: Any) -> Options:
        """The options of a kind: what is said of its fields, and what is given here."""
        names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
        return kind(**{name: self._said[name] for name in names if name in self._said} | more)

    def reading(self) -> ReadOptions:
        return self.options(ReadOptions)

    def selection(self) -> Selection:
        return self.options(Selection)

    def mapping(self) -> MapOptions:
        return self.options(MapOptions)

    def transfer(self, **more: Any) -> TransferOptions:
        return self.options(TransferOptions, run=self.options(RunOptions), **more)
