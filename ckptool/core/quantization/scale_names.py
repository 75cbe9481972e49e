"""Which tensor may hold the scale of another, by names alone: writers call it in many ways.

ComfyUI's ``X.scale_weight``, Mistral's ``X.qscale_weight``, fbgemm's ``X.gate_up_proj_scale``, AMD
Quark's ``X.weight_quantizer.scale``: one of an unknown name must not go unnoticed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from ckptool.core.catalog import TensorEntry
from ckptool.errors import Unsupported

_SCALE = re.compile(r"scal(e|ing)|a(bs)?max", re.IGNORECASE)
_NAMELESS = re.compile(r"(q|de|inv)?_?(scales?|scaling)(_factor|_inv|_[0-9])*")
"""The last part of a scale's name that does not say of what it is."""
_WEIGHTS = ("weight", "kernel")
_INSIDE = ("", "_quantizer")
"""What follows a weight's name in the name of a module of its own with the scale."""
_OF_ALL = ("scaled_fp8",)
"""The last parts of names that mark all weights below as scaled: ComfyUI's (0.3.64)."""


class Scales:
    """The scales among some names."""

    def __init__(self, names: Iterable[str]) -> None:
        self._found: dict[str, list[str]] = defaultdict(list)
        self._of_all: list[tuple[str, str]] = []
        for name in names:
            if _SCALE.search(name):
                parent, _, last = name.rpartition(".")
                self._found[parent].append(last)
                if last in _OF_ALL:
                    self._of_all.append((f"{parent}." if parent else "", name))

    def of(self, name: str) -> str | None:
        """Return the name of what may be the scale of a tensor, None if nothing may be."""
        parent, _, last = name.rpartition(".")
        above, _, module = parent.rpartition(".")
        beside = self._found.get(parent, ())
        named = [n for n in beside if n != last and n not in _OF_ALL and _is_of(n, last)]
        inside = [f"{name}{end}" for end in _INSIDE if f"{name}{end}" in self._found]
        if named:
            return f"{parent}.{named[0]}" if parent else named[0]
        if inside:
            return f"{inside[0]}.{self._found[inside[0]][0]}"
        for other in self._found.get(above, ()) if module and last in _WEIGHTS else ():
            if other.startswith(f"{module}_"):
                return f"{above}.{other}" if above else other
        return next((mark for head, mark in self._of_all if name.startswith(head)), None)

    def require_none(self, entry: TensorEntry) -> None:
        """Raise Unsupported if a tensor of few bits may have a scale, without which it is wrong."""
        scale = self.of(entry.name) if entry.source_dtype.itemsize == 1 else None
        if scale is not None:
            raise Unsupported(
                f"{entry.name}: {entry.source_dtype} with {scale}, which may be its scale: a cast"
                " would leave it out",
                hint="use --dequantize, or leave --dtype out to keep both as they are",
            )


def _is_of(scale: str, last: str) -> bool:
    """Return whether a scale beside a tensor may be of it, by the last parts of their names."""
    if not _SCALE.search(scale):
        return False
    return last in _WEIGHTS or last in scale or _NAMELESS.fullmatch(scale) is not None
