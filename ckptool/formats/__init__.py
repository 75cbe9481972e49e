"""The checkpoint formats ckptool knows: one file each, all metadata only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TypeVar

from ckptool.core.catalog import Catalog
from ckptool.core.layout import Layout
from ckptool.core.placing import Rule
from ckptool.formats.base import Format, Request, Source

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
        "megatron-torch_dist": "megatron_torch_dist.FORMAT",
        "megatron-fsdp_dtensor": "megatron_fsdp_dtensor.FORMAT",
        "dcp": "dcp.FORMAT",
        "deepspeed-universal": "deepspeed_universal.FORMAT",
        "deepspeed": "deepspeed.FORMAT",
        "accelerate": "accelerate.FORMAT",
        "torchsnapshot": "torchsnapshot.FORMAT",
        "dcp-safetensors": "dcp_safetensors.FORMAT",
        "sharded-state": "sharded_state.FORMAT",
        "hf": "hf.FORMAT",
        "llama": "llama.FORMAT",
        "megatron-torch": "megatron_torch.FORMAT",
        "nvrx-local": "nvrx_local.FORMAT",
        "rank-local": "rank_local.FORMAT",
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
        "hf": "hf.lay_out",
        "torch-save": "torch_save.lay_out",
        "dcp": "_dcp_write.lay_out",
        "dcp-safetensors": "dcp_safetensors.lay_out",
        "deepspeed-universal": "_deepspeed_universal_write.lay_out",
        "megatron-torch_dist": "_megatron_write.lay_out",
    }
)
"""What lays a checkpoint out in another format."""

WRITERS: Mapping[str, LayOut] = _Lazy(
    {
        "dcp": "_dcp_write.lay_out",
        "rank-local": "_rank_write.lay_out_rank_files",
        "torch-checkpointing": "_torch_checkpointing_write.lay_out_torch_checkpointing",
        "dcp-safetensors": "dcp_safetensors.lay_out",
        "sharded-state": "_vllm_write.lay_out",
        "llama": "llama.lay_out",
    }
)
"""What writes a checkpoint cut for a mesh."""

CUTS: Mapping[str, tuple[Rule, ...]] = _Lazy(
    {"llama": "_llama_rules.RULES", "sharded-state": "_vllm_write.RULES"}
)
"""How a format cuts tensors by their names, where it leaves no choice."""


def detect(source: Source) -> Format | None:
    """The format of a source, or None where no format recognises it."""
    return next((item for item in FORMATS.values() if item.probe(source)), None)
