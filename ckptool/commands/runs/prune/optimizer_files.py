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
        catalog = open_checkpoint(path, ReadOptions("torch-save")).catalog
    except CkptoolError as error:
        raise Unsupported(f"{path.name} cannot be read: {error.message}") from None
    heads = {name.partition(".")[0] for name in (*catalog.tensors, *catalog.objects)}
    if not catalog.tensors or not heads <= _STATE_DICT:
        raise Unsupported(f"{path.name} is not an optimizer's state dict")


def separate_files(
    opened: OpenedCheckpoint, rest: Catalog, optimizer: Collection[TensorEntry]
) -> frozenset[str]:
    """Return the files of an optimizer's tensors, without which the ``rest`` is complete.

    Raises Unsupported if they also contain something of it, or it would not be readable.
    """
    name = opened.format.name
    files, rest_files = _files_of(optimizer), _files_of(rest.tensors.values())
    if shared := sorted(files & rest_files):
        raise Unsupported(f"ckptool does not write {name}, and {shared[0]} holds the model too")
    rest_folders = {file.rpartition("/")[0] for file in rest_files}
    folders = {file.rpartition("/")[0] for file in files} - rest_folders - {""}
    heads = tuple(f"{folder}/" for folder in folders)
    files |= {file for file in opened.source.files if file.startswith(heads)}
    require_unlisted(opened.source, sorted(files))
    view = LocalSource.folder(Path(str(opened.path)), files)
    text = list_some(sorted(files), 1)
    try:
        catalog = with_every_part(opened.format.scan(view, ScanOptions()))
    except CkptoolError as error:
        raise Unsupported(f"{name} is incomplete without {text}: {error.problems[0]}") from None
    for conflict in catalog.conflicts.keys() - opened.catalog.conflicts.keys():
        raise Unsupported(f"{name} is incomplete without {text}: {catalog.conflicts[conflict]}")
    values = sorted(rest.objects.keys() - catalog.objects.keys())
    if values or _looks(catalog) != _looks(rest):
        what = list_some(values, 1) if values else "tensors"
        raise Unsupported(f"{name}: {what} would change without {text}")
    return files


def _files_of(entries: Iterable[TensorEntry]) -> frozenset[str]:
    ranges = (stored for entry in entries for at in places(entry) for stored in stored_places(at))
    return frozenset(stored.file for stored in ranges)


def _looks(catalog: Catalog) -> dict[str, object]:
    return {name: (e.dtype, e.shape, len(e.chunks)) for name, e in catalog.tensors.items()}
