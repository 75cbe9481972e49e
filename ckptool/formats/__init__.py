"""The checkpoint formats ckptool knows: one file each, all metadata only."""

from __future__ import annotations

from collections.abc import Callable

from ckptool.core.catalog import Catalog
from ckptool.core.layout import Layout
from ckptool.formats import (
    _dcp_write,
    _rank_write,
    _torch_checkpointing_write,
    accelerate,
    dcp,
    dcp_safetensors,
    hf,
    rank_local,
    safetensors,
    sharded_state,
    torch_save,
)
from ckptool.formats.base import Format, Request, Source

FORMATS: tuple[Format, ...] = (
    dcp.FORMAT,
    accelerate.FORMAT,
    dcp_safetensors.FORMAT,
    sharded_state.FORMAT,
    hf.FORMAT,
    rank_local.FORMAT,
    safetensors.FORMAT,
    torch_save.FORMAT,
)
"""Most specific first: the first whose probe says yes is taken."""

BY_NAME = {item.name: item for item in FORMATS}

WRITERS: dict[str, Callable[[Catalog, Request], Layout]] = {
    "dcp": _dcp_write.lay_out,
    "rank-local": _rank_write.lay_out_rank_files,
    "torch-checkpointing": _torch_checkpointing_write.lay_out_torch_checkpointing,
    "dcp-safetensors": dcp_safetensors.lay_out,
    "sharded-state": sharded_state.lay_out,
}
"""What writes a checkpoint cut for a mesh."""


def detect(source: Source) -> Format | None:
    """The format of a source, or None where no format recognises it."""
    return next((item for item in FORMATS if item.probe(source)), None)
