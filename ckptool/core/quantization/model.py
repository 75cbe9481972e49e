"""A quantized tensor, the facts its scheme needs, and the entry of the numbers it becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import Chunk, ScaledBlocks, Scheme, StridedPart, TensorEntry
from ckptool.core.dtype import DType
from ckptool.core.quantization.config import Group, QuantizationConfig
from ckptool.core.selection import renamed_path
from ckptool.errors import Unsupported

Tensors = Mapping[str, TensorEntry]


class Surroundings(Struct, frozen=True):
    """What a scheme needs besides the tensors: the requested type, small tensors, the config.

    ``read`` returns the bytes of a tensor, and none of one that is not small.
    """

    dtype: DType
    read: Callable[[TensorEntry], bytes]
    config: QuantizationConfig = field(default_factory=QuantizationConfig)


class Quantized(Struct, frozen=True):
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

    def contradicts(self, said: str, found: str) -> Unsupported:
        """Return the error that a config says something else than is stored."""
        error = self.unfit(f"{said}, the tensors {found}")
        error.hint = (
            "correct config.json and name its folder with --hf-assets, or use"
            f" --drop '{self.values.name}' to exclude it"
        )
        return error

    def require_said(self, said: Group, **found: int | str | bool) -> None:
        """Raise Unsupported if ``said``, of quantization_config, differs from what is stored.

        A missing value, 0 or -1 agrees with anything.
        """
        for key, value in found.items():
            other = said.weights.get(key)
            if type(other) is type(value) and other not in (value, 0, -1):
                raise self.contradicts(f"{said} says {key} {other}", str(value))

    def require_strategy(self, said: Group, shape: tuple[int, ...], block: tuple[int, ...]) -> None:
        """Raise Unsupported if ``said`` has its scales for other parts of a weight of ``shape``."""
        if not said.allows(shape, block):
            sizes = " x ".join(map(str, block[-2:]))
            raise self.contradicts(
                f"{said} says strategy {said.weights['strategy']}",
                f"have scales {self.scales.name} {list(self.scales.shape)}, one per {sizes}",
            )

    def require_kind(self, config: QuantizationConfig) -> None:
        """Raise Unsupported if the config's method, or its group's format, stores other kinds."""
        if config.is_ignored(self.module):
            return
        if config.kinds is not None and self.kind not in config.kinds:
            raise self.contradicts(f"quantization_config says {config.method}", self.kind)
        group = config.group_of(self.module)
        if group.kinds is not None and self.kind not in group.kinds:
            raise self.contradicts(f"{group} says {group.format}", self.kind)

    def require_type(self, entry: TensorEntry, wanted: str) -> None:
        """Raise Unsupported if a part has a type that would be read as other numbers."""
        if wanted not in (entry.dtype.name, entry.dtype.kind):
            raise Unsupported(
                f"{self.values.name}: scales {entry.name} are {entry.dtype.name}, not {wanted}",
                hint=f"use --drop '{self.values.name}' to exclude it",
            )
