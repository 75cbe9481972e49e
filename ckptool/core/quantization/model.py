"""A quantized tensor, the facts its scheme needs, and the entry of the numbers it becomes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import Catalog, Chunk, Computed, StridedPart, TensorEntry
from ckptool.core.dtype import DType
from ckptool.core.quantization.blocks import ComputeByTorch, by_torch
from ckptool.core.quantization.config import Group, QuantizationConfig
from ckptool.core.selection import renamed_path
from ckptool.errors import Unsupported

Tensors = Mapping[str, TensorEntry]


class Kind(Struct, frozen=True):
    """A kind of quantized tensors, by its name on the screen, and who stores it.

    ``methods`` are names of ``quant_method`` in a quantization_config (transformers 5.23),
    ``formats`` of ``format`` (compressed-tensors 0.20) and ``quant_algo`` (ModelOpt 0.47), all
    separated by spaces.
    """

    name: str
    methods: str = ""
    formats: str = ""


class Scheme(Struct, frozen=True):
    """A scheme, as its file defines it: what names tell it, its kinds, how it is found.

    ``find`` yields the tensors that are complete, given the names that end with one of ``ends``, or
    the names of tensors of type ``dtype``.
    ``marks`` are patterns of the ends of names, after a dot, that tell a kind even if it is not
    complete, or of a variant that is not supported.
    """

    find: Callable[[Catalog, Iterable[str]], Iterator[Quantized]]
    ends: tuple[str, ...]
    kinds: tuple[Kind, ...] = ()
    marks: Mapping[str, str] = field(default_factory=dict)
    dtype: str = ""


class Surroundings(Struct, frozen=True):
    """What a scheme needs besides the tensors: the requested type, small tensors, the config.

    ``read`` returns the bytes of a tensor, and none of one that is not small.
    """

    dtype: DType
    read: Callable[[TensorEntry], bytes]
    config: QuantizationConfig = field(default_factory=QuantizationConfig)


class Quantized(Struct, frozen=True):
    """A quantized tensor: its kind, the name of its numbers, and the tensors it consists of.

    ``extras`` are zero points, a global scale, and the like; ``about`` are tensors that only
    describe it, ``values_beside`` plain values that do, and ``objects`` their names. ``lay_out``
    makes the entry of its numbers, and raises Unsupported if the stored tensors do not match. If it
    ``keeps_scales``, these are tensors of their own, which stay.
    """

    kind: Kind
    name: str
    values: TensorEntry
    scales: TensorEntry
    lay_out: Callable[[Quantized, Surroundings], TensorEntry]
    extras: tuple[TensorEntry, ...] = ()
    about: tuple[TensorEntry, ...] = ()
    values_beside: Mapping[str, Any] = field(default_factory=dict)
    objects: tuple[str, ...] = ()
    keeps_scales: bool = False

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        """All the tensors that the numbers replace."""
        return (self.values,) if self.keeps_scales else (*self._parts, *self.about)

    @property
    def _parts(self) -> tuple[TensorEntry, ...]:
        """The tensors of which the numbers are computed."""
        return (self.values, self.scales, *self.extras)

    @property
    def module(self) -> str:
        """The name of the module whose weight it is."""
        return self.name.rpartition(".")[0]

    @property
    def unpacked_shape(self) -> tuple[int, ...]:
        """The shape of its numbers if each of its bytes has two."""
        shape = self.values.shape
        return (*shape[:-1], 2 * shape[-1]) if shape else ()

    def numbers(
        self,
        compute: ComputeByTorch,
        dtype: DType,
        shape: tuple[int, ...],
        block: tuple[int, ...],
        flat: tuple[int, ...] | None = None,
    ) -> TensorEntry:
        """Return the entry of the numbers, of ``shape``, with a scale per ``block``.

        ``block`` counts in the dims of ``flat`` if that is another shape of the same elements.
        """
        part = StridedPart(flat or shape, 0, row_major_strides(shape, 1))
        at = Computed(self._parts, part, by_torch(compute), block)
        return replace(
            self.values,
            name=self.name,
            path=renamed_path(self.values.path, self.name),
            dtype=dtype,
            shape=shape,
            chunks=(Chunk(Box.whole(shape), at),),
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

    def contradicts(self, recorded: str, stored: str) -> Unsupported:
        """Return the error that a config says something else than is stored."""
        error = self.unfit(f"{recorded}, the tensors {stored}")
        error.hint = (
            "correct config.json and name its folder with --hf-assets, or use"
            f" --drop '{self.values.name}' to exclude it"
        )
        return error

    def require_settings(self, group: Group, **stored: int | str | bool) -> None:
        """Raise Unsupported if ``group``, of quantization_config, differs from what is stored.

        A missing value, 0 or -1 agrees with anything.
        """
        for key, value in stored.items():
            setting = group.weights.get(key)
            if type(setting) is type(value) and setting not in (value, 0, -1):
                raise self.contradicts(f"{group} says {key} {setting}", str(value))

    def require_strategy(
        self, group: Group, shape: tuple[int, ...], block: tuple[int, ...]
    ) -> None:
        """Raise Unsupported if ``group`` has scales for other parts of a weight of ``shape``."""
        if not group.allows(shape, block):
            sizes = " x ".join(map(str, block[-2:]))
            raise self.contradicts(
                f"{group} says strategy {group.weights['strategy']}",
                f"have scales {self.scales.name} {list(self.scales.shape)}, one per {sizes}",
            )

    def require_type(self, entry: TensorEntry, dtype: str) -> None:
        """Raise Unsupported if a part has a type that would be read as other numbers."""
        if dtype not in (entry.dtype.name, entry.dtype.kind):
            raise Unsupported(
                f"{self.values.name}: scales {entry.name} are {entry.dtype.name}, not {dtype}",
                hint=f"use --drop '{self.values.name}' to exclude it",
            )


def parse_object(text: bytes) -> dict[str, Any]:
    """Read a JSON object; {} where it is none."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def part_of_row(shape: tuple[int, ...], columns: int) -> tuple[int, ...]:
    """Return a block of so many columns of one row of a tensor."""
    return (*(1 for _ in shape[1:]), columns)
