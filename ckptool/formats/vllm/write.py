"""Lay out vLLM's sharded state: what each tensor-parallel rank's loader expects to find.

Where a layer's query, key and value projections are all there and cut by rows, each rank's parts
of them are joined to ``qkv_proj``, and so are gate and up projection; embeddings are padded with
zero rows. Everything else is written as it is placed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, TensorEntry, tied
from ckptool.core.dtype import DType
from ckptool.core.layout import Data, FileLayout, Layout, Literal, Part, Scattered
from ckptool.core.mesh import Placement, Shard
from ckptool.core.sharding.placement import Placed, PlacementRule
from ckptool.errors import Unsupported
from ckptool.formats.base import Request
from ckptool.formats.safetensors import extras, split_by_support
from ckptool.formats.vllm.merge import PADDING, VOCABULARY, sizes_of
from ckptool.formats.writing import by_size, companion_files, extra_file, placed_of
from ckptool.serialization.pickle.write import ShardRef
from ckptool.serialization.safetensors import OutgoingSlice, lay_out_safetensors

EXTRA = "model.extra.pt"
_PART = re.compile(
    r"(?P<head>(.*\.)?)(?P<member>[qkv]_proj|gate_proj|up_proj)\.(?P<leaf>weight|bias)"
)
_KEYS_AND_VALUES = re.compile(r"(.*\.)?[kv]_proj\.(weight|bias)")
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

RULES = tuple(
    PlacementRule(f"*{name}", style=style, required=False)
    for style, names in {
        "colwise": ("[qkv]_proj.*", "gate_proj.*", "up_proj.*", "embed_tokens.*", "lm_head.*"),
        "rowwise": ("o_proj.*", "down_proj.*"),
        "replicate": ("norm*.weight", "norm*.bias"),
    }.items()
    for name in names
)
"""How vLLM cuts the tensors of Llama-like models, for the placement of what is written so."""


@dataclass(frozen=True, slots=True)
class _OutgoingShard:
    """A tensor of one rank: contents one after the other, which C order makes rows of it."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    contents: tuple[Data | Scattered | Literal, ...]

    @property
    def nbytes(self) -> int:
        return sum(content.nbytes for content in self.contents)


def lay_out(catalog: Catalog, request: Request) -> Layout:
    """The files of every rank of a mesh of one dim, and one for what safetensors cannot hold.

    Raises Unsupported where the request has no mesh, or one of several dims.
    """
    placed = placed_of(request)
    mesh = placed.mesh
    if len(mesh.shape) != 1:
        raise Unsupported(
            f"sharded state has one file set per tensor-parallel rank; the mesh"
            f" {'x'.join(map(str, mesh.shape))} has {len(mesh.shape)} dims",
            hint=f"--mesh {mesh.size}",
        )
    fitting, others = split_by_support(catalog)
    objects, notes = extras(catalog, others, EXTRA)
    named = _without_aliases(fitting)
    joiner = _Joiner(named, placed, sizes_of(request.config).key_value_heads)
    files = companion_files(catalog)
    if others or objects:
        files.append(extra_file(EXTRA, others, objects))
    empty: dict[str, None] = {}
    for position, rank in enumerate(mesh.ranks):
        held = list(joiner.locals(position))
        files += _rank_files(rank, held, request.max_shard_size)
        empty |= dict.fromkeys(local.name for local in held if not local.nbytes)
    notes += [f"without elements on some ranks, so not in their files: {name}" for name in empty]
    notes += [
        f"tied to another tensor, so not written: {entry.name}"
        for entry in fitting
        if entry not in named
    ]
    return Layout(tuple(files), folder=True, notes=(*notes, *joiner.notes))


def _without_aliases(entries: list[TensorEntry]) -> list[TensorEntry]:
    """Of tied tensors only the one with the first name, which the loader expects alone."""
    catalog = Catalog("", {entry.name: entry for entry in entries}, {}, {})
    dropped = {name for names in tied(catalog) for name in names if name != min(names)}
    return [entry for entry in entries if entry.name not in dropped]


class _Joiner:
    """What each rank holds, fused and padded as vLLM has it."""

    def __init__(
        self, entries: Sequence[TensorEntry], placed: Placed, key_value_heads: int | None
    ) -> None:
        self._ranks = placed.mesh.size
        self._heads = key_value_heads
        self._placements = placed.placements
        self._shards = {entry.name: placed.shards(entry) for entry in entries}
        self._groups = self._grouped({entry.name: entry for entry in entries})

    def _grouped(self, entries: dict[str, TensorEntry]) -> dict[str, tuple[TensorEntry, ...]]:
        """Return the name of each tensor that is written, and what it is joined from."""
        groups: dict[str, tuple[TensorEntry, ...]] = {}
        for name, entry in entries.items():
            found = _PART.fullmatch(name)
            fused = next(
                (f for f, parts in _FUSED.items() if found and found["member"] in parts), ""
            )
            if found is None or not fused:
                groups[name] = (entry,)
                continue
            names = [f"{found['head']}{part}.{found['leaf']}" for part in _FUSED[fused]]
            members = tuple(entries[n] for n in names if n in entries)
            whole = len(members) == len(names) and self._is_joinable(members)
            target = f"{found['head']}{fused}.{found['leaf']}" if whole else name
            groups[target] = members if whole else (entry,)
        return groups

    def _is_joinable(self, members: Sequence[TensorEntry]) -> bool:
        """Return whether all are cut by rows into equal parts, and alike in everything else."""
        kinds = {(entry.dtype, entry.shape[1:]) for entry in members}
        return len(kinds) == 1 and all(
            entry.shape and self._by_rows(entry) and entry.shape[0] % self._parts(entry) == 0
            for entry in members
        )

    def _parts(self, entry: TensorEntry) -> int:
        """Into how many parts ranks cut a tensor's rows: no key-value head is cut."""
        heads = self._heads
        if not heads or not _KEYS_AND_VALUES.fullmatch(entry.name):
            return self._ranks
        if max(heads, self._ranks) % min(heads, self._ranks):
            raise Unsupported(
                f"{entry.name}: {self._ranks} ranks cannot share {heads} key-value heads evenly, as"
                " vLLM wants them",
                hint=f"--mesh {heads}",
            )
        return min(heads, self._ranks)

    def _by_rows(self, entry: TensorEntry) -> bool:
        placement: Placement = self._placements[entry.name][0]
        return self._ranks == 1 or (isinstance(placement, Shard) and placement.dim == 0)

    @property
    def notes(self) -> list[str]:
        """What vLLM's loader may not find as it wants it."""
        apart = [name for name in self._groups if _PART.fullmatch(name)]
        joined = [name for name in self._groups if "qkv_proj." in name]
        notes = []
        if apart:
            notes.append(
                f"vLLM expects qkv_proj and gate_up_proj; {len(apart)} tensors such as {apart[0]}"
                " are written as they are, not joined"
            )
        if joined and self._ranks > 1 and not self._heads:
            notes.append(
                f"keys and values are cut into {self._ranks} parts; where a model has fewer"
                " key-value heads, vLLM expects copies of them instead"
            )
        return notes

    def locals(self, position: int) -> Iterator[_OutgoingShard]:
        """Yield the tensors of the rank at a position of the mesh."""
        for name, members in self._groups.items():
            if VOCABULARY.fullmatch(name) and members[0].shape and self._by_rows(members[0]):
                yield self._padded(members[0], position)
                continue
            if len(members) > 1:
                yield self._joined(name, members, position)
                continue
            ref = ShardRef(members[0], self._shards[members[0].name][position])
            yield _OutgoingShard(name, ref.dtype, ref.shape, (ref.content,))

    def _joined(self, name: str, members: Sequence[TensorEntry], position: int) -> _OutgoingShard:
        """Return a rank's rows of each member.

        Where heads are fewer than ranks, some hold the same.
        """
        contents = []
        for entry in members:
            parts = self._parts(entry)
            size, part = entry.shape[0] // parts, position * parts // self._ranks
            box = Box.along(0, part * size, (size, *entry.shape[1:]))
            contents.append(Data(entry.name, box, entry.dtype.itemsize))
        first = members[0]
        rows = sum(content.box.shape[0] for content in contents)
        return _OutgoingShard(name, first.dtype, (rows, *first.shape[1:]), tuple(contents))

    def _padded(self, entry: TensorEntry, position: int) -> _OutgoingShard:
        """Return a rank's rows of the vocabulary, which zero rows fill up to a multiple of 64."""
        rows, *rest = entry.shape
        each, left = divmod(-(-rows // PADDING) * PADDING, self._ranks)
        if left:
            raise Unsupported(
                f"{entry.name}: {rows:,} rows, padded to a multiple of {PADDING}, do not"
                f" make {self._ranks} equal parts"
            )
        start, stop = min(rows, position * each), min(rows, (position + 1) * each)
        box = Box((start, *(0 for _ in rest)), (stop, *rest))
        data = Data(entry.name, box, entry.dtype.itemsize)
        row = Box.whole(rest).volume * entry.dtype.itemsize
        zeros = Literal(bytes((each - (stop - start)) * row))
        return _OutgoingShard(entry.name, entry.dtype, (each, *rest), (data, zeros))


def _rank_files(rank: int, held: list[_OutgoingShard], limit: int) -> list[FileLayout]:
    """Return the parts of one rank, in order; at least one, for the loader wants a file."""
    groups = by_size((local for local in held if local.nbytes), limit)
    return [
        _part_file(f"model-rank-{rank}-part-{part}.safetensors", group, rank)
        for part, group in enumerate(groups)
    ]


def _part_file(path: str, locals_: list[_OutgoingShard], rank: int) -> FileLayout:
    """Return a safetensors file of local tensors."""
    contents = {local.name: local.contents for local in locals_}
    slices = [OutgoingSlice(o.name, o.name, o.dtype, Box.whole(o.shape)) for o in locals_]
    header, *parts = lay_out_safetensors(path, slices, {}).parts
    data: list[Part] = [
        content for part in parts if isinstance(part, Data) for content in contents[part.name]
    ]
    return FileLayout(path, (header, *data), rank)
