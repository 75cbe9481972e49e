"""One file per rank, written by torch.save or, by torch_checkpointing, as safetensors.

Read: torch ``_experimental`` ``checkpoint_{r}.pt``; plain FSDP rank files such as
``model_rank{r}.pt``; verl ``model_world_size_{W}_rank_{r}.pt``; accelerate 1.15
``pytorch_model_fsdp_0_rank{r}.bin``, and whole ``pytorch_model.bin`` and ``optimizer.bin`` beside
each rank's random states; torch_checkpointing 0.1 ``<item>_{r}.pt`` with ``metadata.pkl``. If files
come in several families, the family begins each name.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

from msgspec.structs import replace

from ckptool.core.catalog import Catalog, Path, TensorEntry, flat_name
from ckptool.core.text import list_some
from ckptool.errors import Damaged, Problem, Refusal
from ckptool.formats.base import (
    Deferred,
    Detection,
    FileRole,
    FileRule,
    Format,
    Loading,
    Reading,
    ScanOptions,
    Writing,
)
from ckptool.formats.companions import OF_VERL, companions
from ckptool.formats.rank_files.items import (
    add_declared_files,
    missing_files,
    missing_tensors,
    names_files,
    read_item_file,
)
from ckptool.formats.rank_files.names import (
    VERL_FAMILIES,
    RankFile,
    are_slices,
    by_family,
    find_numbered_files,
    has_fsdp_folder,
    is_state_of_a_rank,
    keep_processes,
    missing_ranks,
    other_saves,
    rank_files,
    require_one_save,
)
from ckptool.formats.rank_files.torch_checkpointing import (
    METADATA,
    Declared,
    is_uncommitted,
    read_declared,
)
from ckptool.formats.torch_save import INDEX
from ckptool.serialization.source import Source, expect_archives, read_metadata
from ckptool.serialization.state_dict.alike import AlikeFiles
from ckptool.serialization.state_dict.assemble import assemble
from ckptool.serialization.state_dict.flat_params import (
    HINT,
    Member,
    find_members,
    is_flat,
    unflatten,
)
from ckptool.serialization.state_dict.leaves import (
    Assembled,
    Leaf,
    PlainLeaf,
    RankLeaves,
    ShareLeaf,
)

_VERL_CONFIG = "fsdp_config.json"
_VERL, _TORCH_CHECKPOINTING = "verl (by its file names)", "torch_checkpointing"
_ACCELERATE = "accelerate (by its file names)"
WRITERS = {
    _VERL: "verl",
    _TORCH_CHECKPOINTING: "torch-checkpointing",
    _ACCELERATE: "accelerate",
}
"""The format that a writer loads again; writers as in ``Catalog.info``."""


def _probe(source: Source) -> bool:
    if INDEX in source.files:
        return False
    return bool(_files(source)) or is_uncommitted(source) or names_files(source)


def _scan(source: Source, options: ScanOptions) -> Catalog:
    if is_uncommitted(source):
        message = f"{source.root}: no {METADATA}, the only record of how tensors are sharded"
        raise Damaged(message, "save-incomplete", file=METADATA)
    world, declared = options.world_size, read_declared(source)
    files = _files(source, world, declared)
    files = files or _of_world(rank_files(source, by_number=True), world)
    if not files:
        raise Damaged(f"{source.root}: no files per rank")
    require_one_save(source.root, files, one_world=world is None)
    if declared is None:
        problems = missing_ranks(files, world)
    else:
        problems = list(missing_files(source, files, declared))
    is_named = declared is not None or has_fsdp_folder(source)
    expect_archives(source, (item.file for item in files))
    archives = AlikeFiles(source)
    families = {
        family: [
            (item.rank, options.attempt(partial(_read, source, item, declared, archives)) or {})
            for item in items
        ]
        for family, items in by_family(files).items()
    }
    problems += missing_tensors(declared, families) if declared is not None else ()
    ranks = _join_families(families, is_named=is_named)
    problems += [p for rank, leaves in ranks.items() for p in _copied_file(rank, leaves)]
    merged = _merge(ranks, options)
    flat = _flat_parameters(merged)
    problems += merged.problems + flat + _absent_members(merged, ranks)
    options.report(problems, subject=source.root, hint=HINT if flat else None)
    return options.with_placements(_catalog(source, files, merged, declared is not None))


def _files(
    source: Source, world: int | None = None, declared: Declared | None = None
) -> list[RankFile]:
    """Return the rank files: as declared, by names that say it, and by numbers if contents do."""
    files = rank_files(source)
    if declared is not None:
        files = add_declared_files(source, declared, files)
    if METADATA not in source.files:
        numbered = find_numbered_files(
            source, {item.file for item in files} - _of_two_numbers(files)
        )
        claimed = {item.file for item in numbered}
        files = [*(item for item in files if item.file not in claimed), *numbered]
        files = keep_processes(source, files)
        files = [] if are_slices(source, files) else files
    return _of_world(files, world)


def _of_world(files: list[RankFile], world: int | None) -> list[RankFile]:
    """Return the files of ranks of a world of this size, if one is given."""
    if world is None:
        return files
    return [
        item for item in files if (item.rank < world if item.world is None else item.world == world)
    ]


def _of_two_numbers(files: list[RankFile]) -> set[str]:
    """Return files that seem to be of kinds that differ in a number, such as a second rank."""
    kinds: dict[str, set[str]] = {}
    for item in files:
        kinds.setdefault(re.sub(r"[0-9]+", "#", item.file), set()).add(item.family)
    return {item.file for item in files if len(kinds[re.sub(r"[0-9]+", "#", item.file)]) > 1}


def _catalog(
    source: Source, files: list[RankFile], merged: Assembled, checkpointing: bool
) -> Catalog:
    world = max(item.rank for item in files) + 1
    full = [mesh for mesh in merged.meshes if mesh.size == world]
    mesh = max(full, key=lambda mesh: (len(mesh.shape), mesh.names is not None), default=None)
    names = {item.file for item in files} | {METADATA}
    info = {"writer": _TORCH_CHECKPOINTING if checkpointing else _writer(files)}
    version = _fsdp_version(source)
    return merged.catalog(
        "rank-local",
        source,
        (name for name in source.files if name in names),
        world_size=world,
        mesh=mesh,
        mesh_source="declared" if mesh else None,
        info=info | merged.info | ({"FSDP version": version} if version else {}),
        companions=companions(source) or companions(source, f"{OF_VERL}/"),
    )


def _writer(files: list[RankFile]) -> str:
    names = [item.file for item in files]
    if all(re.fullmatch(r"checkpoint_\d+\.pt", name) for name in names):
        return "torch.distributed.checkpoint._experimental (by its file names)"
    if any(item.world for item in files):
        return _VERL
    if any(name.startswith(("pytorch_model_fsdp", "random_states_")) for name in names):
        return _ACCELERATE
    return "torch.save, one file per rank"


def _read(
    source: Source, item: RankFile, declared: Declared | None, archives: AlikeFiles
) -> dict[str, Leaf]:
    name = item.family or posixpath.basename(source.root)
    state = is_state_of_a_rank(name) or _is_flat_optimizer(source, item)
    return read_item_file(source, item, declared, archives, state)


def _is_flat_optimizer(source: Source, item: RankFile) -> bool:
    """Return whether a rank's file is its part of flat optimizer state, as verl saves FSDP1's."""
    return item.family == "optim" and _fsdp_version(source) == "1"


def _fsdp_version(source: Source) -> str | None:
    """Return the version of FSDP that verl records; None if it records none."""
    if _VERL_CONFIG not in source.files:
        return None
    match = re.search(rb'"FSDP_version"\s*:\s*(\d)\b', read_metadata(source, _VERL_CONFIG))
    return match[1].decode() if match else None


def _join_families(
    families: Mapping[str, list[tuple[int, dict[str, Leaf]]]], *, is_named: bool
) -> dict[int, dict[str, Leaf]]:
    """Return the values of each rank, prefixed with their family if there are several.

    Not if all names of the family begin with it already. An ``is_named`` family is always prefixed.
    """
    several = len(families) > 1
    ranks: dict[int, dict[str, Leaf]] = {}
    for family, of_ranks in families.items():
        names = [name for _, leaves in of_ranks for name in leaves]
        is_in_front = several and all(name.startswith(f"{family}.") for name in names)
        for rank, leaves in of_ranks:
            joined = ranks.setdefault(rank, {})
            for name, leaf in leaves.items():
                if is_in_front or not (several or is_named):
                    joined[name] = leaf
                else:
                    full = f"{family}.{name}" if leaf.path else family
                    joined[full] = replace(leaf, path=(family, *leaf.path))
                    if isinstance(leaf.value, Refusal):
                        joined[full] = replace(joined[full], value=leaf.value.called(full))
    return ranks


def _copied_file(rank: int, leaves: Mapping[str, Leaf]) -> Iterator[Problem]:
    """Yield a problem if the DTensors in a file say that another rank wrote it."""
    for name, leaf in leaves.items():
        if isinstance(leaf.value, ShareLeaf) and leaf.value.share.rank not in (None, rank):
            message = f"the file of rank {rank} was written by rank {leaf.value.share.rank}"
            reason = f"(as the record of {name} says): a copied or renamed file"
            file = next((place.file for place in leaf.value.places), None)
            yield Problem(f"{message} {reason}", "rank-copied", file=file)
            return


def _absent_members(merged: Assembled, ranks: Mapping[int, object]) -> list[Problem]:
    absent = sorted({r for mesh in merged.meshes for r in mesh.ranks} - set(ranks))
    if not absent:
        return []
    size = max(mesh.size for mesh in merged.meshes)
    numbers = list_some(list(map(str, absent)), 12)
    message = f"the device mesh has {size} ranks; the file of rank {numbers} is missing"
    return [Problem(message, "rank-missing")]


def _flat_parameters(merged: Assembled) -> list[Problem]:
    """Return FSDP1's flat parameters: local state dicts have no map back to the originals."""
    return [
        Problem(
            f"{name}: an FSDP1 flat parameter; nothing in the files says which parameters it is"
            " made of",
            "parameters-flat",
            tensor=name,
        )
        for name in merged.tensors
        if is_flat(name)
    ]


def _merge(ranks: Mapping[int, RankLeaves], options: ScanOptions) -> Assembled:
    """Merge the ranks' values; unflatten FSDP1's flat parameters if ``options`` has them.

    With ``use_orig_params`` the files also have each rank's piece of each parameter, which is a
    part of the flat one; only its length is checked.
    """
    if not options.flat_params:
        return assemble(ranks, per_rank=options.per_rank)
    flats = assemble(_select(ranks, is_flat)).tensors
    members = [
        (flat, member)
        for flat, parts in find_members(flats, options.flat_params).items()
        for member in parts
    ]
    inner = {flat_name(member.path): (flat, member) for flat, member in members}
    tied = _tied_names(ranks, inner)
    members += [(inner[name][0], replace(inner[name][1], path=path)) for path, name in tied.items()]
    member_names = {*inner, *map(flat_name, tied)}
    rest = _select(ranks, lambda name: not is_flat(name) and name not in member_names)
    merged = assemble(rest, per_rank=options.per_rank)
    merged.problems += _wrong_pieces(ranks, flats, members)
    for flat, member in members:
        for entry in unflatten(flats[flat], [member]):
            merged.tensors[entry.name] = entry
    return merged


def _select(
    ranks: Mapping[int, RankLeaves], is_wanted: Callable[[str], bool]
) -> dict[int, RankLeaves]:
    pairs = ranks.items()
    return {r: {n: leaf for n, leaf in leaves.items() if is_wanted(n)} for r, leaves in pairs}


def _tied_names(ranks: Mapping[int, RankLeaves], inner: Collection[str]) -> dict[Path, str]:
    """Return other names of members: on every rank their bytes are those of the member's piece."""
    by_path: dict[Path, set[str]] = {}
    for leaves in ranks.values():
        pieces = {
            leaf.value.place: name
            for name, leaf in leaves.items()
            if name in inner and isinstance(leaf.value, PlainLeaf) and _elements(leaf.value)
        }
        for name, leaf in leaves.items():
            if name not in inner and isinstance(leaf.value, PlainLeaf) and _elements(leaf.value):
                by_path.setdefault(leaf.path, set()).add(pieces.get(leaf.value.place, ""))
    return {
        path: min(names) for path, names in by_path.items() if len(names) == 1 and "" not in names
    }


def _elements(leaf: PlainLeaf) -> int:
    return math.prod(leaf.tensor.shape)


def _wrong_pieces(
    ranks: Mapping[int, RankLeaves],
    flats: Mapping[str, TensorEntry],
    members: Iterable[tuple[str, Member]],
) -> Iterator[Problem]:
    """Yield the pieces of parameters whose length contradicts the flat parameter."""
    for flat, member in members:
        name = flat_name(member.path)
        for chunk in flats[flat].chunks:
            leaf = ranks.get(chunk.rank or 0, {}).get(name)
            if leaf is None or not isinstance(leaf.value, PlainLeaf):
                continue
            low, high = max(chunk.box.lo[0], member.start), min(chunk.box.hi[0], member.stop)
            actual, expected = _elements(leaf.value), max(0, high - low)
            if actual != expected:
                message = f"{name}: rank {chunk.rank} has {actual:,} elements of it, by"
                message += f" --flat-params it should have {expected:,}"
                yield Problem(message, "sharding-unknown", tensor=name)


FORMAT = Format(
    "rank-local",
    "one file per rank (torch _experimental, torch_checkpointing, verl, accelerate, FSDP)",
    Detection(
        _probe,
        files=(FileRule(r"metadata\.pkl", FileRole.METADATA),),
        other_saves=lambda source, file: other_saves(_files(source), file),
    ),
    Reading(_scan, takes_world_size=True),
    Writing(reshard=Deferred("ckptool.formats.rank_files.write:lay_out_rank_files")),
    Loading(has_rank_state=True),
)

TORCH_CHECKPOINTING_FORMAT = replace(
    FORMAT,
    name="torch-checkpointing",
    summary="torch_checkpointing's rank files",
    detection=replace(FORMAT.detection, probe=None),
    writing=Writing(
        reshard=Deferred("ckptool.formats.rank_files.write:lay_out_torch_checkpointing")
    ),
    loading=Loading(),
)

VERL_FORMAT = replace(
    FORMAT,
    name="verl",
    summary="verl's rank files of model, optimizer and extra state",
    detection=replace(FORMAT.detection, probe=None),
    writing=Writing(
        reshard=Deferred("ckptool.formats.rank_files.verl:lay_out"), families=VERL_FAMILIES
    ),
    loading=Loading(has_rank_state=True, companions_in=OF_VERL),
)
