"""Read nvidia-resiliency-ext's local checkpoints: choose files, and merge all ranks' content.

``<rank>/iter_<iteration>_<owner>_local.pt``, written as ``_local.dirty.pt`` and then renamed. With
replication a rank's folder also has files of other owners. An iteration is complete if every owner
has a file somewhere (nvidia-resiliency-ext 0.2 to 0.7, ``LocalCheckpointManager``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct
from msgspec.structs import replace

from ckptool.core.catalog import Catalog, ObjectEntry, TensorEntry
from ckptool.core.chunks import proved_equal
from ckptool.core.sharding.tensor_parallel import GivenRules, given_rules, suggest_rule
from ckptool.core.views import whole_tensor
from ckptool.errors import CkptoolError, Damaged, Problem, Refusal, UsageError, damaged
from ckptool.formats.base import ScanOptions
from ckptool.formats.megatron import LOCAL_FILE
from ckptool.formats.megatron.local import ROOT, read_megatron, read_state_fields
from ckptool.formats.megatron.model import Arguments, keep_first_arguments, read_arguments
from ckptool.formats.megatron.tensor_parallel import (
    Fragments,
    LocalParameter,
    ParameterRules,
    merge_fragments,
)
from ckptool.serialization.archive.read import TorchFile, read_torch_file
from ckptool.serialization.pickle.records import Call
from ckptool.serialization.source import Source, find_missing_ranks, require_rank
from ckptool.serialization.state_dict.assemble import assemble
from ckptool.serialization.state_dict.leaves import Assembled, Leaf, PlainLeaf, read_leaves

FORMAT_NAME = "nvrx-local"
_PLAIN = "BasicTensorAwareStateDict"
_RANKS_UNKNOWN = (
    "the number of ranks is not recorded: using the highest rank found; --world-size N sets it"
)


def scan(source: Source, options: ScanOptions) -> Catalog:
    """Return the catalog of the newest complete iteration; Damaged if there is none."""
    local = read_local(source, options.world_size)
    args = _read_arguments(local)
    world_size = args.integer("world_size")
    if world_size is not None and options.world_size not in (None, world_size):
        raise UsageError(f"--world-size {options.world_size}: the files say {world_size}")
    if world_size is not None and world_size > len(local.files):
        local = read_local(source, world_size)
    kinds = {_require_kind(file) for file in local.files.values()}
    if len(kinds) > 1:
        raise Damaged(f"{source.root}: files of {' and of '.join(sorted(kinds))}", "saves-mixed")
    notes = list(local.notes)
    if kinds == {ROOT}:
        if options.tp_rules:
            raise UsageError("--tp-rule: these files record how their ranks' shards merge")
        assembled, reason = read_megatron(source, local.files, args.degree("EP") > 1)
        if reason:
            notes.append(f"the optimizer's state is kept by bucket: {reason}")
    else:
        assembled = _read_plain(source, local.files, options)
        if options.world_size is None:
            notes.append(_RANKS_UNKNOWN)
    if assembled.problems:
        raise damaged(assembled.problems, subject=source.root)
    used = [file.what for file in local.files.values()]
    info = {"writer": "nvidia-resiliency-ext LocalCheckpointManager"}
    iteration = ObjectEntry("iteration", ("iteration",), local.iteration)
    assembled.objects = {"iteration": iteration} | assembled.objects
    assembled.notes[:0] = notes
    assembled.conflicts = {n: _add_hint(why, n) for n, why in assembled.conflicts.items()}
    catalog = assembled.catalog(
        FORMAT_NAME,
        source,
        used,
        world_size=len(local.files),
        info=info | (args.info() if args.values else {}),
        copies=frozenset(_find_other_copies(source.files, used)),
    )
    return options.with_placements(keep_first_arguments(catalog))


def _add_hint(why: str, name: str) -> str:
    if isinstance(why, Refusal) or suggest_rule(name) in why:
        return why
    code = why.code if isinstance(why, Problem) else "sharding-unrecorded"
    return Problem(f"{why}; {suggest_rule(name)}", code, tensor=name)


def _require_kind(file: TorchFile) -> str:
    name = file.inert.name.rpartition(".")[2] if isinstance(file.inert, Call) else "something else"
    if name not in (ROOT, _PLAIN):
        raise Damaged(
            f"{file.what}: holds {name}, not a tensor-aware state dict", "file-type-mismatch"
        )
    return name


def _read_arguments(local: LocalIteration) -> Arguments:
    """Return Megatron's arguments, if the files contain its state."""
    common = read_state_fields(next(iter(local.files.values()))).get("common")
    return read_arguments(common.get("args") if isinstance(common, dict) else None)


def _read_plain(source: Source, files: Mapping[int, TorchFile], options: ScanOptions) -> Assembled:
    """Merge plain state dicts: rules place tensors, all else must be equal on all ranks."""
    ranks: dict[int, dict[str, Leaf]] = {}
    for rank, file in files.items():
        state = file.narrowed(read_state_fields(file).get("state_dict"))
        ranks[rank] = read_leaves(state, source)
    plain = [n for leaves in ranks.values() for n, leaf in leaves.items() if _is_plain(leaf)]
    user_rules = given_rules(options.tp_rules, {*plain})
    tensors, conflicts = _merge_by_rules(ranks, user_rules)
    rest = {
        rank: {name: leaf for name, leaf in leaves.items() if not _is_ruled(name, leaf, user_rules)}
        for rank, leaves in ranks.items()
    }
    assembled = assemble(rest, per_rank=options.per_rank)
    for name in sorted(assembled.tensors.keys() & set(plain)):
        if not _is_same_everywhere(assembled.tensors[name]):
            del assembled.tensors[name]
            message = f"{name}: the files do not record how to merge the ranks' plain tensors"
            assembled.conflicts[name] = message
    for name in assembled.conflicts.keys() & set(plain):
        why = assembled.conflicts[name]
        if not isinstance(why, Refusal):
            assembled.conflicts[name] = Problem(why, "sharding-unrecorded", tensor=name)
    assembled.tensors = tensors | assembled.tensors
    assembled.conflicts |= conflicts
    return assembled


def _is_plain(leaf: Leaf) -> bool:
    return isinstance(leaf.value, PlainLeaf)


def _is_ruled(name: str, leaf: Leaf, user_rules: GivenRules) -> bool:
    return _is_plain(leaf) and user_rules(name) is not None


def _is_same_everywhere(entry: TensorEntry) -> bool:
    """Return whether checksums prove that all ranks have the same bytes."""
    return all(proved_equal(chunk.at, copy.at) for chunk in entry.chunks for copy in chunk.copies)


def _merge_by_rules(
    ranks: Mapping[int, Mapping[str, Leaf]], user_rules: GivenRules
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the tensors with a rule, merged by it, and conflicts."""
    rules = ParameterRules(Arguments({}), (max(ranks) + 1, 1, 1), user_rules)
    fragments: Fragments = {}
    paths = {}
    for rank, leaves in ranks.items():
        for name, leaf in leaves.items():
            if _is_ruled(name, leaf, user_rules):
                dtype, shape, place = leaf.value.dtype, leaf.value.shape, leaf.value.place
                parameter = LocalParameter(name, (rank, 0, 0), shape, dtype)
                shard = whole_tensor(name, leaf.path, dtype, shape, place, rank)
                fragments.setdefault((name,), []).append((parameter, shard))
                paths[name] = leaf.path
    tensors, conflicts = merge_fragments(rules.fit, fragments)
    return {n: replace(entry, path=paths[n]) for n, entry in tensors.items()}, conflicts


class LocalIteration(Struct, frozen=True):
    """The files of one iteration, one per owner, and notes on them for the user."""

    iteration: int
    files: dict[int, TorchFile]
    notes: tuple[str, ...]


class _Copy(Struct, frozen=True):
    """A file: in a rank's ``folder``, of the state of its ``owner``; ``dirty`` while written."""

    name: str
    folder: int
    iteration: int
    owner: int
    dirty: bool


def read_local(source: Source, world_size: int | None = None) -> LocalIteration:
    """Return the files of the newest complete iteration.

    ``world_size`` is the number of owners; if unknown, it is taken from the highest rank seen.
    Raises Damaged if no iteration is complete, with what each of them lacks.
    """
    copies = [copy for name in source.files if (copy := _parse_name(name))]
    for copy in copies:
        require_rank(max(copy.folder, copy.owner), copy.name)
    highest = max(max(copy.folder, copy.owner) for copy in copies) + 1
    expected = world_size or highest
    failed: list[str] = []
    for iteration in sorted({copy.iteration for copy in copies}, reverse=True):
        iteration_copies = [copy for copy in copies if copy.iteration == iteration]
        files, notes = _open_copies(source, iteration_copies)
        missing = find_missing_ranks(files, expected)
        strays = [owner for owner in files if owner >= expected]
        if not missing and not strays:
            skipped = (f"{lack}; reading iteration {iteration:,}" for lack in failed)
            return LocalIteration(iteration, files, (*skipped, *notes))
        if strays:
            failed.append(f"iteration {iteration:,} has a file of rank {max(strays)}")
        else:
            failed.append(_describe_missing(iteration, missing, iteration_copies, notes))
    lacks = "\n".join(f"  - {lack}" for lack in failed)
    raise Damaged(
        f"{source.root}: no iteration is complete:\n{lacks}",
        "rank-missing",
        hint="copy the folders of all ranks, which are on the machines that wrote them, into one",
    )


def _parse_name(name: str) -> _Copy | None:
    match = LOCAL_FILE.fullmatch(name)
    if match is None:
        return None
    return _Copy(name, int(match[1]), int(match[2]), int(match[3]), match[4] is not None)


def _open_copies(source: Source, copies: list[_Copy]) -> tuple[dict[int, TorchFile], list[str]]:
    """Open for each owner the first readable copy, its own before replicas."""
    files: dict[int, TorchFile] = {}
    notes: list[str] = []
    for copy in sorted(copies, key=lambda c: (c.owner, c.folder != c.owner, c.folder)):
        if copy.dirty or copy.owner in files:
            continue
        try:
            files[copy.owner] = read_torch_file(source, copy.name)
        except CkptoolError as error:
            message = f"not used: {error.message}"
            notes.append(Problem(message, "copy-damaged", file=copy.name))
            continue
        if copy.folder != copy.owner:
            notes.append(f"rank {copy.owner} is read from its replica {copy.name}")
    return files, notes


def _describe_missing(
    iteration: int, missing: list[int], copies: list[_Copy], notes: list[str]
) -> str:
    dirty = {copy.owner for copy in copies if copy.dirty}
    what = ", ".join(f"{rank} (unfinished)" if rank in dirty else str(rank) for rank in missing)
    return ". ".join([f"iteration {iteration:,} lacks the file of rank {what}", *notes])


def _find_other_copies(files: Collection[str], used: Collection[str]) -> set[str]:
    """Return the finished copies of files that are used, in other ranks' folders."""
    keys = {(copy.iteration, copy.owner) for name in used if (copy := _parse_name(name))}
    copies = [copy for name in set(files).difference(used) if (copy := _parse_name(name))]
    return {c.name for c in copies if (c.iteration, c.owner) in keys and not c.dirty}
