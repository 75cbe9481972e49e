"""vLLM's sharded state: each tensor-parallel rank's own weights, ``model-rank-{r}-part-{p}``.

Written as ``ShardedStateLoader`` reads (vLLM at commit 01ed47b4): plain local tensors without
offsets or metadata, all keys of a rank spread over its parts. Empty tensors and all but the first
name of tied ones are left out, as the loader leaves them out of what it expects. Not read: nothing
in the files says how the tensors were cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, TensorEntry, tied
from ckptool.core.layout import Data, FileLayout, Layout, Part, Scattered
from ckptool.errors import CannotDo, Problem
from ckptool.formats._outgoing import companion_files, extra_file
from ckptool.formats._rank_write import placed_of
from ckptool.formats._safetensors_file import OutgoingSlice, lay_out_safetensors
from ckptool.formats._torch_write import ShardRef
from ckptool.formats.base import Format, Request, ScanOptions, Source
from ckptool.formats.safetensors import extras, split_by_support

_FILE = re.compile(r"model-rank-(\d+)-part-(\d+)\.safetensors")
_EXTRA = "model.extra.pt"
_FUSED = re.compile(r".*\b(q_proj|k_proj|v_proj|gate_proj|up_proj)\.(weight|bias)")


def _probe(source: Source) -> bool:
    return any(_FILE.fullmatch(name) for name in source.files)


def _scan(source: Source, options: ScanOptions) -> Catalog:
    raise CannotDo(
        Problem(
            f"{source.root}: vLLM sharded state holds each rank's local tensors without a record of"
            " how they were cut, so they cannot be put together again",
            "files-only",
        ),
        hint="read the checkpoint that it was made from",
    )


def lay_out(catalog: Catalog, request: Request) -> Layout:
    """The files of every rank of a mesh of one dim, and one for what safetensors cannot hold.

    Raises CannotDo where the request has no mesh, or one of several dims.
    """
    placed = placed_of(request)
    mesh = placed.mesh
    if len(mesh.shape) != 1:
        raise CannotDo(
            f"sharded state has one file set a tensor-parallel rank; the mesh"
            f" {'x'.join(map(str, mesh.shape))} has {len(mesh.shape)} dims",
            hint=f"--mesh {mesh.size}",
        )
    fitting, others = split_by_support(catalog)
    objects, notes = extras(catalog, others, _EXTRA)
    named = _without_aliases(fitting)
    shards = {entry.name: placed.shards(entry) for entry in named}
    files = companion_files(catalog)
    if others or objects:
        files.append(extra_file(_EXTRA, others, objects))
    for position, rank in enumerate(mesh.ranks):
        held = [ShardRef(entry, shards[entry.name][position]) for entry in named]
        files += _rank_files(rank, held, request.max_shard_size)
    empty = [name for name, held in shards.items() if not all(shard.pieces for shard in held)]
    notes += [f"without elements on some ranks, so not in their files: {name}" for name in empty]
    return Layout(tuple(files), folder=True, notes=(*notes, *_name_notes(fitting, named)))


def _without_aliases(entries: list[TensorEntry]) -> list[TensorEntry]:
    """Of tied tensors only the one with the first name, which the loader expects alone."""
    catalog = Catalog("", {entry.name: entry for entry in entries}, {}, {})
    dropped = {name for names in tied(catalog) for name in names if name != min(names)}
    return [entry for entry in entries if entry.name not in dropped]


def _name_notes(entries: list[TensorEntry], named: list[TensorEntry]) -> list[str]:
    kept = {entry.name for entry in named}
    notes = [
        f"tied to another tensor, so not written: {entry.name}"
        for entry in entries
        if entry.name not in kept
    ]
    parts = [entry.name for entry in named if _FUSED.fullmatch(entry.name)]
    if parts:
        notes.append(
            f"vLLM expects qkv_proj and gate_up_proj; {len(parts)} tensors such as {parts[0]} are"
            " written as they are, not joined"
        )
    return notes


def _rank_files(rank: int, held: list[ShardRef], limit: int) -> list[FileLayout]:
    """The parts of one rank, in order; at least one, for the loader wants a file."""
    groups = _grouped((ref for ref in held if ref.content.nbytes), limit)
    return [
        _part_file(f"model-rank-{rank}-part-{part}.safetensors", group, rank)
        for part, group in enumerate(groups)
    ]


def _grouped(refs: Iterable[ShardRef], limit: int) -> list[list[ShardRef]]:
    """As many local tensors a part as fit ``limit`` bytes; a larger one has its own part."""
    groups: list[list[ShardRef]] = [[]]
    held = 0
    for ref in refs:
        nbytes = ref.content.nbytes
        if groups[-1] and held + nbytes > limit:
            groups.append([])
            held = 0
        groups[-1].append(ref)
        held += nbytes
    return groups


def _part_file(path: str, refs: list[ShardRef], rank: int) -> FileLayout:
    """A safetensors file of local tensors."""
    contents: dict[str, Data | Scattered] = {ref.entry.name: ref.content for ref in refs}
    slices = [
        OutgoingSlice(ref.entry.name, ref.entry.name, ref.dtype, Box.whole(ref.shape))
        for ref in refs
    ]
    header, *parts = lay_out_safetensors(path, slices, {}).parts
    data: list[Part] = [contents[part.name] for part in parts if isinstance(part, Data)]
    return FileLayout(path, (header, *data), rank)


FORMAT = Format(
    "sharded-state",
    "vLLM sharded state: model-rank-R-part-P.safetensors",
    _probe,
    _scan,
    reads=False,
)
