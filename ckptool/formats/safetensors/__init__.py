"""One safetensors file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.layout import Layout
from ckptool.core.text import plural
from ckptool.errors import Unrecognized
from ckptool.formats.base import (
    EXTRA,
    Detection,
    FileRole,
    FileRule,
    Format,
    Reading,
    Request,
    ScanOptions,
    Writing,
)
from ckptool.formats.safetensors.weight_delta import WeightDelta as WeightDelta
from ckptool.formats.safetensors.weight_delta import delta_info
from ckptool.formats.safetensors.weight_delta import delta_notes as delta_notes
from ckptool.formats.safetensors.weight_delta import read_delta as read_delta
from ckptool.formats.safetensors.weight_delta import require_weights as require_weights
from ckptool.formats.shards import note_part
from ckptool.formats.side_file import split_side, with_headers
from ckptool.formats.writing import note_companions, note_tied
from ckptool.serialization.safetensors import (
    OutgoingSlice,
    lay_out_safetensors,
    looks_like_safetensors,
    read_safetensors,
)
from ckptool.serialization.safetensors_metadata import PLAIN, SHARDING, header_for
from ckptool.serialization.source import Source


def _main_file(source: Source) -> str | None:
    """Return the only file of a source, apart from ckptool's side file."""
    files = [name for name in source.files if not name.endswith(EXTRA)]
    return files[0] if len(files) == 1 else None


def _probe(source: Source) -> bool:
    file = _main_file(source)
    if file is None:
        return False
    size = source.files[file]
    has_suffix = file.endswith(".safetensors")
    return has_suffix or looks_like_safetensors(source.read(file, 0, min(size, 9)))


def _scan(source: Source, options: ScanOptions) -> Catalog:
    file = _main_file(source)
    if file is None:
        raise Unrecognized(f"{source.root}: not one safetensors file")
    tensors, metadata = read_whole_tensors(source, file, options)
    files = {file: source.files[file]}
    info = {"writer": writer} if (writer := writer_of(metadata)) else {}
    info |= delta_info([metadata])
    notes = (*note_part(file), *_note_shards(file, metadata), *delta_notes(info))
    catalog = Catalog("safetensors", tensors, {}, files, world_size=1, info=info, notes=notes)
    side = file.removesuffix(".safetensors") + EXTRA
    return with_headers(catalog, source, side, {file: metadata}, options)


def writer_of(metadata: Mapping[str, str]) -> str | None:
    """Return who wrote a file by its header, None if that does not say."""
    return "torch HuggingFaceStorageWriter" if SHARDING in metadata else None


def _note_shards(file: str, metadata: Mapping[str, str]) -> Iterator[str]:
    """Yield a note on a file whose header says that its tensors are a rank's shards of others."""
    try:
        placed = json.loads(metadata.get(SHARDING, "{}"))
        starts = [any(record["saved_offsets"]) for record in placed.values()]
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        return
    if shards := sum(starts):
        yield (
            f"{file} is read by itself: by its {SHARDING}, {plural(shards, 'tensor')} of it"
            " begin within larger ones, of which other ranks have the rest"
        )


def read_whole_tensors(
    source: Source, file: str, options: ScanOptions
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the tensors of a file of whole tensors, and the file's metadata."""
    count = len(options.problems or ())
    header = read_safetensors(source, file, options.problems)
    if options.headers is not None and len(options.problems or ()) == count:
        options.headers[file] = header
    tensors = {
        name: TensorEntry(name, (name,), item.kind.dtype, item.kind.shape, item.chunks)
        for name, item in header.tensors.items()
    }
    return tensors, header.metadata


def _lay_out(catalog: Catalog, request: Request) -> Layout:
    extra = request.target.removesuffix(".safetensors") + EXTRA
    fitting, side, mark, notes = split_side(catalog, extra)
    slices = map(OutgoingSlice.whole, fitting)
    header = PLAIN | header_for(catalog, fitting, request.target) | mark
    main = lay_out_safetensors(request.target, slices, header)
    notes += [*note_companions(catalog), *note_tied(catalog)]
    return Layout((*side, main), folder=False, notes=tuple(notes))


FORMAT = Format(
    "safetensors",
    "one safetensors file",
    Detection(
        _probe,
        files=(FileRule(r".*\.safetensors", FileRole.SAFETENSORS),),
        suffixes=(".safetensors",),
        folder="hf",
    ),
    Reading(_scan),
    Writing(convert=_lay_out, has_metadata=True, has_values=False),
)
