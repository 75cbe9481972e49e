"""Any box of a LoRA's sum has the bits of the whole, and those of torch in 64 bits, cast once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import Compute, Computed, Reads, StridedPart, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.engine.formulas.low_rank import (
    LowRank,
    Magnitudes,
    columns_of_band,
    columns_of_cell,
    low_rank_reads,
    magnitude_reads,
    rows_of_cell,
)
from ckptool.engine.formulas.rows import ReplacedRows
from ckptool.engine.read.numbers import Array


@dataclass
class Stored:
    """Tensors that a formula reads; ``gather`` fails for what it did not say that it reads."""

    tensors: list[torch.Tensor]
    compute: Compute
    reads: Reads
    allowed: list[tuple[TensorEntry, Box]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.entries = [
            TensorEntry(str(i), (str(i),), BY_NAME[str(t.dtype)[6:]], tuple(t.shape), ())
            for i, t in enumerate(self.tensors)
        ]
        shape = self.entries[0].shape
        part = StridedPart(shape, 0, row_major_strides(shape, 1))
        self.at = Computed(tuple(self.entries), part, self.compute, reads=self.reads)

    def gather(self, entry: TensorEntry, box: Box) -> Array:
        assert any(entry is one and within.contains(box) for one, within in self.allowed)
        part = self.tensors[int(entry.name)][tuple(map(slice, *box))].contiguous()
        return part.view(torch.uint8).numpy().view(f"u{entry.dtype.itemsize}").reshape(box.shape)

    def box(self, box: Box, dtype: str) -> Array:
        self.allowed = list(self.at.needs(box))
        return self.at.compute(self.gather, self.at, box, BY_NAME[dtype])


def bits(tensor: torch.Tensor) -> Array:
    flat = tensor.contiguous().view(torch.uint8).numpy().view(f"u{tensor.element_size()}")
    return flat.reshape(tensor.shape)


def some(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def lora(shape: tuple[int, ...], rank: int, dtype: torch.dtype) -> Stored:
    *lead, rows, columns = shape
    weight = some(*shape, dtype=dtype)
    left, right = some(*lead, rows, rank, seed=1), some(*lead, rank, columns, seed=2)
    return Stored([weight, left, right], LowRank(0.3), low_rank_reads)


SHAPES = [((300, 2100), 3), ((40, 4500), 200), ((3, 130, 300), 17), ((1, 1), 1), ((130, 1), 64)]
SHAPES += [((50, 700), 600)]
DTYPES = [torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "rank"), SHAPES)
def test_the_sum_is_that_of_torch_in_64_bits(
    shape: tuple[int, ...], rank: int, dtype: torch.dtype
) -> None:
    stored = lora(shape, rank, dtype)
    weight, left, right = (t.double() for t in stored.tensors)
    wanted = weight + left @ right * 0.3
    found = torch.from_numpy(stored.box(Box.whole(shape), "float64").view("f8"))
    assert (found - wanted).abs().max() < 1e-13 * rank
    rounded = stored.box(Box.whole(shape), str(dtype)[6:])
    assert np.array_equal(rounded, bits(found.to(dtype)))


@given(st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.data())
def test_a_number_is_the_same_in_any_box(
    sizes: tuple[tuple[int, ...], int], dtype: torch.dtype, data: st.DataObject
) -> None:
    shape, rank = sizes
    stored = lora(shape, rank, dtype)
    if data.draw(st.booleans()):
        stored.tensors[data.draw(st.sampled_from([1, 2]))][..., 0, -1] = float("inf")
    box = draw_box(shape, data)
    for name in ("float64", "bfloat16"):  # of exact products, and of others
        whole = stored.box(Box.whole(shape), name)
        assert np.array_equal(stored.box(box, name), whole[tuple(map(slice, *box))])


@pytest.mark.parametrize("name", ["float64", "bfloat16"])
def test_a_factor_larger_than_its_weight_is_read_a_part_at_a_time(name: str) -> None:
    stored, largest = lora((9000, 4), 256, torch.bfloat16), 0

    def gather(entry: TensorEntry, box: Box) -> Array:
        nonlocal largest
        largest = max(largest, box.volume)
        return stored.gather(entry, box)

    box = Box((3, 0), (8990, 3))
    stored.allowed = list(stored.at.needs(box))
    found = stored.at.compute(gather, stored.at, box, BY_NAME[name])
    assert largest <= 1 << 19
    weight, left, right = (t.double() for t in stored.tensors)
    sums = (weight + left @ right * 0.3)[3:8990, :3]
    made = torch.from_numpy(found.view(f"i{found.dtype.itemsize}")).view(getattr(torch, name))
    assert torch.allclose(made.double(), sums, rtol=0.004)


@given(st.sampled_from([(300, 700), (5, 3000), (130, 1)]), st.sampled_from(DTYPES), st.data())
def test_rows_have_their_magnitudes_in_any_box(
    shape: tuple[int, int], dtype: torch.dtype, data: st.DataObject
) -> None:
    tensors = [*lora(shape, 5, dtype).tensors, some(shape[0], seed=3)]
    box = draw_box(shape, data)
    found = [
        Stored(tensors, Magnitudes(LowRank(0.3)), magnitude_reads).box(each, "float64")
        for each in (Box.whole(shape), box)
    ]
    assert np.array_equal(found[1], found[0][tuple(map(slice, *box))])
    weight, left, right, magnitudes = (t.double() for t in tensors)
    total = weight + left @ right * 0.3
    wanted = (magnitudes / total.norm(dim=1))[:, None] * total
    assert torch.allclose(torch.from_numpy(found[0].view("f8")), wanted, rtol=1e-12, atol=1e-12)


def test_kept_lengths_are_those_of_the_type() -> None:
    tensors = [*lora((70, 900), 5, torch.float32).tensors, some(70, seed=3)]
    whole = Box.whole((70, 900))
    fresh = Stored(tensors, Magnitudes(LowRank(0.3)), magnitude_reads).box(whole, "float64")
    used = Stored(tensors, Magnitudes(LowRank(0.3)), magnitude_reads)
    used.box(whole, "bfloat16")
    assert np.array_equal(used.box(whole, "float64"), fresh)


@given(st.data())
def test_rows_are_replaced_in_any_box(data: st.DataObject) -> None:
    rows = tuple(data.draw(st.lists(st.integers(0, 8), unique=True, min_size=1)))
    whole, own = some(9, 4, dtype=torch.bfloat16), some(len(rows), 4, seed=1)
    formula = ReplacedRows(rows)
    box = draw_box((9, 4), data)
    found = Stored([whole, own], formula, formula.reads).box(box, "bfloat16")
    wanted = whole.clone()
    wanted[list(rows)] = own.bfloat16()
    assert np.array_equal(found, bits(wanted[tuple(map(slice, *box))]))


def test_what_is_not_finite_stays_so() -> None:
    weight = torch.tensor([[float("nan"), 1.0], [float("inf"), 0.0]])
    factors = [torch.zeros(2, 1), torch.zeros(1, 2)]
    found = Stored([weight, *factors], LowRank(2.0), low_rank_reads)
    assert np.array_equal(found.box(Box.whole((2, 2)), "float32"), bits(weight))


def test_a_cell_is_multiplied_by_one_thread_and_no_strip() -> None:
    for rank in (1, 3, 16, 17, 64, 200, 512, 1024, 9000, 20000):
        rows, columns = rows_of_cell(rank), columns_of_cell(rank)
        assert rows * columns * rank <= 1 << 18 or rows == 1
        assert 5 * rows >= columns or rank > 1024
        assert columns_of_band(rank) % columns == 0


def draw_box(shape: tuple[int, ...], data: st.DataObject) -> Box:
    lo = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    return Box(
        lo, tuple(data.draw(st.integers(n + 1, size)) for n, size in zip(lo, shape, strict=True))
    )
