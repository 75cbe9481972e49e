"""What a checkpoint, and the files beside it, record of the model: one flat record of names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptool.commands.keymap.assets import CONFIG
from ckptool.core.catalog import Catalog
from ckptool.core.keymap.match import Facts
from ckptool.core.keymap.model import KeyMap
from ckptool.errors import UsageError
from ckptool.serialization.pickle.records import Call
from ckptool.storage.local import Files

_PARAMS = "params.json"
_NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")
_DEEPEST = 3
_LARGEST = 1 << 24

Record = Mapping[str, Any]


def records(source: Files, catalog: Catalog, assets: Path | None) -> list[Record]:
    """Return what is recorded of the model, the strongest record first.

    The config.json of ``assets``, that beside the checkpoint, Meta's params.json, and the arguments
    that Megatron-LM saves. UsageError where a file of ``assets`` cannot be read.
    """
    given = [_read_file(assets / CONFIG)] if assets is not None else []
    beside = [read_beside(source, name) for name in (CONFIG, _PARAMS)]
    return [*given, *beside, *map(_of_megatron, _arguments(catalog))]


def read_beside(source: Files, name: str) -> Record:
    """Read a JSON file of the checkpoint; empty where there is no such file."""
    size = source.files.get(name)
    if size is None:
        return {}
    return _parse(f"{source.root}/{name}", size, lambda: source.read(name, 0, size))


def _read_file(path: Path) -> Record:
    """Read a JSON file; empty where there is none."""
    try:
        return _parse(str(path), path.stat().st_size, path.read_bytes) if path.exists() else {}
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None


def _parse(path: str, nbytes: int, read: Callable[[], bytes]) -> Record:
    """Parse a JSON object, with its ``text_config`` as part of it."""
    if nbytes > _LARGEST:
        raise UsageError(f"{path}: larger than {_LARGEST:,} bytes, not a configuration file")
    try:
        content = json.loads(read())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path}: not a JSON object")
    inner = content.get("text_config")
    return {**content, **inner} if isinstance(inner, dict) else content


def _arguments(catalog: Catalog) -> Iterator[Record]:
    """Yield every ``args`` namespace among the values."""
    for entry in catalog.objects.values():
        yield from _namespaces(entry.value, _DEEPEST, named=str(entry.path[-1]) == "args")


def _namespaces(value: Any, depth: int, *, named: bool) -> Iterator[Record]:
    if named and isinstance(value, Call) and value.name in _NAMESPACES:
        yield {k: v for k, v in value.fields.items() if isinstance(k, str)}
    elif depth and isinstance(value, list | tuple):
        for item in value[:4]:
            yield from _namespaces(item, depth - 1, named=False)
    elif depth and isinstance(value, dict):
        yield from _namespaces(value.get("args"), depth - 1, named=True)


def _of_megatron(arguments: Record) -> Record:
    """Add to Megatron-LM's arguments what they mean under others' names (core 0.7 to 0.20)."""
    record = dict(arguments)
    if record.get("group_query_attention") is False:
        record["num_query_groups"] = record.get("num_attention_heads")
    untied = record.get("untie_embeddings_and_output_weights")
    if isinstance(untied, bool):
        record["tie_word_embeddings"] = not untied
    return record


def facts(key_map: KeyMap, records: Sequence[Record], given: Mapping[str, int]) -> Facts:
    """Return the sizes of a map's axes, as given or as recorded, and all facts that hold."""
    merged: dict[str, Any] = {}
    for record in reversed(records):
        merged |= {name: value for name, value in record.items() if value is not None}
    unknown = given.keys() - key_map.axes
    if unknown:
        named = key_map.sizes or sorted(key_map.axes)
        raise UsageError(
            f"--dim {min(unknown)}: unknown dim of map {key_map.name}",
            hint="known dims: " + ", ".join(named) if named else None,
        )
    sizes = {**given}
    for name in key_map.sizes:
        size = sizes[name] if name in sizes else _look_up(name, key_map, merged, sizes, ())
        if size is not None:
            sizes[name] = size
    return Facts(sizes, frozenset(n for n, value in merged.items() if value is True))


def _look_up(
    name: str, key_map: KeyMap, merged: Record, sizes: Mapping[str, int], seen: tuple[str, ...]
) -> int | None:
    """Return the first size that a dim's keys and expressions (``a / b``, ``a * b``) give.

    An expression gives none where a size of it is unknown, or does not divide.
    A dim that is as large as another by default is so only where that one is recorded: a size that
    was given says nothing of the other.
    """
    for lookup in key_map.sizes[name]:
        if isinstance(lookup, int):
            return lookup
        words = lookup.split()
        known = sizes if len(words) > 1 else {}
        value, *others = (
            _value(word, key_map, merged, known, (*seen, name)) for word in words[::2]
        )
        for sign, other in zip(words[1::2], others, strict=False):
            if value is None or not other or (sign == "/" and value % other):
                value = None
                break
            value = value // other if sign == "/" else value * other
        if value is not None:
            return value
    return None


def _value(
    word: str, key_map: KeyMap, merged: Record, sizes: Mapping[str, int], seen: tuple[str, ...]
) -> int | None:
    """Return a record's number, or the size of another dim."""
    if word in sizes:
        return sizes[word]
    number = merged.get(word)
    if type(number) is int and number > 0:
        return number
    if word in key_map.sizes and word not in seen:
        return _look_up(word, key_map, merged, sizes, seen)
    return None
