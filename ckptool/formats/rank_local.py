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
from functools import partial

from ckptool.core.catalog import Catalog, Path
from ckptool.errors import Damaged, Problem
from ckptool.formats import _torch_checkpointing
from ckptool.formats._companions import companions
from ckptool.formats._flat_params import HINT, is_flat
from ckptool.formats._flat_ranks import assembled
from ckptool.formats._infer import with_inferred_mesh
from ckptool.formats._leaves import Assembled, Leaf, ShareLeaf, read_leaves
from ckptool.formats._rank_files import RankFile, has_fsdp_folder, is_single, rank_files
from ckptool.formats._torch_file import read_torch_file
from ckptool.formats.base import (
    Format,
    ScanOptions,
    Source,
    expect_archives,
    first_missing,
    read_metadata,
    require_rank,
)
from ckptool.formats.torch_save import unread_notes

_VERL_CONFIG = "fsdp_config.json"
_STATE_OF_A_RANK = ("extra_state", "random_states", "rng_state")


def _probe(source: Source) -> bool:
    return bool(rank_files(source)) or _torch_checkpointing.is_uncommitted(source)


def _scan(source: Source, options: ScanOptions) -> Catalog:
    if _torch_checkpointing.is_uncommitted(source):
        metadata = _torch_checkpointing.METADATA
        message = f"{source.root}: no {metadata}, which alone says how the ranks' tensors are cut"
        raise Damaged(Problem(message, "save-unfinished", file=metadata))
    files = rank_files(source)
    if not files:
        raise Damaged(f"{source.root}: no files that are one a rank")
    declared = _torch_checkpointing.read(source)
    problems = _missing_ranks(files, declared.world_size if declared else None)
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


def _catalog(
    source: Source, files: list[RankFile], found: Assembled, checkpointing: bool
) -> Catalog:
    world = max(item.rank for item in files) + 1
    full = [mesh for mesh in found.meshes if mesh.size == world]
    mesh = max(full, key=lambda mesh: (len(mesh.shape), mesh.names is not None), default=None)
    names = {item.file for item in files} | {_torch_checkpointing.METADATA}
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


def _missing_ranks(files: list[RankFile], world: int | None) -> list[Problem]:
    """Ranks that the names or the metadata promise and no file holds, family by family."""
    problems: list[Problem] = []
    for family in dict.fromkeys(item.family for item in files):
        mine = [item for item in files if item.family == family]
        if is_single(mine[0].file):
            continue
        worlds = {item.world for item in mine if item.world} or ({world} if world else set())
        if len(worlds) > 1:
            message = f"{family}: file names state the world sizes {sorted(worlds)}"
            problems.append(Problem(message, "saves-mixed"))
        highest = max(item.rank for item in mine)
        expected = max(worlds or {highest + 1})
        require_rank(max(expected, highest), mine[0].family)
        missing = first_missing({item.rank for item in mine}, expected)
        if missing:
            what = ", ".join(map(str, missing))
            like = f"{mine[0].file} and its like"
            message = f"{like}: the file of rank {what} of {expected} is missing"
            problems.append(Problem(message, "rank-missing"))
    return problems


def _read(
    source: Source, item: RankFile, declared: _torch_checkpointing.Declared | None
) -> dict[str, Leaf]:
    if item.file.endswith(".json"):
        return _json_leaves(source, item.file)
    if item.file.endswith(".safetensors") and declared is not None:
        return _torch_checkpointing.safetensors_leaves(
            source, item.file, item.family, item.rank, declared
        )
    state = item.family.startswith(_STATE_OF_A_RANK) or _is_flat_optimizer(source, item)
    return read_leaves(read_torch_file(source, item.file), source, rank_state=state)


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
            yield item.family, Leaf((item.family,), leaf.value, leaf.rank_state)
        else:
            path: Path = (item.family, *leaf.path)
            yield f"{item.family}.{name}", Leaf(path, leaf.value, leaf.rank_state)


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
            yield name[len(head) :], Leaf(leaf.path[1:], leaf.value, leaf.rank_state)
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
)
