"""A folder that accelerate saved: model and optimizer as families of files, and other files.

From FSDP with DCP, ``pytorch_model_fsdp_0/`` (in old versions ``pytorch_model_0/``) and
``optimizer_0/`` are DCP folders (accelerate 1.15); else ``model.safetensors`` or its shards are the
model, ``model_1.safetensors`` a second one, and ``optimizer.bin`` the optimizer. Scheduler, sampler
and random states are beside them, also from transformers' Trainer. The family begins each name,
unless all names begin with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from ckptool.core.catalog import Catalog
from ckptool.core.selection import with_prefix
from ckptool.errors import Damaged
from ckptool.formats import FORMATS, torch_save
from ckptool.formats.base import (
    Deferred,
    Detection,
    Format,
    Loading,
    Reading,
    ScanOptions,
    Writing,
)
from ckptool.formats.companions import (
    RANDOM_STATES,
    TRAINER_FILES,
    companions,
    join_catalogs,
    scan_subfolder,
)
from ckptool.formats.rank_files.names import accelerate_family
from ckptool.formats.safetensors import read_whole_tensors
from ckptool.serialization.safetensors_metadata import texts_by_file
from ckptool.serialization.source import Source

_PART = re.compile(
    r"(?P<folder>(?P<family>pytorch_model(_fsdp)?|optimizer)_(?P<number>\d+))/\.metadata"
)
_OF_FSDP = "pytorch_model_fsdp.bin"
_FURTHER_MODEL = re.compile(r"(model_[1-9]\d*)\.safetensors")


def _parts(source: Source) -> dict[str, str]:
    """Return the subfolders with their families, the model first."""
    return {
        match["folder"]: accelerate_family(match["family"], match["number"])
        for match in filter(None, map(_PART.fullmatch, sorted(source.files, reverse=True)))
    }


def _whole_model(source: Source) -> Format | None:
    """Return the reader of the model if it is not in DCP folders, but in Hugging Face's shards.

    Random states with accelerate's name distinguish its folders from plain models.
    """
    if not any(map(RANDOM_STATES.fullmatch, source.files)):
        return None
    if FORMATS["hf"].matches(source):
        return FORMATS["hf"]
    return torch_save.FORMAT if torch_save.INDEX in source.files else None


def _probe(source: Source) -> object:
    return _parts(source) or _whole_model(source)


def _scan(source: Source, options: ScanOptions) -> Catalog:
    catalogs = []
    parts = _parts(source)
    # beside the model of FSDP, the whole was made of it: by `accelerate merge-weights`, or by
    # transformers' save_pretrained
    is_fsdp = "model" in parts.values() or _OF_FSDP in source.files
    model = None if is_fsdp else _whole_model(source)
    if model is not None:
        catalogs.append(with_prefix(model.scan(source, options), "model"))
        catalogs += _further_models(source, options)
    for folder, family in parts.items():
        inner = scan_subfolder(FORMATS["dcp"].scan, source, folder, options)
        catalogs.append(_in_family(inner, family))
    if FORMATS["rank-local"].matches(source):
        catalogs.append(FORMATS["rank-local"].scan(source, options))
    _require_one_save(catalogs)
    writer = {"writer": "accelerate (by its file names)"}
    joined = join_catalogs(*catalogs)
    extras = companions(source) | {n: source.files[n] for n in TRAINER_FILES if n in source.files}
    return replace(
        joined,
        format="accelerate",
        info=joined.info | writer,
        companions=joined.companions | extras,
    )


def _require_one_save(catalogs: Iterable[Catalog]) -> None:
    """Raise Damaged if several families have one name, of which the last would hide the others."""
    holders: dict[str, Catalog] = {}
    for catalog in catalogs:
        for name in (*catalog.tensors, *catalog.objects, *catalog.conflicts):
            other = holders.setdefault(name, catalog)
            if other is not catalog:
                file, other_file = _file_with(name, catalog), _file_with(name, other)
                message = f"{name} is both in {other_file} and in {file}: of two saves"
                hint = "give the path of one of them, or move the files of the other away"
                raise Damaged(message, "saves-mixed", file=file, hint=hint)


def _file_with(name: str, catalog: Catalog) -> str:
    """Return the first file that has a part of a tensor, or else the first of the catalog."""
    entry = catalog.tensors.get(name)
    return entry.chunks[0].places[0].file if entry and entry.chunks else min(catalog.files)


def _further_models(source: Source, options: ScanOptions) -> Iterator[Catalog]:
    """Yield the models after the first, each in a file of its own."""
    for match in filter(None, map(_FURTHER_MODEL.fullmatch, sorted(source.files))):
        tensors, metadata = read_whole_tensors(source, match[0], options)
        files = {match[0]: source.files[match[0]]}
        catalog = Catalog(
            "safetensors", tensors, {}, files, metadata=texts_by_file({match[0]: metadata})
        )
        yield with_prefix(catalog, match[1])


def _in_family(catalog: Catalog, family: str) -> Catalog:
    if all(name.startswith(f"{family}.") for name in (*catalog.tensors, *catalog.objects)):
        return catalog
    return with_prefix(catalog, family)


FORMAT = Format(
    "accelerate",
    "accelerate's folder: model, optimizer, and the files next to them",
    Detection(
        _probe,
        names="pytorch_model_fsdp_0/.metadata, or random_states_0.pkl",
        found=lambda source: _probe(source) or FORMATS["rank-local"].matches(source),
    ),
    Reading(_scan, locate=Deferred("ckptool.formats.dcp:locate"), takes_world_size=True),
    Writing(
        reshard=Deferred("ckptool.formats.rank_files.accelerate_write:lay_out"),
        families=("model", "optimizer"),
    ),
    Loading(has_rank_state=True),
)
