"""Write a checkpoint in another format, renamed, selected and cast as asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptool.commands.assets import mapped, with_assets
from ckptool.commands.casting import taken, with_dtype
from ckptool.commands.map_report import MapOptions, MapReport, decided_by
from ckptool.commands.numbers_config import as_numbers
from ckptool.commands.open import open_checkpoint
from ckptool.commands.read_options import AS_DETECTED, ReadOptions
from ckptool.commands.selection import EVERYTHING, Selection
from ckptool.commands.transfer import (
    Progress,
    Transfer,
    TransferOptions,
    free_bytes,
    require_agreement,
    require_apart,
    store_notes,
)
from ckptool.core.catalog import Catalog
from ckptool.core.dtype import DType
from ckptool.core.layout import FileLayout
from ckptool.core.plan import Plan
from ckptool.core.quantised import kinds, quantised_names
from ckptool.engine.remote_path import Location
from ckptool.errors import CannotDo, UsageError
from ckptool.formats import CONVERTERS
from ckptool.formats._values import UNREAD_TENSOR, Foreign, type_name
from ckptool.formats.base import Request

TARGETS = (
    *("safetensors", "torch-save", "dcp", "dcp-safetensors"),
    *("deepspeed-universal", "megatron-torch_dist"),
)
"""What ``--to`` accepts. ``safetensors`` is a Hugging Face folder unless the target is a file."""


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """How to read it, what to keep, how to name and write it. ``max_shard_size`` in bytes."""

    to: str
    read: ReadOptions = AS_DETECTED
    selection: Selection = EVERYTHING
    map: MapOptions = field(default_factory=MapOptions)
    dtype: DType | None = None
    dequantize: bool = False
    max_shard_size: int = 5_000_000_000
    one_rank: bool = False
    transfer: TransferOptions = field(default_factory=TransferOptions)


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What is to be written, or was. Sizes in bytes."""

    source: Location
    source_format: str
    target: Location
    target_format: str
    tensors: int
    objects: int
    files: tuple[FileLayout, ...]
    read_bytes: int
    write_bytes: int
    free_bytes: int | None
    left_out: tuple[str, ...]
    map: MapReport | None
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
        self.transfer.run(progress)
        return self.report


def prepare(source: Location, target: Location, options: ConvertOptions) -> Prepared:
    """Plan a conversion: nothing is written yet, and no tensor byte is read.

    Raises UsageError, CannotDo or a SourceError where it cannot be done as asked.
    """
    writer = _writer(options.to, target)
    opened = open_checkpoint(source, options.read)
    require_apart(opened, target)
    found = taken(opened, options.selection, options.dtype, dequantize=options.dequantize)
    kept = found.kept
    require_agreement(kept)
    if not kept.tensors and not kept.objects:
        raise UsageError("nothing is left to convert")
    _require_readable(opened.path, kept)
    catalog, map_report = mapped(opened, opened.located(kept), options.map)
    catalog, cast = with_dtype(catalog, options.dtype)
    request = Request(target.name, options.max_shard_size, options.one_rank)
    layout = CONVERTERS[writer](catalog, request)
    layout = with_assets(layout, options.map.assets, map_report, catalog, model=writer == "hf")
    if options.dequantize:
        layout = as_numbers(opened, catalog, layout)
    plan = Plan(catalog, layout)
    report = ConvertReport(
        source=opened.path,
        source_format=opened.format.name,
        target=target,
        target_format=writer,
        tensors=len(catalog.tensors),
        objects=len(catalog.objects),
        files=layout.files,
        read_bytes=plan.read_bytes,
        write_bytes=layout.nbytes,
        free_bytes=free_bytes(target.parent),
        left_out=_left_out(found.whole, kept, options.selection),
        map=map_report,
        cast=cast,
        dequantized=found.dequantized,
        notes=(
            *catalog.notes,
            *layout.notes,
            *_quantised_notes(catalog, options),
            *store_notes(target, layout, options.transfer),
        ),
    )
    decided = (writer, options.max_shard_size, options.one_rank, decided_by(map_report))
    return Prepared(Transfer(opened, plan, target, options.transfer, decided), report)


def _require_readable(source: Location, kept: Catalog) -> None:
    """CannotDo where there are only tensors of kinds that are not read, such as whole modules."""
    foreign = Foreign()
    values = kept.objects.values()
    if kept.tensors or not all(UNREAD_TENSOR in foreign.of(entry.value) for entry in values):
        return
    names = ", ".join(f"{entry.name} ({type_name(entry.value)})" for entry in [*values][:3])
    raise CannotDo(
        f"{source}: no tensor in it can be read: {names}",
        hint="of a module save its state: torch.save(module.state_dict(), FILE)",
    )


def _writer(to: str, target: Location) -> str:
    """The name of the converter: ``safetensors`` is a folder unless the target is a file."""
    if to not in TARGETS:
        raise UsageError(f"--to {to!r}: no such target", hint="one of " + ", ".join(TARGETS))
    is_file = target.suffix == ".safetensors"
    if is_file and to != "safetensors":
        raise UsageError(f"{target}: a .safetensors file, but --to says {to}")
    if to == "safetensors" and not is_file:
        return "hf"
    return to


def _quantised_notes(catalog: Catalog, options: ConvertOptions) -> list[str]:
    """What a person should know of quantised tensors that are cast or made numbers of."""
    notes = []
    if options.dtype is not None and quantised_names(catalog):
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds(catalog).items())
        notes.append(f"--dtype leaves quantised tensors as they are ({listed}); --dequantize")
    return notes


def _left_out(before: Catalog, after: Catalog, selection: Selection) -> tuple[str, ...]:
    """What the selection left out, as one line a kind."""
    if not (selection.select or selection.drop or selection.model_only):
        return ()
    tensors = len(before.tensors) - len(after.tensors)
    values = len(before.objects) - len(after.objects)
    return tuple(
        f"{count:,} {what}{'s' if count > 1 else ''}"
        for count, what in ((tensors, "tensor"), (values, "value"))
        if count
    )
