"""Megatron's own format (``--ckpt-format torch``): a folder for each model-parallel rank.

Read: Megatron-LM with megatron-core 0.5 to 0.20, and its older ``language_model``:
``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``, ``distrib_optim.pt`` beside it. Tensor-, pipeline-
and expert-parallel ranks become whole tensors ``model.<name>``, ``fp32.<name>``,
``exp_avg.<name>``, ``exp_avg_sq.<name>``, with the layers and experts of the whole model. A gated
``linear_fc1`` is [gate; up], a fused ``linear_qkv`` keeps its query groups.
"""

from __future__ import annotations

import re

from ckptool.core.catalog import Catalog
from ckptool.formats.base import Format, ScanOptions, Source

_FOLDER = re.compile(r"mp_rank_[0-9]{2,6}(_[0-9]{3,6}){0,2}/model_optim_rng\.pt")


def _probe(source: Source) -> bool:
    return any(_FOLDER.fullmatch(name) for name in source.files)


def _scan(source: Source, options: ScanOptions) -> Catalog:
    from ckptool.formats._megatron_torch import scan

    return scan(source, options)


FORMAT = Format(
    "megatron-torch",
    "Megatron's own format, one folder a model-parallel rank (mp_rank_00/model_optim_rng.pt)",
    _probe,
    _scan,
    takes_tp_rules=True,
)
