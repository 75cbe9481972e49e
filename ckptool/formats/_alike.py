"""Archives that are alike: what is read of one is the same in the next, but for its checksums.

A DCP folder holds an archive an item (torch 2.1 to 2.13), and those of tensors of one shape and
type differ in the tensors' bytes and the CRC-32 of these alone, which the reading of an archive
never looks at: where all that it did look at is the same, so is what it found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import starmap
from typing import TYPE_CHECKING, NamedTuple

from ckptool.formats._zip import CRC32_NBYTES, Region, ZipRecord

if TYPE_CHECKING:
    from ckptool.formats._torch_file import TorchFile

_MOST_SIZES, _MOST_OF_A_SIZE = 256, 4

_Spans = tuple[tuple[int, int], ...]


class Traced(Region):
    """A region that notes what is read of it."""

    def __init__(self, region: Region) -> None:
        vars(self).update(vars(region))
        self.spans: list[tuple[int, int]] = []

    def read(self, start: int, nbytes: int) -> bytes:
        """As ``Region.read``."""
        self.spans.append((start, start + nbytes))
        return super().read(start, nbytes)


class _Known(NamedTuple):
    """What was read of an archive, what it holds, and where it notes the CRC-32 of each storage."""

    spans: _Spans
    read: bytes
    file: TorchFile
    offset: int
    noted: Mapping[str, int]

    def again(self, region: Region) -> TorchFile:
        """What another archive holds of which the same was read."""
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


_KNOWN: dict[int, list[_Known]] = {}


def known(region: Region) -> TorchFile | None:
    """What the archive in a region holds, where one that is alike was read before."""
    for one in _KNOWN.get(region.nbytes, ()):
        if region.joined(one.spans) == one.read:
            return one.again(region)
    return None


def learn(
    traced: Traced, file: TorchFile, storages: Mapping[str, ZipRecord], others: Iterable[ZipRecord]
) -> None:
    """Remember what was found in an archive, by all that was read of it, where that is at hand.

    ``storages`` are records whose bytes were not read, by the storages' keys; of them and of
    ``others`` the CRC-32 may differ.
    """
    if len(_KNOWN) >= _MOST_SIZES or not all(starmap(traced.is_at_hand, traced.spans)):
        return
    alike = _KNOWN.setdefault(traced.nbytes, [])
    if len(alike) < _MOST_OF_A_SIZE:
        noted = {key: record.noted for key, record in storages.items()}
        spans = _spans(traced.spans, {*noted.values(), *(record.noted for record in others)})
        alike.append(_Known(spans, traced.joined(spans), file, traced.offset, noted))


def _spans(read: Iterable[tuple[int, int]], free: Iterable[int]) -> _Spans:
    """All bytes that were read, each once and in order, but for the CRC-32 at each of ``free``."""
    held = {at for start, end in read for at in range(start, end)}
    held -= {at for start in free for at in range(start, start + CRC32_NBYTES)}
    starts = sorted(at for at in held if at - 1 not in held)
    ends = sorted(at + 1 for at in held if at + 1 not in held)
    return tuple(zip(starts, ends, strict=True))
