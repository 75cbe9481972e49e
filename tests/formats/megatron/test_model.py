"""The arguments of a model, and the numbers of its layers and experts."""

from __future__ import annotations

from conftest import case

from ckptool.commands.open import open_checkpoint
from ckptool.formats.megatron.model import (
    count_experts,
    find_layer_offsets,
    is_expert,
    number_expert,
    number_layer,
    read_arguments,
)


def test_layers_are_counted_through_stages_and_virtual_stages() -> None:
    """Stage 0 has layers 0, 1 and 3; stage 1 has 2 and 4, 5."""
    runs = {
        (0, 0): ["embedding.w", "decoder.layers.0.w", "decoder.layers.1.w"],
        (1, 0): ["decoder.layers.0.w"],
        (0, 1): ["decoder.layers.0.w"],
        (1, 1): ["decoder.layers.0.w", "decoder.layers.1.w", "mtp.layers.0.w"],
    }
    offsets = find_layer_offsets(runs)
    found = {
        run: [number_layer(name, offsets[run]) for name in names] for run, names in runs.items()
    }
    assert found[1, 0] == ["decoder.layers.2.w"]
    assert found[0, 1] == ["decoder.layers.3.w"]
    assert found[1, 1] == ["decoder.layers.4.w", "decoder.layers.5.w", "mtp.layers.0.w"]


def test_experts_have_numbers_of_the_whole_model() -> None:
    one = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"
    grouped = "decoder.layers.0.mlp.experts.linear_fc1.weight1"
    assert count_experts([one, "x"]) == count_experts([grouped]) == 2
    assert number_expert(one, 4) == one.replace("experts.1", "experts.5")
    assert number_expert(grouped, 4).endswith("weight5")
    assert is_expert(one)
    assert not is_expert("decoder.layers.0.mlp.shared_experts.linear_fc1.weight")


def test_arguments_that_are_not_a_namespace() -> None:
    assert read_arguments(None).info() == {"framework": "Megatron-core"}
    assert read_arguments({"num_layers": 4, "bf16": True}).info()["arguments"] == "layers 4, bf16"


def test_inspect_tells_the_degrees_and_the_step() -> None:
    opened = open_checkpoint(case("megatron_torch").path)
    assert opened.path.name == "iter_0000100"
    assert opened.catalog.info["parallelism"] == "TP 2, PP 1, DP 1, EP 1"
    assert opened.catalog.objects["iteration"].value == 100


def test_a_number_of_thousands_of_digits_counts_nothing() -> None:
    digits = "9" * 5000
    expert = f"decoder.layers.0.mlp.experts.linear_fc1.weight{digits}"
    assert count_experts([expert]) is None
    assert find_layer_offsets({(0, 0): [f"decoder.layers.{digits}.w"], (1, 0): []})[1, 0] == {}
