"""From the files of local checkpoints to the tensors that all ranks hold together.

Which files of nvidia-resiliency-ext's local checkpoints to read.

``<rank>/iter_<iteration>_<owner>_local.pt``, written as ``_local.dirty.pt`` and then renamed. With
replication a rank's folder also holds files of other owners. An iteration is whole where every
owner has a file somewhere (nvidia-resiliency-ext 0.2 to 0.7, ``LocalCheckpointManager``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from ckptool.core.catalog import Catalog, ObjectEntry, TensorEntry, proved_equal
from ckptool.core.sharding.infer import with_inferred_mesh
from ckptool.core.sharding.tensor_parallel import NamedRule, how_to_say, named_rule, require_matched
from ckptool.errors import CkptoolError, Damaged, Problem, Refusal, UsageError, damaged
from ckptool.formats.base import ScanOptions
from ckptool.formats.megatron.arguments import Arguments, arguments, with_first_arguments
from ckptool.formats.megatron.local import ROOT, read_megatron
from ckptool.formats.megatron.parameters import (
    Fragments,
    LocalParameter,
    Model,
    StorageRun,
    merge_fragments,
)
from ckptool.serialization.archive.read import TorchFile, read_torch_file
from ckptool.serialization.pickle.records import Call
from ckptool.serialization.source import Source, first_missing, require_rank
from ckptool.serialization.state_dict.assemble import assemble
from ckptool.serialization.state_dict.leaves import Assembled, Leaf, PlainLeaf, read_leaves
from ckptool.serialization.state_dict.values import unread_notes

FORMAT_NAME = "nvrx-local"
_PLAIN = "BasicTensorAwareStateDict"
_RANKS_UNKNOWN = (
    "the number of ranks is not recorded: the highest rank seen gives it; --world-size N sets it"
)


def scan(source: Source, options: ScanOptions) -> Catalog:
    """Return the catalog of the newest iteration that is whole; Damaged where none is."""
    local = read_local(source, options.world_size)
    args = _arguments(local)
    stated = args.integer("world_size")
    if stated is not None and options.world_size not in (None, stated):
        raise UsageError(f"--world-size {options.world_size}: the files say {stated}")
    if stated is not None and stated > len(local.files):
        local = read_local(source, stated)
    kinds = {_kind(file) for file in local.files.values()}
    if len(kinds) > 1:
        raise Damaged(f"{source.root}: files of {' and of '.join(sorted(kinds))}", "saves-mixed")
    notes = list(local.notes)
    if kinds == {ROOT}:
        if options.tp_rules:
            raise UsageError("--tp-rule: these files record how their ranks' shards merge")
        found, reason = read_megatron(source, local.files, args.degree("EP") > 1)
        if reason:
            notes.append(f"the optimizer's state is kept by bucket: {reason}")
    else:
        found = _read_plain(source, local.files, options)
        if options.world_size is None:
            notes.append(_RANKS_UNKNOWN)
    if found.problems:
        raise damaged(found.problems, subject=source.root)
    used = dict(files_used(source, local))
    objects = {"iteration": ObjectEntry("iteration", ("iteration",), local.iteration)}
    return with_inferred_mesh(
        with_first_arguments(
            Catalog(
                FORMAT_NAME,
                found.tensors,
                objects | found.objects,
                used,
                world_size=len(local.files),
                info={"writer": "nvidia-resiliency-ext LocalCheckpointManager"} | _info(args),
                notes=(*notes, *found.notes, *unread_notes(found.objects)),
                conflicts={n: _hinted(why, n) for n, why in found.conflicts.items()},
                copies=frozenset(other_copies(source.files, used)),
            )
        )
    )


def _info(args: Arguments) -> dict[str, str]:
    return args.info() if args.values else {}


def _hinted(why: str, name: str) -> str:
    if isinstance(why, Refusal) or how_to_say(name) in why:
        return why
    code = why.code if isinstance(why, Problem) else "sharding-unrecorded"
    return Problem(f"{why}; {how_to_say(name)}", code, tensor=name)


def _kind(file: TorchFile) -> str:
    name = file.inert.name.rpartition(".")[2] if isinstance(file.inert, Call) else "something else"
    if name not in (ROOT, _PLAIN):
        raise Damaged(
            f"{file.what}: holds {name}, not a tensor-aware state dict", "file-type-mismatch"
        )
    return name


def _arguments(local: LocalIteration) -> Arguments:
    """Megatron's arguments, where the files hold its state."""
    first = next(iter(local.files.values())).inert
    common = first.fields.get("common") if isinstance(first, Call) else None
    return arguments(common.get("args") if isinstance(common, dict) else None)


def _read_plain(source: Source, files: Mapping[int, TorchFile], options: ScanOptions) -> Assembled:
    """Plain state dicts: the user's rules place tensors, all else must be the same everywhere."""
    ranks: dict[int, dict[str, Leaf]] = {}
    for rank, file in files.items():
        fields = file.inert.fields if isinstance(file.inert, Call) else {}
        state = file.narrowed(fields.get("state_dict"))
        ranks[rank] = read_leaves(state, source, refuse=True)
    names = [n for leaves in ranks.values() for n, x in leaves.items() if _is_plain(x)]
    plain_names = set(names)
    require_matched(options.tp_rules, names)
    placed, conflicts = _placed(ranks, options.tp_rules)
    rest = {
        rank: {
            name: leaf
            for name, leaf in leaves.items()
            if not (_is_plain(leaf) and named_rule(options.tp_rules, name))
        }
        for rank, leaves in ranks.items()
    }
    found = assemble(rest, per_rank=options.per_rank)
    plain = plain_names & found.tensors.keys()
    for name in [n for n in sorted(plain) if not _same_everywhere(found.tensors[n])]:
        del found.tensors[name]
        found.conflicts[name] = f"{name}: nothing says how to merge the ranks' plain tensors"
    for name in plain_names & found.conflicts.keys():
        if isinstance(found.conflicts[name], Refusal):
            continue
        found.conflicts[name] = Problem(found.conflicts[name], "sharding-unrecorded", tensor=name)
    found.tensors = placed | found.tensors
    found.conflicts |= conflicts
    return found


def _same_everywhere(entry: TensorEntry) -> bool:
    """Return whether checksums prove that all ranks hold the same bytes."""
    return all(proved_equal(chunk.at, copy.at) for chunk in entry.chunks for copy in chunk.copies)


def _is_plain(leaf: Leaf) -> bool:
    return isinstance(leaf.value, PlainLeaf)


def _placed(
    ranks: Mapping[int, Mapping[str, Leaf]], rules: tuple[NamedRule, ...]
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the tensors for which there is a rule, put together by it."""
    model = Model(Arguments({}), (max(ranks) + 1, 1, 1), rules)
    found: Fragments = {}
    paths = {}
    for rank, leaves in ranks.items():
        for name, leaf in leaves.items():
            if _is_plain(leaf) and named_rule(rules, name):
                tensor = leaf.value.tensor
                held = LocalParameter(name, (rank, 0, 0), rank, tensor.shape, tensor.dtype)
                stored = StorageRun(tensor.shape, tensor.dtype, leaf.value.place)
                found.setdefault((name,), []).append((held, [stored]))
                paths[name] = leaf.path
    whole = merge_fragments(model.fit, found)
    return {n: replace(e, path=paths[n]) for n, e in whole.tensors.items()}, whole.conflicts


_LOCAL_FILE = re.compile(r"([0-9]{1,9})/iter_([0-9]{7,18})_([0-9]{1,9})_local(\.dirty)?\.pt")


@dataclass(frozen=True, slots=True)
class LocalIteration:
    """The files of one iteration, one for each owner, and what a person should know of them."""

    iteration: int
    files: dict[int, TorchFile]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Copy:
    name: str
    folder: int
    iteration: int
    owner: int
    dirty: bool


def read_local(source: Source, world_size: int | None = None) -> LocalIteration:
    """Return the files of the newest iteration that is whole.

    ``world_size`` is the number of owners; where it is not known, that of the highest rank seen.
    Raises Damaged where no iteration is whole, with what each of them lacks.
    """
    copies = [copy for name in source.files if (copy := _parsed(name))]
    for copy in copies:
        require_rank(max(copy.folder, copy.owner), copy.name)
    highest = max(max(copy.folder, copy.owner) for copy in copies) + 1
    expected = world_size or highest
    failed: list[str] = []
    for iteration in sorted({copy.iteration for copy in copies}, reverse=True):
        mine = [copy for copy in copies if copy.iteration == iteration]
        files, notes = _opened(source, mine)
        missing = first_missing(files, expected)
        others = [owner for owner in files if owner >= expected]
        if not missing and not others:
            skipped = (f"{lack}; iteration {iteration:,} is read" for lack in failed)
            return LocalIteration(iteration, files, (*skipped, *notes))
        if others:
            failed.append(f"iteration {iteration:,} has a file of rank {max(others)}")
        else:
            failed.append(_lacks(iteration, missing, mine, notes))
    lacks = "\n".join(f"  - {lack}" for lack in failed)
    raise Damaged(
        f"{source.root}: no iteration is complete:\n{lacks}",
        "rank-missing",
        hint="copy the folders of all ranks, which are on the machines that wrote them, into one",
    )


def _parsed(name: str) -> _Copy | None:
    match = _LOCAL_FILE.fullmatch(name)
    if match is None:
        return None
    return _Copy(name, int(match[1]), int(match[2]), int(match[3]), match[4] is not None)


def _opened(source: Source, copies: list[_Copy]) -> tuple[dict[int, TorchFile], list[str]]:
    """For each owner the first copy that can be opened, its own before replicas."""
    files: dict[int, TorchFile] = {}
    notes: list[str] = []
    for copy in sorted(copies, key=lambda one: (one.owner, one.folder != one.owner, one.folder)):
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


def _lacks(iteration: int, missing: list[int], copies: list[_Copy], notes: list[str]) -> str:
    dirty = {copy.owner for copy in copies if copy.dirty}
    what = ", ".join(f"{rank} (unfinished)" if rank in dirty else str(rank) for rank in missing)
    return ". ".join([f"iteration {iteration:,} lacks the file of rank {what}", *notes])


def other_copies(files: Collection[str], used: Collection[str]) -> set[str]:
    """The finished copies of files that are used, in other ranks' folders, of one iteration."""
    mine = {(copy.iteration, copy.owner) for name in used if (copy := _parsed(name))}
    others = {name: copy for name in set(files).difference(used) if (copy := _parsed(name))}
    return {
        name
        for name, copy in others.items()
        if (copy.iteration, copy.owner) in mine and not copy.dirty
    }


def files_used(source: Source, local: LocalIteration) -> Mapping[str, int]:
    """Return the files that are read, with their sizes."""
    return {file.what: source.files[file.what] for file in local.files.values()}
