"""The config.json that goes with what is written: it must describe the tensors."""

from __future__ import annotations

import json
from dataclasses import replace

from ckptool.commands.assets import CONFIG
from ckptool.commands.config_check import Config, config_problems, main_dtype, with_dtype
from ckptool.commands.numbers_config import content_of
from ckptool.commands.open import Opened
from ckptool.core.catalog import Catalog
from ckptool.core.layout import FileLayout, Layout, Literal
from ckptool.errors import CannotDo

_MOST_SHOWN = 6
_KEYS = ("dtype", "torch_dtype")


def with_true_config(
    opened: Opened, catalog: Catalog, layout: Layout, *, cast: bool, partial: bool
) -> Layout:
    """The layout, whose config.json (if any) describes the tensors.

    Where tensors were ``cast`` it says their new type. CannotDo where it says something else than
    the tensors; of a ``partial`` checkpoint that is only noted.
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
    raise CannotDo(
        "the config.json that goes with them does not describe the tensors:\n  "
        + "\n  ".join(problems[:_MOST_SHOWN]),
        hint=f"--dtype {types[0].removeprefix('torch.')} casts the weights to what it says"
        if only_type and types
        else "--hf-assets FOLDER carries the config.json of this model along",
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
    note = f"{CONFIG} says {main}, as the tensors are written"
    return replace(layout, files=files, notes=(*layout.notes, note)), made
