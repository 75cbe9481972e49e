"""One tensor a layer and expert."""

from __future__ import annotations

import pytest

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Chunk, Extent, TensorEntry, coverage_problem
from ckptool.core.dtype import BY_NAME
from ckptool.core.rewrite import unstacked
from ckptool.errors import UsageError


def catalog(*entries: TensorEntry) -> Catalog:
    return Catalog("megatron-torch_dist", {entry.name: entry for entry in entries}, {}, {})


def stacked(name: str, *shape: int, path: tuple[str, ...] | None = None) -> TensorEntry:
    """A tensor in chunks of one index of its first dim each."""
    inner = [4] * (len(shape) - 1)
    for dim in range(len(shape) - 2, 0, -1):
        inner[dim - 1] = inner[dim] * shape[dim + 1]
    chunks = tuple(
        Chunk(
            Box((at, *(0,) * (len(shape) - 1)), (at + 1, *shape[1:])),
            Extent(f"file{at}", 0, (0, *inner)),
            at,
        )
        for at in range(shape[0])
    )
    return TensorEntry(name, path or (name,), BY_NAME["float32"], shape, chunks)


def test_layers() -> None:
    found = unstacked(catalog(stacked("decoder.layers.mlp.linear_fc2.weight", 3, 4, 5))).tensors
    assert list(found) == [f"decoder.layers.{n}.mlp.linear_fc2.weight" for n in range(3)]
    for number, entry in enumerate(found.values()):
        assert entry.shape == (4, 5)
        assert coverage_problem(entry) is None
        assert entry.chunks[0].at == Extent(f"file{number}", 0, (20, 4))


def test_experts_of_layers() -> None:
    key = "optimizer.state.exp_avg.decoder.layers.mlp.experts.experts.linear_fc1.weight"
    found = unstacked(catalog(stacked(key, 2, 3, 4, 5))).tensors
    name = "optimizer.state.exp_avg.decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"
    assert len(found) == 6
    assert found[name].shape == (4, 5)
    assert found[name].chunks[0].at == Extent("file1", 160, (20, 4))


def test_what_is_not_stacked_stays() -> None:
    kept = [stacked("embedding.weight", 2, 3), stacked("decoder.layers.0.norm.weight", 4)]
    found = unstacked(catalog(*kept, stacked("decoder.layers.norm2.weight", 2, 3)))
    assert {entry.name for entry in kept} <= found.tensors.keys()
    assert len(found.tensors) == 4


def test_nothing_to_unstack_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="no tensors with stacked"):
        unstacked(catalog(stacked("decoder.layers.0.norm.weight", 4)))


def test_a_slice_whose_name_is_taken() -> None:
    taken = stacked("layers.0.w", 1, 1)
    with pytest.raises(UsageError, match="already exists"):
        unstacked(catalog(taken, stacked("layers.w", 1, 2)))


def test_experts_that_have_keys_of_their_own_stay() -> None:
    own = stacked("decoder.layers.0.mlp.experts.experts.3.linear_fc1.weight", 4, 5)
    found = unstacked(catalog(own, stacked("decoder.layers.w", 2, 3))).tensors
    assert own.name in found
