"""The files of a folder that are one per rank: by their names, else by their content.

accelerate and transformers' Trainer write some files once, beside those of the ranks. Other names
need only differ in numbers: ``rank0/model.pt``, ``dp_rank_00_model.pt``, ``model_1_of_4.bin``.
Numbers may also count steps, or the shards of a whole model, and a LoRA adapter has a rank too
(``lora_rank8.pt``). So unless a name says ``rank``, the files must contain DTensors or
ShardedTensors, whose records name the rank that wrote each.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from ckptool.errors import CkptoolError, Damaged, Problem
from ckptool.formats.rank_files.torch_checkpointing import METADATA
from ckptool.serialization.archive.dtensor import DTensorShare, ShardedShare
from ckptool.serialization.source import Source, find_missing_ranks, require_rank
from ckptool.serialization.state_dict.flat_params import is_flat
from ckptool.serialization.state_dict.leaves import Leaf, PlainLeaf, ShareLeaf, read_file_leaves

_RANK_FILE = re.compile(
    r"(?P<family>.*?)[._-]?(?:world_size_(?P<world>[0-9]{1,9})_)?(?P<word>rank)?[._-]?"
    r"(?<![0-9])(?P<rank>[0-9]{1,9})\.(?:pt|pth|bin|ckpt|pkl|json|safetensors)"
)
_ITEM_FILE = re.compile(
    r"(?P<family>.+)_(?P<rank>[0-9]{1,9})\.(?:pt|json|safetensors)(?P<world>)?(?P<word>)?"
)
_MODELS = ("pytorch_model_fsdp", "pytorch_model")
_SINGLE = re.compile(
    r"(?P<family>scheduler|sampler|dl_state_dict|optimizer|pytorch_model|pytorch_model_fsdp)"
    r"(?:_(?P<number>\d+))?\.bin|(scaler|scheduler|optimizer)\.pt|custom_checkpoint_\d+\.pkl"
)
STATES_OF_A_RANK = ("random_states", "rng_state", "extra_state")
_FAMILY_STEP = re.compile(r"(?:step|iter|epoch)[a-z]*[-_=.]?([0-9]{1,18})", re.IGNORECASE)


class RankFile(Struct, frozen=True):
    """A file of one rank: its family, its rank, and the world size in its name."""

    file: str
    family: str
    rank: int
    world: int | None
    says_rank: bool


def rank_files(source: Source) -> list[RankFile]:
    """Return the files directly in the source's folder whose known names make them rank files."""
    pattern = _ITEM_FILE if METADATA in source.files else _RANK_FILE
    families: dict[tuple[str, int | None], list[RankFile]] = {}
    for file in source.files:
        item = _parse(file, pattern)
        if item is not None:
            families.setdefault((item.family, item.world), []).append(item)
    ranked = [item for items in families.values() if _is_family(items, source) for item in items]
    single = [
        RankFile(match.string, _single_family(match), 0, None, True)
        for match in map(_SINGLE.fullmatch, source.files)
        if match
    ]
    return [*ranked, *single] if ranked or has_fsdp_folder(source) else []


def has_fsdp_folder(source: Source) -> bool:
    """Return whether accelerate put the model beside these files into a separate folder."""
    heads = ("pytorch_model_fsdp_", "pytorch_model_0/")
    return any(name.startswith(heads) for name in source.files)


def accelerate_family(name: str, number: str | None) -> str:
    """Return the family of files or a folder of accelerate, which numbers several models."""
    family = "model" if name in _MODELS else name
    return family if number in (None, "0") else f"{family}_{number}"


def _single_family(match: re.Match[str]) -> str:
    """Return the family of a file that is written once."""
    if match["family"] in _MODELS:
        return accelerate_family(match["family"], match["number"])
    return match.string.partition(".")[0]


def _parse(file: str, pattern: re.Pattern[str]) -> RankFile | None:
    match = pattern.fullmatch(file)
    if "/" in file or match is None or "-of-" in file or _SINGLE.fullmatch(file):
        return None
    family = match["family"]
    accelerate = re.fullmatch(r"(pytorch_model_fsdp|optimizer)_([0-9]+)", family)
    if accelerate and match["word"]:
        family = accelerate_family(accelerate[1], accelerate[2])
    world = int(match["world"]) if match["world"] else None
    says_rank = bool(match["word"]) or family in ("random_states", "rng_state")
    return RankFile(file, family, int(match["rank"]), world, says_rank)


def _is_family(items: list[RankFile], source: Source) -> bool:
    """Return whether files that differ in a number differ in a rank, not in a step or epoch."""
    suffixes = {item.file.rpartition(".")[2] for item in items}
    if suffixes & {"json", "safetensors"}:
        return METADATA in source.files
    ranks = [item.rank for item in items]
    if len(set(ranks)) != len(ranks):
        return False
    if METADATA in source.files:
        return True
    return all(item.says_rank for item in items) or (len(items) > 1 and min(ranks) <= 1)


# Names that differ in numbers

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_LONGEST_NUMBER = 9
_DEPTH = 1
_OF = re.compile(r"(?:.*[._/-])?of[._-]?", re.IGNORECASE)
_RANK = re.compile(r"(?:.*[._/-])?rank[._-]?", re.IGNORECASE)
_WORDS = frozenset(["of", "rank", "dp", "tp", "pp", "ep", "cp", "mp"])
"""Words beside a number that are not the name of a family."""
_STEP = re.compile(r".*(?:step|iter|iteration|epoch|checkpoint|ckpt)s?[._=-]?", re.IGNORECASE)


class _NumberedName(Struct, frozen=True):
    """A file's name: the text before, between and after its numbers, and the numbers.

    ``of`` is the number after the word "of", which is not among ``numbers``.
    """

    file: str
    texts: tuple[str, ...]
    numbers: tuple[int, ...]
    of: int | None


def find_numbered_files(source: Source, besides: Collection[str] = ()) -> list[RankFile]:
    """Return the rank files among those whose names differ in numbers, without ``besides``."""
    families: dict[object, list[_NumberedName]] = {}
    for file in source.files:
        name = _split_numbers(file) if file not in besides else None
        if name is not None:
            families.setdefault((name.texts, name.of), []).append(name)
    return [item for names in families.values() for item in _ranked_files(source, names)]


def _split_numbers(file: str) -> _NumberedName | None:
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
    return _NumberedName(file, tuple(texts), tuple(numbers), of)


def _ranked_files(source: Source, names: list[_NumberedName]) -> Iterator[RankFile]:
    """Yield these files, if they are ranks', each in its own folder or all in one."""
    columns = zip(*(name.numbers for name in names), strict=True)
    varying = [at for at, column in enumerate(columns) if len(set(column)) > 1]
    texts = [text for text in names[0].texts[:-2] if not _OF.fullmatch(text)]
    before = [texts[at] for at in varying]
    folders = {name.file.rpartition("/")[0] for name in names} - {""}
    if not varying or any(map(_STEP.fullmatch, before)) or len(folders) not in (0, len(names)):
        return
    by_name = [name.numbers[varying[0]] for name in names] if len(varying) == 1 else None
    if by_name is not None and _RANK.fullmatch(before[0]):
        ranks: list[int] | None = by_name
    else:
        ranks = _recorded_ranks(source, names, by_name)
    for name, rank in zip(names, ranks or (), strict=False):
        yield RankFile(name.file, _family(name), rank, name.of, says_rank=True)


def _recorded_ranks(
    source: Source, names: list[_NumberedName], by_name: list[int] | None
) -> list[int] | None:
    """Return the rank that each file records; None if they are not of one checkpoint.

    A file that was copied over another's is noticed later: then the numbers are the ranks, if the
    content of the others proves it.
    """
    recorded: list[tuple[int, int]] = []
    for name in names:
        rank_and_world = _recorded_rank(source, name.file)
        if rank_and_world is None:
            return None
        recorded.append(rank_and_world)
    ranks, world = [rank for rank, _ in recorded], min(size for _, size in recorded)
    if world < len(names) or len(set(ranks)) < 2:
        return None
    if len(set(ranks)) == len(ranks):
        return ranks
    offsets = {number - rank for number, rank in zip(by_name or (), ranks, strict=False)}
    first = next((offset for offset in (0, 1) if offset in offsets), None)
    return None if by_name is None or first is None else [number - first for number in by_name]


def _recorded_rank(source: Source, file: str) -> tuple[int, int] | None:
    """Return the rank that wrote a file and the number of ranks, from its shares."""
    try:
        leaves = read_file_leaves(source, file).values()
    except CkptoolError:
        return None
    shares = [
        leaf.value.share
        for leaf in leaves
        if isinstance(leaf.value, ShareLeaf)
        and isinstance(leaf.value.share, DTensorShare | ShardedShare)
    ]
    ranks = {share.rank for share in shares}
    rank = ranks.pop() if len(ranks) == 1 else None
    return None if rank is None else (rank, max(map(_fewest_ranks, shares)))


def _fewest_ranks(share: DTensorShare | ShardedShare) -> int:
    """Return the least number of ranks, from one share."""
    if isinstance(share, ShardedShare):
        return share.world_size
    return max(share.mesh.ranks, default=0) + 1


def _family(name: _NumberedName) -> str:
    """Return the name of the files, without their numbers and the words beside those."""
    words = re.split(r"[._/-]+", "_".join(name.texts[:-1]))
    return "_".join(word for word in words if word and word.lower() not in _WORDS) or "state"


# Whether numbers are those of processes


def by_family(files: Iterable[RankFile]) -> dict[str, list[RankFile]]:
    """Group files by their families."""
    families: dict[str, list[RankFile]] = {}
    for item in files:
        families.setdefault(item.family, []).append(item)
    return families


def keep_processes(source: Source, files: Sequence[RankFile]) -> list[RankFile]:
    """Return the files without the families whose numbers are not ranks of processes."""
    kept = {name for name, of in by_family(files).items() if _are_processes(source, of)}
    return [item for item in files if item.family in kept]


def _are_processes(source: Source, items: Sequence[RankFile]) -> bool:
    """Return whether files are of processes, counted from 0 or recorded in the files.

    Without the first one, whole tensors must at least have the same shape in all of them.
    """
    numbers = {item.rank for item in items}
    stated = any(item.world for item in items) or items[0].family.startswith(STATES_OF_A_RANK)
    if stated or 0 in numbers:
        return True
    try:
        contents = [read_file_leaves(source, item.file) for item in items]
    except CkptoolError:
        return True
    if any(
        isinstance(leaf.value, ShareLeaf) or is_flat(name)
        for leaves in contents
        for name, leaf in leaves.items()
    ):
        return True
    return 1 in numbers and _have_equal_shapes(contents)


def _have_equal_shapes(contents: Sequence[Mapping[str, Leaf]]) -> bool:
    """Return whether tensors of one name have the same shape in all files."""
    shapes: dict[str, tuple[int, ...]] = {}
    return all(
        shapes.setdefault(name, leaf.value.tensor.shape) == leaf.value.tensor.shape
        for leaves in contents
        for name, leaf in leaves.items()
        if isinstance(leaf.value, PlainLeaf)
    )


# What names contradict


def require_one_save(root: str, files: list[RankFile], *, one_world: bool) -> None:
    """Raise Damaged if names state several steps, or two files are of one rank.

    With ``one_world`` they must not state several world sizes either, as after a relaunch.
    """
    known: dict[object, str] = {}
    worlds: dict[int, list[str]] = {}
    kinds: dict[str, dict[int, list[str]]] = {}
    for item in files:
        other = known.setdefault((item.family, item.rank, item.world), item.file)
        if other != item.file:
            message = f"{other} and {item.file} are both the {item.family} of rank {item.rank}"
            hint = "move the files of one of the two saves away"
            raise Damaged(message, "saves-mixed", file=item.file, hint=hint)
        if item.world and one_world:
            worlds.setdefault(item.world, []).append(item.file)
        if match := _FAMILY_STEP.search(item.family):
            kind = item.family[: match.start(1)] + item.family[match.end(1) :]
            kinds.setdefault(kind, {}).setdefault(int(match[1]), []).append(item.file)
    if len(worlds) > 1:
        most = max(worlds, key=lambda world: len(worlds[world]))
        hint = f"--world-size {most} reads those of {most} ranks; move the others away"
        message = f"{root}: rank files of several world sizes: {_counted(worlds)}"
        raise Damaged(message, "saves-mixed", hint=hint)
    for steps in kinds.values():
        if len(steps) > 1:
            message = f"{root}: rank files of several steps: {_counted(steps)}"
            hint = "move the files of each step into a folder of their own"
            raise Damaged(message, "saves-mixed", hint=hint)


def _counted(files: Mapping[int, list[str]]) -> str:
    return ", ".join(
        f"{number} ({len(names):,} file{'s' * (len(names) > 1)}, such as {names[0]})"
        for number, names in sorted(files.items())
    )


def missing_ranks(files: list[RankFile], world: int | None) -> list[Problem]:
    """Return the ranks that names, or else ``world``, imply but no file has, by family."""
    problems: list[Problem] = []
    world = None if any(item.world for item in files) else world
    for family, items in by_family(files).items():
        first = items[0].file
        if _SINGLE.fullmatch(first):
            continue
        last = max(items, key=lambda item: item.rank)
        expected = last.world or world or last.rank + 1
        require_rank(max(expected, last.rank), family)
        if last.rank >= expected:
            message = f"{last.file}: a file of rank {last.rank}, but there are {expected} ranks"
            problems.append(Problem(message, "saves-mixed", file=last.file))
        missing = find_missing_ranks({item.rank for item in items}, expected)
        if missing:
            ranks = ", ".join(map(str, missing))
            message = f"{first} and its like: the file of rank {ranks} of {expected} is missing"
            problems.append(Problem(message, "rank-missing"))
    return problems


VERL_FAMILIES = ("model", "optim", "extra_state")
"""What verl (0.9) has a file of for each rank."""
