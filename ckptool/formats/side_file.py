"""The side file: a torch.save file of what safetensors cannot hold, beside safetensors files.

Its identity is in their headers too, so that no file of its name that another program wrote, or
that belongs to another checkpoint, is read with them. It is made of the values, and of the names,
types and shapes of all tensors, not of their bytes. Those of earlier versions have no such mark.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

from msgspec.structs import replace

from ckptool.core.catalog import Catalog, TensorEntry, flat_name
from ckptool.core.layout import FileLayout
from ckptool.core.selection import Entry
from ckptool.core.text import list_some, plural
from ckptool.errors import Damaged, Problem, damaged
from ckptool.formats.base import ScanOptions
from ckptool.formats.writing import nest_state, select_plain
from ckptool.serialization.archive.write import is_marked, lay_out_side, read_identity
from ckptool.serialization.safetensors_metadata import texts_by_file
from ckptool.serialization.source import Source, is_there
from ckptool.serialization.state_dict.assemble import assemble
from ckptool.serialization.state_dict.leaves import read_file_leaves

SIDE = "ckptool.side"
"""The key of the side file's identity in the header of each file that it goes with."""
_NAMELESS = ((), ("",))
"""The paths of the only value of a torch.save file, or of one under an empty name."""


def with_headers(
    catalog: Catalog,
    source: Source,
    side: str,
    headers: Mapping[str, Mapping[str, str]],
    options: ScanOptions,
) -> Catalog:
    """Add what headers say, and the tensors and values of the side file, if there is one.

    ``headers`` are the metadata of the readable files that the side file goes with: without any,
    nothing says that it belongs to others. Another program's file is left out with a note. Raises
    Damaged, or notes it if ``options`` allow, if the side file belongs to another checkpoint, or
    cannot be read, so that this is unknown.
    """
    catalog = replace(catalog, metadata=texts_by_file(headers))
    marks = {header[SIDE] for header in headers.values() if SIDE in header}
    if side not in source.files and not marks and side in source.unlisted:
        return catalog  # whatever is there, no file here goes with it
    if not is_there(source, side):
        return replace(catalog, notes=(*catalog.notes, *([_missing(side)] if marks else [])))
    judged = marks if headers else None
    return options.attempt(partial(_add_side, catalog, source, side, judged)) or catalog


def _add_side(catalog: Catalog, source: Source, side: str, marks: set[str] | None) -> Catalog:
    """Add a side file that the headers name with ``marks``; None if no header can be read."""
    leaves, identity = read_file_leaves(source, side), read_identity(source, side)
    if identity is None and not marks:
        return replace(catalog, notes=(*catalog.notes, _foreign(side)))
    identities = {identity} if identity and is_marked(identity) else set()
    if marks is not None and marks != identities:
        message = f"{side}: not the side file that was written with the files that are here"
        raise Damaged(Problem(message, "side-file-mismatch", file=side))
    content = assemble({0: leaves})
    twice = sorted((content.tensors | content.objects).keys() & catalog.tensors.keys())
    if content.problems or twice:
        problems = [*content.problems, *(f"{n}: also in the main file" for n in twice)]
        raise damaged(problems, subject=side, hint=f"{side} belongs to another checkpoint")
    return content.added_to(catalog, source, side)


def _missing(side: str) -> Problem:
    loss = "the non-tensor values, and the tensors of types that safetensors lacks, are lost"
    return Problem(f"{side} is missing: without it {loss}", "side-file-missing", file=side)


def _foreign(side: str) -> Problem:
    return Problem(f"not read: {side}: ckptool did not write it", "file-unused", file=side)


def split_side(
    catalog: Catalog, path: str, unread: Collection[str] = ()
) -> tuple[list[TensorEntry], list[FileLayout], dict[str, str], list[str]]:
    """Split off what safetensors cannot hold, into a side file ``path`` if there is any.

    ``unread`` are more element types, which a format's own reader does not know. Returns the other
    tensors, the file, the metadata for the headers of all files that it goes with, and notes on
    what is in it or is not carried at all.
    """
    tensors = list(catalog.tensors.values())
    misfits = [entry for entry in tensors if not _is_supported(entry)]
    misfits += [e for e in tensors if _is_supported(e) and e.dtype.safetensors in unread]
    fitting = [e for e in tensors if _is_supported(e) and e.dtype.safetensors not in unread]
    objects, notes = select_plain(catalog, numpy=False)
    nameless = [e.name for e in fitting if e.name and e.path in _NAMELESS]
    notes += [f"a tensor without a name is written as {name!r}" for name in nameless]
    if objects:
        names = [entry.name for entry in objects]
        notes.append(f"{plural(len(names), 'non-tensor value')} in {path}: {list_some(names)}")
    if misfits:
        names = [f"{entry.name} ({entry.dtype})" for entry in misfits]
        notes.append(f"safetensors has no such element type; in {path}: {list_some(names)}")
    if not (misfits or objects):
        return fitting, [], {}, notes
    partner = repr([(entry.name, entry.dtype.name, entry.shape) for entry in fitting])
    state = nest_state([*map(_under_name, misfits)], [*map(_under_name, objects)])
    parts, identity = lay_out_side(state, partner.encode())
    return fitting, [FileLayout(path, tuple(parts))], {SIDE: identity}, notes


def _under_name(entry: Entry) -> Entry:
    """Return an entry at the path by which its name is read again, also without those beside it.

    Of several with one name, all but one have another one than their path.
    """
    is_named = (flat_name(entry.path) or "value") == entry.name
    return entry if is_named else replace(entry, path=(entry.name,))


def _is_supported(entry: TensorEntry) -> bool:
    """Return whether safetensors has a name for the element type, and can hold the shape in it."""
    return bool(entry.dtype.safetensors) and bool(entry.shape or entry.dtype.packed == 1)
