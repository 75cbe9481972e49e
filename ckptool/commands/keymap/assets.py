"""A key map where one is asked for, and the files that go with a model: ``--hf-assets``, config."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from ckptool.commands.keymap.report import MapReport
from ckptool.commands.open import Opened
from ckptool.commands.options.source import MapOptions
from ckptool.commands.unlisted import require_listed, unlisted_problems
from ckptool.core.catalog import Catalog
from ckptool.core.layout import FileLayout, Layout, Literal, Verbatim
from ckptool.errors import UsageError
from ckptool.storage.local import LocalSource

CONFIG = "config.json"


def mapped(
    opened: Opened, catalog: Catalog, options: MapOptions
) -> tuple[Catalog, MapReport | None]:
    """The (located) catalog under the key map that is asked for, if any, and what was done.

    Raises UsageError or Unsupported where that is not possible.
    """
    if options.name is None:
        if options.dims or options.inverse is not None:
            raise UsageError("--dim and --inverse require --map")
        return catalog, None
    from ckptool.commands.keymap.builtin import map_checkpoint

    return map_checkpoint(opened, catalog, options)


def with_assets(
    layout: Layout, assets: Path | None, report: MapReport | None, catalog: Catalog, *, model: bool
) -> Layout:
    """The layout with the files of ``assets``, which go before those of the same name.

    ``model`` says that the target is a model's folder: it gets a config.json from the map's report
    where it has none. UsageError where files are asked for and the target is a single file.
    """
    if assets is not None and not layout.folder:
        raise UsageError("--hf-assets requires a target folder, not a single file")
    files = [] if assets is None else _asset_files(assets)
    names = {file.path for file in files}
    files += [file for file in layout.files if file.path not in names]
    if not model or report is None or any(file.path == CONFIG for file in files):
        return replace(layout, files=tuple(files))
    if report.config is None:
        lacks = (
            f"config.json not written: {report.config_lacks}; use --hf-assets FOLDER to copy one"
        )
        return replace(
            layout, notes=(*layout.notes, lacks) if report.config_lacks else layout.notes
        )
    from ckptool.commands.keymap.hf_config import with_dtype

    text = json.dumps(with_dtype(report.config, catalog), indent=2) + "\n"
    made = FileLayout(CONFIG, (Literal(text.encode()),))
    note = f"{CONFIG} written from the configuration recorded in the checkpoint"
    return replace(layout, files=(made, *files), notes=(*layout.notes, note))


def _asset_files(folder: Path) -> list[FileLayout]:
    """The files of ``--hf-assets``, to be copied as they are."""
    root = folder.resolve()
    _, found = assets_in(folder)
    return [FileLayout(name, (Verbatim(str(root / name), size),)) for name, size in found.items()]


def assets_in(folder: Path) -> tuple[LocalSource, dict[str, int]]:
    """A folder, and the sizes of config.json, tokenizer files and their like in it.

    UsageError where it is no folder, or holds none of them.
    """
    from ckptool.formats.companions import companions

    if not folder.is_dir():
        raise UsageError(f"--hf-assets {folder}: no such folder")
    source = LocalSource.folder(folder)
    require_listed(unlisted_problems(source.unlisted))
    found = companions(source)
    if not found:
        raise UsageError(
            f"--hf-assets {folder}: no config.json or tokenizer file among"
            f" {len(source.files):,} files"
        )
    return source, found
