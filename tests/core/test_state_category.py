"""Which names belong to the model, to the optimizer, or to neither."""

from __future__ import annotations

from typing import Any

import pytest

from ckptool.core.catalog import Catalog, ObjectEntry, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.quantization.master_names import parameter_of
from ckptool.core.state_category import (
    STATE_CATEGORIES,
    model_prefixes,
    optimizer_names,
    state_category,
    state_category_of_name,
    weights,
    with_every_part,
    with_parts,
)


def catalog(tensors: list[str], values: dict[str, Any] | None = None) -> Catalog:
    return with_parts(
        Catalog(
            "dcp",
            {n: TensorEntry(n, (n,), BY_NAME["float32"], (1,), ()) for n in tensors},
            {n: ObjectEntry(n, (n,), value) for n, value in (values or {}).items()},
            {},
        )
    )


def parts(tensors: list[str], *values: str) -> dict[str, str]:
    whole = catalog(tensors, dict.fromkeys(values, 1))
    return {name: state_category(entry) for name, entry in (whole.tensors | whole.objects).items()}


def test_a_tensor_by_itself_has_no_prefix() -> None:
    lone = TensorEntry("value", (), BY_NAME["float32"], (1,), ())
    assert model_prefixes(Catalog("torch-save", {"value": lone}, {}, {})) == ()


LAYER = ["layers.0.weight", "layers.0.bias"]


@pytest.mark.parametrize(
    ("tensors", "values"),
    [
        (["fp32", "bf16"], []),
        (["fp32.weight", "bf16.weight"], []),
        ([*LAYER, "opt.weight", "opt.bias"], []),
        ([*LAYER, "scaler.weight"], []),
        (["encoder.optimizer.weight", "encoder.state.weight"], []),
        (["model.layers.0.weight", "fp32.weight"], []),
        (["encoder.weight", "fp32.weight"], []),
    ],
)
def test_a_models_own_names(tensors: list[str], values: list[str]) -> None:
    assert set(parts(tensors, *values).values()) == {"model"}


@pytest.mark.parametrize(
    ("model", "optimizer", "values"),
    [
        (["model_state_dict.w"], ["optimizer_state_dict.state.0.exp_avg"], []),
        (["netG.w", "netD.w"], ["optimizerG.state.0.exp_avg", "optimD.state.0.step"], []),
        (["w"], ["muon.state.0.buffer"], ["muon.param_groups.0.lr"]),
        ([], ["state.0.anything"], ["param_groups.0.lr"]),
        ([], ["state.w.exp_avg", "state.w.step"], []),
        (["app.model.w"], ["app.optim.state.w.exp_avg", "app.optim.state.w.step"], []),
        (["state.model.w"], ["state.optimizers.Adam.state.w.exp_avg"], ["state.callbacks"]),
        (["gen.model.w", "dis.model.w"], ["gen.optimizer.moments.w"], []),
        (["module.a.weight"], ["fp32.a.weight", "exp_avg.a.weight"], []),
        (["decoder.a.weight"], ["fp32.decoder.a.weight"], []),
        (["model.module.a.weight"], ["fp32.a.weight"], []),
        (["buffer.scale"], ["exp_avg.a.weight", "fp32.a.weight"], ["client_state.x"]),
        (["module.a.weight"], ["fp32.a.weight", "row_var.a.weight", "step.a.weight"], []),
        (["a", "b.a"], ["fp32.a", "fp32.b.a", "row_var.a"], []),
        (["layers.0.weight"], ["optimizer.state.layers.0.weight.exp_avg"], []),
        (["model.0.weight"], ["optim.moments.0.weight"], []),
    ],
)
def test_an_optimizers_state(model: list[str], optimizer: list[str], values: list[str]) -> None:
    found = parts([*model, *optimizer], *values)
    assert {name for name in model if found[name] != "model"} == set()
    assert {name for name in optimizer if found[name] != "optimizer"} == set()


@pytest.mark.parametrize("name", ["cuda_rng_state", "random_state", "rng_tracker_states", "rng"])
def test_random_states_beside_a_model(name: str) -> None:
    assert parts(["model.w", name, f"{name}.0"]) == {
        "model.w": "model", name: "other", f"{name}.0": "other"
    }  # fmt: skip


def test_a_model_inside_of_a_container_loses_both_steps() -> None:
    whole = catalog(["app.model.w.weight", "app.optim.state.w.weight.exp_avg"])
    assert weights(whole) == ["app.model.w.weight"]
    assert model_prefixes(whole) == ("app.model",)


def test_a_model_in_a_container_loses_both_steps_beside_values_alone() -> None:
    name, path, value = "state.model.w.weight", ("state", "model", "w.weight"), "state.metadata.x"
    values = {value: ObjectEntry(value, (value,), 1)}
    for at, prefixes in ((path, ("state.model",)), ((name,), ())):
        tensor = TensorEntry(name, at, BY_NAME["float32"], (1,), ())
        assert model_prefixes(Catalog("torch-save", {name: tensor}, values, {})) == prefixes


def test_masters_are_the_weights_where_there_are_not_others() -> None:
    whole = with_every_part(catalog(["fp32.a.weight", "exp_avg.a.weight", "buffer.x"]))
    assert {n: e.part for n, e in whole.tensors.items()} == {
        "fp32.a.weight": "model",
        "exp_avg.a.weight": "optimizer",
        "buffer.x": "model",
    }


def test_a_master_is_a_weight_where_it_is_the_only_one_of_its_parameter() -> None:
    """ZeRO 3 with a parameter that is not partitioned: the module has that one alone."""
    whole = catalog(["module.a.w", "fp32.a.w", "fp32.b.w", "exp_avg.b.w"])
    assert weights(whole) == ["module.a.w", "fp32.b.w"]


@pytest.mark.parametrize(
    ("tensors", "state", "settings"),
    [
        (["optim.state.w.exp_avg"], ["optim.param_groups.0.lr"], ["optimizer", "optimizer.name"]),
        (["exp_avg.w"], ["optimizer.loss_scaler.cur_scale", "chained_0.optimizer"], ["optimizer"]),
        ([], ["optimizer.param_groups.0.lr"], ["optimizer.lr"]),
    ],
)
def test_an_optimizers_values_go_with_its_tensors(
    tensors: list[str], state: list[str], settings: list[str]
) -> None:
    values = dict.fromkeys([*state, *settings, "step"], 1)
    assert optimizer_names(catalog(["model.w", *tensors], values)) == {*tensors, *state}


@pytest.mark.parametrize(
    "step",
    ["state.", "optim_", "optim.state.", "scheduler_", "rng_", "state.exp_avg.", "state.param."],
)
@pytest.mark.parametrize("end", ["", "!", "\n", ".exp_avg", ".step", ".master_param"])
def test_long_names_of_strangers_are_read_once(step: str, end: str) -> None:
    """Each of these took minutes, the square of the length or worse."""
    name = step * 20_000 + end
    assert state_category_of_name(name, (name,)) in STATE_CATEGORIES
    assert parameter_of(name) is None or "param" in name
