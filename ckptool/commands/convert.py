"""Write a checkpoint in another format, renamed, selected and cast as requested."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from ckptool.commands.model.links import require_own_files
from ckptool.commands.open import (
    OpenedCheckpoint,
    no_collecting,
    open_checkpoint,
    require_writable,
)
from ckptool.commands.options.target import MAX_SHARD_SIZE, ConvertOptions, SaveOptions
from ckptool.commands.rewrite import RewriteResult, rewrite
from ckptool.commands.transfer.overwrite import when_to_open
from ckptool.commands.transfer.report import not_carried
from ckptool.commands.transfer.rewritten import RewrittenReport, fields_of
from ckptool.commands.transfer.target import lay_out, require_apart, resolve_target
from ckptool.commands.transfer.transfer import Transfer
from ckptool.core.catalog import Catalog
from ckptool.core.layout import Layout
from ckptool.core.planning.plan import Plan
from ckptool.core.quantization.names import kinds, quantized_names
from ckptool.core.text import one_of, plural
from ckptool.errors import Unsupported, UsageError
from ckptool.formats import FORMATS, single_file_suffixes, targets
from ckptool.formats.base import Format, Request
from ckptool.formats.companions import PIPELINE
from ckptool.storage.url import Location

if TYPE_CHECKING:
    from ckptool.commands.keymap.maps import MapReport


class ConvertReport(RewrittenReport, frozen=True, kw_only=True):
    """A conversion, planned or done."""

    schema: ClassVar = "convert"


@no_collecting()
def prepare(
    source: Location, target: Location, options: ConvertOptions, *, ranks: int = 1
) -> Transfer[ConvertReport]:
    """Plan a conversion, shared by ``ranks``; nothing is written and no tensor is read yet."""
    target = resolve_target(target)
    writer = named_writer(options.to, target)
    opened = open_checkpoint(source, options.read, whole=False, placements=False)
    writer = writer or own_writer(opened, target)
    require_apart(opened, target)
    rewritten = rewrite(
        opened,
        options.rewrite,
        opens=when_to_open(target, options.transfer, ranks),
        check=require_some,
    )
    return plan_conversion(opened, rewritten, writer, target, options)


def plan_conversion(
    opened: OpenedCheckpoint,
    rewritten: RewriteResult,
    writer: Format,
    target: Location,
    options: ConvertOptions,
) -> Transfer[ConvertReport]:
    """Plan to write what a checkpoint was rewritten to, in the format of ``writer``."""
    catalog = rewritten.catalog
    writer = _writer_of(catalog, writer)
    if writer.loading.is_model_folder and rewritten.map is not None:
        _require_models_names(rewritten.map, catalog, options)
    _require_heeded(writer, options.max_shard_size, options.rewrite.metadata)
    request = Request(target.name, options.max_shard_size, options.single_rank)
    layout = lay_out(opened, rewritten, writer, request)
    plan = Plan(catalog, layout)
    report = ConvertReport.of(
        opened,
        plan,
        target,
        writer.name,
        options.transfer,
        **fields_of(rewritten, rewritten.kept),
        notes=(*catalog.notes, *layout.notes, *_quantized_notes(catalog, options)),
    )
    if not report.tensors and not report.objects:
        raise _holds_nothing(opened, catalog, layout, writer)
    moves = rewritten.map and rewritten.map.decided
    decided = (writer.name, options.max_shard_size, options.single_rank, moves)
    return Transfer(opened, plan, target, options.transfer, report, decided)


def _require_heeded(
    writer: Format, max_shard_size: int, metadata: Mapping[str, str] | None = None
) -> None:
    """Raise UsageError for an option that files of a format have no use for."""
    if metadata and not writer.writing.has_metadata:
        raise UsageError(f"--metadata: only safetensors files have it, not those of {writer.name}")
    if max_shard_size != MAX_SHARD_SIZE.default and not writer.writing.has_shards:
        raise UsageError(
            f"--max-shard-size: {writer.name} has no shards of a size",
            hint="--to hf writes a folder of safetensors files of at most that size",
        )


def _holds_nothing(
    opened: OpenedCheckpoint, catalog: Catalog, layout: Layout, writer: Format
) -> Unsupported:
    """Return the error of a format that can hold nothing of a checkpoint, as of numpy's arrays."""
    names = not_carried(layout, catalog)
    fits = "torch-save keeps empty dicts" if writer.name == "dcp" else "dcp keeps any value"
    return Unsupported(
        f"{opened.path}: {writer.name} can hold nothing of it: no tensors, but"
        f" {plural(len(names), 'value')} such as {min(names)}",
        "limit-exceeded",
        hint=f"--to {fits}",
    )


def prepare_save(
    opened: OpenedCheckpoint, target: Location, options: SaveOptions
) -> Transfer[ConvertReport]:
    """Plan to write all of an open checkpoint as it is."""
    target = resolve_target(target)
    writer, catalog = writer_for(options.to, target), opened.catalog
    _require_heeded(writer, options.max_shard_size)
    require_writable(opened, catalog)
    if not catalog.tensors and not catalog.objects:
        raise UsageError("no tensors or values to save")
    layout = writer.lay_out(catalog, Request(target.name, options.max_shard_size))
    require_own_files(opened.source, layout.files)
    plan = Plan(catalog, layout)
    report = ConvertReport.of(
        opened,
        plan,
        target,
        writer.name,
        options.transfer,
        notes=(*catalog.notes, *layout.notes),
    )
    return Transfer(opened, plan, target, options.transfer, report, (writer.name, "save"))


def require_some(opened: OpenedCheckpoint, subset: Catalog) -> None:
    """Raise if what was selected may not be written, or is nothing."""
    require_writable(opened, subset)
    if not subset.tensors and not subset.objects:
        raise UsageError(
            "no tensors or values left to convert: all are excluded",
            hint="what --select names is kept, without what --drop names",
        )


def writer_for(to: str | None, target: Location) -> Format:
    """Return the target format: the requested one, or that of the suffix, of a file or a folder.

    Raises UsageError if neither determines it, or they contradict each other.
    """
    writer = named_writer(to, target)
    if writer is None:
        raise UsageError(f"{target}: the name does not determine the format", hint=_TARGETS)
    return writer


_TARGETS = (
    "--to hf writes a folder for transformers and vLLM, --to dcp one for torch; DST.safetensors and"
    " DST.pt are files"
)
_GGUF = "--to hf writes a folder, from which llama.cpp's convert_hf_to_gguf.py makes a .gguf"


def own_writer(opened: OpenedCheckpoint, target: Location) -> Format:
    """Return the source's own format for a folder; UsageError if convert does not write that."""
    row = opened.format
    if re.fullmatch(r"\.[A-Za-z]\w*", target.suffix):
        message = f"{target}: a file's name, whose end is none that convert knows"
        raise UsageError(message, hint=_GGUF if target.suffix == ".gguf" else _TARGETS)
    if row.writing.convert is not None and not row.detection.suffixes:
        return row
    instead = ""
    if row.writing.reshard is not None:
        instead = "; `ckptool reshard SRC DST --mesh N` writes SRC's own kind"
    raise UsageError(
        f"{target}: the name does not determine the format, and {opened.path} is {row.name},"
        " no folder that convert writes",
        hint=f"{_TARGETS}{instead}",
    )


def named_writer(to: str | None, target: Location) -> Format | None:
    """Return the format that --to or a suffix says, None if neither does; UsageError as above."""
    single = single_file_suffixes().get(target.suffix)
    if to is None and single is None:
        return None
    if to is not None and (to not in FORMATS or FORMATS[to].writing.convert is None):
        why = "convert does not write it" if to in FORMATS else "unknown format"
        raise UsageError(f"--to {to!r}: {why}", hint=_written_by(to))
    row = FORMATS[to] if to is not None else single
    if row is None or (single is not None and single is not row):
        suffixes = row.detection.suffixes if row is not None else ()
        kind = f"{suffixes[0]} files" if suffixes else "a folder"
        raise UsageError(
            f"{target}: the name of a {target.suffix} file, but --to {to} writes {kind}",
            hint="choose another name for DST, or leave --to out",
        )
    suffixes, folder = row.detection.suffixes, row.detection.folder
    if suffixes and folder is None and single is None:
        raise UsageError(
            f"{target}: --to {row.name} writes a file, whose name ends in one of"
            f" {', '.join(suffixes)}",
            hint=f"name it {target.name}{suffixes[0]}; --to dcp and --to hf write folders",
        )
    return row if folder is None or single is row else FORMATS[folder]


def _written_by(to: str) -> str | None:
    """Return what writes a format that convert does not."""
    if to in targets(mesh=True):
        return f"`ckptool reshard SRC DST --mesh N --to {to}` writes it"
    return _GGUF if to == "gguf" else one_of(to, targets())


def _writer_of(catalog: Catalog, writer: Format) -> Format:
    """Return the requested format, or diffusers' if a Hugging Face folder is a pipeline's."""
    is_pipeline = writer.name == "hf" and PIPELINE in catalog.companions
    return FORMATS["diffusers"] if is_pipeline else writer


def _require_models_names(chosen: MapReport, catalog: Catalog, options: ConvertOptions) -> None:
    """Raise UsageError if ``--map auto`` would give a model's folder the names of a trainer."""
    from ckptool.commands.keymap.choice import HUGGING_FACE, OF_FILES, PACKED
    from ckptool.commands.keymap.library import AUTO

    if options.rewrite.map.name != AUTO or catalog.format in OF_FILES:
        return
    if chosen.source == HUGGING_FACE and chosen.target != PACKED:
        raise UsageError(
            f"--map {AUTO}: the names are {HUGGING_FACE}'s already, and {chosen.name} would make"
            f" {chosen.target}'s of them, which no model is loaded from",
            hint=f"leave --map out; --map {chosen.name} does it anyway",
        )


def _quantized_notes(catalog: Catalog, options: ConvertOptions) -> list[str]:
    """Note the quantized tensors that ``--dtype`` leaves unchanged."""
    casts = options.rewrite.casts
    if casts is None or casts.model is None or not quantized_names(catalog):
        return []
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds(catalog).items())
    return [f"--dtype does not change quantized tensors ({listed}); use --dequantize"]
