"""From the files of local checkpoints to the tensors that all ranks hold together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptool.core.catalog import Catalog, ObjectEntry, TensorEntry, proved_equal
from ckptool.core.tp_rules import NamedRule, how_to_say, named_rule, require_matched
from ckptool.errors import Damaged, Problem, Refusal, UsageError, damaged
from ckptool.formats._assemble import assemble
from ckptool.formats._infer import with_inferred_mesh
from ckptool.formats._leaves import Assembled, Leaf, PlainLeaf, read_leaves
from ckptool.formats._megatron_args import Arguments, arguments, with_first_arguments
from ckptool.formats._megatron_local import ROOT, read_megatron
from ckptool.formats._megatron_params import Found, Held, Model, Stored, put_together
from ckptool.formats._nvrx_files import Local, files_used, other_copies, read_local
from ckptool.formats._pickle import Call
from ckptool.formats._torch_file import TorchFile
from ckptool.formats.base import ScanOptions, Source
from ckptool.formats.torch_save import unread_notes

FORMAT_NAME = "nvrx-local"
_PLAIN = "BasicTensorAwareStateDict"
_RANKS_UNKNOWN = (
    "the number of ranks is not recorded: it is that of the highest rank seen; --world-size says it"
)


def scan(source: Source, options: ScanOptions) -> Catalog:
    """The catalog of the newest iteration that is whole; Damaged where none is."""
    local = read_local(source, options.world_size)
    args = _arguments(local)
    stated = args.integer("world_size")
    if stated is not None and options.world_size not in (None, stated):
        raise UsageError(f"--world-size {options.world_size}: the files say {stated}")
    if stated is not None and stated > len(local.files):
        local = read_local(source, stated)
    kinds = {_kind(file) for file in local.files.values()}
    if len(kinds) > 1:
        raise Damaged(
            Problem(f"{source.root}: files of {' and of '.join(sorted(kinds))}", "saves-mixed")
        )
    notes = list(local.notes)
    if kinds == {ROOT}:
        if options.tp_rules:
            raise UsageError("--tp-rule: these files say themselves how their ranks fit together")
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
    if isinstance(why, Refusal):
        return why
    code = why.code if isinstance(why, Problem) else "ranks-unplaced"
    return Problem(f"{why}; {how_to_say(name)}", code, tensor=name)


def _kind(file: TorchFile) -> str:
    name = file.inert.name.rpartition(".")[2] if isinstance(file.inert, Call) else "something else"
    if name not in (ROOT, _PLAIN):
        raise Damaged(
            Problem(f"{file.what}: holds {name}, no tensor-aware state dict", "file-unrecognised")
        )
    return name


def _arguments(local: Local) -> Arguments:
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
        found.conflicts[name] = f"{name}: nothing says how the ranks' plain tensors fit together"
    for name in plain_names & found.conflicts.keys():
        if isinstance(found.conflicts[name], Refusal):
            continue
        found.conflicts[name] = Problem(found.conflicts[name], "ranks-unplaced", tensor=name)
    found.tensors = placed | found.tensors
    found.conflicts |= conflicts
    return found


def _same_everywhere(entry: TensorEntry) -> bool:
    """Whether checksums prove that all ranks hold the same bytes."""
    return all(proved_equal(chunk.at, copy.at) for chunk in entry.chunks for copy in chunk.copies)


def _is_plain(leaf: Leaf) -> bool:
    return isinstance(leaf.value, PlainLeaf)


def _placed(
    ranks: Mapping[int, Mapping[str, Leaf]], rules: tuple[NamedRule, ...]
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors for which there is a rule, put together by it."""
    model = Model(Arguments({}), (max(ranks) + 1, 1, 1), rules)
    found: Found = {}
    paths = {}
    for rank, leaves in ranks.items():
        for name, leaf in leaves.items():
            if _is_plain(leaf) and named_rule(rules, name):
                tensor = leaf.value.tensor
                held = Held(name, (rank, 0, 0), rank, tensor.shape, tensor.dtype)
                stored = Stored(tensor.shape, tensor.dtype, leaf.value.place)
                found.setdefault((name,), []).append((held, [stored]))
                paths[name] = leaf.path
    whole = put_together(model.fit_of, found)
    return {n: replace(e, path=paths[n]) for n, e in whole.tensors.items()}, whole.conflicts
