"""nanotron's checkpoints (0.4): detected only to report that they are not supported.

Each tensor has a file of its own, or one for each tensor-parallel rank, below ``model``: what its
name is, and which part of it a rank has, are the file's path and header.
"""

from __future__ import annotations

import re

from ckptool.formats.base import Detection, Format, refusing

_METADATA = "checkpoint_metadata.json"
_TENSOR = re.compile(r"model/(?:.+/)?model_[^/]+\.safetensors")


FORMAT = Format(
    "nanotron",
    "nanotron's checkpoint, recognized but not read",
    Detection(
        lambda source: _METADATA in source.files and any(map(_TENSOR.fullmatch, source.files))
    ),
    refusing(
        "a checkpoint of nanotron: ranks' parts of each tensor in files of their own, which ckptool"
        " does not put together",
        "with nanotron: torchrun --nproc-per-node 1 examples/llama/convert_nanotron_to_hf.py"
        " --checkpoint_path PATH --save_path OUT, then read OUT",
    ),
)
"""Not read: its optimizer's states are flat buffers of data-parallel ranks."""
