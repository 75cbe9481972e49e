"""What a model's config.json says of its quantised weights, and its copy once they are numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptool.commands.assets import CONFIG
from ckptool.commands.open import Opened
from ckptool.core.catalog import Catalog
from ckptool.core.layout import FileLayout, Layout, Literal, Part, Verbatim
from ckptool.core.quantised import kinds

_LARGEST = 1 << 24
_SAYS = ("quantization_config", "compression_config")
_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")


def block_size(opened: Opened) -> tuple[int, int] | None:
    """The size of a block as the model's config.json says it (DeepSeek-V3, transformers)."""
    for part in _with_parts(_config(opened)):
        try:
            rows, columns = map(int, part["quantization_config"]["weight_block_size"])
        except (ValueError, KeyError, TypeError):
            continue
        if rows > 0 and columns > 0:
            return rows, columns
    return None


def as_numbers(opened: Opened, catalog: Catalog, layout: Layout) -> Layout:
    """The layout without what says that the weights are quantised.

    Where some still are, in a way that no numbers are made of, all of it stays, and is noted.
    """
    left = kinds(catalog)
    if left:
        listed = ", ".join(f"{count} {kind}" for kind, count in left.items())
        note = f"still quantised, as no numbers are made of it: {listed}"
        return replace(layout, notes=(*layout.notes, note))
    kept = tuple(file for file in layout.files if file.path not in _FILES)
    files = tuple(_plain(opened, file) if file.path == CONFIG else file for file in kept)
    if files == kept:
        return replace(layout, files=files)
    note = f"{CONFIG} no longer says that the weights are quantised"
    return replace(layout, files=files, notes=(*layout.notes, note))


def _plain(opened: Opened, file: FileLayout) -> FileLayout:
    """A config.json that is to be copied, without what it says of quantised weights."""
    config = content_of(opened, file.parts[0])
    says = [part for part in _with_parts(config) if any(key in part for key in _SAYS)]
    if not says:
        return file
    for part in says:
        for key in _SAYS:
            part.pop(key, None)
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return FileLayout(CONFIG, (Literal(text.encode()),))


def _config(opened: Opened) -> dict[str, Any]:
    """The content of the model's config.json; empty where there is none that can be read."""
    companions = opened.catalog.companions
    name = next((n for n in companions if n.rpartition("/")[2] == CONFIG), None)
    return {} if name is None else content_of(opened, Verbatim(name, companions[name]))


def content_of(opened: Opened, part: Part) -> dict[str, Any]:
    """The JSON object of a file of the source, or of ``--hf-assets``; empty where it is none."""
    if not isinstance(part, Verbatim | Literal) or part.nbytes > _LARGEST:
        return {}
    try:
        if isinstance(part, Literal):
            content = json.loads(part.data)
        elif Path(part.file).is_absolute():
            content = json.loads(Path(part.file).read_bytes())
        else:
            content = json.loads(opened.source.read(part.file, 0, part.nbytes))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _with_parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A config and those of the models it is made of, such as ``text_config``."""
    yield config
    yield from (value for value in config.values() if isinstance(value, dict))
