"""Which tensor may hold the scale of another, by names alone: writers call it in many ways.

ComfyUI's ``X.scale_weight``, Mistral's ``X.qscale_weight``, fbgemm's ``X.gate_up_proj_scale``, AMD
Quark's ``X.weight_quantizer.scale``: one of an unknown name must not go unnoticed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from ckptool.core.catalog import TensorEntry
from ckptool.core.text import MOST_STEPS
from ckptool.errors import Unsupported

_SCALE = re.compile(r"scal(e|ing)|a(bs)?max|dequant|(\b|_)sf\b", re.IGNORECASE)
_NAMELESS = re.compile(r"(q|de|inv)?_?(scales?|scaling)(_factor|_inv|_[0-9])*")
"""The last part of a scale's name that does not say of what it is."""
_WEIGHTS = ("weight", "kernel")
_WEIGHT = re.compile("(.*?)_?q?weight")
_OF_WEIGHT = re.compile("quant|weight|fp8")
"""What the name of a module of its own with the scale, in that of the weight, contains."""
_CODES = re.compile("weight|kernel|data|code|pack|_proj")
_TABLE = re.compile(r"(\w+_)?scales")
"""The name of a container of all scales, each under the name of its weight or module."""
_OF_ALL = ("scaled_fp8",)
"""The last parts of names that mark all weights below as scaled: ComfyUI's (0.3.64)."""


class Scales:
    """The scales among some names."""

    def __init__(self, names: Iterable[str]) -> None:
        self._by_parent: dict[str, list[str]] = defaultdict(list)
        self._in_submodules: dict[str, str] = {}
        self._in_tables: dict[str, str] = {}
        self._global: list[tuple[str, str]] = []
        for name in names:
            if _SCALE.search(name):
                self._add(name)

    def _add(self, name: str) -> None:
        parent, _, last = name.rpartition(".")
        self._by_parent[parent].append(last)
        if last in _OF_ALL:
            self._global.append((f"{parent}." if parent else "", name))
        steps = name.split(".")
        for at in range(max(0, len(steps) - MOST_STEPS), len(steps) - 1):
            step = steps[at]
            if _TABLE.fullmatch(step):
                self._in_tables[".".join(steps[at + 1 :])] = name
            if at and _OF_WEIGHT.search(step) and _SCALE.search(last):
                self._in_submodules.setdefault(".".join(steps[:at]), name)

    def of(self, name: str) -> str | None:
        """Return the name of what may be the scale of a tensor, None if nothing may be."""
        parent, _, last = name.rpartition(".")
        grandparent, _, module = parent.rpartition(".")
        siblings = self._by_parent.get(parent, ())
        scales = [n for n in siblings if n != last and n not in _OF_ALL and _is_of(n, last)]
        if scales:
            return f"{parent}.{scales[0]}" if parent else scales[0]
        if name in self._by_parent:
            return f"{name}.{self._by_parent[name][0]}"
        if last in _WEIGHTS and parent in self._in_submodules:
            return self._in_submodules[parent]
        for path in (name, parent):
            for key in (path, path.partition(".")[2]):
                if key and key in self._in_tables:
                    return self._in_tables[key]
        for other in self._by_parent.get(grandparent, ()) if module and last in _WEIGHTS else ():
            if other.startswith(f"{module}_"):
                return f"{grandparent}.{other}" if grandparent else other
        return next((mark for head, mark in self._global if name.startswith(head)), None)

    def require_none(self, entry: TensorEntry) -> None:
        """Raise Unsupported if a tensor of few bits may have a scale, without which it is wrong."""
        scale = self.of(entry.name) if is_coarse(entry) else None
        if scale is not None:
            raise Unsupported(
                f"{entry.name}: {entry.source_dtype} with {scale}, which may be its scale: a cast"
                " would leave it out",
                hint="use --dequantize, or leave --dtype out to keep both as they are",
            )


def is_coarse(entry: TensorEntry) -> bool:
    """Return whether a tensor is stored in elements of 8 bits and less."""
    return entry.source_dtype.itemsize == 1


def is_weight(name: str) -> bool:
    """Return whether a name is that of a module's weight."""
    return name.rpartition(".")[2] in _WEIGHTS


def may_be_codes(name: str) -> bool:
    """Return whether integers of a name may be a weight's, and no index or mask."""
    return _CODES.search(name.rpartition(".")[2]) is not None


def _is_of(scale: str, last: str) -> bool:
    """Return whether a scale may belong to a tensor beside it, by the last parts of their names."""
    if not _SCALE.search(scale):
        return False
    if last in _WEIGHTS or last in scale or _NAMELESS.fullmatch(scale):
        return True
    weight = _WEIGHT.match(last)
    return weight is not None and weight[1].strip("_") in scale
