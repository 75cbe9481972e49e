"""The files that go with a model: those of ``--hf-assets``, and a correct config.json.

A config.json is copied, or written from what the checkpoint records. It states the dtype of the
output and no quantization of weights that are dequantized; it is refused if it does not describe
the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ckptool.commands.model.adapter_config import ADAPTER_CONFIG, is_of_lora
from ckptool.commands.model.config import (
    config_problems,
    main_dtype,
    with_dtype,
)
from ckptool.commands.model.links import require_own, require_own_files
from ckptool.commands.model.records import (
    CONFIG,
    DTYPE_KEYS,
    Record,
    object_in,
    parse_object,
    read_beside,
    read_file,
    read_nearest,
)
from ckptool.commands.open import OpenedCheckpoint
from ckptool.commands.unread_files import require_listed, unlisted_problems
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.layout import FileLayout, Layout, Literal, Part, Verbatim
from ckptool.errors import CkptoolError, Damaged, Unsupported, UsageError
from ckptool.formats.companions import OF_VERL, PIPELINE, models_of_pipeline
from ckptool.serialization.source import parse_json_object
from ckptool.storage.files import Files, unreadable
from ckptool.storage.local import LocalSource
from ckptool.storage.place import on_disk
from ckptool.storage.url import Location

if TYPE_CHECKING:
    from ckptool.commands.keymap.maps import MapReport
    from ckptool.formats.base import Format

_MOST_SHOWN = 6
_DECLARING = ("quantization_config", "compression_config")
QUANTIZATION_KEYS = (*_DECLARING, "expert_dtype")
"""Keys that say how weights are quantized; the last is DeepSeek V4's, beside the others."""
NOT_CARRIED = "not carried from"
"""How the note begins on a folder beside the source whose config.json contradicts the tensors."""
_TOKENIZERS = frozenset(
    "tokenizer.json tokenizer.model tokenizer_config.json vocab.json vocab.txt spiece.model".split()
)
_QUANTIZATION_METHODS = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""The files that describe a quantization, and their writers: AutoGPTQ, AutoAWQ and ModelOpt."""
QUANTIZATION_FILES = tuple(_QUANTIZATION_METHODS)


def with_assets(
    source: Files,
    layout: Layout,
    assets: Path | None,
    report: MapReport | None,
    catalog: Catalog,
    writer: Format,
) -> Layout:
    """Add the files of ``assets`` to a layout, replacing those of the same name.

    They lie where the ``writer`` has its companions. If the target is a model's folder and has no
    config.json, it gets one from the map's report. Raises Unsupported for links out of the folders
    that files are copied from.
    """
    files = [] if assets is None else _asset_files(assets, catalog)
    if writer.loading.companions_in:
        files = [file.within(writer.loading.companions_in) for file in files]
    names = {file.path for file in files}
    source_files = [file for file in layout.files if file.path not in names]
    require_own_files(source, source_files)
    files += source_files
    layout = replace(layout, files=tuple(files))
    if assets is not None and not _is_adapter(catalog) and (assets / ADAPTER_CONFIG).exists():
        note = f"{ADAPTER_CONFIG} of {assets} left out: the tensors are no adapter's"
        layout = replace(layout, notes=(*layout.notes, note))
    if (
        not writer.loading.is_model_folder
        or report is None
        or any(file.path == CONFIG for file in files)
    ):
        return layout
    if report.config is not None:
        note = f"{CONFIG} written from the configuration recorded in the checkpoint"
        config = with_dtype(report.config, main_dtype(catalog))
        return replace(layout, files=(config_file(config), *files), notes=(*layout.notes, note))
    if report.config_lacks:
        note = f"{CONFIG} not written: {report.config_lacks}; use --hf-assets FOLDER to copy one"
        return replace(layout, notes=(*layout.notes, note))
    return layout


def lacking_files(layout: Layout, source: Location) -> list[str]:
    """Return a note on the files that transformers and vLLM expect in a model's folder and lack.

    It names the folder that has them, if that is the source's or lies around it, unless a note of
    the layout says that its config.json contradicts the tensors.
    """
    paths = {*layout.sizes}
    if ADAPTER_CONFIG in paths:
        return [f"an adapter: loading it needs its base model, which {ADAPTER_CONFIG} names"]
    lacks = [] if CONFIG in paths else [CONFIG]
    if not any(path in _TOKENIZERS or path.endswith(".tiktoken") for path in paths):
        lacks.append("a tokenizer")
    if not lacks:
        return []
    verb = "is" if len(lacks) == 1 else "are"
    is_wrong = any(note.startswith(NOT_CARRIED) for note in layout.notes)
    folder = _folder_of_assets(source) if CONFIG in lacks and not is_wrong else "FOLDER"
    return [f"{' and '.join(lacks)} {verb} missing: copy with --hf-assets {folder}"]


def _folder_of_assets(source: Location) -> str:
    """Return the nearest local folder around a checkpoint that has a config.json, or FOLDER."""
    names = (CONFIG, f"{OF_VERL}/{CONFIG}")
    file = ""
    with suppress(CkptoolError, OSError):  # it is only named in a note
        file, _ = read_nearest(source, names) if on_disk(source) else ("", {})
    return quote(str(Path(file).parent)) if file else "FOLDER"


def _asset_files(folder: Path, catalog: Catalog) -> list[FileLayout]:
    """Lay out the files of ``--hf-assets``, to be copied unchanged."""
    root = folder.resolve()
    _, sizes = assets_in(folder, catalog)
    require_own(folder, sizes)
    return [FileLayout(name, (Verbatim(str(root / name), size),)) for name, size in sizes.items()]


def assets_in(folder: Path, catalog: Catalog) -> tuple[LocalSource, dict[str, int]]:
    """Return a folder and the sizes of its config.json, tokenizer files and similar ones.

    An adapter's config is only for the tensors of one: transformers would load a model beside it as
    an adapter. Raises UsageError if it is not a folder, or has no such files.
    """
    from ckptool.formats.companions import companions

    if not folder.is_dir():
        raise UsageError(
            f"--hf-assets {folder}: no such folder",
            hint="it is a folder with the model's config.json and tokenizer, such as"
            " `hf download OWNER/MODEL --exclude '*.safetensors' --local-dir FOLDER` makes",
        )
    source = LocalSource.folder(folder)
    require_listed(unlisted_problems(source.unlisted))
    sizes = companions(source)
    if not _is_adapter(catalog):
        sizes.pop(ADAPTER_CONFIG, None)
    if not sizes:
        raise UsageError(
            f"--hf-assets {folder}: no config.json or tokenizer file among"
            f" {len(source.files):,} files"
        )
    return source, sizes


def _is_adapter(catalog: Catalog) -> bool:
    """Return whether tensors are those of an adapter, by the names that PEFT gives them."""
    is_said = ADAPTER_CONFIG in {name.rpartition("/")[2] for name in catalog.companions}
    return is_said or any(n.startswith("base_model.") or is_of_lora(n) for n in catalog.tensors)


def drop_quantization_config(opened: OpenedCheckpoint, layout: Layout) -> Layout:
    """Drop the files and settings of a layout that declare the weights quantized; add notes."""
    files, notes = [], []
    for file in layout.files:
        if file.path in QUANTIZATION_FILES:
            notes.append(f"{file.path} left out, as no tensor is quantized")
            continue
        rest, keys = _drop_quantization(opened, file) if file.path == CONFIG else (file, [])
        files.append(rest)
        if keys:
            notes.append(f"{CONFIG}: {', '.join(keys)} removed, as no tensor is quantized")
    return replace(layout, files=tuple(files), notes=(*layout.notes, *notes))


def _drop_quantization(opened: OpenedCheckpoint, file: FileLayout) -> tuple[FileLayout, list[str]]:
    """Drop the quantization from a config.json, and from those nested in it; return the keys."""
    config = read_object(opened, file.parts[0])
    keys = [(part, key) for part in _models(config) for key in QUANTIZATION_KEYS if key in part]
    for part, key in keys:
        del part[key]
    return (config_file(config) if keys else file), list(dict.fromkeys(key for _, key in keys))


def with_true_configs(
    opened: OpenedCheckpoint, catalog: Catalog, layout: Layout, *, cast: bool, partial: bool
) -> Layout:
    """Make the config.json of a layout (if any), or those of a pipeline, describe the tensors.

    If tensors were ``cast`` it states their new type. Raises Unsupported if it contradicts the
    tensors; for a ``partial`` checkpoint that is only noted.
    """
    models = {CONFIG: catalog}
    if any(file.path == PIPELINE for file in layout.files):
        models |= {
            f"{folder}/{CONFIG}": part for folder, part in models_of_pipeline(catalog).items()
        }
    for path, model in models.items():
        layout = _with_true_config(opened, model, layout, path, cast=cast, partial=partial)
    return layout


def _with_true_config(
    opened: OpenedCheckpoint,
    catalog: Catalog,
    layout: Layout,
    path: str,
    *,
    cast: bool,
    partial: bool,
) -> Layout:
    file = next((file for file in layout.files if file.path == path), None)
    config: Record = read_object(opened, file.parts[0]) if file and file.parts else {}
    if not config:
        return layout
    if cast:
        layout, config = _with_main_dtype(catalog, layout, path, config)
    problems = config_problems(config, catalog)
    if not problems:
        return layout
    if partial:
        return replace(layout, notes=(*layout.notes, *map(str, problems)))
    types = [str(config[key]) for key in DTYPE_KEYS if config.get(key)]
    only_type = all(problem.tensor is None and "most elements" in problem for problem in problems)
    raise Unsupported(
        f"{path} does not match the tensors:\n  " + "\n  ".join(problems[:_MOST_SHOWN]),
        hint=f"--dtype {types[0].removeprefix('torch.')} casts the weights to match"
        if only_type and types
        else "use --hf-assets FOLDER to copy the config.json of this model",
    )


def _with_main_dtype(
    catalog: Catalog, layout: Layout, path: str, config: Record
) -> tuple[Layout, Record]:
    """Set the dtype of a layout's config.json, if it states one, to that of most elements."""
    main = main_dtype(catalog)
    types = {str(config[key]).removeprefix("torch.") for key in DTYPE_KEYS if config.get(key)}
    if main is None or not types or types == {main}:
        return layout, config
    config = with_dtype(config, main)
    new_file = config_file(config, path)
    files = tuple(new_file if file.path == path else file for file in layout.files)
    note = f"{path}: dtype set to {main}, as written"
    return replace(layout, files=files, notes=(*layout.notes, note)), config


def quantization_config(opened: OpenedCheckpoint, assets: Path | None) -> Mapping[str, Any]:
    """Return the quantization that a model's config.json, or an older file beside it, states.

    ``assets`` take precedence over the checkpoint's own. Returns {} if none states any. Raises
    Unsupported for a pipeline, whose components have one each, Damaged or NotFound for a file that
    cannot be read.
    """
    if PIPELINE in opened.catalog.companions:
        raise Unsupported(
            f"--dequantize: {opened.path} is a pipeline: each component has its own config",
            hint=f"dequantize one component: ckptool convert {opened.path}/transformer DST --to hf",
        )
    for name, method in {CONFIG: None, **_QUANTIZATION_METHODS}.items():
        for read in _readers(opened, assets, name):
            content = dict(read())
            inside = [c[key] for c in _models(content) for key in _DECLARING if key in c]
            for config in [content.get("quantization", content)] if method else inside:
                if config is not None and not isinstance(config, dict):
                    raise Damaged(
                        f"{name}: what it says of the quantization is not an object",
                        hint="correct it in a copy, and pass that folder as --hf-assets",
                    )
                if config:
                    return {"quant_method": method, **config} if method else config
    return {}


def require_unquantized(opened: OpenedCheckpoint, assets: Path | None, entry: TensorEntry) -> None:
    """Raise Unsupported if a config says that a model is quantized, of which a weight is cast."""
    name = entry.name
    configs = [n for n in opened.catalog.companions if n.endswith(f"/{CONFIG}")]
    if PIPELINE not in opened.catalog.companions:
        is_quantized = bool(quantization_config(opened, assets))
    else:
        contents = (read_object(opened, Verbatim(n, opened.catalog.companions[n])) for n in configs)
        is_quantized = any(key in content for content in contents for key in _DECLARING)
    if is_quantized:
        raise Unsupported(
            f"{name}: {entry.source_dtype}, and quantization_config says that the model is"
            " quantized: a cast would leave out how",
            hint="use --dequantize, or leave --dtype out to keep it as it is",
        )


def _readers(
    opened: OpenedCheckpoint, assets: Path | None, name: str
) -> Iterator[Callable[[], Record]]:
    """Yield the readers of a file of the ``assets``, of the checkpoint, or beside its one file."""
    if assets is not None and name in (sizes := assets_in(assets, opened.catalog)[1]):
        yield partial(read_object, opened, Verbatim(str(assets.resolve() / name), sizes[name]))
    companions = opened.catalog.companions.items()
    parts = [Verbatim(file, size) for file, size in companions if Path(file).name == name]
    yield from (partial(read_object, opened, part) for part in parts)
    if not parts:
        yield partial(read_beside, opened.source, name)
    if opened.path.name in opened.source.files and not opened.path.is_dir():
        yield partial(read_file, opened.path.parent / name)


def read_object(opened: OpenedCheckpoint, part: Part) -> dict[str, Any]:
    """Read the JSON object of a file of the source, or of ``--hf-assets``; {} for no such part.

    Raises Damaged if it is none, NotFound if it cannot be read.
    """
    if isinstance(part, Literal):
        return parse_json_object(part.data, CONFIG)
    if not isinstance(part, Verbatim):
        return {}
    if Path(part.file).is_absolute():
        return parse_object(part.file, part.nbytes, partial(_read_bytes, Path(part.file)))
    return object_in(opened.source, part.file)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(str(path), error) from None


def config_file(config: Record, path: str = CONFIG) -> FileLayout:
    """Return a configuration as transformers and PEFT write one."""
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    data = text.encode(errors="backslashreplace")  # half a character, as JSON's own escape
    return FileLayout(path, (Literal(data),))


def _models(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a config and those nested in it, such as ``text_config``."""
    yield config
    yield from (value for value in config.values() if isinstance(value, dict))
