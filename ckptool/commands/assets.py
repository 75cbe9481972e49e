"""Files that go with a model: those of ``--hf-assets``, beside what a writer lays out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ckptool.core.layout import FileLayout, Layout, Verbatim
from ckptool.engine.sources import LocalSource
from ckptool.errors import UsageError
from ckptool.formats._companions import companions


def asset_files(folder: Path) -> list[FileLayout]:
    """config.json, tokenizer files and their like in a folder, to be copied as they are.

    UsageError where it is no folder, or holds none of them.
    """
    if not folder.is_dir():
        raise UsageError(f"--hf-assets {folder}: no such folder")
    source = LocalSource.folder(folder)
    found = companions(source)
    if not found:
        raise UsageError(
            f"--hf-assets {folder}: no config.json and no tokenizer file among its"
            f" {len(source.files):,} files"
        )
    root = folder.resolve()
    return [FileLayout(name, (Verbatim(str(root / name), size),)) for name, size in found.items()]


def with_files(layout: Layout, files: list[FileLayout]) -> Layout:
    """The layout with more files, which go before those of the same name.

    UsageError where the target is a single file.
    """
    if not files:
        return layout
    if not layout.folder:
        raise UsageError("--hf-assets: the target is a single file, not a folder")
    names = {file.path for file in files}
    kept = [file for file in layout.files if file.path not in names]
    return replace(layout, files=(*files, *kept))
