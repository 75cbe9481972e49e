"""Files whose names differ in numbers only, and are one a rank: by the word, or by what they hold.

``rank0/model.pt``, ``dp_rank_00_model.pt``, ``shard-00000-of-00004.pt``, ``model_1_of_4.bin``.
Numbers may as well count steps, or the shards of a whole model. So unless a name says ``rank``, the
files must hold DTensors or ShardedTensors, whose records say which rank wrote each.

Whether the numbers in files' names are those of processes, or count something else.

A LoRA adapter has a rank too: ``lora_rank8.pt`` and ``lora_rank16.pt`` are two checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptool.errors import CkptoolError
from ckptool.formats.rank_files.names import RankFile
from ckptool.serialization.archive.dtensor import DTensorShare, ShardedShare
from ckptool.serialization.archive.read import read_torch_file
from ckptool.serialization.source import Source
from ckptool.serialization.state_dict.flat_params import is_flat
from ckptool.serialization.state_dict.leaves import Leaf, PlainLeaf, ShareLeaf, read_leaves

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_LONGEST_NUMBER = 9
_DEPTH = 1
_OF = re.compile(r"(?:.*[._/-])?of[._-]?", re.IGNORECASE)
_RANK = re.compile(r"(?:.*[._/-])?rank[._-]?", re.IGNORECASE)
_WORDS = frozenset(["of", "rank", "dp", "tp", "pp", "ep", "cp", "mp"])
"""What stands beside a number and is no name of a family."""
_STEP = re.compile(r".*(?:step|iter|iteration|epoch|checkpoint|ckpt)s?[._=-]?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Name:
    """A file's name: the text before, between and behind its numbers, and the numbers.

    ``of`` is the number behind the word "of", which is not among ``numbers``.
    """

    file: str
    texts: tuple[str, ...]
    numbers: tuple[int, ...]
    of: int | None


def numbered_files(source: Source, besides: Collection[str] = ()) -> list[RankFile]:
    """The rank files among those of which the names differ in numbers, without ``besides``."""
    families: dict[object, list[_Name]] = {}
    for file in source.files:
        name = _parsed(file) if file not in besides else None
        if name is not None:
            families.setdefault((name.texts, name.of), []).append(name)
    return [item for names in families.values() for item in _ranked(source, names)]


def _parsed(file: str) -> _Name | None:
    if not file.endswith(_SUFFIXES) or file.count("/") > _DEPTH:
        return None
    stem, _, suffix = file.rpartition(".")
    pieces = re.split(r"([0-9]+)", stem)
    if len(pieces) < 3 or any(len(number) > _LONGEST_NUMBER for number in pieces[1::2]):
        return None
    texts, numbers, of = [*pieces[0::2], suffix], [], None
    for text, number in zip(pieces[0::2], pieces[1::2], strict=False):
        if _OF.fullmatch(text):
            of = int(number)
        else:
            numbers.append(int(number))
    return _Name(file, tuple(texts), tuple(numbers), of)


def _ranked(source: Source, names: list[_Name]) -> Iterator[RankFile]:
    """These files as those of ranks, where each lies in its own folder or all in none.

    Nothing where they are something else.
    """
    varying = [at for at, column in enumerate(_columns(names)) if len(set(column)) > 1]
    before = [_text_before(names[0], at) for at in varying]
    folders = {name.file.rpartition("/")[0] for name in names}
    if (
        not varying
        or any(map(_STEP.fullmatch, before))
        or len(folders - {""}) not in (0, len(names))
    ):
        return
    by_name = [name.numbers[varying[0]] for name in names] if len(varying) == 1 else None
    if by_name is not None and _RANK.fullmatch(before[0]):
        ranks: list[int] | None = by_name
    else:
        ranks = _ranks_inside(source, names, by_name)
    for name, rank in zip(names, ranks or (), strict=False):
        yield RankFile(name.file, _family(name), rank, name.of, says_rank=True)


def _columns(names: list[_Name]) -> Iterator[tuple[int, ...]]:
    return zip(*(name.numbers for name in names), strict=True)


def _text_before(name: _Name, at: int) -> str:
    """What stands before one of the numbers, the one behind "of" not counted."""
    texts = [text for text in name.texts[:-2] if not _OF.fullmatch(text)]
    return texts[at]


def _ranks_inside(
    source: Source, names: list[_Name], by_name: list[int] | None
) -> list[int] | None:
    """The rank of each file by its content; None where that does not make them one checkpoint's.

    A file that was copied over another's is found later: then the numbers are the ranks, counted as
    those are that the content proves.
    """
    inside: list[tuple[int, int]] = []
    for name in names:
        found = _rank_inside(source, name.file)
        if found is None:
            return None
        inside.append(found)
    ranks, world = [rank for rank, _ in inside], min(size for _, size in inside)
    if world < len(names) or len(set(ranks)) < 2:
        return None
    if len(set(ranks)) == len(ranks):
        return ranks
    offsets = {number - rank for number, rank in zip(by_name or (), ranks, strict=False)}
    first = next((offset for offset in (0, 1) if offset in offsets), None)
    return None if by_name is None or first is None else [number - first for number in by_name]


def _rank_inside(source: Source, file: str) -> tuple[int, int] | None:
    """The rank that wrote a file, and how many there were, as the shares in it say."""
    try:
        leaves = read_leaves(read_torch_file(source, file), source, refuse=True)
    except CkptoolError:
        return None
    held = [leaf.value.share for leaf in leaves.values() if isinstance(leaf.value, ShareLeaf)]
    shares = [share for share in held if isinstance(share, DTensorShare | ShardedShare)]
    ranks = {share.rank for share in shares}
    rank = ranks.pop() if len(ranks) == 1 else None
    return None if rank is None else (rank, max(map(_world_of, shares)))


def _world_of(share: DTensorShare | ShardedShare) -> int:
    """How many ranks there were at least, as one share says."""
    if isinstance(share, ShardedShare):
        return share.world_size
    return max(share.mesh.ranks, default=0) + 1


def _family(name: _Name) -> str:
    """What the files are called, without their numbers and the words beside those."""
    words = re.split(r"[._/-]+", "_".join(name.texts[:-1]))
    return "_".join(word for word in words if word and word.lower() not in _WORDS) or "state"


STATES_OF_A_RANK = ("random_states", "rng_state", "extra_state")


def of_processes(source: Source, files: Sequence[RankFile]) -> list[RankFile]:
    """Return the files without the families whose numbers are no ranks of processes."""
    families: dict[str, list[RankFile]] = {}
    for item in files:
        families.setdefault(item.family, []).append(item)
    kept = {name for name, items in families.items() if _are_processes(source, items)}
    return [item for item in files if item.family in kept]


def _are_processes(source: Source, items: Sequence[RankFile]) -> bool:
    """Whether files are of processes, which are counted from 0, or say so in what they hold.

    Without the first one, whole tensors must at least be of one shape in all of them.
    """
    numbers = {item.rank for item in items}
    stated = any(item.world for item in items) or items[0].family.startswith(STATES_OF_A_RANK)
    if stated or 0 in numbers:
        return True
    try:
        contents = [_leaves(source, item.file) for item in items]
    except CkptoolError:
        return True
    if any(_is_part(name, leaf) for leaves in contents for name, leaf in leaves.items()):
        return True
    return 1 in numbers and _are_alike(contents)


def _leaves(source: Source, file: str) -> Mapping[str, Leaf]:
    return read_leaves(read_torch_file(source, file), source, refuse=True)


def _is_part(name: str, leaf: Leaf) -> bool:
    """Whether something is recorded as one process's part of a whole."""
    return isinstance(leaf.value, ShareLeaf) or is_flat(name)


def _are_alike(contents: Sequence[Mapping[str, Leaf]]) -> bool:
    """Whether tensors of one name have the same shape in all files."""
    shapes: dict[str, tuple[int, ...]] = {}
    return all(
        shapes.setdefault(name, leaf.value.tensor.shape) == leaf.value.tensor.shape
        for leaves in contents
        for name, leaf in leaves.items()
        if isinstance(leaf.value, PlainLeaf)
    )
