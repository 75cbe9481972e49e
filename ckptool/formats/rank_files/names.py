"""The files of a folder that are one per rank: by their names, else by their content.

accelerate and transformers' Trainer write some files once, beside those of the ranks. Other names
need only differ in numbers: ``rank0/model.pt``, ``dp_rank_00_model.pt``, ``checkpoint_1.pt``. Most
numbers count epochs, steps, folds or versions, and a LoRA adapter has a rank too
(``lora_rank8.pt``). So unless a word before the number says that it counts ranks or shards, the
content must say it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from ckptool.errors import Damaged, Problem, Several
from ckptool.formats.rank_files.records import are_processes, have_slices, recorded_ranks
from ckptool.formats.rank_files.torch_checkpointing import METADATA
from ckptool.serialization.file_roles import role_of, without_words
from ckptool.serialization.source import Source, missing_files, require_rank

_COUNTED = r"(?<![a-z])(?:rank|shard|part|process|proc|[dmpt]p)"
"""Words before the number of a rank or a shard. Not ``ep`` and ``cp``: those are mostly an epoch
and a checkpoint, and where they are parallelism, ``rank`` follows."""
_SAVE = (
    r"(?<![a-z])(?:(?:global[-_]?)?step|iter(?:ation)?|epoch|ep|batch|ba|fold|seed|run|trial"
    r"|version|v)s?"
)
"""Words before the number of a save or a training: such files are separate checkpoints."""
_RANK_FILE = re.compile(
    rf"(?P<family>.*?)[._-]?(?:world_size_(?P<world>[0-9]{{1,9}})_)?(?P<word>{_COUNTED})?[._-]?"
    r"(?<![0-9])(?P<rank>[0-9]{1,9})\.(?:pt|pth|bin|ckpt|pkl|json|safetensors)",
    re.IGNORECASE,
)
_ITEM_FILE = re.compile(
    r"(?P<family>.+)_(?P<rank>[0-9]{1,9})\.(?:pt|json|safetensors)(?P<world>)?(?P<word>)?"
)
_MODELS = ("pytorch_model_fsdp", "pytorch_model")
_SINGLE = re.compile(
    r"(?P<family>scheduler|sampler|dl_state_dict|optimizer|pytorch_model|pytorch_model_fsdp)"
    r"(?:_(?P<number>\d+))?\.bin|(scaler|scheduler|optimizer)\.pt|custom_checkpoint_\d+\.pkl"
)
_STATE_OF_A_RANK = re.compile(
    r"(?:random_states|rng_state|extra_state).*|"
    r"(?:(?:train(?:ing)?|val(?:id)?|eval|test|torch|cuda|numpy|python|distributed|batch|random)[-_])?"
    r"(?:random(?:[-_]states?)?|rngs?|extra[-_]states?|(?:data[-_]?)?loader|dataset|sampler)s?"
    r"(?:[-_](?:states?|dict|dp|tp|pp|ep|mp|cp|cpu|cuda|gpu))*",
    re.IGNORECASE,
)
"""Whole names: ``random-baseline`` or ``dataset_v2`` may be that of a training."""
_SAVE_IN = re.compile(
    rf"(?:{_SAVE}|(?<![a-z])(?:checkpoint|ckpt))[-_=.]?[0-9]{{1,18}}(?![0-9])"
    r"|(?<![a-z])(?:best|last|latest)(?![a-z])"
    r"|(?<![0-9])(?<!part[-_])(?<!shard[-_])(?<!chunk[-_])(?<!layer[-_])(?<!block[-_])(?<!expert[-_])"
    r"[0-9]{5,18}(?![0-9])",
    re.IGNORECASE,
)
"""What says which save a file is of: a counting word, or a long number, as in
``optim_000020_rank1.pt`` of nanochat, if no word before it says that it counts parts."""


class RankFile(Struct, frozen=True):
    """A file of one rank: its family, its rank, and the world size in its name.

    ``serialization`` is the class that metadata says wrote it, if any does.
    """

    file: str
    family: str
    rank: int
    world: int | None
    says_rank: bool
    serialization: str | None = None


def rank_files(source: Source, *, by_number: bool = False) -> list[RankFile]:
    """Return the files directly in the source's folder whose known names make them rank files.

    With ``by_number`` also files of which only their content tells that their numbers are ranks.
    """
    pattern = _ITEM_FILE if METADATA in source.files else _RANK_FILE
    families: dict[tuple[str, int | None], list[RankFile]] = {}
    files = [file for file in source.files if "/" not in file]
    for file in files:
        item = _parse(file, pattern)
        if item is not None:
            families.setdefault((item.family, item.world), []).append(item)
    ranked = [
        item
        for items in families.values()
        if _is_family(items, source, by_number=by_number)
        for item in items
    ]
    if _are_whole_saves(ranked):
        return []
    singles = [
        RankFile(match.string, _single_family(match), 0, None, True)
        for match in map(_SINGLE.fullmatch, files)
        if match
    ]
    return [*ranked, *singles] if ranked or has_fsdp_folder(source) else []


def are_slices(source: Source, files: Sequence[RankFile]) -> bool:
    """Return whether files are what each rank alone has of an optimizer, beside a whole model.

    As nanochat writes it: the model once, and of the moments the rows that a rank updates. Nothing
    says which those are, so each file is a checkpoint by itself, unless they are replicas, be they
    equal or not.
    """
    if not files or not all(role_of(item.family) == "optimizer" for item in files):
        return False
    stems = ((name.rpartition(".")[0], name) for name in source.files if name.endswith(_SUFFIXES))
    models = [(_words_of(stem), file) for stem, file in stems if role_of(stem) == "model"]
    families = [
        (_words_of(name), [item.file for item in items]) for name, items in by_family(files).items()
    ]
    return any(
        have_slices(source, slices, model)
        for words, slices in families
        for model_words, model in models
        if model_words <= words
    )


def _words_of(stem: str) -> set[str]:
    """Return the words of a name that say of which save or optimizer it is, not what it is for."""
    return set(without_words(stem).split("-")) - {""}


def other_saves(files: Sequence[RankFile], file: str) -> frozenset[str]:
    """Return the files whose names state another save than that of ``file`` does."""
    saves = {item.file: save_in(item.family) for item in files}
    save = saves.get(file, "")
    return frozenset(name for name, other in saves.items() if save and other not in ("", save))


def _are_whole_saves(files: Sequence[RankFile]) -> bool:
    """Return whether names state several saves, of which one rank wrote each alone.

    As Composer's ``ep1-ba10-rank0.pt`` and ``ep2-ba20-rank0.pt`` (composer 0.32).
    """
    saves = {save for item in files if (save := save_in(item.family))}
    return len(saves) > 1 and len({item.rank for item in files}) == 1


def save_in(family: str) -> str:
    """Return the part of a name that says which save it is, such as ``ep1 ba10``."""
    return " ".join(match[0] for match in _SAVE_IN.finditer(family))


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
    if match is None or "-of-" in file or _SINGLE.fullmatch(file):
        return None
    family = match["family"]
    accelerate = re.fullmatch(r"(pytorch_model_fsdp|optimizer)_([0-9]+)", family)
    if accelerate and match["word"]:
        family = accelerate_family(accelerate[1], accelerate[2])
    world = int(match["world"]) if match["world"] else None
    says_rank = bool(match["word"]) or family in ("random_states", "rng_state")
    return RankFile(file, family, int(match["rank"]), world, says_rank)


def _is_family(items: list[RankFile], source: Source, *, by_number: bool) -> bool:
    """Return whether the names of files that differ in a number say that it is a rank."""
    numbers = {item.rank for item in items}
    is_declared = METADATA in source.files
    if is_declared or by_number:
        return len(numbers) == len(items) and (is_declared or (len(items) > 1 and min(numbers) < 2))
    suffixes = {item.file.rpartition(".")[2] for item in items}
    return suffixes.isdisjoint(("json", "safetensors")) and all(item.says_rank for item in items)


# Names that differ in numbers

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_LONGEST_NUMBER = 9
_DEPTH = 1
_OF = re.compile(r"(?:.*[._/-])?of[._-]?", re.IGNORECASE)
_RANK = re.compile(rf".*{_COUNTED}[._-]?", re.IGNORECASE)
_ANOTHER_SAVE = re.compile(rf".*{_SAVE}[._=-]?", re.IGNORECASE)
_WORDS = frozenset(["of", "rank", "dp", "tp", "pp", "ep", "cp", "mp"])
"""Words beside a number that are not the name of a family."""


class _NumberedName(Struct, frozen=True):
    """A file's name: the text before, between and after its numbers, and the numbers.

    ``of`` is the number after the word "of", which is not among ``numbers``.
    """

    file: str
    texts: tuple[str, ...]
    numbers: tuple[int, ...]
    of: int | None


def find_numbered_files(source: Source, besides: Collection[str] = ()) -> list[RankFile]:
    """Return the rank files among those whose names differ in numbers, without ``besides``.

    Files of values only record no rank: their numbers count as in other files with the same ones.
    """
    families: dict[object, list[_NumberedName]] = {}
    for file in source.files:
        name = _split_numbers(file) if file not in besides else None
        if name is not None:
            families.setdefault((name.texts, name.of), []).append(name)
    rank_files: list[RankFile] = []
    rank_of: dict[frozenset[int], dict[int, int]] = {}
    unproven: list[tuple[list[_NumberedName], list[int]]] = []
    for names in families.values():
        names.sort(key=lambda name: name.numbers)
        varying = _varying(names)
        numbers = [name.numbers[varying[0]] for name in names] if len(varying) == 1 else None
        ranks = _ranks_of(source, names, varying, numbers) if varying else None
        if ranks is not None:
            rank_files += _as_rank_files(names, ranks)
            if numbers is not None:
                rank_of[frozenset(numbers)] = dict(zip(numbers, ranks, strict=True))
        elif numbers is not None:
            unproven.append((names, numbers))
    for names, numbers in unproven:
        rank_by_number = rank_of.get(frozenset(numbers))
        if rank_by_number is not None:
            rank_files += _as_rank_files(names, [rank_by_number[number] for number in numbers])
    return rank_files


def _split_numbers(file: str) -> _NumberedName | None:
    if not file.endswith(_SUFFIXES) or file.count("/") > _DEPTH:
        return None
    stem, _, suffix = file.rpartition(".")
    pieces = re.split(r"([0-9]+)", stem)
    if len(pieces) < 3 or any(len(number) > _LONGEST_NUMBER for number in pieces[1::2]):
        return None
    texts, numbers, total = [*pieces[0::2], suffix], [], None
    for text, number in zip(pieces[0::2], pieces[1::2], strict=False):
        if _OF.fullmatch(text):
            total = int(number)
        else:
            numbers.append(int(number))
    return _NumberedName(file, tuple(texts), tuple(numbers), total)


def _varying(names: Sequence[_NumberedName]) -> list[int]:
    """Return which numbers differ between names, none if they count saves or folders differ."""
    columns = zip(*(name.numbers for name in names), strict=True)
    varying = [at for at, column in enumerate(columns) if len(set(column)) > 1]
    folders = {name.file.rpartition("/")[0] for name in names} - {""}
    if any(map(_ANOTHER_SAVE.fullmatch, _before(names[0], varying))):
        return []
    return varying if len(folders) in (0, len(names)) else []


def _before(name: _NumberedName, varying: Sequence[int]) -> list[str]:
    texts = [text for text in name.texts[:-2] if not _OF.fullmatch(text)]
    return [texts[at] for at in varying]


def _ranks_of(
    source: Source,
    names: Sequence[_NumberedName],
    varying: Sequence[int],
    numbers: list[int] | None,
) -> list[int] | None:
    """Return the rank of each file by its name, else by its content; None if neither says it."""
    if numbers is None or not _RANK.fullmatch(_before(names[0], varying)[0]):
        return recorded_ranks(source, [name.file for name in names], numbers)
    # with as many files as "of" says, the last number says where they are counted from
    first = 1 if max(numbers) == names[0].of and 0 not in numbers else 0
    return [number - first for number in numbers]


def _as_rank_files(names: Sequence[_NumberedName], ranks: Sequence[int]) -> Iterator[RankFile]:
    for name, rank in zip(names, ranks, strict=True):
        yield RankFile(name.file, _family(name), rank, name.of, says_rank=True)


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


def is_state_of_a_rank(name: str) -> bool:
    """Return whether a name says that a file has what each rank has for itself."""
    return _STATE_OF_A_RANK.fullmatch(name) is not None


def keep_processes(source: Source, files: Sequence[RankFile]) -> list[RankFile]:
    """Return the files without the families whose numbers are not ranks of processes."""
    families = {name for name, items in by_family(files).items() if _are_processes(source, items)}
    return [item for item in files if item.family in families]


def _are_processes(source: Source, items: Sequence[RankFile]) -> bool:
    """Return whether files are of processes, counted from 0 or recorded in the files."""
    numbers = {item.rank for item in items}
    stated = any(item.world for item in items) or is_state_of_a_rank(items[0].family)
    return stated or 0 in numbers or are_processes(source, [item.file for item in items], numbers)


# What names contradict


def require_one_save(root: str, files: list[RankFile], *, one_world: bool) -> None:
    """Raise Several if names state several saves, Damaged if two files are of one rank.

    With ``one_world`` they must not state several world sizes either, as after a relaunch.
    """
    files_by_key: dict[object, str] = {}
    worlds: dict[int, list[str]] = {}
    saves: dict[str, list[str]] = {}
    for item in files:
        other = files_by_key.setdefault((item.family, item.rank, item.world), item.file)
        if other != item.file:
            message = f"{other} and {item.file} are both the {item.family} of rank {item.rank}"
            hint = "move the files of one of the two saves away"
            raise Damaged(message, "saves-mixed", file=item.file, hint=hint)
        if item.world and one_world:
            worlds.setdefault(item.world, []).append(item.file)
        if save := save_in(item.family):
            saves.setdefault(save, []).append(item.file)
    if len(worlds) > 1:
        most = max(worlds, key=lambda world: len(worlds[world]))
        hint = f"--world-size {most} reads those of {most} ranks; move the others away"
        message = f"{root}: rank files of several world sizes: {_count_files(worlds)}"
        raise Damaged(message, "saves-mixed", hint=hint)
    if len(saves) > 1:
        hint = "name a file of one of them: all files of its save are read"
        raise Several(f"{root}: rank files of several saves: {_count_files(saves)}", hint=hint)


def _count_files(files: Mapping[int, list[str]] | Mapping[str, list[str]]) -> str:
    return ", ".join(
        f"{label} ({len(names):,} file{'s' * (len(names) > 1)}, such as {names[0]})"
        for label, names in sorted(files.items())
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
        missing = missing_files(first, {item.rank for item in items}, expected)
        problems += [Problem(missing, "rank-missing")] if missing else []
    return problems


VERL_FAMILIES = ("model", "optim", "extra_state")
"""What verl (0.9) has a file of for each rank."""
