"""nvidia-resiliency-ext's local checkpoints: a folder a rank, on the machine that wrote it.

Read: nvidia-resiliency-ext 0.2 to 0.7, with replicas, of plain state dicts
(``BasicTensorAwareStateDict``; what is no DTensor says nothing of how ranks fit together) and of
Megatron-core's (``MCoreTensorAwareStateDict``).
"""

from __future__ import annotations

import re

from ckptool.core.catalog import Catalog
from ckptool.formats.base import Format, ScanOptions
from ckptool.serialization.source import Source

_FILE = re.compile(r"[0-9]{1,9}/iter_[0-9]{7,18}_[0-9]{1,9}_local(\.dirty)?\.pt")


def _probe(source: Source) -> bool:
    return any(_FILE.fullmatch(name) for name in source.files)


def _scan(source: Source, options: ScanOptions) -> Catalog:
    from ckptool.formats.nvrx.scan import scan

    return scan(source, options)


FORMAT = Format(
    "nvrx-local",
    "nvidia-resiliency-ext local checkpoint (0/iter_0000100_0_local.pt)",
    _probe,
    _scan,
    takes_tp_rules=True,
    takes_world_size=True,
)
