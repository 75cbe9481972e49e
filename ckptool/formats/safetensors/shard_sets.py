"""Which safetensors files of a folder are one model: the main one, a variant, a set without index.

transformers (5) and diffusers (0.42) write ``STEM.safetensors``, or shards
``STEM-00001-of-00002.safetensors`` and ``STEM.safetensors.index.json``. The same weights in another
precision, a variant, are ``STEM.fp16.safetensors``, or shards ``STEM.fp16-00001-of-00002`` and
``STEM.safetensors.index.fp16.json``, beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ckptool.errors import Damaged
from ckptool.formats.shards import read_index
from ckptool.serialization.source import Source

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
SHARD = re.compile(r"(?P<stem>.*)(?<!rank)-(?P<number>[0-9]+)-of-(?P<count>[0-9]+)\.safetensors")
"""Not nanotron's ``..._tp-rank-0-of-2.safetensors``: each rank has its part of one tensor."""
_INDEX = re.compile(r"(?P<stem>.+)\.safetensors\.index(?P<variant>\.[^.]+)?\.json")
_VARIANT = re.compile(r"(?P<stem>[^.]+)\.[^.-]+(?P<rest>(-\d+-of-\d+)?\.safetensors)")
_DCP_SHARD = re.compile(r"shard-\d+-model-")


def all_weights(source: Source) -> list[str]:
    """Return the safetensors files directly in the folder, apart from DCP's shards."""
    return [
        name
        for name in source.files
        if "/" not in name and name.endswith(".safetensors") and not _DCP_SHARD.match(name)
    ]


def whole_model(source: Source) -> str | None:
    """Return the file that libraries open as a model by its name, whatever lies beside it.

    As LLaMA-Factory's ``value_head.safetensors`` beside an adapter of PEFT.
    """
    by_name = (WHOLE, ADAPTER) if ADAPTER_CONFIG in source.files else (WHOLE,)
    return next((name for name in by_name if name in source.files), None)


def variants(names: Iterable[str]) -> set[str]:
    """Return the files of variants, such as ``model.fp16.safetensors``, beside the model itself."""
    names = list(names)
    stems = _stems(names)
    matches = (match for match in map(_VARIANT.fullmatch, names) if match)
    return {match.string for match in matches if match["stem"] in stems}


def _stems(names: Iterable[str]) -> set[str]:
    matches = ((name, SHARD.fullmatch(name)) for name in names)
    return {m["stem"] if m else name.removesuffix(".safetensors") for name, m in matches}


def indexes(source: Source) -> list[str]:
    """Return the indexes in the folder, without those of variants beside the model's own."""
    matches = [m for name in source.files if "/" not in name and (m := _INDEX.fullmatch(name))]
    stems = {m["stem"] for m in matches if not m["variant"]} | _stems(all_weights(source))
    return [m.string for m in matches if not m["variant"] or m["stem"] not in stems]


def is_of_a_set(source: Source, file: str) -> bool:
    """Return whether a file is an index, or one of several shards by its name."""
    match = SHARD.fullmatch(file)
    is_shard = match is not None and file in all_weights(source) and int(match["count"]) > 1
    return "/" not in file and (is_shard or _INDEX.fullmatch(file) is not None)


def index_of(source: Source, file: str | None) -> str | None:
    """Return the index to read: ``file``, or the one that lists it; without a file the main one.

    Of several, transformers' own. Raises Damaged if there are others only.
    """
    if file is not None:
        files = [name for name in source.files if "/" not in name and _INDEX.fullmatch(name)]
        return file if file in files else next((i for i in files if _lists(source, i, file)), None)
    names = indexes(source)
    if len(names) > 1 and INDEX not in names:
        message = f"{source.root}: several indexes: {', '.join(names)}"
        raise Damaged(message, hint=f"give the path of one, such as {source.root}/{names[0]}")
    return INDEX if INDEX in names else next(iter(names), None)


def _lists(source: Source, index: str, file: str) -> bool:
    try:
        return file in read_index(source, index)[0].values()
    except Damaged:
        return False


def unindexed(source: Source, file: str | None) -> list[str]:
    """Return the shards of a folder without an index, all that their names state.

    They are those of the set of ``file``, if any. Raises Damaged if there are several sets.
    """
    files = all_weights(source)
    weights = [name for name in files if name not in variants(files)] if file is None else [file]
    matches = [m for name in weights if (m := SHARD.fullmatch(name))]
    if not matches:
        model = whole_model(source)
        return [model] if file is None and model is not None else weights
    counts = {match["count"] for match in matches}
    if len(counts) > 1:
        message = f"{source.root}: file names state {', '.join(sorted(counts))} shards"
        raise Damaged(
            f"{message}, and no index says which are the model",
            "saves-mixed",
            hint=f"give the path of one shard, such as {source.root}/{matches[0].string}, or move"
            " those of the other save away",
        )
    shard = matches[0]
    count, width, digits = int(shard["count"]), len(shard["count"]), len(shard["number"])
    if count > 100_000:
        raise Damaged(f"{shard.string}: the file name states {count:,} shards")
    of_set = [m for name in files if (m := SHARD.fullmatch(name)) and m["stem"] == shard["stem"]]
    numbers = {int(match["number"]) for match in of_set if match["count"] == shard["count"]}
    first = 0 if 0 in numbers else 1
    if max(numbers) >= first + count:
        message = (
            f"{source.root}: file names state {count:,} shards, and {len(numbers):,} are there"
        )
        raise Damaged(message, "saves-mixed", hint="move the shards of the other save away")
    return [
        f"{shard['stem']}-{i:0{digits}d}-of-{count:0{width}d}.safetensors"
        for i in range(first, first + count)
    ]


def wanted_by_names(source: Source, files: Sequence[str]) -> str:
    """Return what implies shards without an index, also of those that may be counted from 0."""
    description = "the other shards' names"
    if len(files) < 2 or [file for file in files if file not in source.files] != [files[-1]]:
        return description
    match = SHARD.fullmatch(files[0])
    if match is None or not int(match["number"]):
        return description
    start, end = match.span("number")
    zeroth = f"{files[0][:start]}{0:0{end - start}d}{files[0][end:]}"
    return f"{description} (or {zeroth}, if they are counted from 0)"
