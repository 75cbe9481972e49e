"""The order of a layer's parameters, from the plans that ranks recorded."""

from __future__ import annotations

import pytest
from msgspec.structs import astuple

from ckptool.errors import Undetermined
from ckptool.formats.megatron.optimizer.order import (
    LayerKey,
    is_local,
    name_module,
    order_layer,
    order_outer,
    parse_layer_key,
)

NORM = "self_attention.linear_qkv.layer_norm_weight"
PROJECTION = "self_attention.linear_proj.weight"
QKV = "self_attention.linear_qkv.weight"
KEYS = [NORM, PROJECTION, QKV]


def plan(*spots: tuple[str, int]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((f"decoder.layers.{key}", (layer, 0)) for key, layer in spots)


def test_separate_norms_come_before_the_projection() -> None:
    order = order_layer(KEYS, [plan((NORM, 0), (PROJECTION, 0))], None)
    assert order == [NORM, PROJECTION, QKV]
    assert is_local(order)
    assert name_module("decoder.layers.", 3, NORM, local=True) == (
        "decoder.layers.3.input_layernorm.weight"
    )


def test_fused_norms_come_after_the_projection() -> None:
    order = order_layer(KEYS, [plan((PROJECTION, 2), (NORM, 2))], None)
    assert order == [PROJECTION, NORM, QKV]
    assert not is_local(order)
    assert name_module("decoder.layers.", 3, NORM, local=False) == f"decoder.layers.3.{NORM}"


def test_keys_of_different_layers_say_nothing_of_one_another() -> None:
    """A rank that holds one key of layer 0 and another of layer 1 tells no order."""
    apart = [plan((PROJECTION, 0), (NORM, 1))]
    with pytest.raises(Undetermined, match="fused"):
        order_layer(KEYS, apart, None)
    assert order_layer(KEYS, apart, "local")[0] == NORM
    assert order_layer(KEYS, apart, "transformer_engine")[0] == PROJECTION


def test_unknown_keys_need_plans_that_leave_no_choice() -> None:
    keys = ["mixer.a", "mixer.b", "mixer.c"]
    whole = [plan(("mixer.b", 0), ("mixer.a", 0)), plan(("mixer.a", 1), ("mixer.c", 1))]
    assert order_layer(keys, whole, "local") == ["mixer.b", "mixer.a", "mixer.c"]
    with pytest.raises(Undetermined, match="comes first"):
        order_layer(keys, whole[:1], "local")
    with pytest.raises(Undetermined, match="disagree"):
        order_layer(keys, [*whole, plan(("mixer.c", 0), ("mixer.b", 0))], "local")


@pytest.mark.parametrize(
    ("key", "offset", "place"),
    [
        ("decoder.layers.mlp.w", (3, 0), ("decoder.layers.", 3, "mlp.w", None, 1)),
        ("decoder.layers.3.mlp.w", (0,), ("decoder.layers.", 3, "mlp.w", None, 0)),
        (
            "decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight_v",
            (0, 0),
            ("decoder.layers.", 3, "mlp.experts.experts.linear_fc1.weight", 5, 0),
        ),
        (
            "mtp.layers.0.transformer_layer.mlp.w",
            (0,),
            ("mtp.layers.", 0, "transformer_layer.mlp.w", None, 0),
        ),
    ],
)
def test_what_a_key_says_of_its_layer(
    key: str, offset: tuple[int, ...], place: tuple[object, ...]
) -> None:
    assert astuple(parse_layer_key(key, offset) or LayerKey("", 0, "", None, 0)) == place


def test_a_layer_that_predicts_further_tokens_holds_a_whole_one() -> None:
    nested = [f"transformer_layer.{key}" for key in KEYS]
    order = order_layer(
        ["final_layernorm.weight", *nested, "hnorm.weight", "eh_proj.weight", "enorm.weight"],
        [],
        "local",
    )
    own = ["enorm.weight", "hnorm.weight", "eh_proj.weight"]
    assert order == [*own, *nested, "final_layernorm.weight"]
    assert is_local(order)
    name = name_module("mtp.layers.", 0, nested[0], local=True)
    assert name == "mtp.layers.0.transformer_layer.input_layernorm.weight"


def test_keys_outside_the_layers() -> None:
    word = "embedding.word_embeddings.weight"
    keys = ["output_layer.weight", "decoder.final_layernorm.weight", word]
    assert order_outer(keys) == ([word], [keys[1]], [keys[0]])
    with pytest.raises(Undetermined, match="vision"):
        order_outer(["vision.weight"])
