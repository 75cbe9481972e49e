"""Compute CRC-32 of files, and of runs from those of their pieces."""

from __future__ import annotations

from pathlib import Path

from isal.isal_zlib import crc32, crc32_combine

from ckptool.storage.disk import is_real_file

__all__ = ["Piece", "crc32", "crc32_combine", "file_crc", "joined"]

Piece = tuple[int, int, int]
"""A run of bytes: its offset, how many they are, and their CRC-32."""


def file_crc(path: Path, nbytes: int, buffer: memoryview) -> int | None:
    """The CRC-32 of a file of ``nbytes``, read through ``buffer``; None if it is no such file."""
    if not is_real_file(path) or path.stat().st_size != nbytes:
        return None
    total = 0
    with open(path, "rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            total = crc32(buffer[:count], total)
    return total


def joined(pieces: list[Piece]) -> int:
    """The CRC-32 of adjoining pieces ``(offset, nbytes, crc32)``, in order of offset."""
    total = 0
    for _, nbytes, crc in sorted(pieces):
        total = crc32_combine(total, crc, nbytes)
    return total
