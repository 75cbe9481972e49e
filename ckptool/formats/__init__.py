"""The checkpoint formats ckptool knows: one file each, all metadata only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TypeVar

from ckptool.core.catalog import Catalog
from ckptool.core.layout import Layout
from ckptool.core.sharding.placement import Rule
from ckptool.formats.base import Format, Request
from ckptool.serialization.source import Source

_T = TypeVar("_T")


class _Lazy(Mapping[str, _T]):
    """Named objects of this package's modules, each imported when it is first asked for.

    ``spots`` maps names to ``module.attribute``. A command pays only for the formats it meets.
    """

    def __init__(self, spots: dict[str, str]) -> None:
        self._spots = spots

    def __getitem__(self, name: str) -> _T:
        module, _, attribute = self._spots[name].rpartition(".")
        found: _T = getattr(import_module(f"{__name__}.{module}"), attribute)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._spots)

    def __len__(self) -> int:
        return len(self._spots)

    def __contains__(self, name: object) -> bool:
        return name in self._spots


FORMATS: Mapping[str, Format] = _Lazy(
    {
        "bytecheckpoint": "bytecheckpoint.FORMAT",
        "megatron-torch_dist": "megatron.TORCH_DIST_FORMAT",
        "megatron-fsdp_dtensor": "megatron.FSDP_DTENSOR_FORMAT",
        "dcp": "dcp.FORMAT",
        "deepspeed-universal": "deepspeed.UNIVERSAL_FORMAT",
        "deepspeed": "deepspeed.FORMAT",
        "accelerate": "rank_files.accelerate.FORMAT",
        "torchsnapshot": "torchsnapshot.FORMAT",
        "dcp-safetensors": "safetensors.dcp_shards.FORMAT",
        "sharded-state": "vllm.FORMAT",
        "hf": "safetensors.huggingface.FORMAT",
        "llama": "llama.FORMAT",
        "megatron-torch": "megatron.TORCH_FORMAT",
        "nvrx-local": "nvrx.FORMAT",
        "rank-local": "rank_files.FORMAT",
        "safetensors": "safetensors.FORMAT",
        "torch-save": "torch_save.FORMAT",
        "orbax": "orbax.FORMAT",
    }
)
"""Most specific first: the first whose probe says yes is taken."""

LayOut = Callable[[Catalog, Request], Layout]

CONVERTERS: Mapping[str, LayOut] = _Lazy(
    {
        "safetensors": "safetensors.lay_out",
        "hf": "safetensors.huggingface.lay_out",
        "torch-save": "torch_save.lay_out",
        "dcp": "dcp.write.lay_out",
        "dcp-safetensors": "safetensors.dcp_shards.lay_out",
        "deepspeed-universal": "deepspeed.universal_write.lay_out",
        "megatron-torch_dist": "megatron.torch_dist_write.lay_out",
    }
)
"""What lays a checkpoint out in another format."""

WRITERS: Mapping[str, LayOut] = _Lazy(
    {
        "dcp": "dcp.write.lay_out",
        "rank-local": "rank_files.write.lay_out_rank_files",
        "torch-checkpointing": "rank_files.write.lay_out_torch_checkpointing",
        "dcp-safetensors": "safetensors.dcp_shards.lay_out",
        "sharded-state": "vllm.write.lay_out",
        "llama": "llama.lay_out",
    }
)
"""What writes a checkpoint cut for a mesh."""

CUTS: Mapping[str, tuple[Rule, ...]] = _Lazy(
    {"llama": "llama.RULES", "sharded-state": "vllm.write.RULES"}
)
"""How a format cuts tensors by their names, where it leaves no choice."""


def detect(source: Source) -> Format | None:
    """The format of a source, or None where no format recognises it."""
    return next((item for item in FORMATS.values() if item.probe(source)), None)
