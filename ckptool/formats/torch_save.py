"""One torch.save file (.pt .pth .bin .ckpt), zip or legacy, or its Hugging Face sharded form.

Read: zip archives by torch 1.6 to 2.13, the legacy stream before, deflated and big-endian ones,
``pytorch_model.bin.index.json`` with its shards (transformers 4). Written: as torch 2.13 does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial

from ckptool.core.catalog import Catalog, ObjectEntry, TensorEntry
from ckptool.core.layout import FileLayout, Layout
from ckptool.errors import Damaged, Problem, Refusal, Unrecognised
from ckptool.formats.base import FileRole, FileRule, Format, Request, ScanOptions
from ckptool.formats.companions import companions, describe_config, describe_framework
from ckptool.formats.writing import nest_state, note_companions, select_plain
from ckptool.serialization.archive.read import is_legacy, is_zip
from ckptool.serialization.archive.write import lay_out_archive
from ckptool.serialization.source import Source, expect_archives, read_metadata, require
from ckptool.serialization.state_dict.assemble import assemble
from ckptool.serialization.state_dict.leaves import Leaf, ShareLeaf, read_file_leaves
from ckptool.serialization.state_dict.values import note_unread

INDEX = "pytorch_model.bin.index.json"
_MODEL = "pytorch_model.bin"
_OF_A_RANK = re.compile(r"rank[._-]?[1-9]", re.IGNORECASE)


def _is_model_folder(source: Source) -> bool:
    """Return whether transformers left a model here, perhaps with its trainer's state beside it."""
    return _MODEL in source.files and "config.json" in source.files


def _probe(source: Source) -> bool:
    if INDEX in source.files or _is_model_folder(source):
        return True
    if len(source.files) != 1:
        return False
    file, size = next(iter(source.files.items()))
    head = source.read(file, 0, min(size, 64))
    named = file.endswith((".pt", ".pth", ".bin", ".ckpt"))
    return is_zip(head) or is_legacy(head) or named


def _scan(source: Source, options: ScanOptions) -> Catalog:
    if INDEX in source.files:
        return _scan_shards(source, options)
    is_model = _is_model_folder(source)
    if len(source.files) != 1 and not is_model:
        raise Unrecognised(f"{source.root}: not one torch.save file")
    file = _MODEL if is_model else next(iter(source.files))
    leaves = read_file_leaves(source, file)
    contents = assemble({_rank_of(leaves): leaves}, per_rank=options.per_rank)
    options.report(contents.problems, subject=file)
    if not contents.tensors and not contents.objects and not contents.conflicts:
        raise Unrecognised(f"{file}: an empty state dict: no tensor and no value in it")
    worlds = {mesh.size for mesh in contents.meshes}
    notes = list(contents.notes)
    if worlds - {1}:
        notes.append(f"{file} holds one rank's part of a checkpoint of {max(worlds)} ranks")
    if _OF_A_RANK.search(file):
        notes.append(f"{file} is read by itself: nothing in it says that it is one rank's part")
    return Catalog(
        "torch-save",
        contents.tensors,
        contents.objects,
        {file: source.files[file]},
        world_size=1,
        info={"writer": "torch.save"} | describe_framework(contents.objects),
        notes=(*notes, *note_unread(contents.objects)),
        conflicts=contents.conflicts,
        companions=companions(source) if is_model else {},
    )


def _rank_of(leaves: Mapping[str, Leaf]) -> int:
    """Return the rank that wrote a file, where the DTensors in it agree on one; else 0."""
    shares = [leaf.value.share for leaf in leaves.values() if isinstance(leaf.value, ShareLeaf)]
    ranks = {share.rank for share in shares if share.rank is not None}
    return ranks.pop() if len(ranks) == 1 else 0


def _scan_shards(source: Source, options: ScanOptions) -> Catalog:
    weight_map = read_weight_map(source, INDEX)
    files = sorted(set(weight_map.values()))
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, ObjectEntry] = {}
    problems: list[str] = []
    notes: list[str] = []
    refusals: dict[str, Refusal] = {}
    expect_archives(source, files)
    for file in files:
        leaves = options.attempt(partial(_shard_leaves, source, file)) or {}
        shard = assemble({0: leaves}, per_rank=options.per_rank)
        refused = {n: why for n, why in shard.conflicts.items() if isinstance(why, Refusal)}
        problems += shard.problems
        problems += [why for name, why in shard.conflicts.items() if name not in refused]
        problems += [
            Problem(f"{name} is in two files", "index-mismatch", file=file, tensor=name)
            for name in shard.tensors.keys() & tensors.keys()
        ]
        notes += shard.notes
        tensors |= shard.tensors
        objects |= shard.objects
        refusals |= refused
    problems += [
        Problem(
            f"{name}, which {INDEX} puts into {file}, is not there",
            "index-mismatch",
            file=INDEX,
            tensor=name,
        )
        for name, file in weight_map.items()
        if name not in tensors and name not in refusals
    ]
    options.report(problems, subject=source.root)
    ordered = {name: tensors.pop(name) for name in weight_map if name in tensors} | tensors
    return Catalog(
        "torch-save",
        ordered,
        objects,
        {file: source.files[file] for file in (*files, INDEX) if file in source.files},
        world_size=1,
        info={"writer": "transformers (pytorch_model.bin shards)"} | describe_config(source),
        notes=(*notes, *note_unread(objects)),
        conflicts=dict(refusals),
        companions=companions(source),
    )


def _shard_leaves(source: Source, file: str) -> dict[str, Leaf]:
    require(source, file, wanted_by=INDEX)
    return read_file_leaves(source, file)


def read_weight_map(source: Source, index: str) -> dict[str, str]:
    """Read which file holds each tensor from a Hugging Face index; Damaged if it is none."""
    try:
        weight_map = json.loads(read_metadata(source, index))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError):
        message = f"{index}: not the JSON of an index with a weight_map"
        raise Damaged(message, "index-unreadable", file=index) from None
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        message = f"{index}: weight_map does not map names to files"
        raise Damaged(message, "index-unreadable", file=index)
    return weight_map


def _lay_out(catalog: Catalog, request: Request) -> Layout:
    objects, notes = select_plain(catalog)
    state = nest_state(list(catalog.tensors.values()), objects)
    root = request.target.rpartition(".")[0] or "archive"
    main = FileLayout(request.target, tuple(lay_out_archive(state, root=root)))
    return Layout((main,), folder=False, notes=(*notes, *note_companions(catalog)))


FORMAT = Format(
    "torch-save",
    "one torch.save file (.pt .pth .bin .ckpt)",
    _probe,
    _scan,
    convert=_lay_out,
    files=(FileRule(r".*\.index\.json", FileRole.INDEX),),
    suffixes=(".pt", ".pth", ".bin", ".ckpt"),
    config="optional",
)
