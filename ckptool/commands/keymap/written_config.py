"""The config.json that goes with what is written: it must describe the tensors.

What a model's config.json says of its quantised weights, and its copy once they are numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptool.commands.keymap.assets import CONFIG
from ckptool.commands.keymap.config_check import Config, config_problems, main_dtype, with_dtype
from ckptool.commands.open import Opened
from ckptool.core.catalog import Catalog
from ckptool.core.layout import FileLayout, Layout, Literal, Part, Verbatim
from ckptool.core.quantization import kinds
from ckptool.errors import Unsupported

_MOST_SHOWN = 6
_KEYS = ("dtype", "torch_dtype")


def with_true_config(
    opened: Opened, catalog: Catalog, layout: Layout, *, cast: bool, partial: bool
) -> Layout:
    """The layout, whose config.json (if any) describes the tensors.

    Where tensors were ``cast`` it says their new type. Unsupported where it says something else
    than the tensors; of a ``partial`` checkpoint that is only noted.
    """
    file = next((file for file in layout.files if file.path == CONFIG), None)
    config: Config = content_of(opened, file.parts[0]) if file and file.parts else {}
    if not config:
        return layout
    if cast:
        layout, config = _with_type(catalog, layout, config)
    problems = config_problems(config, catalog)
    if not problems:
        return layout
    if partial:
        return replace(layout, notes=(*layout.notes, *map(str, problems)))
    types = [str(config[key]) for key in _KEYS if config.get(key)]
    only_type = all(problem.tensor is None and "most elements" in problem for problem in problems)
    raise Unsupported(
        "config.json does not match the tensors:\n  " + "\n  ".join(problems[:_MOST_SHOWN]),
        hint=f"--dtype {types[0].removeprefix('torch.')} casts the weights to match"
        if only_type and types
        else "use --hf-assets FOLDER to copy the config.json of this model",
    )


def _with_type(catalog: Catalog, layout: Layout, config: Config) -> tuple[Layout, Config]:
    """With a config.json that says the type of most elements."""
    main = main_dtype(catalog)
    said = {str(config[key]).removeprefix("torch.") for key in _KEYS if config.get(key)}
    if main is None or not said or said == {main}:
        return layout, config
    made = with_dtype(config, main)
    text = json.dumps(made, indent=2, ensure_ascii=False) + "\n"
    file = FileLayout(CONFIG, (Literal(text.encode()),))
    files = tuple(file if one.path == CONFIG else one for one in layout.files)
    note = f"{CONFIG}: dtype set to {main}, as written"
    return replace(layout, files=files, notes=(*layout.notes, note)), made


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


def drop_quantization_config(opened: Opened, catalog: Catalog, layout: Layout) -> Layout:
    """The layout without what says that the weights are quantised.

    Where some still are, in a way that no numbers are made of, all of it stays, and is noted.
    """
    left = kinds(catalog)
    if left:
        listed = ", ".join(f"{count} {kind}" for kind, count in left.items())
        note = f"still quantized (not supported by --dequantize): {listed}"
        return replace(layout, notes=(*layout.notes, note))
    kept = tuple(file for file in layout.files if file.path not in _FILES)
    files = tuple(_plain(opened, file) if file.path == CONFIG else file for file in kept)
    if files == kept:
        return replace(layout, files=files)
    note = f"{CONFIG}: quantization_config removed"
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
