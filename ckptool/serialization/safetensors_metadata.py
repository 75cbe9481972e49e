"""``__metadata__`` of safetensors files: texts about tensors, which go where the tensors go.

LoRA's alpha (diffusers' ``lora_adapter_metadata``), training settings (kohya's ``ss_*``), a model's
config (LTX), the classes of quantized tensors (torchao): they are stored nowhere else. A catalog
has them by file, without what describes the file itself and is written anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType

from msgspec.structs import replace

from ckptool.core.catalog import Catalog, TensorEntry, stored_places
from ckptool.core.selection import is_used, meant_by
from ckptool.core.text import list_some
from ckptool.errors import Problem, Unsupported, UsageError

EVERY_FILE = ""
"""Stands for the name of a file: these texts are for all files that are written."""
PLAIN = {"format": "pt"}
"""What files of torch's tensors say, without which transformers (5) refuses them."""
SHARDING = "DCP_SHARDING_INFO"
"""The text of a header with the place of each tensor in a larger one, in JSON (torch 2.8 on)."""
_OF_THE_FILE = ("DCP_VERSION", SHARDING)
_OF_CKPTOOL = "ckptool."
_DIGESTS = frozenset(["sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256"])
"""Hashes of all tensors' bytes: of kohya's sd-scripts 0.9, and the model spec 1.0 of SAI."""
_QUANTIZATION = frozenset(["tensor_names", "_quantization_metadata", "quantization_config"])
"""How tensors are quantized: torchao's (0.18) list of its records, ComfyUI 0.3, nunchaku 1.0."""


def is_written_anew(key: str) -> bool:
    """Return whether a text describes only the file that it is in."""
    return key in _OF_THE_FILE or key.startswith(_OF_CKPTOOL)


def texts_by_file(headers: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Return the texts of each file that has any besides those that are written anew."""
    texts = {
        file: {k: v for k, v in header.items() if not is_written_anew(k) and PLAIN.get(k) != v}
        for file, header in headers.items()
    }
    return {file: content for file, content in texts.items() if content}


def header_for(catalog: Catalog, entries: Iterable[TensorEntry], path: str) -> dict[str, str]:
    """Return the texts for the header of a file ``path`` with these tensors, besides its own.

    They are those of the files that the tensors come from. Raises Unsupported if two of those
    files contradict each other.
    """
    texts: dict[str, str] = {}
    origins: dict[str, str] = {}
    for file in _files_of(catalog, entries):
        for key, text in catalog.metadata[file].items():
            if key in origins and texts[key] != text:
                raise Unsupported(
                    f"{path}: metadata {key} differs between {origins[key]} and {file}, whose"
                    " tensors it would have",
                    "limit-exceeded",
                    hint=f"--metadata '{key}=TEXT' sets it for all, --drop-metadata '{key}' leaves"
                    " it out",
                )
            texts[key], origins[key] = text, file
    return {**texts, **catalog.metadata.get(EVERY_FILE, {})}


def compatible_groups(
    catalog: Catalog, entries: Collection[TensorEntry]
) -> list[list[TensorEntry]]:
    """Return tensors in groups whose files do not contradict each other, in order: mostly one."""
    if len(catalog.metadata.keys() - {EVERY_FILE}) < 2:
        return [list(entries)]
    groups: list[tuple[dict[str, str], list[TensorEntry]]] = []
    for entry in entries:
        texts = {k: v for f in _files_of(catalog, [entry]) for k, v in catalog.metadata[f].items()}
        fitting = (g for g in groups if all(g[0].get(k, v) == v for k, v in texts.items()))
        group = next(fitting, None)
        if group is None:
            groups.append(group := ({}, []))
        group[0].update(texts)
        group[1].append(entry)
    return [members for _, members in groups] or [[]]


def note_lost(catalog: Catalog) -> list[Problem]:
    """Return a note on the texts, for a format that has no place for them."""
    files = [file for file in catalog.metadata if file != EVERY_FILE]
    if not files:
        return []
    keys = sorted({key for file in files for key in catalog.metadata[file]})
    message = f"not carried: metadata of {list_some(files, 2)}: {list_some(keys)}"
    return [Problem(message, "value-not-written", file=files[0])]


def texts_of(catalog: Catalog) -> dict[str, set[str]]:
    """Return all texts that a catalog's tensors come with, by key."""
    files = [*_files_of(catalog, catalog.tensors.values())]
    texts: dict[str, set[str]] = {}
    for file in files:
        for key, text in catalog.metadata[file].items():
            texts.setdefault(key, set()).add(text)
    return texts | {key: {text} for key, text in catalog.metadata.get(EVERY_FILE, {}).items()}


def _files_of(catalog: Catalog, entries: Iterable[TensorEntry]) -> Iterable[str]:
    """Return the files with texts that tensors come from; all, if there are no tensors."""
    entries = list(entries) if catalog.metadata else []
    if not entries:
        return [file for file in catalog.metadata if file != EVERY_FILE]
    places = (at for e in entries for chunk in e.chunks for at in stored_places(chunk.at))
    return dict.fromkeys(at.file for at in places if at.file in catalog.metadata)


def rewrite_texts(
    before: Catalog,
    after: Catalog,
    *,
    dequantized: bool = False,
    dropped: Collection[str] = (),
    additions: Mapping[str, str] = MappingProxyType({}),
) -> Catalog:
    """Return the catalog ``after`` a rewrite with texts that are true of its tensors.

    Those that are ``dropped``, by key or glob, are left out, and those that it made wrong, with a
    note; then ``additions`` are set for every file. Raises UsageError if a pattern matches no key,
    or a key is one that is written anew; Unsupported if tensors that texts name have other names.
    """
    keys = {key for texts in after.metadata.values() for key in texts}
    for pattern in dropped:
        if not is_used(pattern, keys):
            choice = f"only {list_some(sorted(keys))}" if keys else "there is none"
            raise UsageError(f"--drop-metadata {pattern!r} matches no metadata: {choice}")
    for key in filter(is_written_anew, additions):
        raise UsageError(f"--metadata {key}: describes the file itself and is written anew")
    is_dropped = meant_by(dropped, keys)
    result = without_texts(after, lambda key, text: is_dropped(key))
    if not dequantized:
        _require_named(before, result)
    changed = dequantized or _look(before) != _look(after)

    def is_stale(key: str, text: str) -> bool:
        if key in _DIGESTS:
            return changed
        return dequantized and (key in _QUANTIZATION or _is_record(text))

    texts = [pair for of_file in result.metadata.values() for pair in of_file.items()]
    if stale := {key for key, text in texts if is_stale(key, text)}:
        note = f"metadata left out, no longer true of the tensors: {list_some(sorted(stale))}"
        result = replace(without_texts(result, is_stale), notes=(*result.notes, note))
    if not additions:
        return result
    metadata = without_texts(result, lambda key, text: key in additions).metadata
    common = {**metadata.get(EVERY_FILE, {}), **additions}
    return replace(result, metadata={**metadata, EVERY_FILE: common})


def without_texts(catalog: Catalog, is_left_out: Callable[[str, str], bool]) -> Catalog:
    """Return a catalog without the texts that a function of key and text says to leave out."""
    texts = {
        file: {key: text for key, text in content.items() if not is_left_out(key, text)}
        for file, content in catalog.metadata.items()
    }
    return replace(catalog, metadata={file: content for file, content in texts.items() if content})


def _look(catalog: Catalog) -> dict[str, tuple[int, str]]:
    """Return the names of tensors, with the identity of their chunks and their element types."""
    return {n: (id(entry.chunks), entry.dtype.name) for n, entry in catalog.tensors.items()}


def _is_record(text: str) -> bool:
    """Return whether a text is torchao's (0.18) record of a tensor: its class and attributes."""
    if '"_type"' not in text:
        return False
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _require_named(before: Catalog, after: Catalog) -> None:
    """Raise Unsupported if tensors with records of torchao got other names."""
    ids = {id(entry.chunks) for entry in after.tensors.values()}
    records = {k for file in after.metadata.values() for k, t in file.items() if _is_record(t)}
    for name, entry in before.tensors.items() if records else ():
        if name in after.tensors or id(entry.chunks) not in ids:
            continue
        owner = next((key for key in _owners(name) if key in records), None)
        if owner is not None:
            raise Unsupported(
                f"{name} would have another name, but metadata {owner} says how torchao quantized"
                " it under this one",
                hint="keep the names, --dequantize, or leave out torchao's metadata:"
                f" --drop-metadata '{owner}'",
            )


def _owners(name: str) -> Iterator[str]:
    """Yield names of tensors that this may be a part of: ``X.weight`` of ``X._weight_scale``."""
    yield name
    head, _, last = name.rpartition(".")
    words = last.removeprefix("_").split("_")
    yield from (f"{head}.{'_'.join(words[:n])}" for n in range(1, len(words)))
