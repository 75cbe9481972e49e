"""A pipeline of diffusers: ``model_index.json``, and a folder for each of its components.

``DiffusionPipeline.save_pretrained`` (diffusers 0.42) writes them. Model components have
``diffusion_pytorch_model.safetensors``, or ``model.safetensors`` if they are transformers', in one
file or in shards, beside a config.json; schedulers and tokenizers are text files. The component's
folder begins each name. Files of a variant (``model.fp16.safetensors``) are the same model again:
they are read if they are the only ones, and written without that word.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from ckptool.core.catalog import Catalog
from ckptool.core.layout import Layout
from ckptool.core.selection import entries_of, with_prefix
from ckptool.errors import Problem, Unsupported
from ckptool.formats import FORMATS
from ckptool.formats.base import (
    Detection,
    Format,
    Reading,
    Request,
    ScanOptions,
    Writing,
)
from ckptool.formats.companions import (
    CONFIG,
    PIPELINE,
    companions,
    component,
    join_catalogs,
    read_json_object,
    scan_subfolder,
)
from ckptool.formats.safetensors import huggingface
from ckptool.formats.writing import lay_out_companions
from ckptool.serialization.source import Source

_READERS = ("hf", "torch-save")
_TEXTS = (".json", ".txt", ".model", ".jinja")


def _components(source: Source) -> dict[str, str]:
    """Return the components of a pipeline, with their classes.

    A component is a list of a library and a class, null if the pipeline lacks it.
    """
    index = read_json_object(source, PIPELINE)
    return {
        name: str(value[1])
        for name, value in index.items()
        if isinstance(value, list) and len(value) == 2 and value[1] and _is_folder(name)
    }


def _is_folder(name: str) -> bool:
    return "/" not in name and "\\" not in name and not name.startswith((".", "_"))


def _scan(source: Source, options: ScanOptions) -> Catalog:
    parts: list[Catalog] = []
    problems: list[str] = []
    components = _components(source)
    for name, kind in components.items():
        folder = source.narrowed(name)
        row = next((FORMATS[n] for n in _READERS if FORMATS[n].matches(folder)), None)
        if not folder.files or (row is None and CONFIG in folder.files):
            what = "weights" if folder.files else "folder"
            message = f"{name}: {PIPELINE} lists this {kind}, but it has no {what}"
            problems.append(Problem(message, "file-missing", file=f"{name}/"))
        if row is not None:
            inner = scan_subfolder(row.scan, source, name, options, prefix=f"{name}.")
            parts.append(with_prefix(inner, name))
    options.report(problems, subject=source.root)
    joined = join_catalogs(Catalog("diffusers", {}, {}, {}, world_size=1), *parts)
    index = read_json_object(source, PIPELINE)
    info = {"writer": "diffusers", "version": str(index.get("_diffusers_version", ""))}
    info |= {"arguments": str(index.get("_class_name", ""))}
    return replace(
        joined,
        info={key: value for key, value in info.items() if value},
        companions=dict(_texts(source, components)),
    )


def _texts(source: Source, components: dict[str, str]) -> Iterator[tuple[str, int]]:
    """Yield the files without tensors: the index, configurations, tokenizers."""
    yield from {PIPELINE: source.files[PIPELINE], **companions(source)}.items()
    for name, size in source.files.items():
        folder, _, file = name.partition("/")
        is_text = file.endswith(_TEXTS) and not file.endswith(".index.json")
        if folder in components and (is_text or name in companions(source, f"{folder}/")):
            yield name, size


def lay_out(catalog: Catalog, request: Request) -> Layout:
    """Lay out each component's weights as a model's folder, and copy all text files.

    Raises Unsupported if the checkpoint is not a pipeline, or a name is of no component.
    """
    if PIPELINE not in catalog.companions:
        raise Unsupported(
            f"--to diffusers: {PIPELINE} is missing, which says what the pipeline is made of",
            hint="--to hf writes one model: put it into the folder of its component",
        )
    components = {name.partition("/")[0] for name in catalog.files}
    for entry in entries_of(catalog):
        if len(entry.path) < 2 or entry.path[0] not in components:
            raise Unsupported(
                f"{entry.name}: the pipeline has no component for it, only {', '.join(components)}",
                hint="names begin with the component's folder: rename or --drop it",
            )
    files, notes = lay_out_companions(catalog), list[str]()
    with_config = replace(request, assets=frozenset([CONFIG]))
    folders = dict.fromkeys(str(entry.path[0]) for entry in entries_of(catalog))
    for folder in folders:
        inner = huggingface.lay_out(component(catalog, folder), with_config, f"{folder}.")
        files += [file.within(folder) for file in inner.files]
        notes += inner.notes
    models = {name.rpartition("/")[0] for name in catalog.companions if name.endswith(f"/{CONFIG}")}
    empty_models = sorted(models.difference(folders))
    if empty_models:
        notes.append(f"without the weights that diffusers expects: {', '.join(empty_models)}")
    return Layout(tuple(files), folder=True, notes=tuple(notes))


FORMAT = Format(
    "diffusers",
    "diffusers' pipeline: model_index.json and one folder per component",
    Detection(lambda source: PIPELINE in source.files, names=PIPELINE),
    Reading(_scan),
    Writing(convert=lay_out, has_shards=True, has_metadata=True, has_values=False),
)
