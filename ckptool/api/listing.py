"""The tensors of an open checkpoint, by name: a mapping that prints as one line for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from ckptool.core.catalog import TensorEntry

_MOST_LINES = 60


class TensorListing(Mapping[str, TensorEntry]):
    """The entries of tensors by name, as the metadata has them; nothing can be changed."""

    def __init__(self, tensors: Mapping[str, TensorEntry]) -> None:
        self._tensors = tensors

    def __repr__(self) -> str:
        shown = list(islice(self._tensors.values(), _MOST_LINES))
        names = [n if n.isprintable() else repr(n) for n in (entry.name for entry in shown)]
        width = max(map(len, names), default=0)
        lines = [
            f"{name:<{width}}  {entry.looks}" for name, entry in zip(names, shown, strict=True)
        ]
        rest = len(self._tensors) - len(lines)
        return "\n".join([*lines, *([f"... and {rest:,} more"] if rest else [])]) or "no tensors"

    def __getitem__(self, name: str) -> TensorEntry:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
