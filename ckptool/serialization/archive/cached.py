"""Archives that differ only in the checksums of their content: one of them is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import starmap
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from ckptool.serialization.zip import CRC32_NBYTES, Region, ZipRecord

if TYPE_CHECKING:
    from ckptool.serialization.archive.read import TorchFile

_MOST_SIZES, _MOST_OF_A_SIZE = 256, 4

_Spans = tuple[tuple[int, int], ...]


class TracedRegion(Region):
    """A region that records what is read of it."""

    def __init__(self, region: Region) -> None:
        vars(self).update(vars(region))
        self.spans: list[tuple[int, int]] = []

    def read(self, start: int, nbytes: int) -> bytes:
        """Read as ``Region.read``, and note it."""
        self.spans.append((start, start + nbytes))
        return super().read(start, nbytes)

    def read_each(self, spans: Iterable[tuple[int, int]]) -> list[bytes]:
        """Read as ``Region.read_each``, and note it."""
        wanted = list(spans)
        self.spans += wanted
        return super().read_each(wanted)


class CachedArchive(NamedTuple):
    """The parts read of an archive, its content, and the place of each storage's CRC-32.

    A DCP folder has an archive per item (torch 2.1 to 2.13), and those of tensors of one shape and
    type differ only in the tensors' bytes and their CRC-32, which reading an archive never uses: if
    everything that it did use is equal, so is the content.
    """

    spans: _Spans
    read: bytes
    file: TorchFile
    offset: int
    noted: Mapping[str, int]

    def at(self, region: Region) -> TorchFile:
        """Return the content of another archive with the same read parts."""
        crcs = {key: region.crc32_at(at) for key, at in self.noted.items()}
        are_checked = any(crcs.values())
        moved = region.offset - self.offset
        storages = {
            key: stored._replace(
                file=region.file,
                offset=stored.offset + moved,
                crc32=crcs[key] if are_checked else None,
            )
            for key, stored in self.file.storages.items()
        }
        return replace(self.file, what=region.what, storages=storages, meshes={})


_CACHE: dict[int, list[CachedArchive]] = {}
"""Archives that were read, by their size in bytes."""


def find_cached(region: Region) -> TorchFile | None:
    """Return the content of the archive in a region, if a similar one was read before."""
    archive = match_cached(region)
    return None if archive is None else archive.at(region)


def match_cached(region: Region) -> CachedArchive | None:
    """Return the archive that was read before and is similar to the one in a region."""
    archives = _CACHE.get(region.nbytes, ())
    return next((one for one in archives if region.joined(one.spans) == one.read), None)


def keep_archive(
    traced: TracedRegion,
    file: TorchFile,
    storages: Mapping[str, ZipRecord],
    unread: Iterable[ZipRecord],
) -> None:
    """Keep the content of an archive, with everything that was read of it, if that is in memory.

    ``storages`` are records whose bytes were not read, by the storages' keys; their CRC-32 and
    those of ``unread`` may differ.
    """
    if len(_CACHE) >= _MOST_SIZES or not all(starmap(traced.is_at_hand, traced.spans)):
        return
    archives = _CACHE.setdefault(traced.nbytes, [])
    if len(archives) < _MOST_OF_A_SIZE:
        noted = {key: record.noted for key, record in storages.items()}
        spans = _subtract(traced.spans, {*noted.values(), *(record.noted for record in unread)})
        archives.append(CachedArchive(spans, traced.joined(spans), file, traced.offset, noted))


def _subtract(spans: Iterable[tuple[int, int]], crcs: Iterable[int]) -> _Spans:
    """Return all bytes of spans, each once and in order, except the CRC-32 at each of ``crcs``."""
    places = {at for start, end in spans for at in range(start, end)}
    places -= {at for start in crcs for at in range(start, start + CRC32_NBYTES)}
    starts = sorted(at for at in places if at - 1 not in places)
    ends = sorted(at + 1 for at in places if at + 1 not in places)
    return tuple(zip(starts, ends, strict=True))
