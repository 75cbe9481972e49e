"""One safetensors file."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.layout import FileLayout, Layout
from ckptool.core.text import list_some, plural
from ckptool.errors import Problem, Unrecognised, damaged
from ckptool.formats.base import EXTRA, FileRole, FileRule, Format, Request, ScanOptions
from ckptool.formats.writing import (
    NOT_CARRIED,
    lay_out_extra,
    note_companions,
    note_tied,
    select_plain,
)
from ckptool.serialization.safetensors import (
    OutgoingSlice,
    lay_out_safetensors,
    looks_like_safetensors,
    read_safetensors,
)
from ckptool.serialization.source import Source
from ckptool.serialization.state_dict.assemble import assemble
from ckptool.serialization.state_dict.leaves import read_file_leaves

_NAMELESS = ((), ("",))
"""The paths of the only value of a torch.save file, or of one under an empty name."""


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
        raise Unrecognised(f"{source.root}: not one safetensors file")
    tensors, metadata = read_whole_tensors(source, file, options)
    info = {"writer": "safetensors"} | {f"metadata.{k}": v for k, v in metadata.items()}
    catalog = Catalog(
        "safetensors",
        tensors,
        {},
        {file: source.files[file]},
        1,
        info=info,
        notes=note_headers({file: metadata}),
    )
    return with_extra(catalog, source, file.removesuffix(".safetensors") + EXTRA)


def with_extra(catalog: Catalog, source: Source, extra: str) -> Catalog:
    """Add the tensors and values of the extra file to the catalog, if there is one."""
    if extra not in source.files:
        return catalog
    more = assemble({0: read_file_leaves(source, extra)})
    twice = sorted(more.tensors.keys() & catalog.tensors.keys())
    if more.problems or twice:
        problems = [*more.problems, *(f"{n}: also in the main file" for n in twice)]
        raise damaged(problems, subject=extra, hint=f"{extra} belongs to another checkpoint")
    return replace(
        catalog,
        tensors=catalog.tensors | more.tensors,
        objects=catalog.objects | more.objects,
        conflicts=catalog.conflicts | more.conflicts,
        files=catalog.files | {extra: source.files[extra]},
    )


_WRITTEN_ANEW = frozenset(["format", "DCP_VERSION", "DCP_SHARDING_INFO"])


def note_headers(metadata: Mapping[str, Mapping[str, str]]) -> tuple[Problem, ...]:
    """Return a note for each file whose header has keys that writers of the format do not use."""
    keys = {file: sorted(header.keys() - _WRITTEN_ANEW) for file, header in metadata.items()}
    return tuple(
        Problem(f"not carried: metadata of {file}: {list_some(names)}", NOT_CARRIED, file=file)
        for file, names in keys.items()
        if names
    )


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


def split_extra(
    catalog: Catalog, path: str, unread: Collection[str] = ()
) -> tuple[list[TensorEntry], list[FileLayout], list[str]]:
    """Split off what safetensors cannot hold, into an extra file ``path`` if there is any.

    ``unread`` are more element types, which a format's own reader does not know. Returns the other
    tensors, the file, and notes on what is in it or is not carried at all.
    """
    tensors = list(catalog.tensors.values())
    others = [entry for entry in tensors if not _is_supported(entry)]
    others += [e for e in tensors if _is_supported(e) and e.dtype.safetensors in unread]
    fitting = [e for e in tensors if _is_supported(e) and e.dtype.safetensors not in unread]
    objects, notes = select_plain(catalog, numpy=False)
    nameless = [e.name for e in fitting if e.name and e.path in _NAMELESS]
    notes += [f"a tensor without a name is written as {name!r}" for name in nameless]
    if objects:
        names = [entry.name for entry in objects]
        notes.append(f"{plural(len(names), 'non-tensor value')} in {path}: {list_some(names)}")
    if others:
        names = [f"{entry.name} ({entry.dtype})" for entry in others]
        notes.append(f"safetensors has no such element type; in {path}: {list_some(names)}")
    files = [lay_out_extra(path, others, objects)] if others or objects else []
    return fitting, files, notes


def _is_supported(entry: TensorEntry) -> bool:
    """Return whether safetensors has a name for the element type, and can hold the shape in it."""
    name = entry.dtype.safetensors
    return bool(name) and not (name == "F4" and not entry.shape)


def _lay_out(catalog: Catalog, request: Request) -> Layout:
    extra = request.target.removesuffix(".safetensors") + EXTRA
    fitting, files, notes = split_extra(catalog, extra)
    slices = map(OutgoingSlice.whole, fitting)
    main = lay_out_safetensors(request.target, slices, {"format": "pt"})
    notes += [*note_companions(catalog), *note_tied(catalog)]
    return Layout((*files, main), folder=False, notes=tuple(notes))


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
