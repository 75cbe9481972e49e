"""One file a rank, written by torch.save (or, by torch_checkpointing, as safetensors).

Read: torch ``_experimental`` ``checkpoint_{r}.pt``; plain FSDP rank files such as
``model_rank{r}.pt``; verl ``model_world_size_{W}_rank_{r}.pt``; accelerate 1.15
``pytorch_model_fsdp_0_rank{r}.bin``, and whole ``pytorch_model.bin`` and ``optimizer.bin`` beside
each rank's random states; torch_checkpointing 0.1 ``<item>_{r}.pt`` with
``metadata.pkl``. Where files come in several families, the family begins each name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from ckptool.core.catalog import Catalog
from ckptool.core.sharding.infer import with_inferred_mesh
from ckptool.errors import Damaged, Problem
from ckptool.formats.base import Deferred, FileRole, FileRule, Format, ScanOptions
from ckptool.formats.companions import companions
from ckptool.formats.rank_files.flat_ranks import assembled
from ckptool.formats.rank_files.names import RankFile, has_fsdp_folder, is_single, rank_files
from ckptool.formats.rank_files.numbered import STATES_OF_A_RANK, numbered_files, of_processes
from ckptool.formats.rank_files.torch_checkpointing import (
    METADATA,
    Declared,
    is_uncommitted,
    read,
    safetensors_leaves,
)
from ckptool.formats.torch_save import INDEX
from ckptool.serialization.archive.read import read_torch_file
from ckptool.serialization.source import (
    Source,
    expect_archives,
    first_missing,
    read_metadata,
    require_rank,
)
from ckptool.serialization.state_dict.flat_params import HINT, is_flat
from ckptool.serialization.state_dict.leaves import Assembled, Leaf, ShareLeaf, read_leaves
from ckptool.serialization.state_dict.values import unread_notes

_VERL_CONFIG = "fsdp_config.json"
_STEP = re.compile(r"(?:step|iter|epoch)[a-z]*[-_=.]?([0-9]{1,18})", re.IGNORECASE)


def _probe(source: Source) -> bool:
    if INDEX in source.files:
        return False
    return bool(_files(source)) or is_uncommitted(source)


def _scan(source: Source, options: ScanOptions) -> Catalog:
    if is_uncommitted(source):
        metadata = METADATA
        message = f"{source.root}: no {metadata}, which alone says how the ranks' tensors are cut"
        raise Damaged(message, "save-incomplete", file=metadata)
    files = _files(source, options.world_size)
    if not files:
        raise Damaged(f"{source.root}: no files that are one a rank")
    _require_one_file_a_rank(files)
    declared = read(source)
    if options.world_size is None:
        _require_one_world_size(source.root, files)
    _require_one_step(source.root, files)
    problems = _missing_ranks(files, declared.world_size if declared else options.world_size)
    ranks: dict[int, dict[str, Leaf]] = {}
    families = list(dict.fromkeys(item.family for item in files))
    several = len(families) > 1 or declared is not None or has_fsdp_folder(source)
    expect_archives(source, (item.file for item in files))
    for item in files:
        leaves = options.attempt(partial(_read, source, item, declared)) or {}
        ranks.setdefault(item.rank, {}).update(_renamed(leaves, item, several))
    ranks = _strip_repeated(ranks, families) if len(families) > 1 else ranks
    problems += [p for rank, leaves in ranks.items() for p in _wrong_rank(rank, leaves)]
    found = assembled(ranks, options)
    flat = _flat_parameters(found)
    problems += found.problems + flat + _absent_members(found, ranks)
    options.report(problems, subject=source.root, hint=HINT if flat else None)
    return _catalog(source, files, found, declared is not None)


def _files(source: Source, world: int | None = None) -> list[RankFile]:
    """The rank files, by names that are known, and by numbers in others where contents agree."""
    named = rank_files(source)
    if METADATA not in source.files:
        numbered = numbered_files(source, {item.file for item in named} - _of_two_numbers(named))
        claimed = {item.file for item in numbered}
        named = [*(item for item in named if item.file not in claimed), *numbered]
        named = of_processes(source, named)
    return [item for item in named if world is None or _is_of(item, world)]


def _is_of(item: RankFile, world: int) -> bool:
    """Whether a file is one of so many ranks, by the size in its name or else by its rank."""
    return item.rank < world if item.world is None else item.world == world


def _of_two_numbers(files: list[RankFile]) -> set[str]:
    """The files that seem to be of kinds which differ in a number, such as another rank's."""
    kinds: dict[str, set[str]] = {}
    for item in files:
        kinds.setdefault(re.sub(r"[0-9]+", "#", item.file), set()).add(item.family)
    return {item.file for item in files if len(kinds[re.sub(r"[0-9]+", "#", item.file)]) > 1}


def _catalog(
    source: Source, files: list[RankFile], found: Assembled, checkpointing: bool
) -> Catalog:
    world = max(item.rank for item in files) + 1
    full = [mesh for mesh in found.meshes if mesh.size == world]
    mesh = max(full, key=lambda mesh: (len(mesh.shape), mesh.names is not None), default=None)
    names = {item.file for item in files} | {METADATA}
    catalog = Catalog(
        "rank-local",
        found.tensors,
        found.objects,
        {name: size for name, size in source.files.items() if name in names},
        world_size=world,
        mesh=mesh,
        mesh_source="declared" if mesh else None,
        info={"writer": "torch_checkpointing" if checkpointing else _writer(files)},
        notes=(*found.notes, *unread_notes(found.objects)),
        conflicts=found.conflicts,
        companions=companions(source) or companions(source, "huggingface/"),
    )
    return with_inferred_mesh(catalog) if mesh is None else catalog


def _writer(files: list[RankFile]) -> str:
    names = [item.file for item in files]
    if all(re.fullmatch(r"checkpoint_\d+\.pt", name) for name in names):
        return "torch.distributed.checkpoint._experimental (by its file names)"
    if any(item.world for item in files):
        return "verl (by its file names)"
    if any(name.startswith(("pytorch_model_fsdp", "random_states_")) for name in names):
        return "accelerate (by its file names)"
    return "torch.save, one file a rank"


def _require_one_world_size(root: str, files: list[RankFile]) -> None:
    """Damaged where the names state several numbers of ranks, as after a relaunch with others."""
    stated: dict[int, list[str]] = {}
    for item in files:
        if item.world:
            stated.setdefault(item.world, []).append(item.file)
    if len(stated) < 2:
        return
    most = max(stated, key=lambda world: len(stated[world]))
    raise Damaged(
        f"{root}: rank files of several world sizes: {_counted(stated)}",
        "saves-mixed",
        hint=f"--world-size {most} reads those of {most} ranks; move the others away",
    )


def _require_one_step(root: str, files: list[RankFile]) -> None:
    """Damaged where files of one kind are of several steps, by their names."""
    kinds: dict[str, dict[int, list[str]]] = {}
    for item in files:
        if match := _STEP.search(item.family):
            kind = item.family[: match.start(1)] + item.family[match.end(1) :]
            kinds.setdefault(kind, {}).setdefault(int(match[1]), []).append(item.file)
    for steps in kinds.values():
        if len(steps) > 1:
            message = f"{root}: rank files of several steps: {_counted(steps)}"
            raise Damaged(
                message,
                "saves-mixed",
                hint="move the files of each step into a folder of their own",
            )


def _require_one_file_a_rank(files: list[RankFile]) -> None:
    """Damaged where two files of one kind are of the same rank, and of the same number of ranks."""
    known: dict[object, str] = {}
    for item in files:
        other = known.setdefault((item.family, item.rank, item.world), item.file)
        if other != item.file:
            message = f"{other} and {item.file} are both the {item.family} of rank {item.rank}"
            raise Damaged(
                message,
                "saves-mixed",
                file=item.file,
                hint="move the files of one of the two saves away",
            )


def _counted(files: Mapping[int, list[str]]) -> str:
    return ", ".join(
        f"{number} ({len(names):,} file{'s' * (len(names) > 1)}, such as {names[0]})"
        for number, names in sorted(files.items())
    )


def _missing_ranks(files: list[RankFile], known: int | None) -> list[Problem]:
    """Ranks that the names promise and no file holds, family by family.

    ``known`` is the number of ranks where no name states it.
    """
    problems: list[Problem] = []
    known = None if any(item.world for item in files) else known
    for family in dict.fromkeys(item.family for item in files):
        mine = [item for item in files if item.family == family]
        if is_single(mine[0].file):
            continue
        last = max(mine, key=lambda item: item.rank)
        expected = last.world or known or last.rank + 1
        require_rank(max(expected, last.rank), mine[0].family)
        if last.rank >= expected:
            message = f"{last.file}: a file of rank {last.rank}, and there are {expected} ranks"
            problems.append(Problem(message, "saves-mixed", file=last.file))
        missing = first_missing({item.rank for item in mine}, expected)
        if missing:
            what = ", ".join(map(str, missing))
            like = f"{mine[0].file} and its like"
            message = f"{like}: the file of rank {what} of {expected} is missing"
            problems.append(Problem(message, "rank-missing"))
    return problems


def _read(source: Source, item: RankFile, declared: Declared | None) -> dict[str, Leaf]:
    if item.file.endswith(".json"):
        return _json_leaves(source, item.file)
    if item.file.endswith(".safetensors") and declared is not None:
        return safetensors_leaves(source, item.file, item.family, item.rank, declared)
    state = item.family.startswith(STATES_OF_A_RANK) or _is_flat_optimizer(source, item)
    opened = read_torch_file(source, item.file)
    return read_leaves(opened, source, rank_state=state, refuse=True)


def _json_leaves(source: Source, file: str) -> dict[str, Leaf]:
    try:
        value = json.loads(read_metadata(source, file))
        return {name: Leaf((name,), leaf) for name, leaf in value.items()}
    except (ValueError, AttributeError, RecursionError):
        problem = Problem(f"{file}: not a JSON object", "metadata-unreadable", file=file)
        raise Damaged(problem) from None


def _is_flat_optimizer(source: Source, item: RankFile) -> bool:
    """verl with FSDP1 saves each rank's own part of flat optimizer state, and no map to names."""
    if item.family != "optim" or _VERL_CONFIG not in source.files:
        return False
    text = read_metadata(source, _VERL_CONFIG)
    return re.search(rb'"FSDP_version"\s*:\s*1\b', text) is not None


def _renamed(
    leaves: Mapping[str, Leaf], item: RankFile, several: bool
) -> Iterator[tuple[str, Leaf]]:
    """The leaves with their family in front, where there are several families."""
    for name, leaf in leaves.items():
        if not several:
            yield name, leaf
        elif leaf.path == ():
            yield item.family, replace(leaf, path=(item.family,))
        else:
            yield f"{item.family}.{name}", replace(leaf, path=(item.family, *leaf.path))


def _strip_repeated(
    ranks: dict[int, dict[str, Leaf]], families: list[str]
) -> dict[int, dict[str, Leaf]]:
    """Without the family where all names of the family begin with it already."""
    for family in families:
        double = f"{family}.{family}."
        mine = [n for leaves in ranks.values() for n in leaves if n.startswith(f"{family}.")]
        if mine and all(name.startswith(double) for name in mine):
            ranks = {rank: dict(_unprefixed(leaves, family)) for rank, leaves in ranks.items()}
    return ranks


def _unprefixed(leaves: Mapping[str, Leaf], family: str) -> Iterator[tuple[str, Leaf]]:
    head = f"{family}."
    for name, leaf in leaves.items():
        if name.startswith(head):
            yield name[len(head) :], replace(leaf, path=leaf.path[1:])
        else:
            yield name, leaf


def _wrong_rank(rank: int, leaves: Mapping[str, Leaf]) -> Iterator[Problem]:
    """A file whose DTensors say that another rank wrote them is a copy in the wrong place."""
    for name, leaf in leaves.items():
        if isinstance(leaf.value, ShareLeaf) and leaf.value.share.rank not in (None, rank):
            message = f"the file of rank {rank} was written by rank {leaf.value.share.rank}"
            reason = f"(as the record of {name} says): a copied or renamed file"
            file = next((place.file for place in leaf.value.places), None)
            yield Problem(f"{message} {reason}", "rank-copied", file=file)
            return


def _absent_members(found: Assembled, ranks: Mapping[int, object]) -> list[Problem]:
    absent = sorted({r for mesh in found.meshes for r in mesh.ranks} - set(ranks))
    if not absent:
        return []
    size = max(mesh.size for mesh in found.meshes)
    message = f"the device mesh has {size} ranks; the file of rank {absent[:12]} is missing"
    return [Problem(message, "rank-missing")]


def _flat_parameters(found: Assembled) -> list[Problem]:
    """FSDP1's local state dicts hold flat parameters and no map back to the originals."""
    return [
        Problem(
            f"{name}: an FSDP1 flat parameter; nothing in the files says which parameters it is"
            " made of",
            "parameters-flat",
            tensor=name,
        )
        for name in found.tensors
        if is_flat(name)
    ]


FORMAT = Format(
    "rank-local",
    "one file a rank (torch _experimental, torch_checkpointing, verl, accelerate, FSDP)",
    _probe,
    _scan,
    reshard=Deferred("ckptool.formats.rank_files.write:lay_out_rank_files"),
    files=(FileRule(r"metadata\.pkl", FileRole.METADATA),),
    takes_world_size=True,
)

TORCH_CHECKPOINTING_FORMAT = replace(
    FORMAT,
    name="torch-checkpointing",
    summary="torch_checkpointing's rank files",
    probe=None,
    reshard=Deferred("ckptool.formats.rank_files.write:lay_out_torch_checkpointing"),
)
