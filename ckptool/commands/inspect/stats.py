"""Statistics of tensors of every element type, streamed in bounded memory."""

from __future__ import annotations

import math
from abc import ABCMeta
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, overload

import numpy as np
from msgspec import Struct, StructMeta, field
from msgspec.structs import replace

from ckptool.commands.document import Report
from ckptool.commands.open import OpenedCheckpoint, Opens
from ckptool.core.catalog import TensorEntry
from ckptool.core.quantization.names import packed_names
from ckptool.core.selection import tensors_named
from ckptool.core.sharding.coverage import coverage_problems
from ckptool.engine.progress import UNWATCHED, Progress
from ckptool.engine.read.numbers import Array, decode
from ckptool.engine.read.tensors import TensorSource, TensorTile, tensor_job
from ckptool.engine.read.tiles import read_tiles, require_unchanged
from ckptool.errors import damaged
from ckptool.storage.files import Files

_TILE_ELEMENTS = 1 << 20
_MANTISSA, _EXPONENT, _BIAS = 52, 0x7FF, 1023
"""Of a number of 64 bits: the bits after its exponent, those of that, and what is added to it."""

Number = int | float


class TensorStats(Struct, frozen=True):
    """Statistics of one tensor's values.

    ``minimum``, ``maximum``, ``mean`` and ``std`` (of the population) cover the finite values and
    are None if there are none; of complex values they describe the magnitudes. NaN and infinite
    values are counted. All are None for element types that are not numbers (packed bits).
    ``norm`` is the root of the sum of squares. ``histogram`` counts the finite values but zero by
    the exponent ``e`` of their size, from ``2 ** e`` to below ``2 ** (e + 1)``; of these
    ``denormal`` are too small for a full mantissa in the tensor's type.
    """

    entry: TensorEntry
    minimum: Number | None = None
    maximum: Number | None = None
    mean: float | None = None
    std: float | None = None
    zeros: int | None = None
    nan: int | None = None
    inf: int | None = None
    norm: float | None = None
    denormal: int | None = None
    histogram: Mapping[int, int] = field(default_factory=dict)

    @property
    def largest(self) -> Number | None:
        """Return the largest size of a finite value."""
        if self.minimum is None or self.maximum is None:
            return None
        return max(-self.minimum, self.maximum)

    def to_dict(self) -> dict[str, Any]:
        """Return its JSON; null if there is no (finite) number."""
        return {
            "name": self.entry.name,
            "of": "magnitudes" if self.entry.dtype.kind == "complex" else "values",
            "min": _finite(self.minimum),
            "max": _finite(self.maximum),
            "mean": _finite(self.mean),
            "std": _finite(self.std),
            "norm": _finite(self.norm),
            "absmax": _finite(self.largest),
            "zeros": self.zeros,
            "zero_share": self.zeros / max(1, self.entry.elements) if self.zeros else self.zeros,
            "denormal": self.denormal,
            "nan": self.nan,
            "inf": self.inf,
            "histogram": [[power, self.histogram[power]] for power in sorted(self.histogram)],
        }


def _finite(value: Number | None) -> Number | None:
    return value if value is None or math.isfinite(value) else None


class _SequenceStruct(StructMeta, ABCMeta):
    """The metaclass of a Struct that is a ``collections.abc.Sequence``."""


class StatsReport(Report, Sequence[TensorStats], frozen=True, metaclass=_SequenceStruct):
    """The statistics of tensors, in order; true if no value is NaN or infinite."""

    computed: ClassVar = ("ok",)

    stats: tuple[TensorStats, ...] = field(name="_stats")

    schema: ClassVar = "stats"

    @property
    def ok(self) -> bool:
        return not any(row.nan or row.inf for row in self.stats)

    def __len__(self) -> int:
        return len(self.stats)

    @overload
    def __getitem__(self, at: int) -> TensorStats: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[TensorStats]: ...
    def __getitem__(self, at: int | slice) -> TensorStats | Sequence[TensorStats]:
        return self.stats[at]

    def more(self) -> Mapping[str, object]:
        """Return one row per tensor."""
        return {"stats": [row.to_dict() for row in self.stats]}

    def _short(self) -> dict[str, Any]:
        return {"tensors": len(self)} | Report._short(self)


class _Moments(Struct):
    """Running count, mean and sum of squared deviations (Chan's merge), with the extremes."""

    count: int = 0
    mean: float = 0.0
    deviations: float = 0.0
    minimum: Number | None = None
    maximum: Number | None = None
    zeros: int = 0
    nan: int = 0
    inf: int = 0
    exponents: Counter[int] = field(default_factory=Counter)

    def add(self, values: Array) -> None:
        """Add real numbers."""
        self.zeros += int(np.count_nonzero(values == 0))
        if values.dtype.kind == "f":
            finite = np.isfinite(values)
            self.nan += int(np.count_nonzero(np.isnan(values)))
            self.inf += int(np.count_nonzero(np.isinf(values)))
            values = values if finite.all() else values[finite]
        if values.size:
            self._merge(values)

    def _merge(self, values: Array) -> None:
        low, high = values.min().item(), values.max().item()
        self.minimum = low if self.minimum is None else min(self.minimum, low)
        self.maximum = high if self.maximum is None else max(self.maximum, high)
        numbers = values.astype(np.float64)
        codes = numbers.view(np.int64) >> _MANTISSA & _EXPONENT  # denormal ones of 64 bits are one
        sizes = np.bincount(codes, minlength=1)
        self.exponents.update({at - _BIAS: n for at, n in enumerate(sizes.tolist()) if n})
        mean = float(numbers.mean())
        numbers -= mean
        shift = mean - self.mean
        total = self.count + values.size
        self.deviations += float(np.dot(numbers, numbers))
        self.deviations += shift * shift * self.count * values.size / total
        self.mean += shift * values.size / total
        self.count = total

    def of(self, entry: TensorEntry) -> TensorStats:
        """Return the statistics of everything added."""
        mean, std = (
            (self.mean, math.sqrt(self.deviations / self.count)) if self.count else (None,) * 2
        )
        result = TensorStats(
            entry, self.minimum, self.maximum, mean, std, self.zeros, self.nan, self.inf
        )
        norm = math.hypot(math.sqrt(self.deviations), math.sqrt(self.count) * self.mean)
        sizes = Counter(self.exponents)
        sizes[-_BIAS] -= self.zeros  # a zero has the code of the smallest numbers
        dtype, denormal = entry.source_dtype, None
        if dtype.kind == "float" and dtype.mantissa:
            denormal = sum(n for exponent, n in sizes.items() if exponent < 1 - dtype.bias)
        return replace(result, norm=norm, denormal=denormal, histogram=+sizes)


def stats(
    opened: OpenedCheckpoint,
    globs: Sequence[str],
    progress: Progress = UNWATCHED,
) -> StatsReport:
    """Return statistics of every tensor that matches any of ``globs``, in the catalog's order.

    A glob may also be a full name or part of one. Raises UsageError if a pattern
    matches no tensor, Damaged if chunks are missing, Changed if files were written to meanwhile.
    """
    catalog = opened.catalog
    tensors = {name: catalog.tensors[name] for name in tensors_named(catalog, globs, "--stats")}
    problems = coverage_problems(tensors.values())
    if problems:
        raise damaged(problems, subject=str(opened.path))
    packed = packed_names(catalog)
    numeric = {n: e for n, e in tensors.items() if e.source_dtype.is_numeric and n not in packed}
    numbers = replace(catalog, tensors=numeric, objects={})
    located = opened.open_containers(numbers, Opens.LATE_IN_STORES).tensors
    entries = [located[name] for name in tensors if name in located]
    progress.begin(sum(entry.elements * entry.source_dtype.itemsize for entry in entries))
    measured = _measure(entries, opened.source, progress)
    require_unchanged(catalog, opened.source)
    rows = (measured.get(name) or TensorStats(entry) for name, entry in tensors.items())
    return StatsReport(tuple(rows))


def _measure(
    entries: Iterable[TensorEntry],
    source: Files,
    progress: Progress,
) -> dict[str, TensorStats]:
    """Return the statistics of located tensors by name."""
    measured: dict[str, TensorStats] = {}

    def measure(entry: TensorEntry, tiles: Iterator[TensorTile]) -> None:
        moments = _Moments()
        with np.errstate(over="ignore", invalid="ignore"):
            for tile in tiles:
                moments.add(decode(tile.values.reshape(-1), entry.source_dtype))
        measured[entry.name] = moments.of(entry)

    jobs = (tensor_job(e, _TILE_ELEMENTS * e.source_dtype.itemsize, stored=True) for e in entries)
    read_tiles(TensorSource(source), jobs, measure, source.policy.workers, progress)
    return measured
