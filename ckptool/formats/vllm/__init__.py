"""vLLM's sharded state: each tensor-parallel rank's own weights, ``model-rank-{r}-part-{p}``.

As ``ShardedStateLoader`` reads (vLLM at commit 01ed47b4): plain local tensors without offsets or
metadata, all keys of a rank spread over its parts. Empty tensors and all but the first name of tied
ones are omitted, as the loader does not expect them. Read: models whose cuts ``merge`` knows; the
files do not record them. Written: if a layer's query, key and value projections are all there and
cut by rows, each rank's parts of them are joined to ``qkv_proj``, and so are gate and up
projection; embeddings are padded with zero rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from msgspec import Struct

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, TensorEntry, tied_names
from ckptool.core.dtype import DType
from ckptool.core.layout import Data, FileLayout, Layout, Literal, Part
from ckptool.core.mesh import Placement, Shard
from ckptool.core.sharding.placement import PlacedTensors, PlacementRule
from ckptool.core.sharding.tensor_parallel import given_rules, tp_mesh
from ckptool.core.text import list_some
from ckptool.core.views import whole_tensor
from ckptool.errors import Damaged, Unsupported
from ckptool.formats.base import (
    MODEL_EXTRA,
    Format,
    Loading,
    Reading,
    Request,
    ScanOptions,
    Writing,
    by_name,
)
from ckptool.formats.companions import companions, describe_config, read_config
from ckptool.formats.side_file import split_side, with_headers
from ckptool.formats.vllm.merge import PADDING, VOCABULARY, Merger, is_known, sizes_of
from ckptool.formats.writing import group_by_size, lay_out_companions, require_placed
from ckptool.serialization.pickle.write import TensorRef
from ckptool.serialization.safetensors import OutgoingSlice, lay_out_safetensors, read_safetensors
from ckptool.serialization.safetensors_metadata import header_for
from ckptool.serialization.source import Source, expect_heads, find_missing_ranks, require_rank

_PART = re.compile(
    r"(?P<head>(.*\.)?)(?P<member>[qkv]_proj|gate_proj|up_proj)\.(?P<leaf>weight|bias)"
)
_KEYS_AND_VALUES = re.compile(r"(.*\.)?[kv]_proj\.(weight|bias)")
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

_RULES = tuple(
    PlacementRule(f"*{name}", style=style, required=False)
    for style, names in {
        "colwise": ("[qkv]_proj.*", "gate_proj.*", "up_proj.*", "embed_tokens.*", "lm_head.*"),
        "rowwise": ("o_proj.*", "down_proj.*"),
        "replicate": ("norm*.weight", "norm*.bias"),
    }.items()
    for name in names
)
"""How vLLM cuts the tensors of Llama-like models, for the placement of tensors written for it."""
_FILE = re.compile(r"model-rank-([0-9]{1,9})-part-([0-9]{1,9})\.safetensors")


def _scan(source: Source, options: ScanOptions) -> Catalog:
    files = [match for name in source.files if (match := _FILE.fullmatch(name))]
    world = max(int(match[1]) for match in files) + 1
    _require_parts(source, files, world)
    tensors, headers, problems = _read_ranks(source, files, options)
    merger = Merger(sizes_of(read_config(source)), world, given_rules(options.tp_rules, tensors))
    merger.merge(tensors)
    merger.add_tied()
    options.report([*problems, *merger.problems], subject=source.root)
    info = {"writer": "vLLM or SGLang (by its file names)", "parallelism": f"TP {world}"}
    catalog = Catalog(
        "sharded-state",
        merger.tensors,
        {},
        {match.string: source.files[match.string] for match in files},
        world_size=world,
        mesh=tp_mesh(world) if world > 1 else None,
        mesh_source="declared" if world > 1 else None,
        info=info | describe_config(source, options),
        notes=tuple(merger.notes),
        conflicts=merger.unknown,
        companions=companions(source),
    )
    return with_headers(catalog, source, MODEL_EXTRA, headers, options)


def _require_parts(source: Source, files: list[re.Match[str]], world: int) -> None:
    """Raise Damaged if a rank, or a part before a rank's last, has no file."""
    require_rank(world, source.root)
    parts: dict[int, set[int]] = {}
    for match in files:
        parts.setdefault(int(match[1]), set()).add(int(match[2]))
    missing = [f"model-rank-{rank}-part-0" for rank in find_missing_ranks(parts, world)]
    for rank, numbers in parts.items():
        absent = find_missing_ranks(numbers, max(numbers) + 1)
        missing += [f"model-rank-{rank}-part-{part}" for part in absent]
    if missing:
        raise Damaged(f"{source.root}: {missing[0]}.safetensors is missing", "rank-missing")


def _read_ranks(
    source: Source, files: list[re.Match[str]], options: ScanOptions
) -> tuple[dict[str, dict[int, TensorEntry]], dict[str, dict[str, str]], list[str]]:
    """Return each rank's tensors, by name and rank, the metadata of all files, and problems.

    A problem is a tensor that a rank has twice.
    """
    tensors: dict[str, dict[int, TensorEntry]] = {}
    headers: dict[str, dict[str, str]] = {}
    problems = []
    expect_heads(source, (match.string for match in files))
    for match in sorted(files, key=lambda match: (int(match[1]), int(match[2]))):
        header = options.attempt(partial(read_safetensors, source, match.string))
        headers |= {match.string: header.metadata} if header else {}
        for name, item in (header.tensors if header else {}).items():
            by_rank, rank = tensors.setdefault(name, {}), int(match[1])
            if rank in by_rank:
                problems.append(f"{name}: twice in the files of rank {rank}")
            by_rank[rank] = whole_tensor(name, (name,), item.dtype, item.shape, item.at, rank)
    return tensors, headers, problems


class _OutgoingShard(Struct, frozen=True):
    """A tensor of one rank: contents one after the other, which C order makes rows of it."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    contents: tuple[Data | Literal, ...]

    @property
    def nbytes(self) -> int:
        return sum(content.nbytes for content in self.contents)


def lay_out(catalog: Catalog, request: Request) -> Layout:
    """Lay out every rank's files, and one for other values; Unsupported except for a 1-d mesh."""
    placed = require_placed(request)
    mesh = placed.mesh
    if len(mesh.shape) != 1:
        raise Unsupported(
            f"sharded state has one file set per tensor-parallel rank; the mesh"
            f" {'x'.join(map(str, mesh.shape))} has {len(mesh.shape)} dims",
            hint=f"--mesh {mesh.size}",
        )
    fitting, side, mark, notes = split_side(catalog, MODEL_EXTRA)
    tensors = _without_aliases(fitting)
    joiner = _Joiner(tensors, placed, sizes_of(request.config).key_value_heads)
    files = [*lay_out_companions(catalog), *side]
    mark = header_for(catalog, tensors, request.target) | mark
    empty: dict[str, None] = {}
    for position, rank in enumerate(mesh.ranks):
        shards = list(joiner.shards(position))
        groups = group_by_size((shard for shard in shards if shard.nbytes), request.max_shard_size)
        files += [_part_file(rank, part, group, mark) for part, group in enumerate(groups)]
        empty |= dict.fromkeys(shard.name for shard in shards if not shard.nbytes)
    notes += [f"empty on some ranks, so not in their files: {name}" for name in empty]
    notes += [
        f"tied to another tensor, so not written: {entry.name}"
        for entry in fitting
        if entry not in tensors
    ]
    return Layout(tuple(files), folder=True, notes=(*notes, *joiner.notes))


def _without_aliases(entries: list[TensorEntry]) -> list[TensorEntry]:
    """Keep of tied tensors only the one with the first name, which the loader expects alone."""
    catalog = Catalog("", {entry.name: entry for entry in entries}, {}, {})
    dropped = {name for names in tied_names(catalog) for name in names if name != min(names)}
    return [entry for entry in entries if entry.name not in dropped]


class _Joiner:
    """Joins and pads each rank's tensors, as vLLM does."""

    def __init__(
        self, entries: Sequence[TensorEntry], placed: PlacedTensors, key_value_heads: int | None
    ) -> None:
        self._ranks = placed.mesh.size
        self._heads = key_value_heads
        self._placements = placed.placements
        self._shards = {entry.name: placed.shards(entry) for entry in entries}
        self._groups = self._group({entry.name: entry for entry in entries})

    def _group(self, entries: dict[str, TensorEntry]) -> dict[str, tuple[TensorEntry, ...]]:
        """Return the name of each tensor that is written, and what it is joined from."""
        groups: dict[str, tuple[TensorEntry, ...]] = {}
        for name, entry in entries.items():
            match = _PART.fullmatch(name)
            if match is None:
                groups[name] = (entry,)
                continue
            fused = next(f for f, parts in _FUSED.items() if match["member"] in parts)
            names = [f"{match['head']}{part}.{match['leaf']}" for part in _FUSED[fused]]
            members = tuple(entries[n] for n in names if n in entries)
            is_joined = len(members) == len(names) and self._is_joinable(members)
            target = f"{match['head']}{fused}.{match['leaf']}" if is_joined else name
            groups[target] = members if is_joined else (entry,)
        return groups

    def _is_joinable(self, members: Sequence[TensorEntry]) -> bool:
        """Return whether all are cut by rows into equal parts, and alike in everything else."""
        kinds = {(entry.dtype, entry.shape[1:]) for entry in members}
        return len(kinds) == 1 and all(
            entry.shape and self._by_rows(entry) and entry.shape[0] % self._parts(entry) == 0
            for entry in members
        )

    def _parts(self, entry: TensorEntry) -> int:
        """Return into how many parts ranks cut a tensor's rows: no key-value head is cut."""
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
        """Return what vLLM's loader may not find as expected."""
        parts = [name for name in self._groups if _PART.fullmatch(name)]
        joined = [name for name in self._groups if "qkv_proj." in name]
        notes = []
        if parts:
            notes.append(
                f"vLLM expects qkv_proj and gate_up_proj; {len(parts):,} tensors such as {parts[0]}"
                " are written as they are, not joined"
            )
        if joined and self._ranks > 1 and not self._heads:
            notes.append(
                f"keys and values are cut into {self._ranks} parts; where a model has fewer"
                " key-value heads, vLLM expects copies of them instead"
            )
        unknown = [name for name in self._groups if not is_known(name)]
        if unknown and self._ranks > 1:
            notes.append(
                f"nothing says how vLLM cuts {list_some(unknown, 2)}: reading them takes --tp-rule"
            )
        return notes

    def shards(self, position: int) -> Iterator[_OutgoingShard]:
        """Yield the tensors of the rank at a position of the mesh."""
        for name, members in self._groups.items():
            if VOCABULARY.fullmatch(name) and members[0].shape and self._by_rows(members[0]):
                yield self._pad(members[0], position)
                continue
            if len(members) > 1:
                yield self._join(name, members, position)
                continue
            ref = TensorRef.of_shard(members[0], self._shards[members[0].name][position])
            yield _OutgoingShard(name, ref.dtype, ref.shape, (ref.content,))

    def _join(self, name: str, members: Sequence[TensorEntry], position: int) -> _OutgoingShard:
        """Return a rank's rows of each member; several ranks have the same if heads are few."""
        contents = []
        for entry in members:
            parts = self._parts(entry)
            size, part = entry.shape[0] // parts, position * parts // self._ranks
            box = Box.along(0, part * size, (size, *entry.shape[1:]))
            contents.append(Data.of(entry.name, box, entry.dtype.itemsize))
        first = members[0]
        rows = sum(content.shape[0] for content in contents)
        return _OutgoingShard(name, first.dtype, (rows, *first.shape[1:]), tuple(contents))

    def _pad(self, entry: TensorEntry, position: int) -> _OutgoingShard:
        """Return a rank's rows of the vocabulary, which zero rows fill up to a multiple of 64."""
        rows, *rest = entry.shape
        share, remainder = divmod(-(-rows // PADDING) * PADDING, self._ranks)
        if remainder:
            raise Unsupported(
                f"{entry.name}: {rows:,} rows, padded to a multiple of {PADDING}, do not"
                f" make {self._ranks} equal parts"
            )
        start, stop = min(rows, position * share), min(rows, (position + 1) * share)
        box = Box((start, *(0 for _ in rest)), (stop, *rest))
        data = Data.of(entry.name, box, entry.dtype.itemsize)
        row = Box.whole(rest).volume * entry.dtype.itemsize
        zeros = Literal(bytes((share - (stop - start)) * row))
        return _OutgoingShard(entry.name, entry.dtype, (share, *rest), (data, zeros))


def _part_file(
    rank: int, part: int, shards: list[_OutgoingShard], mark: Mapping[str, str]
) -> FileLayout:
    """Lay out a safetensors file of local tensors; a rank has at least one, for the loader."""
    path = f"model-rank-{rank}-part-{part}.safetensors"
    contents = {shard.name: shard.contents for shard in shards}
    slices = [OutgoingSlice(o.name, o.dtype, Box.whole(o.shape)) for o in shards]
    header, *parts = lay_out_safetensors(path, slices, mark).parts
    data: list[Part] = [
        content for part in parts if isinstance(part, Data) for content in contents[part.name]
    ]
    return FileLayout(path, (header, *data), rank)


FORMAT = Format(
    "sharded-state",
    "vLLM sharded state: model-rank-R-part-P.safetensors",
    by_name(_FILE, "model-rank-R-part-P.safetensors"),
    Reading(_scan, takes_tp_rules=True),
    Writing(reshard=lay_out, has_metadata=True, has_values=False),
    Loading(rules=lambda: _RULES, is_model_folder=True),
)
