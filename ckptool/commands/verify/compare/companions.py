"""The files that go with a model: config.json, tokenizer and their like, on both sides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptool.commands.keymap.assets import assets_in
from ckptool.commands.open import Opened
from ckptool.engine.check.digest import file_digests
from ckptool.errors import Problem
from ckptool.storage.local import Files


@dataclass(frozen=True, slots=True)
class _Companion:
    source: Files
    file: str
    nbytes: int

    def digest(self) -> str:
        """The SHA-256 (hex) of the file."""
        return file_digests([self.file], self.source, 1)[self.file]


def differing_companions(one: Opened, other: Opened, assets: Path | None) -> Iterator[Problem]:
    """One problem for each file beside the first one's tensors that the other lacks or has changed.

    The files of ``assets``, which ``convert`` copies, go before those of the same name. Every file
    is read once. Raises NotFound where one cannot be, UsageError where there are no assets.
    """
    mine, theirs = _of(one), _of(other)
    if assets is not None:
        source, found = assets_in(assets)
        mine |= {name: _Companion(source, name, size) for name, size in found.items()}
    for name, here in mine.items():
        there = theirs.get(name)
        if there is None:
            yield Problem(f"{name}: a file in A, missing in B", "companion-missing", file=name)
        elif here.nbytes != there.nbytes or here.digest() != there.digest():
            message = f"{name}: content differs (A {here.nbytes:,} bytes, B {there.nbytes:,})"
            yield Problem(message, "companion-differs", file=name)


def _of(opened: Opened) -> dict[str, _Companion]:
    """Each file by its name, as ``convert`` writes it."""
    return {
        name.rpartition("/")[2]: _Companion(opened.source, name, size)
        for name, size in opened.catalog.companions.items()
    }
