"""The files that contain only an optimizer's state, beside those of the model."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from ckptool.commands.open import OpenedCheckpoint, open_checkpoint
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.verify.checks.recorded_hashes import LISTS
from ckptool.core.catalog import Catalog, TensorEntry, places, stored_places
from ckptool.core.state_category import with_every_part
from ckptool.core.text import list_some
from ckptool.errors import CkptoolError, Unsupported
from ckptool.formats.base import ScanOptions
from ckptool.serialization.source import read_metadata
from ckptool.storage.files import Files
from ckptool.storage.local import LocalSource
from ckptool.storage.url import Location

_STATE_DICT = frozenset(["state", "param_groups"])


def require_unlisted(source: Files, names: Iterable[str]) -> None:
    """Raise Unsupported if a list of the folder's files contains one that is to be removed."""
    lists = [file for file in LISTS if file in source.files]
    texts = {file: read_metadata(source, file) for file in lists}
    for name in names:
        for file, text in texts.items():
            if name.encode() in text:
                raise Unsupported(f"{file} lists {name}, and verify would report it missing")


def require_optimizer(path: Location) -> None:
    """Raise Unsupported if a file contains more than the state dict of an optimizer."""
    try:
        found = open_checkpoint(path, ReadOptions("torch-save")).catalog
    except CkptoolError as error:
        raise Unsupported(f"{path.name} cannot be read: {error.message}") from None
    heads = {name.partition(".")[0] for name in (*found.tensors, *found.objects)}
    if not found.tensors or not heads <= _STATE_DICT:
        raise Unsupported(f"{path.name} is not an optimizer's state dict")


def files_apart(
    opened: OpenedCheckpoint, kept: Catalog, dropped: Collection[TensorEntry]
) -> frozenset[str]:
    """Return the files of the ``dropped`` tensors, without which the rest is complete.

    Raises Unsupported if they also contain something ``kept``, or the rest would not be readable.
    """
    name = opened.format.name
    theirs, others = _files_of(dropped), _files_of(kept.tensors.values())
    if shared := sorted(theirs & others):
        raise Unsupported(f"ckptool does not write {name}, and {shared[0]} holds the model too")
    used = {file.rpartition("/")[0] for file in others}
    folders = {file.rpartition("/")[0] for file in theirs} - used - {""}
    below = tuple(f"{folder}/" for folder in folders)
    theirs |= {file for file in opened.source.files if file.startswith(below)}
    require_unlisted(opened.source, sorted(theirs))
    view = LocalSource.folder(Path(str(opened.path)), theirs)
    lost = list_some(sorted(theirs), 1)
    try:
        left = with_every_part(opened.format.reading.scan(view, ScanOptions()))
    except CkptoolError as error:
        raise Unsupported(f"{name} is incomplete without {lost}: {error.problems[0]}") from None
    values = sorted(kept.objects.keys() - left.objects.keys())
    if values or _looks(left) != _looks(kept):
        what = list_some(values, 1) if values else "tensors"
        raise Unsupported(f"{name}: {what} would change without {lost}")
    return theirs


def _files_of(entries: Iterable[TensorEntry]) -> frozenset[str]:
    found = (place for entry in entries for at in places(entry) for place in stored_places(at))
    return frozenset(place.file for place in found)


def _looks(catalog: Catalog) -> dict[str, object]:
    return {name: (e.dtype, e.shape, len(e.chunks)) for name, e in catalog.tensors.items()}
