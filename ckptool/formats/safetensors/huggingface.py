"""A Hugging Face model folder: safetensors shards and ``model.safetensors.index.json``.

Read: as transformers, huggingface_hub and torch's HuggingFaceStorageWriter (full save) write it.
Written: as transformers 5 does, with ``{"format": "pt"}`` in each header.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping

from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.layout import FileLayout, Layout, Literal
from ckptool.core.text import plural
from ckptool.errors import Damaged, Problem, Refusal
from ckptool.formats.base import (
    MODEL_EXTRA,
    Detection,
    Format,
    Loading,
    Reading,
    Request,
    ScanOptions,
    Writing,
)
from ckptool.formats.companions import companions, describe_config
from ckptool.formats.safetensors import read_whole_tensors, writer_of
from ckptool.formats.safetensors.shard_sets import (
    ADAPTER,
    ADAPTER_CONFIG,
    INDEX,
    SHARD,
    WHOLE,
    all_weights,
    index_of,
    indexes,
    is_of_a_set,
    unindexed,
    variants,
    wanted_by_names,
    whole_model,
)
from ckptool.formats.safetensors.weight_delta import delta_info, delta_notes
from ckptool.formats.shards import find_elsewhere, list_misplaced, read_index, read_shards
from ckptool.formats.side_file import split_side, with_headers
from ckptool.formats.writing import group_by_size, lay_out_companions, note_tied
from ckptool.serialization.safetensors import OutgoingSlice, lay_out_safetensors
from ckptool.serialization.safetensors_metadata import PLAIN, compatible_groups, header_for
from ckptool.serialization.source import Source, expect_heads, require
from ckptool.serialization.state_dict.leaves import Assembled

_INDEX_SUFFIX = ".safetensors.index.json"
_STEM = "diffusion_pytorch_model"
"""The stem of diffusers' (0.42) own model files, which is ``model`` in transformers."""
_MIB = 1 << 20
"""The unit of the total size in the indexes of ColossalAI (0.5)."""
_CONFIGS = ("config.json", ADAPTER_CONFIG)
_LORA = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)\b")


def _weights(source: Source) -> list[str]:
    """Return the model's safetensors files, without those of variants beside them."""
    names = all_weights(source)
    copies = variants(names)
    return [name for name in names if name not in copies]


def _probe(source: Source) -> bool:
    weights = _weights(source)
    sets = {m["stem"] for name in weights if (m := SHARD.fullmatch(name))}
    return (
        bool(indexes(source))
        or len(sets) == 1
        or whole_model(source) is not None
        or (len(weights) == 1 and not source.files.keys().isdisjoint(_CONFIGS))
    )


def _scan(source: Source, options: ScanOptions) -> Catalog:
    user_file = options.user_file
    index = index_of(source, user_file)
    weight_map, metadata = read_index(source, index) if index else ({}, None)
    files = sorted(set(weight_map.values())) if index else unindexed(source, user_file)
    if user_file is None:
        _refuse_two_models(source, index, files)
    if index and options.problems is None:
        _require_shards(source, files, index)
    headers: dict[str, dict[str, str]] = {}

    def read(file: str) -> Assembled:
        tensors, headers[file] = read_whole_tensors(source, file, options)
        return Assembled(tensors)

    absences = _absent_tensors(source, index, weight_map) if options.problems is None else {}
    present = [file for file in files if not absences or file in source.files]
    expect_heads(source, present)
    wanted_by = index or wanted_by_names(source, files)
    contents, file_of, unread = read_shards(source, present, wanted_by, read, options)
    contents.conflicts |= absences
    unread |= {*files} - {*present}
    notes: list[str] = []
    if index:
        if options.problems is not None:
            other_files = (name for name in _weights(source) if name not in files)
            strays = find_elsewhere(weight_map.keys() - file_of.keys(), other_files, read, options)
            contents.add(strays.contents)
            file_of |= strays.file_of
            files += strays.files
        _judge_index(index, weight_map, file_of, unread, contents, options)
        notes += _index_notes(index, None if unread else metadata, contents.tensors, weight_map)
    options.report(contents.problems, subject=source.root)
    copies = variants(all_weights(source)) - {*files} if user_file is None else set[str]()
    writers = filter(None, map(writer_of, headers.values()))
    info = {"writer": writer} if (writer := next(writers, None)) else {}
    info |= describe_config(source, options)
    info |= delta_info([metadata, *headers.values()])
    catalog = Catalog(
        "hf",
        contents.tensors,
        {},
        {file: source.files[file] for file in (*files, index or "") if file in source.files},
        world_size=1,
        info=info,
        notes=(*notes, *_variants_notes(copies), *delta_notes(info)),
        conflicts=contents.conflicts,
        companions=companions(source),
        copies=frozenset(copies),
    )
    return with_headers(catalog, source, MODEL_EXTRA, headers, options)


def _absent_tensors(
    source: Source, index: str | None, weight_map: Mapping[str, str]
) -> dict[str, Refusal]:
    """Return why tensors are refused whose shard is missing: the others can be read without it."""
    why: dict[str, Problem] = {}
    for file in {*weight_map.values()} - source.files.keys():
        try:
            require(source, file, wanted_by=str(index))
        except Damaged as error:
            why[file] = error.message
    return {
        name: Refusal(why[file], why[file].code, file=file, tensor=name)
        for name, file in weight_map.items()
        if file in why
    }


def _judge_index(
    index: str,
    weight_map: Mapping[str, str],
    file_of: Mapping[str, str],
    unread: Collection[str],
    contents: Assembled,
    options: ScanOptions,
) -> None:
    """Add to contents what the index lists and what is not where it says.

    With ``options`` that note damage, a tensor that was found elsewhere is only a problem.
    """
    skipped = {problem.tensor for problem in options.problems or ()}
    listed = {
        name: file
        for name, file in weight_map.items()
        if name not in skipped and (file not in unread or name in file_of)
    }
    for wrong in list_misplaced(listed, file_of, index):
        if options.problems is not None and wrong.tensor in file_of:
            contents.problems.append(Problem(str(wrong), wrong.code, file=index))
        else:
            contents.conflicts[str(wrong.tensor)] = wrong


def _variants_notes(copies: Collection[str]) -> Iterator[Problem]:
    if copies:
        first, *rest = sorted(copies)
        more = f" ({plural(len(rest), 'more file')})" if rest else ""
        message = f"{first}: a variant of the model, not read{more}"
        yield Problem(message, "checkpoint-nested", file=first)


def _require_shards(source: Source, files: list[str], index: str) -> None:
    """Raise Damaged, with a hint, if a listed shard is missing and other shards are there."""
    missing = next((file for file in files if file not in source.files), None)
    other = next((name for name in _weights(source) if name not in files), None)
    if missing is None or other is None:
        return
    try:
        require(source, missing, wanted_by=index)
    except Damaged as error:
        error.add_hint(
            f"give the path of a shard that is there, {source.root}/{other}, to read its set by"
            " the files' names, or see what --salvage finds"
        )
        raise


def _refuse_two_models(source: Source, index: str | None, files: list[str]) -> None:
    """Raise Damaged if model.safetensors is beside shards of another save.

    transformers opens it before it looks for an index (transformers 5), so the shards would be
    another model than the one that users of the folder load.
    """
    of_model = index == INDEX or any(file.startswith("model-") for file in files)
    if of_model and WHOLE in source.files and WHOLE not in files:
        problem = Problem(
            f"{source.root}: holds model.safetensors, which transformers opens, and"
            f" {plural(len(files), 'shard')} of another save ({index or files[0]}), which"
            " transformers leaves out; ckptool converts neither",
            "saves-mixed",
            file=WHOLE,
        )
        raise Damaged(
            problem.with_hint(
                f"read {source.root}/{WHOLE} by its own path, or the shards by the path of"
                f" {index or files[0]}"
            )
        )


def _index_notes(
    index: str, metadata: object, tensors: dict[str, TensorEntry], weight_map: dict[str, str]
) -> list[str]:
    notes: list[str] = []
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    actual = sum(entry.nbytes for entry in tensors.values())
    if isinstance(total, int | float) and actual not in (total, total * _MIB):
        message = f"{index} states a total_size of {total:,} bytes, the tensors have {actual:,}"
        notes.append(Problem(message, "index-total-size", file=index))
    unlisted = [name for name in tensors if name not in weight_map]
    if unlisted:
        message = f"{index} does not list {len(unlisted):,} of the tensors: {unlisted[0]}, ..."
        notes.append(Problem(message, "index-unlisted", file=index))
    return notes


def lay_out(catalog: Catalog, request: Request, head: str = "") -> Layout:
    """Lay out a model's folder; in its files names have no prefix ``head``."""
    fitting, side, mark, notes = split_side(catalog, MODEL_EXTRA)
    is_adapter = _is_adapter(fitting, {*catalog.companions, *request.assets})
    groups = [fitting]
    if not is_adapter:
        sets = compatible_groups(catalog, fitting)
        groups = [g for tensors in sets for g in group_by_size(tensors, request.max_shard_size)]
    stem = _stem_of(catalog)
    names = [f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    if len(groups) == 1:
        names = [ADAPTER if is_adapter else f"{stem}.safetensors"]
    files = [*lay_out_companions(catalog), *side]
    for name, group in zip(names, groups, strict=True):
        slices = (OutgoingSlice.whole(entry, head) for entry in group)
        header = PLAIN | header_for(catalog, group, name) | mark
        files.append(lay_out_safetensors(name, slices, header))
    if len(groups) > 1:
        files.append(_index_file(f"{stem}{_INDEX_SUFFIX}", names, groups, head))
    return Layout(tuple(files), folder=True, notes=(*notes, *note_tied(catalog)))


def _is_adapter(tensors: list[TensorEntry], files: set[str]) -> bool:
    """Return whether this is PEFT's adapter, which PEFT looks for in one file of that name.

    By its configuration among the files or, without one, by the names: all are LoRA's (PEFT 0.21).
    """
    configs = [name for name in _CONFIGS if name in files]
    if configs:
        return configs == [ADAPTER_CONFIG]
    return bool(tensors) and all(_LORA.search(entry.name) for entry in tensors)


def _stem_of(catalog: Catalog) -> str:
    """Return the stem of the weight files: the source's, if that is diffusers'."""
    return _STEM if any(name.startswith(_STEM) for name in catalog.files) else "model"


def _index_file(
    index: str, names: list[str], groups: list[list[TensorEntry]], head: str
) -> FileLayout:
    total = sum(entry.nbytes for group in groups for entry in group)
    shards = zip(names, groups, strict=True)
    weight_map = {e.name.removeprefix(head): name for name, group in shards for e in group}
    lines = json.dumps(  # what indent=2 makes of it, which Python's own encoder writes slowly
        weight_map, separators=(",\n    ", ": "), sort_keys=True, ensure_ascii=False
    )
    head_lines = f'{{\n  "metadata": {{\n    "total_size": {total}\n  }},\n  "weight_map": {{\n    '
    text = f"{head_lines}{lines[1:-1]}\n  }}\n}}\n"
    return FileLayout(index, (Literal(text.encode()),))


FORMAT = Format(
    "hf",
    "Hugging Face folder: safetensors shards and their index",
    Detection(_probe, has_set=is_of_a_set),
    Reading(_scan),
    Writing(convert=lay_out, has_shards=True, has_metadata=True, has_values=False),
    Loading(is_model_folder=True, config="required"),
)
