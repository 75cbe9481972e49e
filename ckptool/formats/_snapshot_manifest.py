"""The manifest of a TorchSnapshot folder: JSON that says what each rank holds, and where."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from ckptool.core.catalog import Index, Path
from ckptool.errors import Damaged, Problem, Unrecognised
from ckptool.formats.base import Source, read_metadata, require_rank

METADATA = ".snapshot_metadata"

Fields = Mapping[str, Any]
"""One entry of the manifest, as JSON has it."""

CONTAINERS = ("dict", "OrderedDict", "list")
SHARDED = ("ShardedTensor", "DTensor")

_LONGEST_NUMBER = 20


@dataclass(frozen=True, slots=True)
class Manifest:
    """For each logical path of the state dicts, the entry of each rank that has one.

    ``version`` is that of the package that wrote it.
    """

    version: str
    world_size: int
    entries: dict[str, dict[int, Fields]]

    def path(self, logical: str, rank: int) -> Path:
        """The steps of a logical path; the rank's containers say what kind each step is."""
        tokens = logical.split("/")
        containers = ("/".join(tokens[:at]) for at in range(len(tokens)))
        return tuple(
            _step(unquote(token), self.entries.get(container, {}).get(rank, {}))
            for token, container in zip(tokens, containers, strict=True)
        )

    def leaves(self) -> Iterator[tuple[str, dict[int, Fields]]]:
        """The logical paths of everything but containers that hold something."""
        inner = {logical.rpartition("/")[0] for logical in self.entries}
        for logical, held in self.entries.items():
            if logical not in inner:
                yield logical, held


def _step(text: str, container: Fields) -> Any:
    if container.get("type") == "list":
        return Index(int(text))
    keys = container.get("keys") or ()
    if text not in keys and len(text) < _LONGEST_NUMBER and text.lstrip("-").isdecimal():
        return int(text) if int(text) in keys else text
    return text


def read_manifest(source: Source) -> Manifest:
    """The manifest of a folder.

    Raises Damaged where it is not as TorchSnapshot 0.1 writes it, Unrecognised where it is YAML,
    as versions before wrote it.
    """
    text = read_metadata(source, METADATA)
    if text and not text.lstrip().startswith(b"{"):
        raise Unrecognised(
            f"{METADATA}: not the JSON that TorchSnapshot 0.1 writes",
            hint="where an older TorchSnapshot wrote YAML: load it with that, save it with 0.1",
        )
    try:
        content = json.loads(text)
        version = str(content.get("version", ""))
        world, manifest = content["world_size"], content["manifest"]
        entries: dict[str, dict[int, Fields]] = {}
        for key, entry in manifest.items():
            rank, _, logical = key.partition("/")
            entries.setdefault(logical, {})[int(rank)] = {"type": str(entry["type"])} | entry
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        message = f"{METADATA}: not a manifest as TorchSnapshot writes it"
        raise Damaged(Problem(message, "metadata-unreadable", file=METADATA)) from None
    highest = max((rank for held in entries.values() for rank in held), default=0)
    if type(world) is not int or not 0 <= highest < world:
        message = f"{METADATA}: an entry of rank {highest} in a world of {world!r:.20}"
        raise Damaged(Problem(message, "metadata-unreadable", file=METADATA))
    require_rank(world, METADATA)
    return Manifest(version, world, entries)


def _boolean(text: str) -> bool:
    return {"True": True, "False": False}[text]


def _double(text: str) -> float:
    value: float = struct.unpack("<d", base64.b64decode(text))[0]
    return value


VALUES: dict[str, Callable[[str], Any]] = {
    "int": int,
    "str": str,
    "bool": _boolean,
    "bytes": base64.b64decode,
    "float": _double,
}
"""What the ``serialized_value`` of a primitive entry stands for, by the entry's type."""
