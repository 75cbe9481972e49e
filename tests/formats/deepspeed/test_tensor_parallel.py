"""How tensor-parallel shards fit together, against shards cut by torch's rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, Extent
from ckptool.core.dtype import BY_NAME
from ckptool.core.sharding.tensor_parallel import Fit, fit_ranks, parse_tp_rule
from ckptool.errors import Damaged, Undetermined, Unsupported
from ckptool.formats.deepspeed import tensor_parallel
from ckptool.formats.deepspeed.flat_runs import RankShard
from ckptool.formats.deepspeed.tensor_parallel import fit_shards, merge_tensor

WHOLE = np.arange(12 * 8).reshape(12, 8)


def along(dim: int, array: np.ndarray = WHOLE, ranks: int = 2) -> list[np.ndarray]:
    return np.split(array, ranks, dim)


def blocks(sizes: list[int], ranks: int = 2) -> list[np.ndarray]:
    """Each block of rows cut among the ranks, a rank's pieces one after the other."""
    parts = np.split(WHOLE, np.cumsum(sizes)[:-1])
    pieces = [np.array_split(part, ranks) for part in parts]
    return [np.concatenate([piece[rank] for piece in pieces]) for rank in range(ranks)]


def cut(box: Box) -> tuple[slice, ...]:
    return tuple(map(slice, box.lo, box.hi))


def joined(fits: list[Fit], shards: list[np.ndarray]) -> np.ndarray:
    whole = np.full(fits[0].whole, -1)
    for shard, fit in zip(shards, fits, strict=True):
        for outer, inner in fit.pieces:
            whole[cut(outer)] = shard[cut(inner)]
    return whole


def piece(shape: list[int], source: int, dest: int, strides: list[int], scale: float = 1.0) -> Any:
    """A block of a shard of four columns, in a tensor of eight."""
    return {
        "shape": shape,
        "source": [source, [8, 1]],
        "dest": [dest, strides],
        "locations": [0],
        "scale": scale,
    }


def affine(scale: float = 1.0, strides: tuple[int, int] = (4, 1)) -> dict[str, Any]:
    ranks = {
        rank: {"shard_shape": [12, 4], "pieces": [piece([12, 4], 4 * rank, 0, [*strides], scale)]}
        for rank in (0, 1)
    }
    return {"affine_map": {"params": {"w$": {"logical_shape": [12, 8], "ranks": ranks}}}}


VERSION = {"universal_checkpoint_version": 0.2}


@pytest.mark.parametrize(
    ("info", "shards"),
    [
        (VERSION, along(0)),
        (VERSION, [WHOLE[:7], WHOLE[7:]]),
        ({"parameter_with_row_parallelism_patterns": [r"\w+$"]}, along(1)),
        ({"tp_replicated_parameter_patterns": ["w"]}, [WHOLE, WHOLE]),
        ({"parameter_with_2_sub_params_cat_dim_0": ["w"]}, blocks([6, 6])),
        (
            {
                "parameter_with_sub_params": [
                    {"patterns": ["w"], "shape": (3, -1), "partition_dim": 0}
                ]
            },
            blocks([4, 4, 4]),
        ),
        (
            {
                "parameter_with_sub_params": [
                    {"patterns": ["^w$"], "shape": [(7, 3, 2), 8], "partition_dim": 0}
                ],
                "sub_param_shard_widths": {"^w$": [[4, 3], [2, 1], [1, 1]]},
            },
            blocks([7, 3, 2]),
        ),
        (affine(), along(1)),
    ],
    ids=["rows", "uneven", "columns", "replicated", "gated", "fused", "fused, uneven", "affine"],
)
def test_shards_become_the_whole(info: dict[str, Any], shards: list[np.ndarray]) -> None:
    fits = fit_shards("w", [shard.shape for shard in shards], info)
    assert np.array_equal(joined(fits, shards), WHOLE)


def test_a_rank_without_heads_has_an_empty_shard() -> None:
    """As automatic tensor parallelism cuts two key-value heads among three ranks."""
    info = affine()
    ranks = info["affine_map"]["params"]["w$"]["ranks"]
    ranks[2] = {"shard_shape": [12, 0], "pieces": [piece([12, 0], 8, 0, [1, 1])]}
    shards = [*along(1), WHOLE[:, :0]]
    fits = fit_shards("w", [shard.shape for shard in shards], info)
    assert np.array_equal(joined(fits, shards), WHOLE)


@pytest.mark.parametrize(
    ("info", "why"),
    [
        ({}, "no universal_checkpoint_info"),
        ({"parameter_to_average_patterns": ["w"]}, "averages"),
        ({"autotp_unsupported_parameter_patterns": {"w": "heads are uneven"}}, "heads are uneven"),
        (affine(scale=0.5), "scaled"),
        (affine(strides=(1, 12)), "not boxes"),
        (
            {
                "parameter_with_sub_params": [
                    {"patterns": ["w"], "shape": (5, -1), "partition_dim": 0}
                ]
            },
            "cannot be cut evenly",
        ),
    ],
)
def test_what_no_copy_of_bytes_can_join_is_unknown(info: dict[str, Any], why: str) -> None:
    with pytest.raises(Undetermined, match=why):
        fit_shards("w", [(12, 4), (12, 4)], info)


@pytest.mark.parametrize(
    ("rule", "shards"),
    [
        ("column", along(0)),
        ("row", along(1)),
        ("replicate", [WHOLE, WHOLE]),
        ("gated", blocks([6, 6])),
        ("Shard(0, 3)", blocks([4, 4, 4])),
    ],
)
def test_a_given_rule_joins_shards(rule: str, shards: list[np.ndarray]) -> None:
    fits = fit_ranks([shard.shape for shard in shards], parse_tp_rule(f"w={rule}")[1])
    assert np.array_equal(joined(fits, shards), WHOLE)


def test_replicas_of_several_shapes_are_unknown() -> None:
    with pytest.raises(Undetermined, match=r"shards of \[12, 4\], \[6, 4\]"):
        fit_shards("w", [(12, 4), (6, 4)], {"tp_replicated_parameter_patterns": ["w"]})


@pytest.mark.parametrize("rule", ["Shard(2)", "Shard(0, 5)"])
def test_a_rule_that_does_not_fit_is_refused(rule: str) -> None:
    with pytest.raises(Undetermined, match="does not fit"):
        fit_ranks([(12, 4), (12, 4)], parse_tp_rule(f"w={rule}")[1])


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(a|aa)" * 40 + "b", "takes more than 0.05 s"),
        ("(a{1000}){1000}", "is too long, or repeats too much"),
        ("(", "missing"),
    ],
)
def test_patterns_that_may_take_for_ever_are_refused(
    pattern: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_parallel, "_LONGEST", 0.05)
    with pytest.raises(Unsupported, match=f"universal_checkpoint_info: pattern .* {why}"):
        fit_shards("a" * 60 + "-", [(2,)] * 2, {"tp_replicated_parameter_patterns": [pattern]})


def test_copies_of_several_types_are_refused_however_they_are_cut() -> None:
    """The borders of ZeRO's partitions cut the ranks' copies in different places."""
    at = Extent("a", 0, (4,))
    whole = [Chunk(Box((0,), (4,)), at, 0)]
    halves = [Chunk(Box((0,), (2,)), at, 1), Chunk(Box((2,), (4,)), at, 1)]
    shards = {
        0: RankShard(BY_NAME["float32"], (4,), whole),
        1: RankShard(BY_NAME["bfloat16"], (4,), halves),
    }
    info = VERSION | {"tp_replicated_parameter_patterns": ["w"]}
    with pytest.raises(Damaged, match="w: tensor-parallel ranks store it with different dtypes"):
        merge_tensor(("fp32", "w"), shards, info)


def test_an_affine_map_that_is_none_is_refused() -> None:
    info = {"affine_map": {"params": [["w", {}]]}, "tp_replicated_parameter_patterns": ["w"]}
    with pytest.raises(Damaged, match="the params of affine_map are not a dict"):
        fit_shards("w", [(2,), (2,)], info)


def test_no_more_parts_are_read_than_a_parameter_can_have() -> None:
    parts = {"patterns": ["w"], "shape": [10**12, 2], "partition_dim": 0}
    info = VERSION | {"parameter_with_sub_params": [parts]}
    assert [fit.whole for fit in fit_shards("w", [(0, 2), (0, 2)], info)] == [(0, 2)] * 2
    with pytest.raises(Unsupported, match="a parameter of 1,000,000,000,000 parts"):
        tensor_parallel.describe_cut("w", (0, 2), info)


def test_a_parameter_may_have_as_many_parts_as_a_model_has_heads() -> None:
    whole = np.arange(512 * 2).reshape(512, 2)
    heads = np.split(whole, 256)
    shards = [np.concatenate([head[rank : rank + 1] for head in heads]) for rank in (0, 1)]
    parts = {"patterns": ["w"], "shape": [256, 2], "partition_dim": 0}
    info = VERSION | {"parameter_with_sub_params": [parts]}
    fits = fit_shards("w", [shard.shape for shard in shards], info)
    assert np.array_equal(joined(fits, shards), whole)
    cut_as = tensor_parallel.describe_cut("w", (512, 2), info)["sub_param_shape"].state
    assert cut_as["shape"] == ((2,) * 256, 2)
