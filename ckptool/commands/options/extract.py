"""How to extract tensors from a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptool.commands.options import PLACE
from ckptool.commands.options.declaration import OptionSet, group, option
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.rewrite import RewriteOptions
from ckptool.commands.options.target import TransferOptions

if TYPE_CHECKING:
    from ckptool.storage.url import Location

_NAMES = ("select", "drop", "model_only", "no_optimizer", "peft_adapter", "strip_prefix", "rename")
_WRITING = ("overwrite", "verify", "fsync", "part", "finish", "dry_run")
_MAPS = ("map", "dim", "hf_assets", "inverse", "metadata", "drop_metadata")


class ExtractOptions(OptionSet):
    """How to read the checkpoint, which element type to use, and how to write the tensors."""

    out: Location | None = option(
        "--out",
        PLACE,
        short="-o",
        metavar="FILE",
        help="Write this .npy or .safetensors file; never overwrites.",
    )
    read: ReadOptions = group(ReadOptions, without=("split_stacked",))
    rewrite: RewriteOptions = group(RewriteOptions, without=(*_NAMES, *_MAPS))
    transfer: TransferOptions = group(
        TransferOptions,
        without=_WRITING,
    )
