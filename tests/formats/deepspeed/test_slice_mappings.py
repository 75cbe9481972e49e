"""Partitions beside experts, whose parameters DeepSpeed before 0.19 lists in no model file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from conftest import case, convert_to, read_back
from msgspec.structs import replace

from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.verify import verify
from ckptool.errors import Damaged
from ckptool.formats.deepspeed import states
from ckptool.serialization.archive.read import TorchFile, read_torch_file
from ckptool.serialization.pickle.records import Call
from ckptool.serialization.source import Source

NAME = "deepspeed_experts_zero_2"
Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Read the case as its older versions write it, with a change to each rank's optimizer."""

    def prepare(change: Change = lambda file: None) -> Path:
        def read(source: Source, file: str) -> TorchFile:
            opened = read_torch_file(source, file)
            content = dict[Any, Any](cast(Mapping[Any, Any], opened.inert))
            if "module" in content:
                del content["param_shapes"], content["ds_config"]
            elif "optimizer_state_dict" in content:
                content["optimizer_state_dict"] = {**content["optimizer_state_dict"]}
                del content["optimizer_state_dict"]["param_alignment_paddings"]
                change(content)
            return replace(opened, inert=content)

        monkeypatch.setattr(states, "read_torch_file", read)
        return case(NAME).path

    return prepare


def test_the_partitions_say_what_is_in_them(older: Callable[..., Path], out: Path) -> None:
    checkpoint = older()
    assert verify(checkpoint, VerifyOptions(workers=1)).ok
    convert_to("safetensors", checkpoint, out / "m")
    assert read_back("safetensors", out / "m") == case(NAME).truth


def in_another_order(file: dict[str, Any]) -> None:
    file["ds_config"] = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}


def without_mappings(file: dict[str, Any]) -> None:
    del file["optimizer_state_dict"]["param_slice_mappings"]


def without_a_parameter(file: dict[str, Any]) -> None:
    mappings = file["optimizer_state_dict"]["param_slice_mappings"]
    file["optimizer_state_dict"]["param_slice_mappings"] = [
        {name: at for name, at in dict(group).items() if name != "dense.bias"} for group in mappings
    ]


def without_a_group(file: dict[str, Any]) -> None:
    file["optimizer_state_dict"]["param_slice_mappings"] = []


def with_a_bias_in_the_middle_of_a_weight(file: dict[str, Any]) -> None:
    optimizer = file["optimizer_state_dict"]
    first, *groups = (dict(group) for group in optimizer["param_slice_mappings"])
    if "dense.bias" in first:
        weight, bias = first["dense.weight"], first["dense.bias"]
        first["dense.weight"] = moved(weight, bias.fields["numel"])
        first = {"dense.bias": moved(bias, 0), **{n: first[n] for n in first if n != "dense.bias"}}
    optimizer["param_slice_mappings"] = [first, *groups]


def moved(address: Any, start: int) -> Any:
    fields = {**address.fields, "start": start}
    return Call(address.function, address.args, address.is_new, state=fields)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (in_another_order, "order under round_robin_gradients is in no file"),
        (without_mappings, "no param_shapes, and no param_slice_mappings"),
        (without_a_group, "no param_shapes, and no param_slice_mappings"),
        (
            with_a_bias_in_the_middle_of_a_weight,
            "dense.weight goes on at 7 of a partition, not where one ends",
        ),
        (without_a_parameter, "gate.wg.weight begins at 20 of a partition, not at 13"),
    ],
)
def test_the_weights_are_read_if_the_partitions_are_not_known(
    change: Change, words: str, older: Callable[..., Path], out: Path
) -> None:
    checkpoint = older(change)
    with pytest.raises(Damaged, match=words):
        convert_to("safetensors", checkpoint, out / "m")
    convert_to("safetensors", checkpoint, out / "m", model_only=True)
    truth = case(NAME).truth
    weights = {n.removeprefix("module."): t for n, t in truth.items() if n.startswith("module.")}
    assert read_back("safetensors", out / "m") == weights
