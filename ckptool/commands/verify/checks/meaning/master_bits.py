"""How weights differ from their masters, and whether another way to round explains it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field

from ckptool.core.catalog import TensorEntry
from ckptool.core.dtype import BY_NAME, DType, short_name
from ckptool.engine.check.pairs import PairSource, PairTile, TensorPair, pair_jobs
from ckptool.engine.read.numbers import Array, decode
from ckptool.engine.read.rounding import cast
from ckptool.engine.read.tensors import TensorSource
from ckptool.engine.read.tiles import read_tiles
from ckptool.storage.files import Files

_ENOUGH = 200
"""Differing values of which the share, and their place between two numbers, can be judged."""
_COARSE = 1 / 16
"""The largest relative error of e4m3, whose numbers have four bits; with a smallest number."""
_SMALLEST = 2.0**-18
"""Half the distance of the smallest numbers of e4m3, relative to the largest of a scaled tensor."""
_FINE = 1 / 100
"""A relative error that is less than that of e4m3 on average, and more than that of 16 bits."""

_SIMILAR, _MOSTLY = 1 / 2, 0.8
"""The largest relative error of what is an average of masters, and how many have it."""
_SMALL, _LARGEST = 1 << 8, 1 << 15
"""Sizes of integers of 16 bits; of chance, one in 128 is small."""


class Counts(Struct):
    """Counts of values that are not the nearest number to their masters.

    ``differing`` counts all of them, ``inexact`` all masters between two numbers of the weight's
    type. Of the differing values, ``farther`` are the other of these two numbers, ``above`` larger
    than their master, without sign, ``coarse`` as close as numbers of 8 bits, ``of_bf16`` and
    ``of_fp16`` the master in these types. The masters of ``whole`` are integers of 16 bits that are
    not small, those of ``zero`` are zero, and those of ``similar`` differ by less than half.
    ``off_middle`` sums up how far masters of the farther are from the middle of the two numbers, as
    a share of their distance, and ``error`` the relative errors.
    """

    elements: int = 0
    differing: int = 0
    inexact: int = 0
    farther: int = 0
    above: int = 0
    coarse: int = 0
    of_bf16: int = 0
    of_fp16: int = 0
    whole: int = 0
    zero: int = 0
    similar: int = 0
    off_middle: float = 0.0
    error: float = 0.0

    def add(self, other: Counts) -> None:
        """Add the counts of further values."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class First(NamedTuple):
    """The first value that differs: its index, the number, and the one that it should be."""

    at: tuple[int, ...]
    stored: float
    rounded: float


class Difference(Struct, eq=False):
    """A weight and its master, and how the values of the one are not those of the other."""

    weight: TensorEntry
    master: TensorEntry
    counts: Counts = field(default_factory=Counts)
    first: First | None = None

    @property
    def message(self) -> str:
        """What is wrong, with the numbers and the first place."""
        message = (
            f"{self.weight.name}: {self.counts.differing:,} of {self.weight.elements:,} values"
        )
        message += f" are not those of {self.master.name} as {short_name(self.weight.dtype.name)}"
        if self.first is not None:
            index, stored, rounded = self.first
            message += f", first {stored:g} at {list(index)}, where the master gives {rounded:g}"
        return message


def differences(
    pairs: Iterable[tuple[TensorEntry, TensorEntry]], source: Files
) -> list[Difference]:
    """Return how weights differ from their masters, of those that do and can be read."""
    results = {weight.name: Difference(weight, master) for weight, master in pairs}
    lock, unread = threading.Lock(), set[str]()

    def look(subject: None, tiles: Iterator[PairTile]) -> None:
        for tile in tiles:
            if tile.failure is not None and tile.pair is not None:
                unread.add(tile.pair.one.name)  # the reader of all data reports on it
                return
            pair, weights, masters = tile.require()
            counts, first = _count(weights, masters, tile, pair.one.dtype)
            with lock:
                difference = results[pair.one.name]
                difference.counts.add(counts)
                if first and (difference.first is None or first < difference.first):
                    difference.first = first

    of_elements = TensorSource(source)
    tensor_pairs = [TensorPair(d.weight, d.master) for d in results.values()]
    workers = source.policy.workers
    read_tiles(PairSource(of_elements, of_elements), pair_jobs(tensor_pairs), look, workers)
    return [d for name, d in results.items() if d.counts.differing and name not in unread]


def _count(
    weights: Array, masters: Array, tile: PairTile, dtype: DType
) -> tuple[Counts, First | None]:
    """Return the counts of a tile's values, and the first that differs."""
    stored = decode(weights.reshape(-1), dtype).astype(np.float64)
    with np.errstate(all="ignore"):
        exact, nearest, farther = _neighbors(masters.reshape(-1), dtype)
        wrong = np.flatnonzero(np.abs(stored - exact) > np.abs(nearest - exact))
        counts = Counts(stored.size, wrong.size, int(np.count_nonzero(nearest != exact)))
        if not wrong.size:
            return counts, None
        value, master, near, far = (numbers[wrong] for numbers in (stored, exact, nearest, farther))
        is_farther, error = (value == far) & (near != master), np.abs(value - master)
        most = np.abs(stored).max()
        counts.farther = int(np.count_nonzero(is_farther))
        counts.above = int(np.count_nonzero(np.abs(value) > np.abs(master)))
        bound = np.abs(master) * _COARSE + most * _SMALLEST
        counts.coarse = int(np.count_nonzero(error <= bound))
        bits = masters.reshape(-1)[wrong]
        counts.of_bf16, counts.of_fp16 = (
            int(np.count_nonzero(_are_nearest(value, bits, BY_NAME[name])))
            for name in ("bfloat16", "float16")
        )
        size = np.abs(master)
        is_whole = (size == np.floor(size)) & (size > _SMALL) & (size <= _LARGEST)
        counts.whole = int(np.count_nonzero(is_whole))
        counts.zero = int(np.count_nonzero(size == 0))
        counts.similar = int(np.count_nonzero(error < _SIMILAR * size))
        between = (np.abs(near - master) / np.abs(far - near))[is_farther]
        counts.off_middle = float((0.5 - between).sum())
        counts.error = float((error / np.maximum(np.abs(master), most * _SMALLEST)).sum())
    inside = np.unravel_index(int(wrong[0]), tile.box.shape)
    index = tuple(int(at) + low for at, low in zip(inside, tile.box.lo, strict=True))
    return counts, First(index, float(value[0]), float(near[0]))


def _are_nearest(values: Array, bits: Array, dtype: DType) -> Array:
    """Return where values are masters in a type; those in the middle may be either number.

    Transformer Engine, beside its remainders of 16 bits, rounds these away from zero.
    """
    exact, nearest, farther = _neighbors(bits, dtype)
    in_middle = np.abs(farther - exact) == np.abs(nearest - exact)
    are_nearest: Array = (values == nearest) | (in_middle & (values == farther))
    return are_nearest


def _neighbors(bits: Array, dtype: DType) -> tuple[Array, Array, Array]:
    """Return masters as numbers, the nearest numbers of a type, and those on their other side."""
    exact = bits.view(np.float32).astype(np.float64)
    codes = cast(bits, BY_NAME["float32"], dtype)
    nearest = decode(codes, dtype).astype(np.float64)
    one = codes.dtype.type(1)
    # the codes of a sign are in the order of the numbers' sizes
    other_codes = np.where(np.abs(nearest) < np.abs(exact), codes + one, codes - one)
    return exact, nearest, decode(other_codes, dtype).astype(np.float64)


def other_way(deviations: Sequence[Difference]) -> tuple[str | None, list[Difference]]:
    """Return in which other way weights were rounded, and which ones; None if in no known way.

    A way is judged by the values of all weights that it may explain: few values prove nothing.
    """
    for way, explains, is_likely in _WAYS:
        explained = [deviation for deviation in deviations if explains(deviation.counts)]
        total = Counts()
        for deviation in explained:
            total.add(deviation.counts)
        if explained and is_likely(total):
            return way, explained
    return None, []


def similar(deviations: Sequence[Difference]) -> list[Difference]:
    """Return the weights whose values mostly are near their masters', as averages of them are."""
    return [d for d in deviations if d.counts.similar > _MOSTLY * d.counts.differing]


def _between_neighbors(counts: Counts) -> bool:
    return counts.farther == counts.differing


def _is_stochastic(counts: Counts) -> bool:
    """Return whether the farther number was taken as often as stochastic rounding takes it.

    The nearer its master, the more often: of all one in four, a sixth of the distance from the
    middle on average. Weights of an earlier step have masters close to the middle.
    """
    if counts.differing < _ENOUGH:
        return False
    share, above = counts.farther / counts.inexact, counts.above / counts.differing
    return 0.2 < share < 0.3 and 0.3 < above < 0.7 and counts.off_middle / counts.farther > 0.12


def _is_cut(counts: Counts) -> bool:
    """Return whether all are smaller than their masters: half of those that are rounded."""
    is_known = counts.differing >= _ENOUGH and not counts.above
    return is_known and 0.4 < counts.farther / counts.inexact < 0.6


def _as_of_8_bits(counts: Counts) -> bool:
    return counts.coarse == counts.differing > counts.farther


def _is_of_8_bits(counts: Counts) -> bool:
    """Return whether most values differ about as much as rounding to 8 bits makes them (fp8).

    Half of them are larger than their master, unlike weights of an earlier step, if all grew.
    """
    are_most = counts.differing >= _ENOUGH and counts.differing > 0.7 * counts.inexact
    is_even = 0.3 < counts.above / max(1, counts.differing) < 0.7
    return are_most and is_even and counts.error > _FINE * counts.differing


def _are_remainders(counts: Counts) -> bool:
    """Return whether almost all masters are integers of 16 bits, or zero, as of frozen weights."""
    return counts.whole >= _ENOUGH and counts.whole + counts.zero > 0.9 * counts.differing


def _is_certain(counts: Counts) -> bool:
    """Return that chance does not make numbers of few bits of others, not even of one."""
    return True


_WAYS = (
    ("rounded through bfloat16 from", lambda c: c.of_bf16 == c.differing, _is_certain),
    ("rounded through float16 from", lambda c: c.of_fp16 == c.differing, _is_certain),
    ("rounded stochastically from", _between_neighbors, _is_stochastic),
    ("rounded toward zero from", _between_neighbors, _is_cut),
    ("rounded to 8 bits from", _as_of_8_bits, _is_of_8_bits),
    ("beside remainders of 16 bits as floats, not", lambda c: True, _are_remainders),
)
"""Other ways to round than to the nearest: which weights one may explain, and how it shows.
The first two are those of weights that were trained in a type, and are stored in another, the last
that of Megatron-core's ``dp_zero`` with its precision-aware optimizer (0.11 to 0.16)."""
