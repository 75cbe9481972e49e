"""Which placements every tensor gets on a new mesh: words, rules, policies and names."""

from __future__ import annotations

import pytest
from core.sharding.placed_entries import S0, S1, STRIDED, R, choose, entry

from ckptool.core.catalog import TensorEntry
from ckptool.core.mesh import Mesh, Partial, Placement, Placements, Shard, StridedShard
from ckptool.core.sharding.placement import (
    Choice,
    PlacementRule,
    Placer,
    parse_mesh,
    parse_placement,
    parse_rule,
)
from ckptool.errors import CkptoolError, Unsupported, UsageError


def placed(text: str, one: TensorEntry, *rules: str, policy: str | None = None) -> str:
    """The placements of one tensor on the mesh of ``text``, as they print."""
    placer = Placer(parse_mesh(text), tuple(map(parse_rule, rules)), policy)
    return ", ".join(map(str, choose(placer, one)[one.name].placements))


@pytest.mark.parametrize(
    ("text", "shape", "names"),
    [
        ("8", (8,), None),
        ("2x4", (2, 4), None),
        ("2X2x2", (2, 2, 2), None),
        ("2x2x2x2", (2, 2, 2, 2), None),
        ("dp=2,tp=4", (2, 4), ("dp", "tp")),
        (" dp = 2 , tp = 4 ", (2, 4), ("dp", "tp")),
        ("fsdp=3", (3,), ("fsdp",)),
    ],
)
def test_a_mesh(text: str, shape: tuple[int, ...], names: tuple[str, ...] | None) -> None:
    assert parse_mesh(text) == Mesh.of(shape, names)


@pytest.mark.parametrize(
    "text",
    ["", "0", "2x0", "-2", "2x", "x2", "2*4", "two", "1.5", "dp=2,4", "dp=2,dp=4", "=2", "dp=",
     "2x2x2x2x2", "1000000", "999999x999999"],
)  # fmt: skip
def test_no_mesh(text: str) -> None:
    with pytest.raises(UsageError, match="mesh"):
        parse_mesh(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Shard(0)", S0),
        (" shard( 1 ) ", S1),
        ("Shard(-1)", Shard(-1)),
        ("StridedShard(0, 2)", STRIDED),
        ("_StridedShard(0,2)", STRIDED),
        ("Replicate()", R),
        ("replicate", R),
    ],
)
def test_a_placement(text: str, expected: Placement) -> None:
    assert parse_placement(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "Shard", "Shard()", "Shard(0, 1)", "StridedShard(0)", "StridedShard(0, 0)", "Replicate(0)",
     "Shard(a)", "Shard(0", "colwise(0)", "Shard(x0)", "Shard(1 0)", f"Shard({'9' * 5000})"],
)  # fmt: skip
def test_no_placement(text: str) -> None:
    with pytest.raises(UsageError, match="is not a placement"):
        parse_placement(text)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("*=Shard(0),Replicate()", PlacementRule("*", (S0, R))),
        ("a.*.w = StridedShard(0, 2) , Shard(0)", PlacementRule("a.*.w", (STRIDED, S0))),
        ("*.q=colwise", PlacementRule("*.q", style="colwise")),
        ("*.o= rowwise ", PlacementRule("*.o", style="rowwise")),
    ],
)
def test_a_rule(text: str, rule: PlacementRule) -> None:
    assert parse_rule(text) == rule


@pytest.mark.parametrize("text", ["", "w", "=Shard(0)", "w=", "w=sideways", "w=Shard(0);Shard(1)"])
def test_no_rule(text: str) -> None:
    with pytest.raises(UsageError):
        parse_rule(text)


def test_a_partial_placement_is_refused_with_its_reason() -> None:
    with pytest.raises(CkptoolError, match="addend"):
        parse_placement("Partial(sum)")


@pytest.mark.parametrize(
    ("mesh", "policy", "expected"),
    [
        ("4", "fsdp", "Shard(0)"),
        ("2x4", "fsdp", "Shard(0), Shard(0)"),
        ("2x2x2", "fsdp", "Shard(0), Shard(0), Shard(0)"),
        ("2x4", "hsdp", "Replicate(), Shard(0)"),
        ("2x4", "replicate", "Replicate(), Replicate()"),
        ("dp=2,tp=4", "fsdp", "Shard(0), Shard(0)"),
    ],
)
def test_a_policy(mesh: str, policy: str, expected: str) -> None:
    assert placed(mesh, entry(), policy=policy) == expected


@pytest.mark.parametrize("policy", ["fsdp", "hsdp", "replicate"])
def test_a_scalar_is_replicated(policy: str) -> None:
    assert placed("2x4", entry(shape=()), policy=policy) == "Replicate(), Replicate()"


@pytest.mark.parametrize(
    ("mesh", "rule", "shape", "expected"),
    [
        ("2x4", "w=Shard(0),Shard(1)", (8, 6), "Shard(0), Shard(1)"),
        ("2x4", "*=Replicate(),Shard(-1)", (8, 6), "Replicate(), Shard(-1)"),
        ("4", "w=colwise", (8, 6), "Shard(0)"),
        ("4", "w=rowwise", (8, 6), "Shard(1)"),
        ("4", "w=rowwise", (8,), "Replicate()"),
        ("4", "w=colwise", (), "Replicate()"),
        ("2x4", "w=rowwise", (8, 6), "Shard(0), Shard(1)"),
        ("2x4", "w=colwise", (8, 6), "StridedShard(0, 4), Shard(0)"),
        ("dp=2,tp=4", "w=colwise", (8, 6), "StridedShard(0, 4), Shard(0)"),
        ("tp=4,dp=2", "w=colwise", (8, 6), "Shard(0), Shard(0)"),
        ("dp=2,tp=1", "w=colwise", (8, 6), "Shard(0), Shard(0)"),
        ("dp_replicate=2,dp_shard=2,tp=2", "w=rowwise", (8, 6), "Replicate(), Shard(0), Shard(1)"),
    ],
)
def test_a_rule_applies(mesh: str, rule: str, shape: tuple[int, ...], expected: str) -> None:
    assert placed(mesh, entry(shape=shape), rule) == expected


def test_the_first_rule_that_matches_wins() -> None:
    rules = ("a.w=Shard(1)", "a.*=Shard(0)", "*=Replicate()")
    entries = [entry("a.w"), entry("a.v"), entry("b")]
    found = choose(Placer(Mesh.of((2,)), tuple(map(parse_rule, rules))), *entries)
    assert [choice.placements for choice in found.values()] == [(S1,), (S0,), (R,)]
    assert [choice.reason for choice in found.values()] == ["rule a.w", "rule a.*", "rule *"]


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("w=Shard(0)", "1 placement, the mesh 2x4 has 2 dims"),
        ("w=Shard(0),Shard(2)", r"Shard\(2\) does not fit its shape"),
        ("w=Shard(-3),Replicate()", r"Shard\(-3\) does not fit its shape"),
        ("v=Shard(0),Shard(0)", "matches none of"),
    ],
)
def test_a_rule_that_does_not_fit(rule: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        placed("2x4", entry(), rule)


@pytest.mark.parametrize(
    ("source", "own", "mesh", "expected"),
    [
        ("2", (S1,), "8", "Shard(1)"),
        ("2x2", (S0, S1), "3x4", "Shard(0), Shard(1)"),
        ("2x2", (R, S0), "dp=4,tp=2", "Replicate(), Shard(0)"),
        ("dp=2,tp=2", (S0, S1), "dp=4,tp=8", "Shard(0), Shard(1)"),
        ("dp=2,tp=2", (S0, S1), "tp=4,dp=2", "Shard(1), Shard(0)"),
        ("tp=2", (S1,), "dp=2,tp=4", "Replicate(), Shard(1)"),
        ("2x2", (STRIDED, S0), "2x4", "StridedShard(0, 4), Shard(0)"),
        ("2x2", (STRIDED, S0), "4x1", "Shard(0), Shard(0)"),
        ("dp=2,tp=2", (STRIDED, S0), "dp=2,tp=8", "StridedShard(0, 8), Shard(0)"),
        ("dp=2,tp=2", (STRIDED, S0), "tp=4,dp=2", "Shard(0), Shard(0)"),
        ("dp=2,tp=2", (STRIDED, S0), "pp=2,dp=2,tp=3", "Replicate(), StridedShard(0, 3), Shard(0)"),
        ("2x2x2", (S0, STRIDED, S0), "2x2x4", "Shard(0), StridedShard(0, 4), Shard(0)"),
        ("2x2x2", (StridedShard(0, 4), STRIDED, S0), "2x3x5",
         "StridedShard(0, 15), StridedShard(0, 5), Shard(0)"),
        ("2x2", (STRIDED, S1), "2x4", "Shard(0), Shard(1)"),
        ("2x2", (STRIDED, S1), "2x2", "StridedShard(0, 2), Shard(1)"),
        ("2x2x2", (STRIDED, STRIDED, S0), "2x2x2",
         "StridedShard(0, 2), StridedShard(0, 2), Shard(0)"),
        ("2x2x2", (STRIDED, STRIDED, S0), "2x3x4",
         "StridedShard(0, 4), StridedShard(0, 4), Shard(0)"),
        ("tp=2,dp=2", (S0, S0), "dp=2,tp=4", "StridedShard(0, 4), Shard(0)"),
    ],
)  # fmt: skip
def test_kept(source: str, own: Placements, mesh: str, expected: str) -> None:
    one = entry(shape=(8, 6), placements=own, mesh=parse_mesh(source))
    assert placed(mesh, one) == expected
    assert choose(Placer(parse_mesh(mesh)), one)["w"].reason == "kept from the source"


def test_the_checkpoints_mesh_serves_where_a_tensor_has_none() -> None:
    one = entry(placements=(S1,))
    found = choose(Placer(Mesh.of((4,))), one, mesh=Mesh.of((2,)))
    assert found["w"].placements == (S1,)


def test_dims_that_do_not_agree_are_not_kept() -> None:
    one = entry(placements=(S1,), mesh=Mesh.of((2,)))
    assert placed("2x4", one) == "Shard(0), Shard(0)"


def test_partial_values_are_refused() -> None:
    with pytest.raises(Unsupported, match="partial"):
        placed("2", entry(placements=(Partial("sum"),), mesh=Mesh.of((2,))))


@pytest.mark.parametrize(
    ("mesh", "name", "shape", "expected"),
    [
        ("fsdp=4", "w", (8, 6), "Shard(0)"),
        ("dp_shard=4", "w", (8, 6), "Shard(0)"),
        ("dp_replicate=2,dp_shard=4", "w", (8, 6), "Replicate(), Shard(0)"),
        ("dp_shard=2,cp=2", "w", (8, 6), "Shard(0), Shard(0)"),
        ("pp=2,dp_shard=2", "w", (8, 6), "Replicate(), Shard(0)"),
        ("dp_shard=2,tp=2", "layers.0.attention.wq.weight", (8, 6), "StridedShard(0, 2), Shard(0)"),
        ("dp_shard=2,tp=2", "layers.0.attention.wo.weight", (8, 6), "Shard(0), Shard(1)"),
        ("dp_shard=2,tp=2", "layers.0.attention.wo.bias", (8,), "Shard(0), Replicate()"),
        ("dp_shard=2,tp=2", "layers.0.ffn_norm.weight", (8,), "Shard(0), Replicate()"),
        ("dp_shard=2,tp=2", "model.layers.0.mlp.down_proj.weight", (8, 6), "Shard(0), Shard(1)"),
        ("dp_shard=2,tp=2", "tok_embeddings.weight", (8, 6), "StridedShard(0, 2), Shard(0)"),
        ("dp_shard=2,tp=2", "o.state.layers.0.attention.wo.weight.exp_avg", (8, 6),
         "Shard(0), Shard(1)"),
        ("dp_shard=2,tp=2", "o.state.layers.0.attention.wo.weight.step", (),
         "Replicate(), Replicate()"),
        ("dp_replicate=2,dp_shard=2,tp=2", "layers.0.feed_forward.w1.weight", (8, 6),
         "Replicate(), StridedShard(0, 2), Shard(0)"),
        ("ep=4", "layers.0.moe.experts.w1", (8, 6, 4), "Shard(0)"),
        ("ep=4", "layers.0.attention.wq.weight", (8, 6), "Replicate()"),
    ],
)  # fmt: skip
def test_conventional_names(mesh: str, name: str, shape: tuple[int, ...], expected: str) -> None:
    assert placed(mesh, entry(name, shape)) == expected
    assert choose(Placer(parse_mesh(mesh)), entry(name, shape))[name].reason == "mesh dim names"


def test_other_names_mean_nothing() -> None:
    found = choose(Placer(parse_mesh("rows=2,tp=2")), entry())
    assert found["w"] == Choice((S0, S0), "policy fsdp, the default")
