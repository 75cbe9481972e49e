"""What the transfer bench measures: another command is another row."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from ckptool.commands.bench.transfer.programs import RANKS

OTHERS = {"{quarter}": 0.25, "{triple}": 3.0, "{wide}": 1.0}
"""Checkpoints that are written beside the source, as multiples of its size."""

CKPTOOL = (sys.executable, "-m", "ckptool")
CONVERT = (*CKPTOOL, "convert", "--quiet")
_CONVERT = (*CONVERT, "{source}")
TO_SAFETENSORS = ("{target}.safetensors", "--to", "safetensors")
_MODULE = ("-m", "ckptool.commands.bench.transfer.programs")
PROGRAM = (sys.executable, *_MODULE)
_FORMAT_UTILS = (sys.executable, "-m", "torch.distributed.checkpoint.format_utils")
RESHARD = (*CKPTOOL, "reshard", "--quiet")
ON_2X4 = (
    *("--to", "dcp", "--mesh", "2x4", "--no-fsync"),
    *("--shard", "*norm.weight*=Shard(0),Replicate()", "--shard", "*=Shard(0),Shard(1)"),
)
_TO_2X4 = ("{target}", *ON_2X4)
_MANIFEST = (*CKPTOOL, "verify", "--quiet", "{source}", "--write-manifest")
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node")
_LOAD = (*_TORCHRUN, str(RANKS), *_MODULE, "load")
_COPY_AND_SYNC = 'cp -r "$0" "$1" && find "$1" -exec sync {} +'
_CAT_AND_HASH = 'find "$0" -type f -exec cat {} + | sha256sum'


@dataclass(frozen=True, slots=True)
class Row:
    """One command. ``{source}``, ``{light}`` and ``{target}`` stand for paths, as do ``{quarter}``
    and ``{triple}``: checkpoints like the source of a quarter and of three times its size.

    ``{wide}`` is one of the source's size whose tensors have long rows, ``{many}`` what 64 ranks
    save of 1,000 small tensors. ``measure`` is what is compared with the ``peers``: wall-clock
    seconds, CPU seconds, or the seconds of the load alone that the command writes to the file
    ``{result}``. A row that ``needs`` packages is left out, with the reason, where one is missing
    or it cannot be done; one that needs torch needs a checkpoint that torch reads, too.
    """

    name: str
    command: tuple[str, ...]
    peers: tuple[str, ...] = ()
    measure: Literal["wall", "cpu", "load"] = "wall"
    needs: tuple[str, ...] = ()


def _loads(what: str, source: str, dim: int) -> tuple[Row, Row]:
    """Return the same load by torch's reader and by ckptool's, onto four ranks."""
    ours, theirs = f"dcp.load, {what}, ckptool's reader", f"dcp.load, {what}, torch's reader"
    words = (source, str(dim), "{result}")
    return (
        Row(ours, (*_LOAD, "ckptool", *words), peers=(theirs,), measure="load", needs=("torch",)),
        Row(theirs, (*_LOAD, "torch", *words), measure="load", needs=("torch",)),
    )


ROWS = (
    Row("cp -r", ("cp", "-r", "{source}", "{target}")),
    Row(
        "convert --to safetensors",
        (*_CONVERT, *TO_SAFETENSORS, "--no-fsync", "--no-verify"),
        peers=("cp -r", "torch to safetensors"),
    ),
    Row(
        "convert --to safetensors, verified",
        (*_CONVERT, *TO_SAFETENSORS, "--no-fsync", "--verify"),
        peers=("cp -r",),
    ),
    Row(
        "torch to safetensors",
        (*PROGRAM, "to-safetensors", "{source}", "{target}"),
        needs=("torch",),
    ),
    Row(
        "convert --to torch-save",
        (*_CONVERT, "{target}.pt", "--to", "torch-save", "--no-fsync", "--no-verify"),
        peers=("cp -r", "torch to torch-save"),
    ),
    Row(
        "torch to torch-save",
        (*_FORMAT_UTILS, "dcp_to_torch", "{source}", "{target}.pt"),
        needs=("torch",),
    ),
    Row(
        "convert --to dcp",
        (*_CONVERT, "{target}", "--to", "dcp", "--no-fsync", "--no-verify"),
        peers=("cp -r",),
    ),
    Row(
        "reshard --mesh 2x4",
        (*RESHARD, "{source}", *_TO_2X4, "--no-verify"),
        peers=("cp -r", "torch to 2x4, 8 ranks"),
    ),
    Row(
        "reshard --mesh 2x4, verified",
        (*RESHARD, "{source}", *_TO_2X4, "--verify"),
        peers=("cp -r",),
    ),
    Row(
        "torch to 2x4, 8 ranks",
        (*_TORCHRUN, "8", *_MODULE, "reshard", "{source}", "{target}"),
        needs=("torch",),
    ),
    Row(
        "reshard --mesh 2x4, a quarter of the size",
        (*RESHARD, "{quarter}", *_TO_2X4, "--no-verify"),
    ),
    Row(
        "reshard --mesh 2x4, three times the size",
        (*RESHARD, "{triple}", *_TO_2X4, "--no-verify"),
    ),
    *(
        Row(
            f"plan 1,000 tensors of {chunks:,} chunks",
            (*PROGRAM, "plan", "1000", str(chunks), "32x64"),
        )
        for chunks in (256, 512, 1024)
    ),
    *_loads("row shards", "{source}", 0),
    *_loads("columns", "{source}", 1),
    *_loads("columns of long rows", "{wide}", 1),
    Row("cp -r, synced", ("sh", "-c", _COPY_AND_SYNC, "{source}", "{target}")),
    Row(
        "convert --to safetensors, synced",
        (*_CONVERT, *TO_SAFETENSORS, "--fsync", "--no-verify"),
        peers=("cp -r, synced",),
    ),
    Row("verify", (*CKPTOOL, "verify", "--quiet", "{source}"), peers=("cat FILES | sha256sum",)),
    Row("cat FILES | sha256sum", ("sh", "-c", _CAT_AND_HASH, "{source}")),
    Row("verify --quick", (*CKPTOOL, "verify", "--quiet", "--quick", "{source}")),
    Row("verify --against", (*CKPTOOL, "verify", "--quiet", "{source}", "--against", "{source}")),
    Row("verify --write-manifest", (*_MANIFEST, "{target}.json")),
    Row("verify --quick, 1,000 tensors of 64 ranks", (*CKPTOOL, "verify", "--quick", "{many}")),
    Row("verify, 1,000 tensors of 64 ranks", (*CKPTOOL, "verify", "{many}")),
    Row("inspect, 1,000 tensors of 64 ranks", (*CKPTOOL, "inspect", "{many}")),
    Row("--help", (*CKPTOOL, "--help"), measure="cpu"),
    Row("inspect", (*CKPTOOL, "inspect", "{light}"), peers=("torch read_metadata",), measure="cpu"),
    Row(
        "torch read_metadata",
        (*PROGRAM, "read-metadata", "{light}"),
        measure="cpu",
        needs=("torch",),
    ),
)
