"""One safetensors file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.layout import Layout
from ckptool.core.quantization.comfy import HEADER, INFO, join_headers
from ckptool.core.text import list_some
from ckptool.errors import Problem, Unrecognized
from ckptool.formats.base import EXTRA, FileRole, FileRule, Format, Request, ScanOptions
from ckptool.formats.shards import note_part
from ckptool.formats.side_file import SIDE, split_side, with_side
from ckptool.formats.writing import NOT_CARRIED, note_companions, note_tied
from ckptool.serialization.safetensors import (
    OutgoingSlice,
    lay_out_safetensors,
    looks_like_safetensors,
    read_safetensors,
)
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
    named = file.endswith(".safetensors")
    return named or looks_like_safetensors(source.read(file, 0, min(size, 9)), size)


def _scan(source: Source, options: ScanOptions) -> Catalog:
    file = _main_file(source)
    if file is None:
        raise Unrecognized(f"{source.root}: not one safetensors file")
    tensors, metadata = read_whole_tensors(source, file, options)
    described = {f"metadata.{key}": text for key, text in metadata.items() if key != SIDE}
    info = {"writer": "safetensors"} | described
    catalog = Catalog(
        "safetensors",
        tensors,
        {},
        {file: source.files[file]},
        1,
        info=info,
        notes=(*note_part(file), *note_headers({file: metadata})),
    )
    return with_side(
        catalog, source, file.removesuffix(".safetensors") + EXTRA, [metadata], options
    )


_WRITTEN_ANEW = frozenset(["format", "DCP_VERSION", "DCP_SHARDING_INFO", SIDE])


def note_headers(metadata: Mapping[str, Mapping[str, str]]) -> tuple[Problem, ...]:
    """Return a note for each file whose header has keys that writers of the format do not use."""
    keys = {file: sorted(header.keys() - _WRITTEN_ANEW) for file, header in metadata.items()}
    return tuple(
        Problem(f"not carried: metadata of {file}: {list_some(names)}", NOT_CARRIED, file=file)
        for file, names in keys.items()
        if names
    )


def quantization_info(metadata: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the entry of ``Catalog.info`` that says how ComfyUI quantized the weights of files."""
    texts = [header[HEADER] for header in metadata if HEADER in header]
    return {INFO: join_headers(texts)} if texts else {}


def read_whole_tensors(
    source: Source, file: str, options: ScanOptions
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the tensors of a file of whole tensors, and the file's metadata."""
    header = read_safetensors(source, file, options.problems)
    tensors = {
        name: TensorEntry(name, (name,), item.kind.dtype, item.kind.shape, item.chunks)
        for name, item in header.tensors.items()
    }
    return tensors, header.metadata


def _lay_out(catalog: Catalog, request: Request) -> Layout:
    extra = request.target.removesuffix(".safetensors") + EXTRA
    fitting, side, mark, notes = split_side(catalog, extra)
    slices = map(OutgoingSlice.whole, fitting)
    main = lay_out_safetensors(request.target, slices, {"format": "pt"} | mark)
    notes += [*note_companions(catalog), *note_tied(catalog)]
    return Layout((*side, main), folder=False, notes=tuple(notes))


FORMAT = Format(
    "safetensors",
    "one safetensors file",
    _probe,
    _scan,
    convert=_lay_out,
    files=(FileRule(r".*\.safetensors", FileRole.SAFETENSORS),),
    suffixes=(".safetensors",),
    folder="hf",
    has_values=False,
)
