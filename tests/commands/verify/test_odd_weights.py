"""Weights that are odd beside those of other layers, and those that rightly are so."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from verify.verify_runs import checked

import ckptool
from ckptool.commands.verify.findings import Finding

States = dict[str, torch.Tensor]


def layers(count: int = 4, part: str = "mlp.up.weight", dtype: torch.dtype | None = None) -> States:
    generator = torch.Generator().manual_seed(1)
    return {
        f"model.layers.{layer}.{part}": torch.randn(1024, 512, generator=generator).to(dtype)
        for layer in range(count)
    }


def zeroed(state: States, *names: str) -> States:
    return {n: torch.zeros_like(t) if n in names else t for n, t in state.items()}


def found(path: Path, code: str = "weight-zero") -> list[Finding]:
    return [finding for finding in checked(path).findings if finding.code == code]


SAVES: dict[str, Callable[[States, Path], object]] = {
    "m.safetensors": lambda state, path: save_file(state, path),
    "m.pt": lambda state, path: torch.save(state, path),
    "dcp": lambda state, path: dcp.save(state, checkpoint_id=path, no_dist=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SAVES)
def test_a_layer_of_zeros_is_one_finding(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    state = layers(dtype=dtype) | layers(part="mlp.down.weight", dtype=dtype)
    state["embed.weight"] = torch.zeros(1024, 512, dtype=dtype)
    SAVES[name](state, tmp_path / name)
    assert not found(tmp_path / name)
    lost = zeroed(state, "model.layers.2.mlp.up.weight", "model.layers.2.mlp.down.weight")
    (tmp_path / "lost").mkdir()
    SAVES[name](lost, tmp_path / "lost" / name)
    (finding,) = found(tmp_path / "lost" / name)
    text = "model.layers.2.mlp.{0}.weight: all values are zero, but of none of 3 others like"
    text += " model.layers.#.mlp.{0}.weight"
    assert {each.message for each in finding.affected} == {text.format(w) for w in ("up", "down")}
    assert len(finding.affected) == 2
    assert checked(tmp_path / "lost" / name).ok


@pytest.mark.parametrize(
    "made",
    [
        lambda: {name: torch.zeros(1024, 512) for name in layers()},  # a kind that begins as zeros
        lambda: zeroed(layers(2), "model.layers.0.mlp.up.weight"),  # one of two: which is wrong?
        lambda: zeroed(layers(part="lora_B.weight"), "model.layers.0.lora_B.weight"),
        lambda: {**layers(), "model.layers.4.mlp.up.weight": torch.zeros(4, 4)},
        lambda: {
            **{f"model.layers.{i}.bias": torch.ones(1 << 19) for i in range(4)},
            "model.layers.4.bias": torch.zeros(1 << 19),
        },
        lambda: {**layers(), "model.layers.4.mlp.up.weight": -torch.zeros(1024, 512)},
        lambda: {
            **layers(),
            "model.layers.4.mlp.up.weight": torch.eye(1024, 512).roll(511, 1) * 1e-40,
        },
    ],
)
def test_zeros_that_may_be_right_are_none(made: Callable[[], States], tmp_path: Path) -> None:
    save_file(made(), tmp_path / "m.safetensors")
    assert not found(tmp_path / "m.safetensors")


def test_moments_of_experts_that_were_never_chosen_are_none(tmp_path: Path) -> None:
    moments = zeroed(layers(part="exp_avg"), "model.layers.1.exp_avg")
    state = {
        "model": layers(),
        "optimizer": {"state": {n: {"exp_avg": t} for n, t in moments.items()}},
    }
    torch.save(state, tmp_path / "m.pt")
    assert not found(tmp_path / "m.pt")


def test_one_value_in_the_last_tile_is_enough(tmp_path: Path) -> None:
    state = {f"layers.{i}.w": torch.randn(3, 1 << 20) for i in range(3)}
    state["layers.3.w"] = torch.zeros(3, 1 << 20)
    state["layers.3.w"][2, -1] = -1
    save_file(state, tmp_path / "m.safetensors")
    assert not found(tmp_path / "m.safetensors")
    state["layers.3.w"][2, -1] = 0
    save_file(state, tmp_path / "m.safetensors")
    assert [finding.tensor for finding in found(tmp_path / "m.safetensors")] == ["layers.3.w"]


def small(count: int = 5, dtype: torch.dtype = torch.float32) -> States:
    generator = torch.Generator().manual_seed(2)
    parts = {"mlp.up": (16, 8), "attn.q": (8, 8), "norm": (8,)}
    return {
        f"layers.{layer}.{part}.weight": torch.randn(shape, generator=generator).to(dtype)
        for layer in range(count)
        for part, shape in parts.items()
    }


ODD: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "weight-zero": (torch.zeros_like, "all values are zero, but of none of 4 others like"),
    "weight-constant": (lambda t: torch.full_like(t, 0.5), "all values are 0.5, but of none of 4"),
    "weight-denormal": (
        lambda t: t * 2.0**-133,
        "100% of the sampled values but zero are denormal, but",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("code", ODD)
def test_a_small_matrix_that_is_odd(code: str, dtype: torch.dtype, tmp_path: Path) -> None:
    state, (make, text) = small(dtype=dtype), ODD[code]
    state["layers.3.attn.q.weight"] = make(state["layers.3.attn.q.weight"])
    state["layers.3.norm.weight"] = torch.ones(8, dtype=dtype)
    SAVES["dcp"](state, tmp_path / "c")
    (finding,) = found(tmp_path / "c", code)
    assert finding.message.startswith(f"layers.3.attn.q.weight: {text}")
    assert len(checked(tmp_path / "c").findings) == 1


@pytest.mark.parametrize("average", ["ema_state_dict", "state_dict_ema", "ema"])
def test_a_model_that_is_all_zero_beside_its_average(average: str, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    weights = model.state_dict()
    zero = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    torch.save({"state_dict": zero, average: weights}, tmp_path / "m.pt")
    (finding,) = found(tmp_path / "m.pt")
    assert finding.message.startswith("state_dict.0.weight: all values are zero, as are those of")
    torch.save({"state_dict": weights, average: zero}, tmp_path / "n.pt")
    assert not found(tmp_path / "n.pt")


def test_a_model_that_is_all_zero(tmp_path: Path) -> None:
    state = small() | {"embed.weight": torch.ones(32, 8)}
    empty = {n: torch.zeros_like(t) if t.dim() > 1 else t for n, t in state.items()}
    for step, made in (("step-1", state), ("step-2", empty), ("delta", empty)):
        (tmp_path / step).mkdir()
        save_file(made, tmp_path / step / "m.safetensors")
    (finding,) = found(tmp_path / "step-2")
    assert finding.message.endswith(
        ".weight: all values are zero, as are those of all 11 matrices of the model"
    )
    assert not found(tmp_path / "delta")  # the two models were equal
    shutil.rmtree(tmp_path / "delta")
    good = ckptool.verify_run(tmp_path).latest_good
    assert good is not None
    assert good.path.name == "step-1"


def test_adapters_that_begin_as_zeros_are_no_empty_model(tmp_path: Path) -> None:
    state = {f"layers.{n}.q.lora_B.weight": torch.zeros(16, 8) for n in range(5)}
    save_file(state, tmp_path / "m.safetensors")
    assert not found(tmp_path / "m.safetensors")
    of_kinds = {f"layers.0.{kind}_proj.miss_block": torch.zeros(4, 32) for kind in ("q", "v")}
    (tmp_path / "c").mkdir()
    save_file(of_kinds, tmp_path / "c" / "adapter_model.safetensors")
    assert not found(tmp_path / "c" / "adapter_model.safetensors")
    save_file(of_kinds, tmp_path / "c" / "model.safetensors")
    assert found(tmp_path / "c" / "model.safetensors")


def test_a_weight_beside_its_master_is_looked_at_too(tmp_path: Path) -> None:
    state = small(dtype=torch.bfloat16)
    state["layers.3.attn.q.weight"].zero_()
    state |= {f"optimizer.state.fp32_param.{name}": t.float() for name, t in state.items()}
    SAVES["dcp"](state, tmp_path / "c")
    assert found(tmp_path / "c")
    assert not found(tmp_path / "c", "weights-differ-from-masters")


def copied(state: States, of: int, *to: int) -> States:
    head = f"layers.{of}."
    mine = {name: t for name, t in state.items() if name.startswith(head)}
    return state | {
        n.replace(head, f"layers.{at}."): t.clone() for n, t in mine.items() for at in to
    }


def test_a_layer_that_is_another(tmp_path: Path) -> None:
    SAVES["dcp"](copied(small(), 1, 3), tmp_path / "c")
    (finding,) = found(tmp_path / "c", "layers-equal")
    assert finding.severity.value == "info"
    assert finding.message == "layers.3: its 2 matrices are those of layers.1, bit for bit"


def test_layers_of_nan_are_no_copies(tmp_path: Path) -> None:
    state = small()
    for name in (UPS[1], QS[1], UPS[3], QS[3]):
        state[name].fill_(torch.nan)[::2].neg_()
    SAVES["dcp"](state, tmp_path / "c")
    (finding,) = checked(tmp_path / "c").findings
    assert finding.code == "not-finite"


@pytest.mark.parametrize("of", ["fp32.", "exp_avg."])
def test_a_master_stands_for_a_weight_that_is_not_stored(of: str, tmp_path: Path) -> None:
    state = {of + name: t for name, t in copied(small(), 1, 3).items()}
    state[of + QS[2]] = torch.zeros(8, 8)
    SAVES["dcp"](state, tmp_path / "c")
    messages = [each.message for each in checked(tmp_path / "c").findings]
    zero = f"fp32.{QS[2]}: all values are zero, but of none of 4 others like layers.#.attn.q.weight"
    equal = "layers.3: its 2 matrices are those of layers.1, bit for bit"
    assert messages == ([zero, equal] if of == "fp32." else [])


def test_a_weight_and_its_master_are_one_finding(tmp_path: Path) -> None:
    state = copied(small(), 1, 3)
    state[QS[2]] = torch.zeros(8, 8)
    SAVES["dcp"](state | {f"fp32.{n}": t.clone() for n, t in state.items()}, tmp_path / "c")
    assert [each.tensor for each in checked(tmp_path / "c").findings] == [QS[2], UPS[3]]


@pytest.mark.parametrize(
    "state",
    [
        copied(small(), 0, 1, 2, 3, 4),  # a model that is yet to be trained
        copied(small(2), 0, 1),
        small() | {"layers.3.attn.q.weight": small()["layers.1.attn.q.weight"].clone()},
        {n.replace("attn", "experts"): t for n, t in copied(small(), 1, 3).items()},
        {n: t.fill_(0.5) for n, t in small().items()},
        {n: t * 2.0**-133 for n, t in small().items()},
    ],
)
def test_what_is_odd_of_most_layers_or_of_experts_is_none(state: States, tmp_path: Path) -> None:
    SAVES["dcp"](state, tmp_path / "c")
    assert not checked(tmp_path / "c").findings


def changed(change: Callable[[torch.Tensor], torch.Tensor], *names: str, count: int = 5) -> States:
    return {n: change(t) if n in names else t for n, t in small(count).items()}


def difference(*frozen: str) -> States:
    state = changed(torch.zeros_like, *frozen)
    return {name: t * 0.01 if "norm" in name else t for name, t in state.items()}


def scales(dtype: torch.dtype) -> States:
    """Of blocks, and powers of two: those of one weight are often equal."""
    many = {f"layers.{i}.w_scale": 2.0 ** -torch.randint(9, 12, (8, 16)) for i in range(5)}
    many["layers.2.w_scale"] = torch.full((8, 16), 2.0**-10)
    return {name: scale.to(dtype) for name, scale in many.items()}


UPS = [f"layers.{layer}.mlp.up.weight" for layer in range(5)]
QS = [f"layers.{layer}.attn.q.weight" for layer in range(5)]
IN_16_BITS = {n: t.half() * 2.0**-11 for n, t in small().items()}


@pytest.mark.parametrize(
    "state",
    [
        scales(torch.float32),
        scales(torch.float8_e8m0fnu),
        {f"layers.{i}.m": torch.ones(9, 9).tril(i) for i in range(9)},  # masks
        changed(torch.ones_like, QS[2]),  # a norm of several dims, not trained
        changed(torch.zeros_like, UPS[1], UPS[3]),  # blocks that were added
        difference(UPS[0], QS[0], UPS[1], QS[1]),  # of models in which these were frozen
        difference(UPS[2], QS[2]),
        difference(UPS[3], UPS[4], QS[4]),
        IN_16_BITS | {QS[1]: IN_16_BITS[QS[1]] * 2.0**-10},  # hardly changed
        changed(lambda t: t * torch.tensor([2.0**-133] + [1.0] * (t.shape[0] - 1))[:, None], QS[2]),
    ],
    ids=[
        "scales",
        "scales-e8m0",
        "masks",
        "ones",
        "added",
        "first",
        "one",
        "last",
        "difference",
        "dead",
    ],
)
def test_weights_that_may_be_right_are_none(state: States, tmp_path: Path) -> None:
    SAVES["dcp"](state, tmp_path / "c")
    assert not checked(tmp_path / "c").findings


@pytest.mark.parametrize(
    "names", [(UPS[2], QS[2], UPS[3], QS[3]), (UPS[0], QS[0]), (UPS[4], QS[4]), (UPS[0],)]
)
def test_layers_of_zeros_among_others_are_found(names: tuple[str, ...], tmp_path: Path) -> None:
    SAVES["dcp"](changed(torch.zeros_like, *names, count=6), tmp_path / "c")
    (finding,) = found(tmp_path / "c")
    assert {each.tensor for each in finding.affected or [finding]} == {*names}


def stacks(layers: int = 5, experts: int = 8) -> States:
    """What Megatron's torch_dist has, and experts as transformers packs them."""
    generator = torch.Generator().manual_seed(2)
    shapes = {
        "decoder.layers.self_attention.linear_qkv.weight": (layers, 96, 64),
        "decoder.layers.mlp.linear_fc1.weight": (layers, 128, 64),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": (layers, 64),
        "decoder.layers.moe.experts.experts.linear_fc1.weight": (layers, experts, 64, 48),
        "decoder.layers.moe.experts.experts.linear_fc2.weight": (layers, experts, 48, 64),
    }
    for layer in range(3):
        shapes[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = (experts, 64, 48)
        shapes[f"model.layers.{layer}.mlp.experts.down_proj"] = (experts, 48, 64)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


ZEROED: dict[str, tuple[str, Any, str]] = {
    "a layer": ("linear_qkv", 3, "[3]: all values are zero, but of none of 4 others like decoder"),
    "an expert of a layer": ("moe.experts.experts.linear_fc2", (2, 5), "[2, 5]: all values"),
    "an expert": ("model.layers.1.mlp.experts.down", 5, "[5]: all values are zero, but of none of"),
    "an expert of every layer": (".experts.", (..., 7, slice(None), slice(None)), ""),
    "an expert of the only layer that has any": ("2.mlp.experts.", 5, ""),
    "padding": ("decoder.layers.", 4, ""),
    "the first layer": ("linear_qkv", 0, "[0]: all values are zero, but of none of 4 others like"),
    "none": ("", (), ""),
}


@pytest.mark.parametrize("how", ZEROED)
@pytest.mark.parametrize("name", ["m.safetensors", "dcp"])
def test_zeros_of_what_is_stacked(how: str, name: str, tmp_path: Path) -> None:
    state, (part, at, expected) = stacks(), ZEROED[how]
    if "only" in how:
        state = {n: w for n, w in state.items() if "experts" not in n or part in n}
    for weight in (w for n, w in state.items() if part and part in n):
        weight[at] = 0
    SAVES[name](state, tmp_path / name)
    messages = [finding.message for finding in found(tmp_path / name)]
    assert len(messages) == bool(expected)
    assert all(expected in message and part in message for message in messages)


def test_a_stacked_layer_that_is_another(tmp_path: Path) -> None:
    state = stacks()
    for weight in (w for n, w in state.items() if n.startswith("decoder.layers.")):
        weight[3] = weight[1]
    save_file(state, tmp_path / "m.safetensors")
    (finding,) = found(tmp_path / "m.safetensors", "layers-equal")
    assert finding.message == (
        "decoder.layers.3: its 2 matrices are those of decoder.layers.1, bit for bit"
    )
    assert finding.tensor in state


@pytest.mark.parametrize(
    "shapes",
    [
        {"conv1.weight": (16, 3, 3), "conv2.weight": (32, 3, 3)},
        {"conv1.weight": (32, 3), "conv2.weight": (32, 5)},
        {"conv1.weight": (32, 31), "conv1.bias": ()},
    ],
)
def test_filters_are_no_layers(shapes: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    state = {f"features.layers.{n}": torch.randn(32, *shape) for n, shape in shapes.items()}
    state["features.layers.conv1.weight"][5] = 0
    save_file(state, tmp_path / "m.safetensors")
    assert not found(tmp_path / "m.safetensors")


PARTS = ("q_proj", "o_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("zero", "count"),
    [
        ({"o_proj", "down_proj"}, 0),  # of one block that was added to a model
        ({"down_proj"}, 1),
        ({"q_proj", "o_proj", "down_proj"}, 3),
    ],
)
def test_a_single_block_that_adds_nothing_yet(zero: set[str], count: int, tmp_path: Path) -> None:
    state = {n: w for part in PARTS for n, w in layers(part=f"{part}.weight").items()}
    state = zeroed(state, *(f"model.layers.2.{part}.weight" for part in zero))
    save_file(state, tmp_path / "m.safetensors")
    assert sum(len(finding.affected) or 1 for finding in found(tmp_path / "m.safetensors")) == count


@pytest.mark.parametrize(
    ("zero", "is_trained", "count"),
    [({"attn.o"}, False, 0), ({"attn.o"}, True, 1), ({"attn.q", "attn.o"}, False, 2)],
)
def test_attention_that_adds_nothing_and_is_not_trained(
    zero: set[str], is_trained: bool, count: int, tmp_path: Path
) -> None:
    parts = ("attn.q_proj", "attn.o_proj", "mlp.down_proj")
    state = {n: w for part in parts for n, w in layers(part=f"{part}.weight").items()}
    state = zeroed(state, *(f"model.layers.2.{part}_proj.weight" for part in zero))
    moments = {n: {"exp_avg": w} for n, w in state.items()} if is_trained else {}
    torch.save({"model": state, "optimizer": {"state": moments}}, tmp_path / "m.pt")
    assert sum(len(each.affected) or 1 for each in found(tmp_path / "m.pt")) == count
    numbered = dict(enumerate(moments.values()))
    torch.save({"model": state, "optimizer": {"state": numbered}}, tmp_path / "n.pt")
    assert sum(len(each.affected) or 1 for each in found(tmp_path / "n.pt")) == count


@pytest.mark.parametrize(("name", "count"), [("m", 1), ("delta", 0), ("my-task-vector", 0)])
def test_what_was_not_trained_is_zero_in_a_difference(
    name: str, count: int, tmp_path: Path
) -> None:
    lost = zeroed(layers(), "model.layers.2.mlp.up.weight")
    save_file(lost, tmp_path / f"{name}.safetensors")
    assert len(found(tmp_path / f"{name}.safetensors")) == count
