"""A quantized tensor, the facts its scheme needs, and the entry of the numbers it becomes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import translate
from typing import Any

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import Chunk, ScaledBlocks, Scheme, StridedPart, TensorEntry
from ckptool.core.dtype import DType
from ckptool.core.selection import renamed_path
from ckptool.errors import Unsupported

Tensors = Mapping[str, TensorEntry]
_IGNORED = ("ignore", "modules_to_not_convert")
"""Keys for modules without such weights: compressed-tensors' and ModelOpt's, transformers'.

By name, by ``re:`` and a pattern, or by a glob, as in ModelOpt (0.47).
"""
_FP8 = frozenset(["FP8", "FP8 in blocks"])
_MX = frozenset(["MXFP4", "MXFP8"])
_OF_METHOD: Mapping[str, frozenset[str]] = {
    "awq": frozenset(["AWQ"]),
    "bitsandbytes": frozenset(["bitsandbytes NF4", "bitsandbytes FP4", "bitsandbytes INT8"]),
    "compressed-tensors": _FP8 | _MX | {"packed integers", "INT8", "NVFP4"},
    "fbgemm_fp8": frozenset(["FP8"]),
    "fp8": _FP8 | _MX,
    "gptq": frozenset(["GPTQ"]),
    "modelopt": _FP8 | _MX | {"NVFP4", "INT8"},
    "mxfp4": frozenset(["MXFP4"]),
    "torchao": frozenset(["torchao"]),
}
"""The kinds that each ``quant_method`` stores (transformers 5.23); others may store any."""


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """The recorded quantization of a model: ``quantization_config`` of config.json.

    ``fields`` are as transformers reads them; empty if there are none.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    _ignored: tuple[re.Pattern[str], ...] = field(init=False)

    def __post_init__(self) -> None:
        lists = (self.fields.get(key) for key in _IGNORED)
        names = [str(name) for some in lists if isinstance(some, list) for name in some]
        object.__setattr__(self, "_ignored", tuple(_patterns(names)))

    @property
    def method(self) -> str | None:
        """The ``quant_method``, None if none is stated."""
        method = self.fields.get("quant_method")
        return None if method is None else str(method)

    def block_of(self, module: str) -> tuple[int, int] | None:
        """Return the block size of a module's weight, None if none is stated.

        A group of part of a row is a block of one row.
        """
        weights = self.weights_of(module)
        group = _pair([1, weights.get("group_size")])
        said = _pair(weights.get("block_structure")) or group
        return said or _pair(self.fields.get("weight_block_size"))

    def weights_of(self, module: str) -> Mapping[str, Any]:
        """Return the settings for the weights of a module's group (compressed-tensors 0.20).

        A target is the name of a module, ``re:`` and a pattern of names, or a class: the first two
        take precedence. {} if no group matches the module, or ``ignore`` does.
        """
        if self.is_ignored(module):
            return {}
        groups = self.fields.get("config_groups")
        found = list(groups.values()) if isinstance(groups, dict) else []
        found = [group for group in found if isinstance(group, dict)]
        of_class = [g for g in found if any(_is_class(target) for target in _targets(g))]
        named = [g for g in found if any(_names(target, module) for target in _targets(g))]
        for group in (*named, *(of_class if len(of_class) == 1 else ())):
            weights = group.get("weights")
            return weights if isinstance(weights, dict) else {}
        return {}

    def is_ignored(self, module: str) -> bool:
        """Return whether the config does not apply to a module."""
        return any(pattern.match(module) for pattern in self._ignored)


def _patterns(names: list[str]) -> Iterator[re.Pattern[str]]:
    """Yield patterns of modules: each that ``re:`` begins, and one of all names and globs."""
    globs = [translate(name) for name in names if not name.startswith("re:")]
    if globs:
        yield re.compile("|".join(globs))
    for name in names:
        with suppress(re.error):
            if name.startswith("re:"):
                yield re.compile(name.removeprefix("re:"))


def _targets(group: Mapping[str, Any]) -> list[str]:
    targets = group.get("targets")
    return [str(target) for target in targets] if isinstance(targets, list) else []


def _is_class(target: str) -> bool:
    return not target.startswith("re:") and "." not in target and target[:1].isupper()


def _names(target: str, module: str) -> bool:
    """Return whether a target names a module, or its pattern matches the beginning of its name."""
    if not target.startswith("re:"):
        return target == module
    try:
        return re.match(target.removeprefix("re:"), module) is not None
    except re.error:
        return False


def _pair(value: Any) -> tuple[int, int] | None:
    if not isinstance(value, list) or len(value) != 2 or any(type(n) is not int for n in value):
        return None
    return (value[0], value[1]) if min(value) > 0 else None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a scheme needs besides the tensors: the requested type, small tensors, the config.

    ``read`` returns the bytes of a tensor, and none of one that is not small.
    """

    dtype: DType
    read: Callable[[TensorEntry], bytes]
    config: QuantizationConfig = QuantizationConfig()


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantized tensor: its kind, the name of its numbers, and the tensors it consists of.

    ``others`` are zero points, a scale of all, and the like; ``about`` are tensors that only
    describe it, ``values_beside`` plain values that do, and ``objects`` their names. ``lay_out``
    makes the entry of its numbers, and raises Unsupported if the stored tensors do not match.
    """

    kind: str
    name: str
    values: TensorEntry
    scales: TensorEntry
    lay_out: Callable[[Quantized, Surroundings], TensorEntry]
    scheme: Scheme = "scaled"
    others: tuple[TensorEntry, ...] = ()
    about: tuple[TensorEntry, ...] = ()
    settings: tuple[float, ...] = ()
    values_beside: Mapping[str, Any] = field(default_factory=dict)
    objects: tuple[str, ...] = ()

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        """All the tensors that the numbers replace."""
        return (self.values, self.scales, *self.others, *self.about)

    @property
    def module(self) -> str:
        """The name of the module whose weight it is."""
        return self.name.rpartition(".")[0]

    def numbers(
        self,
        dtype: DType,
        shape: tuple[int, ...],
        block: tuple[int, ...],
        flat: tuple[int, ...] | None = None,
    ) -> TensorEntry:
        """Return the entry of the numbers, of ``shape``, with a scale per ``block``.

        ``block`` counts in the dims of ``flat`` if that is another shape of the same elements.
        """
        part = StridedPart(flat or shape, 0, row_major_strides(shape, 1))
        stored = (self.values, self.scales, block, part, self.scheme, self.others, self.settings)
        return replace(
            self.values,
            name=self.name,
            path=renamed_path(self.values.path, self.name),
            dtype=dtype,
            shape=shape,
            chunks=(Chunk(Box.whole(shape), ScaledBlocks(*stored)),),
            placements=None,
            mesh=None,
            stored=None,
        )

    def unfit(self, why: str | None = None) -> Unsupported:
        """Return the error that its parts do not fit together."""
        why = why or f"scales {self.scales.name} {list(self.scales.shape)} do not match its blocks"
        return Unsupported(
            f"{self.values.name} {list(self.values.shape)}: {why}",
            hint=f"use --drop '{self.values.name}' to exclude it",
        )

    def require_said(self, said: Mapping[str, Any], **found: int | str | bool) -> None:
        """Raise Unsupported if ``said``, of quantization_config, differs from what is stored.

        A missing value, or -1, agrees with anything.
        """
        for key, value in found.items():
            other = said.get(key)
            if type(other) is type(value) and other not in (value, -1):
                raise self.unfit(f"quantization_config says {key} {other}, the tensors {value}")

    def require_method(self, config: QuantizationConfig) -> None:
        """Raise Unsupported if the config's method stores no tensors of this kind."""
        kinds = _OF_METHOD.get(config.method or "")
        if kinds and self.kind not in kinds and not config.is_ignored(self.module):
            raise self.unfit(f"quantization_config says {config.method}, the tensors {self.kind}")

    def require_type(self, entry: TensorEntry, wanted: str) -> None:
        """Raise Unsupported if a part has a type that would be read as other numbers."""
        if wanted not in (entry.dtype.name, entry.dtype.kind):
            raise Unsupported(
                f"{self.values.name}: scales {entry.name} are {entry.dtype.name}, not {wanted}",
                hint=f"use --drop '{self.values.name}' to exclude it",
            )
