"""Safetensors shards with DCP's sharding info, by torch's HuggingFaceStorageWriter.

``shard-{rank+1:05}-model-{i:05}-of-{n:05}.safetensors`` (torch 2.8 to 2.13), each header with
``DCP_SHARDING_INFO``: the offset of every chunk. Neither the world size nor the full shapes are
recorded; a full shape is the largest end of any chunk.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from msgspec import Struct, field

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Chunk, TensorEntry, merge_copies
from ckptool.core.dtype import DType
from ckptool.core.layout import FileLayout, Layout
from ckptool.core.sharding.coverage import coverage_problem
from ckptool.errors import CkptoolError, Problem
from ckptool.formats.base import (
    MODEL_EXTRA,
    Format,
    Loading,
    Reading,
    Request,
    ScanOptions,
    Writing,
    by_name,
)
from ckptool.formats.companions import CONFIG, companions, read_json_object
from ckptool.formats.safetensors.huggingface import FORMAT as HF
from ckptool.formats.side_file import split_side, with_headers
from ckptool.formats.writing import WriterAssignment, lay_out_companions, note_tied
from ckptool.serialization.safetensors import OutgoingSlice, lay_out_safetensors, read_safetensors
from ckptool.serialization.safetensors_metadata import PLAIN, SHARDING, header_for
from ckptool.serialization.source import Source, expect_heads, require_rank

_SHARD = re.compile(
    r"(?P<folder>sharded/)?shard-(?P<rank>[0-9]{1,9})-model-(?P<part>[0-9]{1,9})"
    r"-of-(?P<parts>[0-9]{1,9})\.safetensors"
)
_ROWS = {
    "vocab_size": re.compile(r"(.*\.)?(embed_tokens|wte|word_embeddings|lm_head)\.weight"),
    "hidden_size": re.compile(r"(.*\.)?(norm|input_layernorm|post_attention_layernorm)\.weight"),
}
"""Tensors, by transformers' names, with as many rows as a number in the config."""
_UNREAD_BY_TORCH = ("F8_E8M0", "F4", "F6_E2M3", "F6_E3M2")
"""Element types that torch 2.13's HuggingFaceStorageReader has no name for."""


class _ShardContents(Struct):
    """The joint content of all shards, by tensor: chunks, and element types with dim counts.

    ``headers`` are the metadata of each file.
    """

    chunks: dict[str, list[Chunk]] = field(default_factory=lambda: defaultdict(list))
    types: dict[str, set[tuple[DType, int]]] = field(default_factory=lambda: defaultdict(set))
    problems: list[str] = field(default_factory=list)
    headers: dict[str, dict[str, str]] = field(default_factory=dict)


def _scan(source: Source, options: ScanOptions) -> Catalog:
    shards = [match for name in source.files if (match := _SHARD.fullmatch(name))]
    contents = _ShardContents(problems=_name_problems(shards))
    last = max(shards, key=lambda match: int(match["rank"]))
    expect_heads(source, (match.string for match in shards))
    for match in shards:
        require_rank(int(match["rank"]), match.string)
        read = partial(_read_shard, source, match, contents, options)
        if not options.attempt(read) and match is last:
            contents.problems += _unknown_shapes(contents, match.string)
    tensors = {}
    for name, chunks in contents.chunks.items():
        if len(contents.types[name]) > 1:
            types = sorted(f"{dtype} of {dims} dims" for dtype, dims in contents.types[name])
            message = f"{name}: shards disagree: {types}"
            contents.problems.append(Problem(message, "ranks-disagree", tensor=name))
            continue
        ((dtype, _),) = contents.types[name]
        shape = tuple(map(max, zip(*(chunk.box.hi for chunk in chunks), strict=True)))
        tensors[name] = TensorEntry(name, (name,), dtype, shape, merge_copies(chunks))
    contents.problems += [p for p in map(coverage_problem, tensors.values()) if p is not None]
    config = options.attempt(partial(read_json_object, source, CONFIG)) or {}
    contents.problems += _shorter_than_configured(config, tensors)
    world = int(last["rank"])
    notes, copies = _compare_consolidated(source, world, tensors, contents.problems)
    hint = "a shard file is missing or from another save"
    options.report(contents.problems, subject=source.root, hint=hint)
    catalog = options.with_placements(
        Catalog(
            "dcp-safetensors",
            tensors,
            {},
            {match.string: source.files[match.string] for match in shards},
            world_size=world,
            info={"writer": "torch HuggingFaceStorageWriter"},
            notes=tuple(notes),
            companions=companions(source),
            copies=copies,
        )
    )
    return with_headers(catalog, source, MODEL_EXTRA, contents.headers, options)


def _name_problems(shards: list[re.Match[str]]) -> list[str]:
    """Return contradictions in the names; a rank without data has no file: coverage decides."""
    problems: list[str] = [
        Problem(f"{match.string}: no shard 0 exists, shards are counted from 1", "rank-missing")
        for match in shards
        if not int(match["rank"])
    ]
    counts = {int(match["parts"]) for match in shards}
    if len(counts) > 1:
        message = f"file names state {sorted(counts)[:12]} files a rank"
        problems.append(Problem(f"{message}: shards of several saves are mixed", "saves-mixed"))
    return problems


def _unknown_shapes(contents: _ShardContents, file: str) -> list[Problem]:
    """Return all but scalars: shapes are where the last chunks end, which ``file`` may have."""
    return [
        Problem(
            f"{name}: its shape is unknown, as {file} may hold its end",
            "sharding-unknown",
            file=file,
            tensor=name,
        )
        for name, chunks in contents.chunks.items()
        if chunks[0].box.shape
    ]


def _read_shard(
    source: Source, shard: re.Match[str], contents: _ShardContents, options: ScanOptions
) -> bool:
    """Add the tensors of one shard to ``contents``; return whether their places are known."""
    file, rank = shard.string, int(shard["rank"]) - 1
    header = read_safetensors(source, file, options.problems)
    contents.headers[file] = header.metadata
    try:
        info = json.loads(header.metadata[SHARDING])
        offsets = {name: _offsets(info[name]["saved_offsets"]) for name in header.tensors}
        lost = info.keys() - offsets.keys() - {problem.tensor for problem in options.problems or ()}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        message = f"{file}: no {SHARDING} for its tensors"
        reason = "so their place in the whole is unknown"
        contents.problems.append(Problem(f"{message}, {reason}", "sharding-unknown", file=file))
        return False
    for name in sorted(lost):
        message = f"{file}: {name}: listed in {SHARDING}, but not in the file"
        contents.problems.append(Problem(message, "data-missing", file=file, tensor=name))
    for name, item in header.tensors.items():
        if len(offsets[name]) != len(item.shape) or min(offsets[name], default=0) < 0:
            message = f"{file}: {name}: saved_offsets do not fit shape {list(item.shape)}"
            contents.problems.append(Problem(message, "sharding-unknown", file=file, tensor=name))
            continue
        contents.types[name].add((item.dtype, len(item.shape)))
        contents.chunks[name].append(Chunk(Box.at(offsets[name], item.shape), item.at, rank))
    return True


def _offsets(saved: object) -> tuple[int, ...]:
    if not isinstance(saved, list) or not all(type(n) is int and n < 1 << 63 for n in saved):
        raise TypeError("saved_offsets that are not a list of numbers")
    return tuple(saved)


def _shorter_than_configured(
    config: Mapping[str, Any], tensors: dict[str, TensorEntry]
) -> list[Problem]:
    """Return tensors with fewer rows than ``config.json`` says: the last shards are lost."""
    try:
        sizes = {key: int(config.get("text_config", config)[key]) for key in _ROWS}
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        return []
    return [
        Problem(
            f"{name}: {entry.shape[0]:,} rows in the shards, but {CONFIG} says {key}"
            f" {sizes[key]:,}",
            "chunk-gap",
            tensor=name,
        )
        for name, entry in tensors.items()
        for key, names in _ROWS.items()
        if names.fullmatch(name) and entry.shape and entry.shape[0] < sizes[key]
    ]


def _compare_consolidated(
    source: Source, world: int, tensors: dict[str, TensorEntry], problems: list[str]
) -> tuple[list[str], frozenset[str]]:
    """Compare with a consolidated copy in the same folder; note what cannot be verified here.

    Returns the notes, and the files of the copy.
    """
    if not HF.matches(source):
        message = f"nothing here records the number of ranks: if there were more than {world},"
        reason = "their shards are lost and the shapes too small"
        return [Problem(f"{message} {reason}", "world-size-unrecorded")], frozenset()
    try:
        copy = HF.scan(source, ScanOptions())
    except CkptoolError as error:
        damage = error.message.within("the consolidated copy beside the shards is damaged")
        return [damage], frozenset()
    for name, entry in copy.tensors.items():
        sharded = tensors.get(name)
        if sharded is None:
            message = f"{name}: in the consolidated copy, but in no shard"
            problems.append(Problem(message, "data-missing", tensor=name))
        elif sharded.shape != entry.shape:
            message = f"{name}: {list(entry.shape)} in the consolidated copy"
            message += f", {list(sharded.shape)} in the shards"
            problems.append(Problem(message, "chunk-gap", tensor=name))
    note = "read from the shards; the consolidated copy beside them is not used"
    return [note], frozenset(copy.files)


def _lay_out(catalog: Catalog, request: Request) -> Layout:
    """Lay a catalog out, cut for the request's mesh or in the source's own chunks."""
    fitting, side, mark, notes = split_side(catalog, MODEL_EXTRA, _UNREAD_BY_TORCH)
    assignment = WriterAssignment(request)
    by_file: dict[tuple[int, int], list[OutgoingSlice]] = defaultdict(list)
    for entry in fitting:
        written: dict[int, int] = defaultdict(int)
        for box, rank in assignment.boxes(entry).items():
            if entry.elements and not box.volume:
                continue
            item = OutgoingSlice(entry.name, entry.dtype, box)
            by_file[rank, written[rank]].append(item)
            written[rank] += 1
    parts = max((part for _, part in by_file), default=0) + 1
    files = [*lay_out_companions(catalog), *side]
    for at, slices in sorted(by_file.items()):
        entries = [catalog.tensors[item.name] for item in slices] if catalog.metadata else []
        texts = partial(header_for, catalog, entries)
        files.append(_shard_file(*at, parts, slices, texts, mark))
    return Layout(tuple(files), folder=True, notes=(*notes, *note_tied(catalog)))


def _shard_file(
    rank: int,
    part: int,
    parts: int,
    slices: list[OutgoingSlice],
    texts: Callable[[str], dict[str, str]],
    mark: Mapping[str, str],
) -> FileLayout:
    info = {item.name: {"saved_offsets": list(item.box.lo)} for item in slices}
    sharding = {"DCP_VERSION": "1.0", SHARDING: json.dumps(info)}
    name = f"shard-{rank + 1:05d}-model-{part + 1:05d}-of-{parts:05d}.safetensors"
    metadata = {**PLAIN, **texts(name), **sharding, **mark}
    return lay_out_safetensors(name, slices, metadata, rank)


FORMAT = Format(
    "dcp-safetensors",
    "safetensors shards with DCP sharding info (HuggingFaceStorageWriter)",
    by_name(_SHARD, "shard-R-model-I-of-N.safetensors"),
    Reading(_scan),
    Writing(convert=_lay_out, reshard=_lay_out, of_ranks=True, has_metadata=True, has_values=False),
    Loading(config="optional"),
)
