"""Write a checkpoint in another format, renamed, selected and cast as asked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ckptool.commands.keymap.assets import with_assets
from ckptool.commands.keymap.report import MapReport, decided_by
from ckptool.commands.keymap.written_config import drop_quantization_config, with_true_config
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.source import RewriteOptions, Selection
from ckptool.commands.options.target import ConvertOptions
from ckptool.commands.rewrite import rewrite
from ckptool.commands.transfer import (
    Progress,
    Transfer,
    free_bytes,
    named_target,
    require_agreement,
    require_apart,
    target_notes,
)
from ckptool.core.catalog import Catalog
from ckptool.core.layout import FileLayout
from ckptool.core.plan import Plan
from ckptool.core.quantization import kinds, quantised_names
from ckptool.errors import Unsupported, UsageError
from ckptool.formats import FORMATS, targets
from ckptool.formats.base import Format, Request
from ckptool.serialization.state_dict.values import UNREAD_TENSOR, Foreign, type_name
from ckptool.storage.url import Location


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What is to be written, or was. Sizes in bytes."""

    source: Location
    source_format: str
    target: Location
    target_format: str
    tensors: int
    objects: int = field(metadata={"key": "values"})
    files: tuple[FileLayout, ...] = field(metadata={"key": None})
    read_bytes: int
    write_bytes: int
    free_bytes: int | None
    excluded: tuple[str, ...]
    map: MapReport | None = field(metadata={"key": None})
    cast: dict[str, int]
    dequantized: dict[str, int]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A conversion that is planned and checked, but not begun."""

    transfer: Transfer
    report: ConvertReport

    @property
    def nbytes(self) -> int:
        """Bytes that the transfer moves."""
        return self.transfer.nbytes

    def run(self, progress: Progress = lambda nbytes: None) -> ConvertReport:
        """Write the target. Raises as a transfer does; the target is whole or not there."""
        notes = self.transfer.run(progress)
        return replace(self.report, notes=(*self.report.notes, *notes))


def prepare(source: Location, target: Location, options: ConvertOptions) -> Prepared:
    """Plan a conversion: nothing is written yet, and no tensor byte is read.

    Raises UsageError, Unsupported or a SourceError where it cannot be done as asked.
    """
    target = named_target(target)
    writer = _writer(options.to, target)
    opened = open_checkpoint(source, options.read, whole=False)
    require_apart(opened, target)
    found = rewrite(
        opened, options.rewrite, locate=True, check=lambda kept: _require_some(opened.path, kept)
    )
    catalog = found.catalog
    request = Request(target.name, options.max_shard_size, options.single_rank)
    layout = writer.lay_out(catalog, request)
    assets = options.rewrite.map.assets
    layout = with_assets(layout, assets, found.map, catalog, model=writer.is_model_folder)
    if options.rewrite.dequantize:
        layout = drop_quantization_config(opened, catalog, layout)
    chosen = options.rewrite.selection
    layout = with_true_config(
        opened,
        catalog,
        layout,
        cast=bool(found.cast or found.dequantized),
        partial=bool(chosen.select or chosen.drop),
    )
    plan = Plan(catalog, layout)
    report = ConvertReport(
        source=opened.path,
        source_format=opened.format.name,
        target=target,
        target_format=writer.name,
        tensors=len(catalog.tensors),
        objects=len(catalog.objects),
        files=layout.files,
        read_bytes=plan.read_bytes,
        write_bytes=layout.nbytes,
        free_bytes=free_bytes(target.parent),
        excluded=_excluded(found.whole, found.kept, options.rewrite.selection),
        map=found.map,
        cast=found.cast,
        dequantized=found.dequantized,
        notes=(
            *catalog.notes,
            *layout.notes,
            *_quantised_notes(catalog, options.rewrite),
            *target_notes(opened, target, layout, options.transfer),
        ),
    )
    decided = (writer.name, options.max_shard_size, options.single_rank, decided_by(found.map))
    return Prepared(Transfer(opened, plan, target, options.transfer, decided), report)


def _require_some(source: Location, kept: Catalog) -> None:
    """Raise where ranks contradict one another, or nothing that can be read was selected."""
    require_agreement(kept)
    if not kept.tensors and not kept.objects:
        raise UsageError("no tensors or values left to convert")
    _require_readable(source, kept)


def _require_readable(source: Location, kept: Catalog) -> None:
    """Unsupported where there are only tensors of kinds that are not read, such as sparse ones."""
    foreign = Foreign()
    values = kept.objects.values()
    if kept.tensors or not all(UNREAD_TENSOR in foreign.of(entry.value) for entry in values):
        return
    names = ", ".join(f"{entry.name} ({type_name(entry.value)})" for entry in [*values][:3])
    raise Unsupported(
        f"{source}: no readable tensors: {names}",
        hint="in torch: convert them to plain tensors and save those",
    )


def _writer(to: str, target: Location) -> Format:
    """Return the target's format: ``safetensors`` is a folder unless the target is a file."""
    if to not in FORMATS or FORMATS[to].convert is None:
        raise UsageError(f"--to {to!r}: unknown format", hint="one of " + ", ".join(targets()))
    is_file = target.suffix == ".safetensors"
    if is_file and to != "safetensors":
        raise UsageError(f"{target}: .safetensors file, but --to is {to}")
    return FORMATS["hf" if to == "safetensors" and not is_file else to]


def _quantised_notes(catalog: Catalog, options: RewriteOptions) -> list[str]:
    """What a person should know of quantised tensors that are cast or made numbers of."""
    notes = []
    if options.casts is not None and options.casts.model is not None and quantised_names(catalog):
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds(catalog).items())
        notes.append(f"--dtype does not change quantized tensors ({listed}); use --dequantize")
    return notes


def _excluded(before: Catalog, after: Catalog, selection: Selection) -> tuple[str, ...]:
    """Return what the selection excludes, a line for tensors and one for values."""
    asked = {
        "--select": selection.select,
        "--drop": selection.drop,
        "--model-only": selection.model_only,
    }
    options = ", ".join(option for option, given in asked.items() if given)
    tensors = len(before.tensors) - len(after.tensors)
    values = len(before.objects) - len(after.objects)
    return tuple(
        f"{count:,} {what}{'s' if count > 1 else ''} ({options})"
        for count, what in ((tensors, "tensor"), (values, "non-tensor value"))
        if options and count
    )
