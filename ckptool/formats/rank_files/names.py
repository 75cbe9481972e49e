"""The files of a folder that are one a rank, and those that accelerate writes once beside them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckptool.formats.rank_files.torch_checkpointing import METADATA
from ckptool.serialization.source import Source

_RANK_FILE = re.compile(
    r"(?P<family>.*?)[._-]?(?:world_size_(?P<world>[0-9]{1,9})_)?(?P<word>rank)?[._-]?"
    r"(?<![0-9])(?P<rank>[0-9]{1,9})\.(?:pt|pth|bin|ckpt|pkl|json|safetensors)"
)
_ITEM_FILE = re.compile(
    r"(?P<family>.+)_(?P<rank>[0-9]{1,9})\.(?:pt|json|safetensors)(?P<world>)?(?P<word>)?"
)
_ACCELERATE = {"pytorch_model_fsdp": "model", "pytorch_model": "model"}
_SINGLE = re.compile(
    r"(?P<family>scheduler|sampler|dl_state_dict|optimizer|pytorch_model|pytorch_model_fsdp)"
    r"(?P<number>_\d+)?\.bin|(scaler|scheduler|optimizer)\.pt|custom_checkpoint_\d+\.pkl"
)


@dataclass(frozen=True, slots=True)
class RankFile:
    """A file of one rank: its family, rank, and the world size its name states."""

    file: str
    family: str
    rank: int
    world: int | None
    says_rank: bool


def rank_files(source: Source) -> list[RankFile]:
    """The rank files directly in the source's folder; empty where they are none."""
    pattern = _ITEM_FILE if METADATA in source.files else _RANK_FILE
    found = [parsed for file in source.files if (parsed := _parse(file, pattern)) is not None]
    by_family: dict[tuple[str, int | None], list[RankFile]] = {}
    for item in found:
        by_family.setdefault((item.family, item.world), []).append(item)
    ranked = [item for items in by_family.values() if _is_family(items, source) for item in items]
    single = [
        RankFile(match.string, _single_family(match), 0, None, True)
        for match in map(_SINGLE.fullmatch, source.files)
        if match
    ]
    return [*ranked, *single] if ranked or has_fsdp_folder(source) else []


def has_fsdp_folder(source: Source) -> bool:
    """Whether accelerate put the model beside these files into a folder of its own."""
    heads = ("pytorch_model_fsdp_", "pytorch_model_0/")
    return any(name.startswith(heads) for name in source.files)


def is_single(file: str) -> bool:
    """Files that accelerate and transformers' Trainer write once, beside those of the ranks."""
    return _SINGLE.fullmatch(file) is not None


def _single_family(match: re.Match[str]) -> str:
    """The family of such a file; accelerate numbers models and optimizers where it has several."""
    family = _ACCELERATE.get(match["family"] or "")
    if family is None:
        return match.string.partition(".")[0]
    return family + ("" if match["number"] in (None, "_0") else match["number"])


def _parse(file: str, pattern: re.Pattern[str]) -> RankFile | None:
    match = pattern.fullmatch(file)
    if "/" in file or match is None or "-of-" in file or is_single(file):
        return None
    family = match["family"]
    accelerate = re.fullmatch(r"(pytorch_model_fsdp|optimizer)_([0-9]+)", family)
    if accelerate and match["word"]:
        number = "" if accelerate[2] == "0" else f"_{accelerate[2]}"
        family = _ACCELERATE.get(accelerate[1], accelerate[1]) + number
    world = int(match["world"]) if match["world"] else None
    says_rank = bool(match["word"]) or family in ("random_states", "rng_state")
    return RankFile(file, family, int(match["rank"]), world, says_rank)


def _is_family(items: list[RankFile], source: Source) -> bool:
    """Whether files that differ in a number differ in a rank, and not in a step or epoch."""
    suffixes = {item.file.rpartition(".")[2] for item in items}
    if suffixes & {"json", "safetensors"}:
        return METADATA in source.files
    ranks = [item.rank for item in items]
    if len(set(ranks)) != len(ranks):
        return False
    if METADATA in source.files:
        return True
    return all(item.says_rank for item in items) or (len(items) > 1 and min(ranks) <= 1)
