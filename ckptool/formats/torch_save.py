"""One torch.save file (.pt .pth .bin .ckpt), zip or legacy, or its Hugging Face sharded form.

Read: zip archives by torch 1.6 to 2.13, the legacy stream before, deflated and big-endian ones,
``pytorch_model.bin.index.json`` with its shards (transformers 4). Written: as torch 2.13 does.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptool.core.catalog import Catalog
from ckptool.core.layout import Layout
from ckptool.errors import Empty, Unrecognized
from ckptool.formats.base import (
    Detection,
    FileRole,
    FileRule,
    Format,
    Loading,
    Reading,
    Request,
    ScanOptions,
    Writing,
)
from ckptool.formats.companions import companions, describe_config, describe_framework
from ckptool.formats.lightning import as_one_file
from ckptool.formats.shards import list_misplaced, note_part, read_index, read_shards
from ckptool.formats.writing import nest_state, note_companions, select_plain
from ckptool.serialization.archive.read import is_legacy, is_zip
from ckptool.serialization.archive.write import ROOT, archive_file
from ckptool.serialization.source import Source, expect_archives
from ckptool.serialization.state_dict.assemble import assemble
from ckptool.serialization.state_dict.leaves import Assembled, Leaf, ShareLeaf, read_file_leaves

INDEX = "pytorch_model.bin.index.json"
_MODELS = ("pytorch_model.bin", "diffusion_pytorch_model.bin")
_SUFFIXES = (
    *(".pt", ".pth", ".bin", ".ckpt", ".pth.tar", ".pth.lora", ".state"),
    *(".th", ".pyth"),  # AudioCraft and Demucs; SlowFast
)


def _model_in(source: Source) -> str | None:
    """Return the model file that transformers or diffusers saved here with its config.json.

    A trainer's state may be beside it.
    """
    names = (name for name in _MODELS if name in source.files)
    return next(names, None) if "config.json" in source.files else None


def _probe(source: Source) -> bool:
    if INDEX in source.files or _model_in(source):
        return True
    if len(source.files) != 1:
        return False
    file, size = next(iter(source.files.items()))
    head = source.read(file, 0, min(size, 64))
    has_suffix = file.endswith(_SUFFIXES)
    return is_zip(head) or is_legacy(head) or has_suffix


def _scan(source: Source, options: ScanOptions) -> Catalog:
    if INDEX in source.files:
        return _scan_shards(source, options)
    model = _model_in(source)
    if len(source.files) != 1 and model is None:
        raise Unrecognized(f"{source.root}: not one torch.save file")
    file = model or next(iter(source.files))
    leaves = read_file_leaves(source, file)
    contents = assemble({_rank_of(leaves): leaves}, per_rank=options.per_rank)
    options.report(contents.problems, subject=file)
    if not contents.tensors and not contents.objects and not contents.conflicts:
        raise Empty(f"{file}: an empty state dict: no tensor and no value in it")
    worlds = {mesh.size for mesh in contents.meshes}
    if worlds - {1}:
        part = f"{file} holds one rank's part of a checkpoint of {max(worlds)} ranks"
        contents.notes.append(part)
    contents.notes += note_part(file)
    return contents.catalog(
        "torch-save",
        source,
        [file],
        world_size=1,
        info={"writer": "torch.save"} | contents.info | describe_framework(contents.objects),
        companions=companions(source) if model else {},
    )


def _rank_of(leaves: Mapping[str, Leaf]) -> int:
    """Return the rank that wrote a file, if the DTensors in it agree on one; else 0."""
    shares = [leaf.value.share for leaf in leaves.values() if isinstance(leaf.value, ShareLeaf)]
    ranks = {share.rank for share in shares if share.rank is not None}
    return ranks.pop() if len(ranks) == 1 else 0


def _scan_shards(source: Source, options: ScanOptions) -> Catalog:
    weight_map, _ = read_index(source, INDEX)
    files = sorted(set(weight_map.values()))

    def read(file: str) -> Assembled:
        return assemble({0: read_file_leaves(source, file)}, per_rank=options.per_rank)

    expect_archives(source, files)
    contents, _, unread = read_shards(source, files, INDEX, read, options)
    tensors, problems = contents.tensors, contents.take_problems()
    names = {*tensors, *contents.conflicts}
    misplaced = {n: file for n, file in weight_map.items() if n not in names and file not in unread}
    options.report(problems, subject=source.root)
    contents.tensors = {name: tensors.pop(name) for name in weight_map if name in tensors} | tensors
    contents.conflicts |= {str(p.tensor): p for p in list_misplaced(misplaced, {}, INDEX)}
    info = {"writer": "transformers (pytorch_model.bin shards)"}
    return contents.catalog(
        "torch-save",
        source,
        [*files, INDEX],
        world_size=1,
        info=info | describe_config(source, options),
        companions=companions(source),
    )


def _lay_out(catalog: Catalog, request: Request) -> Layout:
    catalog = as_one_file(catalog)
    objects, notes = select_plain(catalog)
    state = nest_state(list(catalog.tensors.values()), objects)
    main = archive_file(request.target, state, root=request.target.rpartition(".")[0] or ROOT)
    return Layout((main,), folder=False, notes=(*notes, *note_companions(catalog)))


FORMAT = Format(
    "torch-save",
    "one torch.save file (.pt .pth .bin .ckpt)",
    Detection(
        _probe,
        files=(FileRule(r".*\.index(\.[^.]+)?\.json", FileRole.INDEX),),
        suffixes=_SUFFIXES,
    ),
    Reading(_scan),
    Writing(convert=_lay_out),
    Loading(config="optional"),
)
