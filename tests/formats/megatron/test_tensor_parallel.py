"""How Megatron's modules cut their parameters, by name, sizes and arguments."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ckptool.core.dtype import BY_NAME
from ckptool.core.sharding.tensor_parallel import TpRule, fit_rank, given_rules, parse_tp_rule
from ckptool.errors import Undetermined
from ckptool.formats.megatron.model import (
    Arguments,
)
from ckptool.formats.megatron.tensor_parallel import (
    RULES,
    LocalParameter,
    ParameterRules,
    view_experts,
)

GATED = Arguments({"swiglu": True, "tensor_model_parallel_size": 2})
PLAIN = Arguments({"swiglu": False})


Shapes = Mapping[str, tuple[int, ...]]


def find_rule(name: str, shapes: Shapes, stated: TpRule | None, args: Arguments) -> TpRule:
    """The rule of a parameter, of which ``stated`` was saved with it."""
    of_name = {} if stated is None else {name: stated}
    given = given_rules((), ())
    return RULES.find(name, ParameterRules(args, (2, 1, 1), given, of_name, dict(shapes)))


def rule_or_reason(name: str, shapes: Shapes, stated: TpRule | None, args: Arguments) -> str:
    """The rule of a parameter, or why it is not known."""
    try:
        return str(find_rule(name, shapes, stated, args))
    except Undetermined as error:
        return str(error)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("embedding.word_embeddings.weight", "Shard(0)"),
        ("output_layer.weight", "Shard(0)"),
        ("decoder.layers.3.self_attention.linear_qkv.weight", "Shard(0)"),
        ("decoder.layers.3.self_attention.linear_qkv.bias", "Shard(0)"),
        ("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight", "Replicate()"),
        ("decoder.layers.3.self_attention.linear_proj.weight", "Shard(1)"),
        ("decoder.layers.3.self_attention.linear_q_up_proj.weight", "Shard(0)"),
        ("decoder.layers.3.mlp.linear_fc1.weight", "Shard(0, 2)"),
        ("decoder.layers.3.mlp.linear_fc1.bias", "Shard(0, 2)"),
        ("decoder.layers.3.mlp.linear_fc2.weight", "Shard(1)"),
        ("decoder.layers.3.mlp.router.weight", "Replicate()"),
        ("decoder.layers.3.mlp.shared_experts.linear_fc1.weight", "Shard(0, 2)"),
        ("decoder.layers.3.mlp.shared_experts.gate_weight", "Replicate()"),
        ("decoder.layers.3.mlp.experts.local_experts.2.linear_fc2.weight", "Shard(1)"),
        ("decoder.layers.3.mlp.experts.linear_fc1.weight7", "Shard(0, 2)"),
        ("decoder.layers.3.mlp.experts.linear_fc2.weight7", "Shard(1)"),
        ("decoder.layers.3.input_layernorm.weight", "Replicate()"),
        ("decoder.layers.3.self_attention.q_layernorm.weight", "Replicate()"),
        ("decoder.final_layernorm.bias", "Replicate()"),
        ("vision_model.class_token", "Replicate()"),
        ("vision_model.conv1.weight", "Replicate()"),
        ("vision_model.position_embeddings.weight", "Replicate()"),
        ("vision_model.embedder.weight", "Shard(0)"),
        ("language_model.encoder.layers.0.self_attention.query_key_value.weight", "Shard(0)"),
        ("language_model.encoder.layers.0.self_attention.dense.weight", "Shard(1)"),
        ("language_model.encoder.layers.0.mlp.dense_h_to_4h.weight", "Shard(0, 2)"),
    ],
)
def test_how_megatron_partitions_a_parameter(name: str, rule: str) -> None:
    assert rule_or_reason(name, {name: (8, 8)}, None, GATED) == rule


def test_a_row_parallel_bias_is_replicated() -> None:
    name = "layers.0.mlp.linear_fc2.bias"
    assert rule_or_reason(name, {name: (8,)}, None, PLAIN) == "Replicate()"


def test_a_linear_layer_that_is_not_gated() -> None:
    name = "layers.0.mlp.linear_fc1.weight"
    assert rule_or_reason(name, {name: (8, 8)}, None, PLAIN) == "Shard(0)"
    assert "gate" in rule_or_reason(name, {name: (8, 8)}, None, Arguments({}))


@pytest.mark.parametrize(
    ("name", "down", "taken", "rule"),
    [
        ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight", (6, 8), "Shard(0)"),
        ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight", (6, 4), "Shard(0, 2)"),
        ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight", (6, 5), "Shard(0, 2)"),
        ("mlp.linear_fc1.bias", "mlp.linear_fc2.weight", (6, 8), "Shard(0)"),
        ("experts.linear_fc1.bias3", "experts.linear_fc2.weight3", (6, 8), "Shard(0)"),
        ("experts.weight1", "experts.weight2", (3, 8, 6), "Shard(2)"),
        ("experts.weight1", "experts.weight2", (3, 4, 6), "Shard(2, 2)"),
    ],
)
def test_what_the_next_layer_takes_tells_a_gate_better_than_the_arguments(
    name: str, down: str, taken: tuple[int, ...], rule: str
) -> None:
    """The arguments are those of the language model: a vision model beside it may differ."""
    shapes = {name: (3, 6, 8) if name == "experts.weight1" else (8, 6), down: taken}
    assert rule_or_reason(name, shapes, None, GATED) == rule


@pytest.mark.parametrize(
    ("leaf", "blocks"),
    [
        ("mixer.in_proj.weight", (12, 12, 4, 4, 6)),
        ("mixer.conv1d.weight", (12, 4, 4)),
        ("mixer.conv1d.bias", (12, 4, 4)),
        ("mixer.A_log", (1,)),
        ("mixer.D", (1,)),
        ("mixer.dt_bias", (1,)),
        ("mixer.norm.weight", (1,)),
        ("self_attention.in_proj.weight", (4, 4, 12, 12, 3, 3)),
        ("self_attention.conv1d.weight", (4, 4, 12)),
        ("self_attention.A_log", (1,)),
    ],
)
def test_a_mixer_joins_several_tensors_in_one(leaf: str, blocks: tuple[int, ...]) -> None:
    """Mamba: z, x, B, C, dt; gated delta net: query, key, value, z, beta, alpha."""
    mixer = {"in_proj.weight": (38, 8), "conv1d.weight": (20, 1, 4), "conv1d.bias": (20,)}
    mixer |= {"out_proj.weight": (8, 12), "A_log": (6,), "D": (6,), "dt_bias": (6,)}
    delta = mixer | {"in_proj.weight": (38, 8), "A_log": (3,)}
    shapes = {f"mixer.{n}": s for n, s in (mixer | {"norm.weight": (12,)}).items()}
    shapes |= {f"self_attention.{n}": s for n, s in delta.items()}
    assert find_rule(leaf, shapes, None, PLAIN) == TpRule(0, blocks)


def test_a_mixer_whose_sizes_contradict_is_not_joined() -> None:
    shapes = {"mixer.in_proj.weight": (37, 8), "mixer.conv1d.weight": (20, 1, 4)}
    assert "do not determine" in rule_or_reason("mixer.in_proj.weight", shapes, None, PLAIN)
    shapes |= {"mixer.out_proj.weight": (8, 12), "mixer.A_log": (6,)}
    assert "give 38" in rule_or_reason("mixer.in_proj.weight", shapes, None, PLAIN)


@pytest.mark.parametrize(("rows", "rule"), [(24, "Replicate()"), (12, "Shard(0)"), (7, "it has 7")])
def test_a_down_projection_is_known_by_its_rows(rows: int, rule: str) -> None:
    latent = {"kv_lora_rank": 16, "qk_pos_emb_head_dim": 8, "tensor_model_parallel_size": 2}
    name = "decoder.layers.0.self_attention.linear_kv_down_proj.weight"
    assert rule_or_reason(name, {name: (rows, 4)}, None, Arguments(latent)).startswith(rule)


def test_what_a_master_says_of_itself_counts_where_names_say_nothing() -> None:
    stated = parse_tp_rule("x=row")[1]
    shapes = {"my.own.weight": (4, 4)}
    assert find_rule("my.own.weight", shapes, stated, PLAIN) == stated
    assert "no rule says how Megatron" in rule_or_reason("my.own.weight", shapes, None, PLAIN)


def test_a_scalar_on_one_rank_is_a_contradiction_and_no_failure() -> None:
    rules = ParameterRules(
        GATED, (2, 1, 1), given_rules((), ()), shapes={"mlp.linear_fc1.weight": ()}
    )
    held = LocalParameter("mlp.linear_fc1.weight", (1, 0, 0), (8, 4), BY_NAME["bfloat16"])
    assert rules.fit(held) == fit_rank((8, 4), ())


def test_grouped_experts_are_read_by_expert() -> None:
    assert view_experts("mlp.experts.weight1", (4, 24), 3) == (3, 4, 8)
    assert view_experts("mlp.experts.weight2", (24, 4), 3) == (3, 8, 4)
    assert view_experts("mlp.router.weight", (24, 4), 3) == (24, 4)
