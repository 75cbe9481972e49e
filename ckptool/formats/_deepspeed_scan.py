"""Read a DeepSpeed checkpoint: files, then ranks, then what they hold together."""

from __future__ import annotations

from ckptool.core.catalog import Catalog
from ckptool.errors import Damaged, Problem
from ckptool.formats._deepspeed_catalog import add_tied_masters, assembled, catalog_of
from ckptool.formats._deepspeed_checkpoint import Checkpoint, read_checkpoint
from ckptool.formats._deepspeed_expert_files import lost_optimizers, require_experts
from ckptool.formats._deepspeed_files import (
    LATEST,
    find_files,
    tag_folder,
)
from ckptool.formats._deepspeed_frozen import note_excluded
from ckptool.formats._deepspeed_holding import all_holdings
from ckptool.formats._deepspeed_local import MASTER
from ckptool.formats._deepspeed_weights import trained_shapes
from ckptool.formats._leaves import Assembled
from ckptool.formats.base import ScanOptions, Source


def scan(source: Source, options: ScanOptions) -> Catalog:
    """The catalog of the latest tag, or of the tag whose folder the source is."""
    folder = tag_folder(source, LATEST)
    checkpoint = read_checkpoint(source, find_files(source.files, folder))
    if not checkpoint.files.stage_3:
        require_experts(checkpoint)
    holdings = all_holdings(checkpoint)
    found = assembled(checkpoint, holdings, options)
    add_tied_masters(found, checkpoint.aliases)
    note_excluded(checkpoint, found)
    if not checkpoint.optimizers and trained_shapes(checkpoint.model):
        _miss_optimizers(checkpoint, found)
    lost = lost_optimizers(checkpoint)
    if lost is not None:
        found.conflicts[MASTER] = lost
    files = [*checkpoint.files.all, *([LATEST] if folder else [])]
    return catalog_of("deepspeed", checkpoint, found, files)


def _miss_optimizers(checkpoint: Checkpoint, found: Assembled) -> None:
    """A conflict where the weights are there without masters and moments; else Damaged."""
    what = checkpoint.model.file.what
    if checkpoint.files.stage_3:
        raise Damaged(
            Problem(
                f"{what}: ZeRO 3 keeps weights in the files of optimizer states, and none of those"
                " is there",
                "file-missing",
            )
        )
    message = f"{what}: was trained with ZeRO, and all files of optimizer states are missing: no"
    message += " masters and moments; --model-only converts the weights"
    found.conflicts[MASTER] = Problem(message, "file-missing")
