"""A DeepSpeed checkpoint: ``latest`` and a folder a tag, or the tag's folder itself.

Read: ZeRO 0 to 3 of DeepSpeed 0.4 to 0.19, BF16_Optimizer, pipeline layers, tensor parallelism
with ``universal_checkpoint_info``, mixtures of experts. Names: ``module.<p>`` (weights in the
training type), ``fp32.<p>`` (masters), ``exp_avg.<p>`` and the optimizer's other states,
``step.<p>``, ``frozen.<p>``, ``buffer.<b>``; ``client_state`` is what the training script added.
"""

from __future__ import annotations

from ckptool.core.catalog import Catalog
from ckptool.formats._deepspeed_files import LATEST, holds_model_file, tags
from ckptool.formats.base import Format, ScanOptions, Source


def _probe(source: Source) -> bool:
    if LATEST in source.files:
        return bool(tags(source))
    return holds_model_file(source.files)


def _scan(source: Source, options: ScanOptions) -> Catalog:
    from ckptool.formats._deepspeed_read import malformed_is_damaged
    from ckptool.formats._deepspeed_scan import scan

    with malformed_is_damaged(source.root):
        return scan(source, options)


FORMAT = Format(
    "deepspeed",
    "DeepSpeed: ZeRO 0 to 3, pipelines, tensor parallelism, mixtures of experts",
    _probe,
    _scan,
    takes_tp_rules=True,
)
