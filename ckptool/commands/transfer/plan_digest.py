"""The digest of a plan, which a resumed run, all parts and all ranks must agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from ckptool.core.catalog import Chunk, Computed, TensorEntry
from ckptool.core.chunks import ChunkTable, WholeTensor
from ckptool.core.layout import Literal, Verbatim
from ckptool.core.planning.plan import Plan
from ckptool.engine.read.containers import likely_place
from ckptool.engine.write.run import read_verbatim
from ckptool.storage.files import Files
from ckptool.version import __version__


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
    shared: dict[int, int] = {}
    for entry in plan.entries:
        chunks = entry.chunks
        kind = (entry.name, entry.path, entry.shape, entry.dtype.name, entry.source_dtype.name)
        if isinstance(chunks, WholeTensor):
            digest.update(repr((kind, chunks.begin)).encode())
            continue
        if isinstance(chunks, ChunkTable):
            digest.update(b"".join([repr(kind).encode(), *_columns(chunks, shared)]))
            continue
        digest.update(repr((kind, _spots(entry, chunks))).encode())
    for value in plan.catalog.objects.values():
        digest.update(repr((value.name, value.path)).encode())
    return digest.hexdigest()


def _spots(entry: TensorEntry, chunks: Iterable[Chunk]) -> list[object]:
    """Return where each chunk of a tensor is, or of what it is computed, and where that is.

    What they are computed by is decided elsewhere.
    """
    spots = list[object]()
    for chunk in chunks:
        if isinstance(chunk.at, Computed):
            of = [(part.name, part.shape, _spots(part, part.chunks)) for part in chunk.at.stored]
            spots.append((chunk.box.lo, chunk.at.part, chunk.at.block, of))
            continue
        at = likely_place(chunk.at, entry.source_dtype.itemsize)  # the same at every opening
        spots.append((chunk.box.lo, at.file, at.offset))
    return spots


def _columns(table: ChunkTable, shared: dict[int, int]) -> Iterator[bytes]:
    """Yield all that tells a table from others, as bytes.

    The files and the boxes that many tables share are yielded once, and then by their number in
    ``shared``, which has those that were met, by id.
    """
    items, boxes = table.items, table.boxes
    for part in (items.files, boxes):
        if id(part) not in shared:
            shared[id(part)] = len(shared)
            yield boxes.lows.tobytes() if part is boxes else repr(items.files).encode()
    yield b"%d %d %d" % (len(table), shared[id(items.files)], shared[id(boxes)])
    yield items.file_numbers.tobytes()
    yield items.offsets.tobytes()
    yield items.lengths.tobytes()
