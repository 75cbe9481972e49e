"""The digest of a plan, which a resumed run, all parts and all ranks must agree on."""

from __future__ import annotations

import hashlib

from ckptool import __version__
from ckptool.core.layout import Literal, Verbatim
from ckptool.core.plan import Plan
from ckptool.core.sharding.table import ChunkTable, WholeTensor
from ckptool.engine.read.containers import likely_place
from ckptool.engine.write.run import read_verbatim
from ckptool.storage.local import Files


def plan_digest(plan: Plan, source: Files, decided: object) -> str:
    """Hash everything that decides the output, except the source's own bytes, with SHA-256.

    This includes headers, values and configs, which options affect, and files from elsewhere.
    ``decided`` is what options and maps decide beyond the layout.
    """
    digest = hashlib.sha256(repr((__version__, decided)).encode())
    for file in plan.layout.files:
        digest.update(repr((file.path, file.nbytes, file.rank)).encode())
        for part in file.decisive:
            if isinstance(part, Literal):
                digest.update(part.data)
            elif isinstance(part, Verbatim) and part.file not in source.files:
                for piece in read_verbatim(part, source):
                    digest.update(piece)
    for entry in plan.entries:
        chunks = entry.chunks
        kind = (entry.name, entry.path, entry.shape, entry.dtype.name, entry.source_dtype.name)
        if isinstance(chunks, WholeTensor):
            digest.update(repr((kind, chunks.begin)).encode())
            continue
        digest.update(repr(kind).encode())
        if isinstance(chunks, ChunkTable):
            for column in chunks.columns():
                digest.update(column)
            continue
        size = entry.source_dtype.itemsize  # a place is the same at every opening
        places = [(chunk.box.lo, likely_place(chunk.at, size)) for chunk in chunks]
        spots = [(lo, at.file, at.offset) for lo, at in places]
        digest.update(repr(spots).encode())
    for value in plan.catalog.objects.values():
        digest.update(repr((value.name, value.path)).encode())
    return digest.hexdigest()
