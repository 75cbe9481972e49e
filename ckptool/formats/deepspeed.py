"""A DeepSpeed checkpoint: ``latest`` and a folder a tag, or the tag's folder itself.

Read: ZeRO 0 to 3 of DeepSpeed 0.4 to 0.19, BF16_Optimizer, pipeline layers, tensor parallelism
with ``universal_checkpoint_info``, mixtures of experts. Names: ``module.<p>`` (weights in the
training type), ``fp32.<p>`` (masters), ``exp_avg.<p>`` and the optimizer's other states,
``step.<p>``, ``frozen.<p>``, ``buffer.<b>``; ``client_state`` is what the training script added.
"""

from __future__ import annotations

from ckptool.core.catalog import Catalog
from ckptool.errors import Damaged
from ckptool.formats._assemble import Assembled
from ckptool.formats._deepspeed_catalog import add_tied_masters, assembled, catalog_of
from ckptool.formats._deepspeed_checkpoint import Checkpoint, read_checkpoint
from ckptool.formats._deepspeed_files import (
    LATEST,
    find_files,
    holds_model_file,
    tag_folder,
    tags,
)
from ckptool.formats._deepspeed_holding import holding_of
from ckptool.formats._deepspeed_optimizer import MASTER
from ckptool.formats._deepspeed_weights import trained_shapes
from ckptool.formats.base import Format, ScanOptions, Source


def _probe(source: Source) -> bool:
    if LATEST in source.files:
        return bool(tags(source))
    return holds_model_file(source.files)


def _scan(source: Source, options: ScanOptions) -> Catalog:
    folder = tag_folder(source, LATEST)
    checkpoint = read_checkpoint(source, find_files(source.files, folder))
    holdings = [holding_of(checkpoint, mp) for mp in range(checkpoint.grid.model)]
    found = assembled(checkpoint, holdings, options)
    add_tied_masters(found, checkpoint.aliases)
    if not checkpoint.optimizers and trained_shapes(checkpoint.model):
        _miss_optimizers(checkpoint, found)
    checkpoint.notes += _other_tags(source, folder)
    files = [*checkpoint.files.all, *([LATEST] if folder else [])]
    return catalog_of("deepspeed", checkpoint, found, files)


def _miss_optimizers(checkpoint: Checkpoint, found: Assembled) -> None:
    """A conflict where the weights are there without masters and moments; else Damaged."""
    what = checkpoint.model.file.what
    if checkpoint.files.stage_3:
        raise Damaged(
            f"{what}: ZeRO 3 keeps weights in the files of optimizer states, and none of those is"
            " there"
        )
    found.conflicts[MASTER] = (
        f"{what}: was trained with ZeRO, and all files of optimizer states are missing: no masters"
        " and moments; --model-only converts the weights"
    )


def _other_tags(source: Source, folder: str) -> list[str]:
    others = [tag for tag in tags(source) if f"{tag}/" != folder]
    return [f"{folder[:-1]} is the latest tag; also here: {', '.join(others)}"] if others else []


FORMAT = Format(
    "deepspeed",
    "DeepSpeed: ZeRO 0 to 3, pipelines, tensor parallelism, mixtures of experts",
    _probe,
    _scan,
)
