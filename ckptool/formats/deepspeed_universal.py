"""DeepSpeed's universal checkpoint: ``zero/<parameter>/fp32.pt`` and its like, and model files.

Read: what ``ds_to_universal`` of DeepSpeed 0.10 to 0.19 writes. Written: what DeepSpeed 0.19 loads
with ``checkpoint.load_universal``, at any ZeRO stage, data and tensor parallelism.
"""

from __future__ import annotations

from ckptool.core.catalog import Catalog
from ckptool.formats._deepspeed_files import LATEST, LATEST_UNIVERSAL, OPTIMIZER_STATE
from ckptool.formats.base import Format, ScanOptions, Source


def _probe(source: Source) -> bool:
    if LATEST_UNIVERSAL in source.files:
        return LATEST not in source.files
    return OPTIMIZER_STATE in source.files


def _scan(source: Source, options: ScanOptions) -> Catalog:
    from ckptool.formats._deepspeed_read import malformed_is_damaged
    from ckptool.formats._deepspeed_universal_read import scan

    with malformed_is_damaged(source.root):
        return scan(source, options)


FORMAT = Format(
    "deepspeed-universal",
    "DeepSpeed's universal checkpoint: a folder a parameter",
    _probe,
    _scan,
)
