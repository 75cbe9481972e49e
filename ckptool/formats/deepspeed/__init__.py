"""DeepSpeed's checkpoints, as it saves them, and universal ones.

``deepspeed``: ``latest`` and a folder per tag, or the tag's folder itself. Read: ZeRO 0 to 3 of
DeepSpeed 0.4 to 0.19, BF16_Optimizer, pipeline layers, tensor parallelism with
``universal_checkpoint_info``, mixtures of experts. Names: ``module.<p>`` (weights in the training
type), ``fp32.<p>`` (masters), ``exp_avg.<p>`` and the optimizer's other states, ``step.<p>``,
``frozen.<p>``, ``buffer.<b>``; ``client_state`` is what the training script added.

``deepspeed-universal``: ``zero/<parameter>/fp32.pt`` and similar files, and model files. Read: what
``ds_to_universal`` of DeepSpeed 0.10 to 0.19 writes. Written: what DeepSpeed 0.19 loads with
``checkpoint.load_universal``, at any ZeRO stage, data and tensor parallelism.
"""

from __future__ import annotations

from ckptool.formats.base import Deferred, Detection, Format, LatestMarker, Reading, Writing
from ckptool.formats.deepspeed.checkpoint import (
    LATEST,
    LATEST_UNIVERSAL,
    OPTIMIZER_STATE,
    is_tag,
    list_tags,
)
from ckptool.serialization.source import Source


def _probe(source: Source) -> bool:
    if LATEST in source.files:
        return bool(list_tags(source))
    return is_tag(source.files)


FORMAT = Format(
    "deepspeed",
    "DeepSpeed: ZeRO 0 to 3, pipelines, tensor parallelism, mixtures of experts",
    Detection(_probe, latest=LatestMarker(LATEST)),
    Reading(Deferred("ckptool.formats.deepspeed.scan:scan"), takes_tp_rules=True),
)


def _probe_universal(source: Source) -> bool:
    if LATEST_UNIVERSAL in source.files:
        return LATEST not in source.files
    return OPTIMIZER_STATE in source.files


UNIVERSAL_FORMAT = Format(
    "deepspeed-universal",
    "DeepSpeed's universal checkpoint: a folder per parameter",
    Detection(_probe_universal),
    Reading(Deferred("ckptool.formats.deepspeed.universal:scan")),
    Writing(convert=Deferred("ckptool.formats.deepspeed.write:lay_out")),
)
