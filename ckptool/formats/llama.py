"""Meta's Llama folders: ``consolidated.NN.pth``, one a model-parallel rank, and ``params.json``.

How a tensor is cut follows from the layer that Meta's code makes it with (fairscale's
``ColumnParallelLinear`` and ``RowParallelLinear``); the files do not say it. Token embeddings
are cut along their width in Llama 1 and 2 (``ParallelEmbedding``) and by rows of the vocabulary in
Llama 3 (``VocabParallelEmbedding``): the width of a part tells. Where there are more ranks than
key-value heads, several ranks hold the same one. Written: the same cuts, for a mesh of one dim.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.layout import FileLayout, Layout
from ckptool.core.mesh import Shard
from ckptool.core.tp_rules import NamedRule, named_rule, require_matched
from ckptool.errors import CannotDo, Damaged, Problem, Refusal
from ckptool.formats._assemble import assemble
from ckptool.formats._companions import companions
from ckptool.formats._frameworks import read_json_object
from ckptool.formats._leaves import Leaf, PlainLeaf, RankLeaves, read_leaves
from ckptool.formats._llama_rules import Cut, Sizes, cut_of, is_embedding, sizes_of
from ckptool.formats._outgoing import companion_files, plain_objects
from ckptool.formats._pickle_write import ShardRef
from ckptool.formats._rank_write import placed_of
from ckptool.formats._tensor_parallel import Local, Locals, joined, tp_mesh
from ckptool.formats._torch_file import read_torch_file
from ckptool.formats._torch_write import torch_archive
from ckptool.formats.base import (
    Format,
    Request,
    ScanOptions,
    Source,
    expect_archives,
    first_missing,
    require_rank,
)
from ckptool.formats.torch_save import unread_notes

_FILE = re.compile(r"consolidated\.([0-9]{2,9})\.pth")
_PARAMS = "params.json"


def _files(source: Source) -> dict[int, str]:
    """The model-parallel ranks' files by rank."""
    matches = filter(None, map(_FILE.fullmatch, source.files))
    return {int(match[1]): match.string for match in matches}


def _probe(source: Source) -> bool:
    return bool(_files(source)) and (_PARAMS in source.files or len(_files(source)) > 1)


def _scan(source: Source, options: ScanOptions) -> Catalog:
    files = _files(source)
    world = max(files) + 1
    require_rank(world, files[max(files)])
    missing = first_missing(files, world)
    if missing:
        message = f"{source.root}: consolidated.{missing[0]:02d}.pth is missing"
        message += f" (model-parallel ranks {missing} of {world})"
        raise Damaged(Problem(message, "rank-missing"))
    expect_archives(source, (files[rank] for rank in sorted(files)))
    ranks = {rank: _leaves(source, files[rank]) for rank in sorted(files)}
    sizes = sizes_of(read_json_object(source, _PARAMS))
    merger = _Merger(ranks, sizes, options.tp_rules)
    cut, conflicts = merger.cut_tensors()
    left = {r: _without(leaves, {*cut, *conflicts}) for r, leaves in ranks.items()}
    found = assemble(left, per_rank=options.per_rank)
    options.report([*merger.problems, *found.problems], subject=source.root)
    tensors = found.tensors | cut
    order = {name: at for at, name in enumerate(ranks[0])}
    return Catalog(
        "llama",
        dict(sorted(tensors.items(), key=lambda pair: order.get(pair[0], len(order)))),
        found.objects,
        {file: source.files[file] for _, file in sorted(files.items())},
        world_size=world,
        mesh=tp_mesh(world) if world > 1 else None,
        mesh_source="declared" if world > 1 else None,
        info=_info(sizes, world),
        notes=(*found.notes, *unread_notes(found.objects)),
        conflicts=found.conflicts | conflicts,
        companions=companions(source),
    )


def _info(sizes: Sizes, world: int) -> dict[str, str]:
    info = {"writer": "Meta llama (by its file names)", "parallelism": f"TP {world}"}
    return info | ({"arguments": sizes.arguments} if sizes.arguments else {})


def _leaves(source: Source, file: str) -> dict[str, Leaf]:
    return read_leaves(read_torch_file(source, file), source, refuse=True)


def _without(leaves: RankLeaves, names: set[str]) -> RankLeaves:
    return {name: leaf for name, leaf in leaves.items() if name not in names}


class _Merger:
    """Joins the parts of tensors that model parallelism cuts, by name and ``params.json``.

    A rule that was given decides before a name does.
    """

    def __init__(
        self, ranks: Mapping[int, RankLeaves], sizes: Sizes, rules: Sequence[NamedRule]
    ) -> None:
        self.problems: list[Problem] = []
        self._ranks = ranks
        self._rules = rules
        norm = ranks[0].get("norm.weight")
        length = norm.value.tensor.shape if norm and isinstance(norm.value, PlainLeaf) else ()
        known = sizes.width or (length[0] if length else None)
        self._sizes = replace(sizes, width=known)

    def cut_tensors(self) -> tuple[dict[str, TensorEntry], dict[str, str]]:
        """The tensors that are cut, and why those are not known of which no rule is known."""
        cut: dict[str, TensorEntry] = {}
        unknown: dict[str, str] = {}
        names = {
            name: None
            for leaves in self._ranks.values()
            for name, leaf in leaves.items()
            if isinstance(leaf.value, PlainLeaf)
        }
        require_matched(self._rules, list(names))
        for leaves in self._ranks.values():
            for name, leaf in leaves.items():
                if isinstance(leaf.value, Refusal):
                    names.pop(name, None)
        for name in names if len(self._ranks) > 1 else ():
            held = {rank: leaves[name] for rank, leaves in self._ranks.items() if name in leaves}
            try:
                entry = self._cut(name, held)
            except CannotDo as error:
                unknown[name] = error.message.recoded("sharding-unknown")
            except Damaged as error:
                self.problems += error.problems
            else:
                if entry is not None:
                    cut[name] = entry
        return cut, unknown

    def _cut(self, name: str, held: Mapping[int, Leaf]) -> TensorEntry | None:
        """The joined tensor; None where each rank has the whole of it."""
        parts = _locals(name, held)
        world, path = len(self._ranks), next(iter(held.values())).path
        rule = named_rule(self._rules, name)
        if rule is not None:
            cut = Cut(rule.dim, rule.blocks)
        else:
            cut = cut_of(name, next(iter(parts.values())).shape, self._sizes, world)
        if cut.dim is None:
            return None
        return joined(
            name, path, parts, cut.dim, world=world, holders=cut.holders, blocks=cut.blocks
        )


def _locals(name: str, held: Mapping[int, Leaf]) -> Locals:
    found = {}
    for rank, leaf in held.items():
        if not isinstance(leaf.value, PlainLeaf):
            message = f"{name}: a tensor on some ranks, none on rank {rank}"
            raise Damaged(Problem(message, "rank-missing", tensor=name))
        tensor = leaf.value.tensor
        found[rank] = Local(tensor.dtype, tensor.shape, leaf.value.place)
    return found


def lay_out(catalog: Catalog, request: Request) -> Layout:
    """One file a rank of a mesh of one dim. Raises CannotDo where Meta's code could not load it."""
    placed = placed_of(request)
    if len(placed.mesh.shape) != 1:
        raise CannotDo("Meta's llama files have one model-parallel dim", hint="such as --mesh 8")
    objects, notes = plain_objects(catalog)
    shards = {name: placed.shards(entry) for name, entry in catalog.tensors.items()}
    for entry in catalog.tensors.values():
        _require_cut(entry, placed.placements[entry.name][0], placed.mesh.size)
    files = companion_files(catalog)
    for rank in range(placed.mesh.size):
        state: dict[str, Any] = {entry.name: entry.value for entry in objects}
        for name, entry in catalog.tensors.items():
            state[name] = ShardRef(entry, shards[name][rank])
        stem = f"consolidated.{rank:02d}"
        files.append(FileLayout(f"{stem}.pth", tuple(torch_archive(state, root=stem)), rank))
    if _PARAMS not in catalog.companions:
        notes.append(f"no {_PARAMS} is written, which Meta's code reads the model's sizes from")
    return Layout(tuple(files), folder=True, notes=tuple(notes))


def _require_cut(entry: TensorEntry, placement: object, ranks: int) -> None:
    """CannotDo where a tensor is not cut as Meta's code cuts it, into equal parts."""
    dim = placement.dim if isinstance(placement, Shard) else None
    if ranks == 1:
        return
    cut = Cut(dim) if is_embedding(entry.name) else cut_of(entry.name, entry.shape, Sizes(), ranks)
    wanted = cut.dim
    if len(cut.blocks) > 1:
        raise CannotDo(f"{entry.name}: several tensors in one, which ckptool does not cut")
    if dim != wanted:
        shown = "whole on every rank" if wanted is None else f"cut along dim {wanted}"
        raise CannotDo(f"{entry.name}: {placement}; Meta's code has it {shown}")
    if dim is not None and entry.shape[dim] % ranks:
        raise CannotDo(
            f"{entry.name}: {entry.shape[dim]:,} of dim {dim} are no {ranks} equal parts, as Meta's"
            " code wants them"
        )


FORMAT = Format(
    "llama",
    "Meta llama: consolidated.NN.pth and params.json",
    _probe,
    _scan,
    takes_tp_rules=True,
)
