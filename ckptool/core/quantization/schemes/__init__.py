"""All schemes of quantized tensors. A new one is a file beside this one, and a row here.

A scheme's file has all of it: which tensors match by their names and types, the layout of their
numbers, whose facts are checked against the config's, and the arithmetic that computes a box.
"""

from __future__ import annotations

from ckptool.core.quantization.schemes import (
    bitsandbytes,
    comfy,
    gpt_oss,
    gptq_awq,
    packed_integers,
    remainders,
    scaled,
    torchao,
)

SCHEMES = (
    comfy.SCHEME,
    scaled.SCHEME,
    gpt_oss.SCHEME,
    packed_integers.SCHEME,
    gptq_awq.SCHEME,
    bitsandbytes.SCHEME,
    torchao.SCHEME,
    remainders.SCHEME,
)
"""The first is for weights with a marker, which no other scheme may find."""
