"""A model in several files: the index of the file that contains each tensor, and their names.

``*.index.json`` as transformers, huggingface_hub and torch write it: ``weight_map`` maps names to
files beside the index. Names end with ``-00001-of-00002``, mostly counted from 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

from msgspec import Struct, field

from ckptool.core.catalog import TensorEntry
from ckptool.errors import Damaged, Problem, Refusal
from ckptool.formats.base import ScanOptions
from ckptool.serialization.source import Source, read_metadata, require
from ckptool.serialization.state_dict.leaves import Assembled
from ckptool.serialization.state_dict.values import same_value

_OF = re.compile(r"(?<![0-9])[0-9]+[._-]of[._-](?P<count>[0-9]+)", re.IGNORECASE)
_OF_A_RANK = re.compile(r"rank[._-]?[1-9]", re.IGNORECASE)


def note_part(file: str) -> Iterator[str]:
    """Yield a note on a file that is read by itself, if by its name it is one of several."""
    count = max((int(match["count"]) for match in _OF.finditer(file)), default=1)
    if count > 1:
        yield f"{file} is read by itself: by its name it is one of {count:,} parts"
    elif _OF_A_RANK.search(file):
        yield f"{file} is read by itself: it does not say that it is one rank's part"


def read_index(source: Source, index: str) -> tuple[dict[str, str], object]:
    """Return the file of each tensor, and the index's ``metadata``; Damaged if invalid."""
    try:
        content = json.loads(read_metadata(source, index))
        weight_map, metadata = content["weight_map"], content.get("metadata")
    except (ValueError, KeyError, TypeError, RecursionError):
        message = f"{index}: not the JSON of an index with a weight_map"
        raise Damaged(message, "index-unreadable", file=index) from None
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        message = f"{index}: weight_map does not map names to files"
        raise Damaged(message, "index-unreadable", file=index)
    paths = {file: _without_dots(file) for file in set(weight_map.values())}
    return {name: paths[file] for name, file in weight_map.items()}, metadata


def _without_dots(file: str) -> str:
    """Return a path without the steps that lead nowhere: transformers 5 opens ``./FILE``, too."""
    first, *rest = file.split("/")
    steps = [step for step in rest if step not in ("", ".")]
    return "/".join(steps if first == "." else [first, *steps])


def read_shards(
    source: Source,
    files: Iterable[str],
    wanted_by: str,
    read: Callable[[str], Assembled],
    options: ScanOptions,
) -> tuple[Assembled, dict[str, str], set[str]]:
    """Return what ``read`` finds in all files together, and the last file with each tensor.

    The files that cannot be read come third: each is one problem, however many tensors it has.
    """
    contents = Assembled()
    file_of: dict[str, str] = {}
    unread: set[str] = set()
    for file in files:
        shard = options.attempt(partial(_read_shard, source, file, wanted_by, read))
        if shard is None:
            unread.add(file)
            continue
        for name in shard.tensors:
            if name in file_of:
                message = f"{name} is both in {file_of[name]} and in {file}"
                problem = Problem(message, "index-mismatch", file=file, tensor=name)
                contents.problems.append(problem)
        for name in contents.objects.keys() & shard.objects.keys():
            if not same_value(contents.objects[name].value, shard.objects[name].value):
                message = f"{name}: another value in {file} than in the shards before it"
                problem = Problem(message, "index-mismatch", file=file, tensor=name)
                contents.problems.append(problem)
        contents.add(shard)
        file_of |= dict.fromkeys(shard.tensors, file)
    return contents, file_of, unread


def _read_shard(
    source: Source, file: str, wanted_by: str, read: Callable[[str], Assembled]
) -> Assembled:
    require(source, file, wanted_by=wanted_by)
    return read(file)


class FoundElsewhere(Struct):
    """Tensors in files that no index lists: their ``contents``, and the ``files`` they are in."""

    contents: Assembled = field(default_factory=Assembled)
    file_of: dict[str, str] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        return sorted({*self.file_of.values()})


def find_elsewhere(
    names: Collection[str],
    files: Iterable[str],
    read: Callable[[str], Assembled],
    options: ScanOptions,
) -> FoundElsewhere:
    """Find tensors that are not where the index says in other files; none if two files have one."""
    holders: dict[str, list[tuple[str, TensorEntry]]] = {}
    for file in files if names else ():
        shard = options.attempt(partial(read, file)) or Assembled()
        for name in names & shard.tensors.keys():
            holders.setdefault(name, []).append((file, shard.tensors[name]))
    single_holders = {name: places[0] for name, places in holders.items() if len(places) == 1}
    contents = Assembled({name: entry for name, (_, entry) in single_holders.items()})
    return FoundElsewhere(contents, {name: file for name, (file, _) in single_holders.items()})


def list_misplaced(
    weight_map: Mapping[str, str], file_of: Mapping[str, str], index: str
) -> list[Refusal]:
    """Return the tensors that are not in the files that the index lists."""
    return [
        Refusal(
            f"{name}: {index} lists it in {file}, but it is "
            + (f"in {file_of[name]}" if name in file_of else "missing"),
            "index-mismatch",
            file=index,
            tensor=name,
        )
        for name, file in weight_map.items()
        if file_of.get(name) != file
    ]
