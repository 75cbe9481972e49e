"""Carry config.json, tokenizers and the like from beside bare tensors into a model's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec.structs import replace

from ckptool.commands.model.adapter_config import ADAPTER_CONFIG
from ckptool.commands.model.assets import NOT_CARRIED
from ckptool.commands.model.links import require_own
from ckptool.commands.model.records import CONFIG
from ckptool.commands.open import OpenedCheckpoint
from ckptool.core.layout import FileLayout, Layout, Verbatim
from ckptool.core.text import list_some
from ckptool.errors import Unsupported
from ckptool.formats.companions import OF_VERL, TRAINER_STATE, companions, read_json_object
from ckptool.serialization.source import Source
from ckptool.storage.local import LocalSource
from ckptool.storage.place import on_disk

_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_OF_A_MODEL = ("model_type", "architectures")
"""Keys of a config.json that a model of transformers, or vLLM, is made from."""
_MOST_SHOWN = 3


def with_files_beside(
    opened: OpenedCheckpoint, layout: Layout, complete: Callable[[Layout, bool], Layout]
) -> Layout:
    """Add the files of the model that lie beside a checkpoint of tensors alone, then ``complete``.

    Those of its own folder, else of verl's ``../huggingface/``, else of the Trainer's checkpoint
    around it: the first whose config.json fits. A note says what was added, or why it was not: a
    config.json that contradicts the tensors may be another model's, also if they are a part of one.
    A layout that has one already gets none, nor does an adapter get its base model's.
    ``complete`` takes a layout, and whether its config.json must fit.
    """
    names = {*layout.sizes}
    if opened.catalog.companions or names & {CONFIG, ADAPTER_CONFIG}:
        return complete(layout, False)
    refused: list[str] = []
    for place, root, files in _beside(opened):
        if _ADAPTER_WEIGHTS in names and all(file.path != ADAPTER_CONFIG for file in files):
            continue
        added = tuple(file for file in files if file.path not in names)
        shown = list_some([file.path for file in added], _MOST_SHOWN)
        note = f"carried from {place}: {shown}"
        more = replace(layout, files=(*layout.files, *added), notes=(*layout.notes, note))
        try:
            if root is not None:
                require_own(root, [str(Path(place, file.path).relative_to(root)) for file in added])
            return complete(more, True)
        except Unsupported as error:
            hint = f"; {error.hint}" if error.hint else ""
            refused.append(f"{NOT_CARRIED} {place}: {shown}, as {error}{hint}")
    return complete(replace(layout, notes=(*layout.notes, *refused)), False)


def _beside(opened: OpenedCheckpoint) -> Iterator[tuple[str, Path | None, list[FileLayout]]]:
    """Yield the folders beside a checkpoint that have a model's config.json, and their files.

    With each comes the folder around it, unless it is the source's own.
    """
    if opened.path.is_dir() and _is_model(opened.source):
        sizes = companions(opened.source).items()
        yield "the source's folder", None, [_copy(name, name, size) for name, size in sizes]
    if (path := on_disk(opened.path)) is None:
        return
    real_path = path.resolve()
    around = real_path.parent
    for folder in (around / OF_VERL, *([around] if (around / TRAINER_STATE).is_file() else ())):
        if folder == real_path or not folder.is_dir():
            continue
        source = LocalSource.folder(folder)
        if _is_model(source):
            sizes = companions(source).items()
            copies = [_copy(n, str(folder / n), size) for n, size in sizes]
            yield str(folder), around, copies


def _copy(name: str, file: str, size: int) -> FileLayout:
    return FileLayout(name, (Verbatim(file, size),))


def _is_model(source: Source) -> bool:
    """Return whether a folder has a config.json that a model is made from, no trainer's own.

    Raises Damaged or NotFound for one that cannot be read.
    """
    content = read_json_object(source, CONFIG)
    return any(key in content for key in _OF_A_MODEL)
