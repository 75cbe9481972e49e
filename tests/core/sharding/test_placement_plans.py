"""Where placements are from: the order in which they are asked, plans and tp_plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from core.sharding.placed_entries import S0, S1, STRIDED, R, choose, entry

from ckptool.commands.options.target import ReshardOptions
from ckptool.commands.reshard.plan_file import read_plan, read_tp_plan
from ckptool.commands.reshard.reshard import _placer
from ckptool.core.catalog import TensorEntry
from ckptool.core.mesh import Mesh, StridedShard
from ckptool.core.sharding.placement import (
    PlacedTensors,
    PlacementRule,
    Placer,
    parse_mesh,
    parse_rule,
)
from ckptool.errors import CkptoolError, Unsupported, UsageError

OWN = entry(placements=(S1, R), mesh=parse_mesh("dp=2,tp=2"))


@pytest.mark.parametrize(
    ("one", "mesh", "rules", "policy", "reason"),
    [
        (OWN, "dp=2,tp=2", ("w=Shard(0),Shard(0)",), "replicate", "rule w"),
        (OWN, "dp=2,tp=2", (), "replicate", "policy replicate"),
        (OWN, "dp=2,tp=2", (), None, "kept from the source"),
        (entry(), "dp=2,tp=2", (), None, "mesh dim names"),
        (entry(), "2x2", (), None, "policy fsdp, the default"),
    ],
)
def test_order(
    one: TensorEntry, mesh: str, rules: tuple[str, ...], policy: str | None, reason: str
) -> None:
    placer = Placer(parse_mesh(mesh), tuple(map(parse_rule, rules)), policy)
    assert choose(placer, one)["w"].reason == reason


PLAN = """
mesh = "2x4"
names = ["dp", "tp"]
[[rule]]
tensor = "a.*"
placements = ["StridedShard(0, 4)", "Shard(0)"]
[[rule]]
tensor = "*"
placements = ["rowwise"]
"""


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_plan_names_the_mesh_and_the_rules_in_order(tmp_path: Path) -> None:
    mesh, rules = read_plan(written(tmp_path / "p.toml", PLAN))
    assert mesh == Mesh.of((2, 4), ("dp", "tp"))
    assert rules == [
        PlacementRule("a.*", (StridedShard(0, 4), S0)),
        PlacementRule("*", style="rowwise"),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mesh = ", "--plan"),
        (f"mesh = {'[' * 3000}", "not TOML: nested too deep"),
        ('mesh = "0x2"', "invalid mesh"),
        ('mesh = [2, 4]', r"mesh = \[2, 4\] must be text"),
        ('[[rules]]\ntensor = "w"\nplacements = ["Shard(0)"]', "'rules' is not one of mesh, names"),
        ('[[rule]]\ntensor = "w"\nplacements = "colwise"\nmesh = "2"', "'mesh' is not one of"),
        ('[[rule]]\ntensor = "w"\nplacements = 7', "must be a list of placements"),
        ('mesh = "2x4"\nnames = ["dp", "dp"]', "must be a list"),
        ('mesh = "2"\nnames = "dp"', "must be a list"),
        ('mesh = "2x4"\nnames = ["dp"]', "1 names for 2 mesh dims"),
        ('[[rule]]\ntensor = "w"', "needs tensor and placements"),
        ('[[rule]]\nplacements = ["Shard(0)"]', "needs tensor and placements"),
        ('[rule]\ntensor = "w"\nplacements = ["Shard(0)"]', "needs tensor and placements"),
        ('rule = 5', "needs tensor and placements"),
        ('[[rule]]\ntensor = "w"\nplacements = ["Shrd(0)"]', "is not a placement"),
    ],
)  # fmt: skip
def test_a_plan_that_is_none(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        read_plan(written(tmp_path / "p.toml", text))


def test_a_plan_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_plan(tmp_path / "p.toml")


def test_options_come_before_the_plan_and_its_mesh(tmp_path: Path) -> None:
    plan = written(tmp_path / "p.toml", PLAN)
    rule = parse_rule("a.w=Replicate(),Replicate()")
    placer = _placer(ReshardOptions(mesh=Mesh.of((4, 2)), rules=(rule,), plan_file=plan))
    assert placer.mesh == Mesh.of((4, 2), ("dp", "tp"))
    assert [one.glob for one in placer.rules] == ["a.w", "a.*", "*"]
    assert _placer(ReshardOptions(plan_file=plan)).mesh == Mesh.of((2, 4), ("dp", "tp"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ReshardOptions(), "no mesh"),
        (ReshardOptions(mesh=Mesh.of((2,)), policy="zero3"), "unknown policy"),
    ],
)
def test_options_that_say_too_little(options: ReshardOptions, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        _placer(options)


LLAMA = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.input_layernorm": "sequence_parallel",
}


@pytest.mark.parametrize("key", ["base_model_tp_plan", "tp_plan"])
def test_a_tp_plan_places_a_model_without_biases(key: str, tmp_path: Path) -> None:
    rules = read_tp_plan(written(tmp_path / "config.json", json.dumps({key: LLAMA})))
    names = [f"model.layers.1.{module}.weight" for module in ("self_attn.q_proj",
             "self_attn.o_proj", "input_layernorm")]  # fmt: skip
    entries = [entry(names[0]), entry(names[1]), entry(names[2], (8,)), entry("lm_head.weight")]
    entries += [entry(f"optim.state.{names[1]}.exp_avg"), entry(f"optim.state.{names[1]}.step", ())]
    found = choose(Placer(parse_mesh("dp=2,tp=2"), tuple(rules)), *entries)
    assert [", ".join(map(str, choice.placements)) for choice in found.values()] == [
        "StridedShard(0, 2), Shard(0)",
        "Shard(0), Shard(1)",
        "Shard(0), Replicate()",
        "StridedShard(0, 2), Shard(0)",
        "Shard(0), Shard(1)",
        "Replicate(), Replicate()",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "--tp-plan"),
        ("{}", "base_model_tp_plan or tp_plan not found"),
        ("[]", "base_model_tp_plan or tp_plan not found"),
        ('{"tp_plan": {"q": 5}}', "base_model_tp_plan or tp_plan not found"),
        ('{"tp_plan": {"q": "sideways"}}', "sideways"),
    ],
)
def test_a_tp_plan_that_is_none(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        read_tp_plan(written(tmp_path / "config.json", text))


def test_placed_shards_are_those_of_the_mesh() -> None:
    shards = PlacedTensors(Mesh.of((2, 2)), {"w": (STRIDED, S0)}).shards(entry(shape=(8, 6)))
    assert [shard.pieces[0].box.lo[0] for shard in shards] == [0, 4, 2, 6]


def test_every_refusal_has_an_exit_code() -> None:
    assert (UsageError.exit_code, Unsupported.exit_code) == (2, 4)
    assert issubclass(Unsupported, CkptoolError)
