"""What the transfer bench measures: another command is another row."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Literal, NamedTuple

from msgspec import Struct

from benchmarks.programs import RANKS


class Other(NamedTuple):
    """A checkpoint that is written beside the source, of ``times`` its size.

    Like the source; or of tensors of one ``shape``, rows and columns, where the rows are 0 eight
    of them.
    """

    times: float
    shape: tuple[int, int] | None = None
    dtype: str = ""


OTHERS: Mapping[str, Other] = {
    "{quarter}": Other(0.25),
    "{tall}": Other(1.0, (0, 512), "bfloat16"),
    "{middle}": Other(1.0, (0, 3072), "bfloat16"),
    "{wide}": Other(1.0, (0, 8192), "float32"),
    "{small}": Other(0.02, (64, 64), "bfloat16"),
    "{triple}": Other(3.0),
}
"""What the placeholders of rows stand for, beside the source itself."""

CKPTOOL = (sys.executable, "-m", "ckptool")
CONVERT = (*CKPTOOL, "convert", "--quiet")
_CONVERT = (*CONVERT, "{source}")
TO_SAFETENSORS = ("{target}.safetensors", "--to", "safetensors")
_MODULE = ("-m", "benchmarks.programs")
PROGRAM = (sys.executable, *_MODULE)
_FORMAT_UTILS = (sys.executable, "-m", "torch.distributed.checkpoint.format_utils")
RESHARD = (*CKPTOOL, "reshard", "--quiet")
_COLUMNS_TOO = ("--to", "dcp", "--mesh", "2x4", "--no-fsync", "--shard", "*=Shard(0),Shard(1)")
ON_2X4 = (*_COLUMNS_TOO[:-2], "--shard", "*norm.weight*=Shard(0),Replicate()", *_COLUMNS_TOO[-2:])
_TO_2X4 = ("{target}", *ON_2X4)
_PARTED = (*CONVERT, "{triple}", *TO_SAFETENSORS)
_MANIFEST = (*CKPTOOL, "verify", "--quiet", "{source}", "--write-manifest")
_NAMES = ("{names}/one.safetensors", "{names}/other.safetensors")
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node")
_LOAD = (*_TORCHRUN, str(RANKS), *_MODULE, "load")
_COPY_AND_SYNC = 'cp -r "$0" "$1" && find "$1" -exec sync {} +'
_CAT = 'find "$0" -type f -exec cat {} + > /dev/null'
_DD = 'find "$0" -type f -exec dd if={} of=/dev/null bs=4M iflag=direct status=none \\;'
_IN_PARTS = (
    'for part in 1/8 2/8 3/8 4/8 5/8 6/8 7/8 8/8; do "$@" --part $part || exit; done; "$@" --finish'
)
_CAT_AND_HASH = 'find "$0" -type f -exec cat {} + | sha256sum'


class Row(Struct, frozen=True):
    """One command. ``{source}``, ``{light}`` and ``{target}`` stand for paths, as do ``OTHERS``.

    ``{many}`` is what 64 ranks save of 1,000 small tensors, ``{names}`` a folder of two equal
    safetensors files of 100,000. ``measure`` is what is compared with the ``peers``: wall-clock
    seconds, CPU seconds, or the seconds of the load alone that the command writes to the file
    ``{result}``. A row that ``needs`` packages is left out, with the reason, where one is missing
    or it cannot be done; one that needs torch needs a checkpoint that torch reads, too. What it
    reads is ``cold``, or in the page cache. What takes long is measured ``once``, in the first
    round.
    """

    name: str
    command: tuple[str, ...]
    peers: tuple[str, ...] = ()
    measure: Literal["wall", "cpu", "load"] = "wall"
    needs: tuple[str, ...] = ()
    cold: bool = False
    once: bool = False


def _loads(what: str, source: str, dim: int) -> tuple[Row, Row]:
    """Return the same load by torch's reader and by ckptool's, onto four ranks."""
    ours, theirs = f"dcp.load, {what}, ckptool's reader", f"dcp.load, {what}, torch's reader"
    words = (source, str(dim), "{result}")
    return (
        Row(ours, (*_LOAD, "ckptool", *words), peers=(theirs,), measure="load", needs=("torch",)),
        Row(theirs, (*_LOAD, "torch", *words), measure="load", needs=("torch",)),
    )


def _shape(mark: str, what: str) -> tuple[Row, ...]:
    """Return how long it takes to move a checkpoint of one shape, against a copy of it."""
    copy, safetensors = f"cp -r, {what}", (*CONVERT, mark, *TO_SAFETENSORS, "--no-fsync")
    reshard = (*RESHARD, mark, "{target}", *_COLUMNS_TOO)
    return (
        Row(copy, ("cp", "-r", mark, "{target}")),
        Row(f"convert --to safetensors, {what}", (*safetensors, "--no-verify"), (copy,)),
        Row(f"reshard --mesh 2x4, {what}", (*reshard, "--no-verify"), (copy,)),
        Row(f"reshard --mesh 2x4, verified, {what}", (*reshard, "--verify"), (copy,)),
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
        once=True,
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
        once=True,
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
        once=True,
    ),
    Row(
        "reshard --mesh 2x4, a quarter of the size",
        (*RESHARD, "{quarter}", *_TO_2X4, "--no-verify"),
    ),
    Row("convert, three times the size", _PARTED, measure="cpu"),
    Row(
        "convert, three times the size, 8 parts in turn",
        ("sh", "-c", _IN_PARTS, "sh", *_PARTED),
        peers=("convert, three times the size",),
        measure="cpu",
    ),
    *_shape("{tall}", "runs of 256 B"),
    *_shape("{middle}", "runs of 1.5 KiB"),
    *_shape("{wide}", "runs of 8 KiB"),
    *_shape("{small}", "small tensors"),
    Row(
        "plan 1,000 tensors of 1,024 chunks",
        (*PROGRAM, "plan", "1000", "1024", "32x64"),
        once=True,
    ),
    *_loads("row shards", "{source}", 0),
    *_loads("columns", "{source}", 1),
    *_loads("columns, runs of 8 KiB", "{wide}", 1),
    Row("cp -r, synced", ("sh", "-c", _COPY_AND_SYNC, "{source}", "{target}")),
    Row(
        "convert --to safetensors, synced",
        (*_CONVERT, *TO_SAFETENSORS, "--fsync", "--no-verify"),
        peers=("cp -r, synced",),
    ),
    Row("verify", (*CKPTOOL, "verify", "--quiet", "{source}"), peers=("cat FILES | sha256sum",)),
    Row("cat FILES | sha256sum", ("sh", "-c", _CAT_AND_HASH, "{source}"), once=True),
    Row("dd iflag=direct bs=4M, cold", ("sh", "-c", _DD, "{source}"), cold=True),
    Row("cat, cold", ("sh", "-c", _CAT, "{source}"), cold=True),
    Row(
        "verify, cold",
        (*CKPTOOL, "verify", "--quiet", "{source}"),
        peers=("dd iflag=direct bs=4M, cold", "cat, cold"),
        cold=True,
    ),
    Row("cp -r, cold", ("cp", "-r", "{source}", "{target}"), cold=True),
    Row(
        "convert --to safetensors, cold",
        (*_CONVERT, *TO_SAFETENSORS, "--no-fsync", "--no-verify"),
        peers=("cp -r, cold",),
        cold=True,
    ),
    Row(
        "convert --to safetensors, verified, cold",
        (*_CONVERT, *TO_SAFETENSORS, "--no-fsync", "--verify"),
        peers=("cp -r, cold",),
        cold=True,
    ),
    Row("verify --quick", (*CKPTOOL, "verify", "--quiet", "--quick", "{source}")),
    Row("verify --against", (*CKPTOOL, "verify", "--quiet", "{source}", "--against", "{source}")),
    Row("verify --write-manifest", (*_MANIFEST, "{target}.json")),
    Row("verify --quick, 1,000 DCP tensors of 64 ranks", (*CKPTOOL, "verify", "--quick", "{many}")),
    Row("verify, 1,000 DCP tensors of 64 ranks", (*CKPTOOL, "verify", "{many}"), once=True),
    Row("inspect, 1,000 DCP tensors of 64 ranks", (*CKPTOOL, "inspect", "{many}")),
    Row("verify, 100,000 tensors", (*CKPTOOL, "verify", "{names}/one.safetensors")),
    Row("diff, 100,000 tensors", (*CKPTOOL, "diff", *_NAMES)),
    Row("--help", (*CKPTOOL, "--help"), measure="cpu"),
    Row("inspect", (*CKPTOOL, "inspect", "{light}"), peers=("torch read_metadata",), measure="cpu"),
    Row(
        "torch read_metadata",
        (*PROGRAM, "read-metadata", "{light}"),
        measure="cpu",
        needs=("torch",),
    ),
)
