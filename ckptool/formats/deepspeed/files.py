"""The files of a DeepSpeed checkpoint, by the ranks in their names.

A root holds ``latest`` (the tag, as text) and a folder a tag. In names, ``zero_pp_rank`` is the
data-parallel rank and ``mp_rank`` counts pipeline stages and tensor-parallel ranks, the latter
fastest (DeepSpeed 0.3 to 0.19, ``runtime/engine.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from ckptool.errors import Damaged
from ckptool.serialization.source import Source, first_missing, require_rank

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
OPTIMIZER_STATE = "zero/optimizer_state.pt"
_LONGEST_TAG = 1000
_Key = TypeVar("_Key", bound=tuple[int, ...])
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<dp>\d{1,9})_)?mp_rank_(?P<mp>\d{1,9})_model_states\.pt")
_OPTIMIZER = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_?optim_states\.pt"
)
_LAYER = re.compile(r"layer_(?P<layer>\d{1,9})(?:-model_(?P<tp>\d{1,9}))?-model_states\.pt")
_EXPERT = re.compile(
    r"(?:layer_(?P<layer>\d{1,9})_)?expert_(?P<expert>\d{1,9})_mp_rank_(?P<mp>\d{1,9})"
    r"_model_states\.pt"
)
_EXPERT_OPTIMIZER = re.compile(
    r"expp_rank_(?P<ep>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_optim_states\.pt"
)

Ranks = tuple[int, int]
"""A data-parallel rank and a model-parallel (``mp``) rank."""


@dataclass(slots=True)
class Files:
    """The files of one tag. ``stage_3`` says that model files are one a data-parallel rank.

    ``layers`` are by layer and tensor-parallel rank, ``experts`` by MoE layer, expert and ``mp``
    rank, ``expert_optimizers`` by expert-parallel rank and ``mp`` rank.
    """

    models: dict[Ranks, str] = field(default_factory=dict)
    optimizers: dict[Ranks, str] = field(default_factory=dict)
    layers: dict[tuple[int, int], str] = field(default_factory=dict)
    experts: dict[tuple[int, int, int], str] = field(default_factory=dict)
    expert_optimizers: dict[Ranks, str] = field(default_factory=dict)
    stage_3: bool = False

    @property
    def all(self) -> list[str]:
        return [
            *self.models.values(),
            *self.optimizers.values(),
            *self.layers.values(),
            *self.experts.values(),
            *self.expert_optimizers.values(),
        ]


def holds_model_file(names: Iterable[str]) -> bool:
    """Return whether a folder with these files is one of DeepSpeed's tags."""
    return any(_MODEL.fullmatch(name) for name in names)


def without_copies(paths: Iterable[str]) -> list[str]:
    """Without the model files of ZeRO 3 where there are others, as a universal checkpoint has."""
    matches = {path: _MODEL.fullmatch(path.rpartition("/")[2]) for path in paths}
    whole = any(match and match["dp"] is None for match in matches.values())
    return [path for path, m in matches.items() if not (whole and m and m["dp"] is not None)]


def tag_folder(source: Source, marker: str) -> str:
    """Return the folder of the tag that the marker file names, with a trailing slash.

    Empty without one.

    Raises Damaged where the marker names a folder that is not there.
    """
    size = source.files.get(marker)
    if size is None:
        return ""
    text = source.read(marker, 0, min(size, _LONGEST_TAG)).decode("utf-8", "replace")
    folder = text.strip() + "/"
    if len(folder) > 1 and any(name.startswith(folder) for name in source.files):
        return folder
    others = ", ".join(tags(source)) or "no other tag"
    raise Damaged(
        f"{marker} names the tag {text.strip()[:80]!r}, which does not exist; found: {others}",
        "file-missing",
        file=marker,
        hint="name the folder of a tag itself",
    )


def tags(source: Source) -> list[str]:
    """Return the folders directly below the root that hold model files of DeepSpeed."""
    found = (name.partition("/") for name in source.files if name.count("/") == 1)
    return list(dict.fromkeys(head for head, _, name in found if _MODEL.fullmatch(name)))


def find_files(paths: Iterable[str], folder: str) -> Files:
    """Return the files directly in ``folder``. Damaged where two of them claim the same ranks."""
    found = Files()
    for path in paths:
        name = path.removeprefix(folder)
        if path.startswith(folder) and "/" not in name:
            _sort_in(found, name, path)
    return found


def _sort_in(found: Files, name: str, path: str) -> None:
    if match := _MODEL.fullmatch(name):
        found.stage_3 = found.stage_3 or match["dp"] is not None
        _put(found.models, _ranks(match, "dp", "mp"), path)
    elif match := _OPTIMIZER.fullmatch(name):
        _put(found.optimizers, _ranks(match, "dp", "mp"), path)
    elif match := _LAYER.fullmatch(name):
        _put(found.layers, _ranks(match, "layer", "tp"), path)
    elif match := _EXPERT.fullmatch(name):
        layer, expert = _ranks(match, "layer", "expert")
        _put(found.experts, (layer, expert, int(match["mp"])), path)
    elif match := _EXPERT_OPTIMIZER.fullmatch(name):
        _put(found.expert_optimizers, _ranks(match, "ep", "mp"), path)


def _ranks(match: re.Match[str], first: str, second: str) -> Ranks:
    ranks = int(match[first] or 0), int(match[second] or 0)
    require_rank(max(ranks), match[0])
    return ranks


def _put(files: dict[_Key, str], key: _Key, path: str) -> None:
    if key in files:
        raise Damaged(
            f"{files[key]} and {path} claim the same ranks: two checkpoints lie in one folder",
            "saves-mixed",
            file=path,
            hint="move the files of one of the two away",
        )
    files[key] = path


def require_all(files: dict[Ranks, str], dp: int, mp: int, what: str) -> None:
    """Raise Damaged where the file of a rank is missing, or is of a rank there is none of."""
    for model_rank in range(mp):
        held = {d for d, m in files if m == model_rank}
        missing = first_missing(held, dp)
        if missing:
            ranks = ", ".join(map(str, missing))
            message = f"{what} of zero_pp_rank {ranks}, mp_rank {model_rank:02d} missing:"
            message += f" {len(held):,} of {dp:,} are there"
            raise Damaged(message, "rank-missing")
    stray = [name for (d, m), name in files.items() if d >= dp or m >= mp]
    if stray:
        raise Damaged(
            f"{stray[0]} belongs to no rank of DP {dp:,} and {mp:,} model-parallel ones",
            "saves-mixed",
            file=stray[0],
            hint="an earlier save with more ranks may have left it: move it away",
        )
