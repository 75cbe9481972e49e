"""Orbax checkpoints (JAX): detected only to report that they are not supported.

``_METADATA`` or ``manifest.ocdbt`` (orbax-checkpoint 0.5 and later), in the folder itself or in
that of an item such as ``default/`` or ``state/`` below a step.
"""

from __future__ import annotations

from ckptool.formats.base import Detection, Format, refusing
from ckptool.serialization.source import Source

_MARKS = ("_METADATA", "manifest.ocdbt", "_CHECKPOINT_METADATA")
_ITEM_DEPTH = 1


def _probe(source: Source) -> bool:
    return any(
        name.rpartition("/")[2] in _MARKS and name.count("/") <= _ITEM_DEPTH
        for name in source.files
    )


FORMAT = Format(
    "orbax",
    "JAX's Orbax checkpoint, recognized but not read",
    Detection(_probe),
    refusing(
        "an Orbax checkpoint of JAX: its arrays are zarr in a key-value store, which ckptool does"
        " not read",
        "with orbax: tree = orbax.checkpoint.PyTreeCheckpointer().restore(PATH), then"
        " safetensors.numpy.save_file of its arrays by their paths",
    ),
)
"""Not read: it would need tensorstore."""
