"""ckptool.load: in place, strict, nested; misfits are refused before anything is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import bits
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import ckptool
from ckptool.api.state_dict import leaves_of
from ckptool.dcp import CheckpointReader
from ckptool.errors import Unsupported, UsageError

STATE: dict[str, Any] = {
    "model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.arange(3.0)},
    "optimizer": {"state": [torch.ones(2), {"step": torch.tensor(5)}], "lr": 0.5},
    "step": 7,
    "shape": torch.Size([3, 4]),
}


def zeros(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return torch.zeros_like(tree)
    if isinstance(tree, dict):
        return {key: zeros(value) for key, value in tree.items()}
    return [zeros(value) for value in tree] if type(tree) is list else None


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[k], other[k]) for k in one)
    return one == other if type(one) is not list else all(map(alike, one, other))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.save(STATE, tmp_path / "state.pt")
    return tmp_path / "state.pt"


def test_a_nested_state_dict_is_filled_where_its_tensors_lie(saved: Path) -> None:
    state = zeros(STATE)
    weight = state["model"]["w"]
    report = ckptool.load(saved, state)
    assert alike(state, STATE)
    assert state["model"]["w"] is weight
    assert (len(report.loaded), report.missing, report.unexpected) == (7, (), ())
    assert report.nbytes == 12 * 4 + 3 * 4 + 2 * 4 + 8
    assert repr(report) == "<ckptool.LoadReport: 7 loaded, 0 missing, 0 unexpected, 76 bytes>"


def test_a_model_is_loaded_through_its_own_state_dict(tmp_path: Path) -> None:
    there, here = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    save_file({f"module.{n}": t for n, t in there.state_dict().items()}, tmp_path / "m.safetensors")
    ckptool.load(tmp_path / "m.safetensors", here.state_dict(), strip_prefix="module")
    assert torch.equal(here.weight, there.weight)
    assert torch.equal(here.bias, there.bias)


def test_names_that_only_one_has_are_listed(saved: Path) -> None:
    state = zeros(STATE)
    state["model"]["new"] = state["model"].pop("b")
    with pytest.raises(ckptool.KeysDiffer, match=r"missing \(1\): model.new") as caught:
        ckptool.load(saved, state)
    assert (caught.value.missing, caught.value.unexpected) == (("model.new",), ("model.b",))
    assert not state["model"]["w"].any()
    report = ckptool.load(saved, state, strict=False)
    assert (report.missing, report.unexpected) == (("model.new",), ("model.b",))
    assert torch.equal(state["model"]["w"], STATE["model"]["w"])


def test_only_the_model(saved: Path) -> None:
    state = zeros(STATE["model"])
    ckptool.load(saved, state, model_only=True)
    assert alike(state, STATE["model"])


class Subclass(torch.Tensor):
    """As quantizing libraries make them."""


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (torch.zeros(3, 4, dtype=torch.float64), r"float32 \[3, 4\] in the .*, float64 \[3, 4\]"),
        (torch.zeros(4, 3), r"float32 \[3, 4\] in the checkpoint, float32 \[4, 3\]"),
        (torch.zeros(3, 4, device="meta"), "on the meta device"),
        (torch.zeros(3, 1).expand(3, 4), "an expanded view or similar"),
        (torch.zeros(3, 4).to_sparse(), "sparse"),
        (torch.nested.nested_tensor([torch.zeros(4)] * 3), "a nested tensor"),
        (torch.nn.UninitializedParameter(), "an uninitialized parameter"),
        (torch.zeros(3, 4).as_subclass(Subclass), "a Subclass, a subclass with its own memory"),
        (torch.zeros(6).as_strided((3, 4), (1, 1)), "several of its elements share"),
        (1.5, "a tensor in the checkpoint, a float in the state dict"),
    ],
)
def test_what_cannot_be_filled_is_refused_before_anything_is(
    saved: Path, other: Any, says: str
) -> None:
    state = zeros(STATE)
    state["model"]["w"] = other
    with pytest.raises(Unsupported, match=says):
        ckptool.load(saved, state)
    assert not state["model"]["b"].any()


def test_a_value_is_no_tensor(saved: Path) -> None:
    state = zeros(STATE) | {"step": torch.tensor(0)}
    with pytest.raises(Unsupported, match="step: a value in the checkpoint, a tensor"):
        ckptool.load(saved, state)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(4, 3).t(),
        lambda: torch.zeros(6, 8)[::2, ::2],
        lambda: torch.nn.Parameter(torch.zeros(3, 4)),
        lambda: torch.zeros(15)[3:].view(3, 4),
        torch.inference_mode()(lambda: torch.zeros(3, 4)),
        lambda: torch.zeros(3, 4, requires_grad=True),
    ],
    ids=["transposed", "strided", "parameter", "offset", "inference", "with a gradient"],
)
def test_memory_of_any_strides(saved: Path, make: Any) -> None:
    state = zeros(STATE)
    state["model"]["w"] = tensor = make()
    ckptool.load(saved, state)
    assert torch.equal(tensor.detach(), STATE["model"]["w"])


class Tied(torch.nn.Module):
    """A head that is the embedding, and buffers of both kinds."""

    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.embed.weight.data.fill_(fill)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.full((3,), fill))
        self.register_buffer("cache", torch.full((3,), fill), persistent=False)


WEIGHT = torch.full((5, 3), 2.0)


@pytest.mark.parametrize("names", [["embed"], ["head"], ["embed", "head"]], ids=" and ".join)
def test_tied_parameters_are_loaded_under_any_name(tmp_path: Path, names: list[str]) -> None:
    held = {f"{name}.weight": WEIGHT.clone() for name in names} | {"seen": torch.ones(3)}
    save_file(held, tmp_path / "m.safetensors")
    model = Tied()
    report = ckptool.load(tmp_path / "m.safetensors", model.state_dict())
    assert report.loaded == ("seen", "embed.weight", "head.weight")
    assert torch.equal(model.head.weight, WEIGHT)
    assert torch.equal(model.get_buffer("cache"), torch.zeros(3))


def test_tied_parameters_that_are_not_in_the_checkpoint(tmp_path: Path) -> None:
    held = {"embed.weight": WEIGHT, "head.weight": WEIGHT + 1, "seen": torch.ones(3)}
    save_file(held, tmp_path / "m.safetensors")
    with pytest.raises(Unsupported, match=r"embed.weight and head.weight share memory"):
        ckptool.load(tmp_path / "m.safetensors", Tied().state_dict())
    ckptool.load(tmp_path / "m.safetensors", Tied().state_dict(), drop="head.weight")


def test_views_of_one_memory_are_compared_once_all_is_read(tmp_path: Path) -> None:
    held = {"x": torch.arange(12.0).reshape(4, 3), "y": torch.arange(9.0, 12.0)}
    save_file(held, tmp_path / "m.safetensors")
    memory = torch.zeros(16)
    ckptool.load(tmp_path / "m.safetensors", {"x": memory[:12].view(4, 3), "y": memory[9:12]})
    assert memory[:12].tolist() == list(range(12))
    apart = torch.zeros(4, 6)
    ckptool.load(tmp_path / "m.safetensors", {"x": apart[:, ::2], "y": apart[1, 1::2]})
    assert torch.equal(apart[:, ::2], held["x"])
    with pytest.raises(Unsupported, match=r"[xy] and [xy] share memory"):
        ckptool.load(tmp_path / "m.safetensors", {"x": memory[:12].view(4, 3), "y": memory[8:11]})


def test_nothing_else_stands_for_a_missing_name(tmp_path: Path) -> None:
    save_file({"x": WEIGHT}, tmp_path / "m.safetensors")
    whole = torch.zeros(6, 3)
    with pytest.raises(ckptool.KeysDiffer, match=r"missing \(1\): y"):
        ckptool.load(tmp_path / "m.safetensors", {"x": whole[:5], "y": whole[1:]})


def stepped(step: bool = True) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}]
    optimizer = torch.optim.AdamW(groups if step else [{"params": [p]} for p in model.parameters()])
    if step:
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("form", ["torch-save", "dcp"])
def test_an_optimizer_s_own_state_dict(tmp_path: Path, form: str) -> None:
    model, optimizer = stepped()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    torch.save(state, tmp_path / "m.pt")
    if form == "dcp":
        dcp.save(state, checkpoint_id=tmp_path / "m", no_dist=True)
    path = tmp_path / ("m" if form == "dcp" else "m.pt")
    other, fresh = stepped()
    optimizer_state = fresh.state_dict()
    filled = {"model": other.state_dict(), "optimizer": optimizer_state, "step": 0}
    ckptool.load(path, filled)
    fresh.load_state_dict(optimizer_state)
    assert alike(filled, state)
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.2]
    other, fresh = stepped(False)
    with pytest.raises(ckptool.KeysDiffer) as caught:
        ckptool.load(path, filled | {"optimizer": fresh.state_dict()})
    assert str(caught.value.hint).endswith("state_dict.get_optimizer_state_dict creates it")
    states = get_optimizer_state_dict(other, fresh)["state"]
    assert {*states} == {"weight", "bias"}


def test_an_empty_dict_is_nothing_to_load(tmp_path: Path) -> None:
    saved = torch.optim.SGD([torch.zeros(2)]).state_dict()
    torch.save({"optimizer": saved, "none": None, "list": []}, tmp_path / "m.pt")
    filled = torch.optim.SGD([torch.zeros(2)], lr=0.5).state_dict()
    ckptool.load(tmp_path / "m.pt", {"optimizer": filled, "none": 1, "list": []})
    assert filled["param_groups"][0]["lr"] == saved["param_groups"][0]["lr"]


trees = st.dictionaries(
    st.sampled_from("abc"),
    st.recursive(
        st.integers() | st.builds(lambda: torch.ones(())) | st.tuples(st.integers()),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers(0, 3), inner),
    ),
)

KINDS = [
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("complex32", "complex64", "complex128", "bool"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("shape", [(6,), (), (0, 4), (2, 3)], ids=str)
def test_element_types_and_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    state = {}
    for kind in KINDS:
        dtype = getattr(torch, kind)
        data = torch.randint(0, 2, (torch.Size(shape).numel() * dtype.itemsize,))
        state[kind] = data.to(torch.uint8).view(dtype).reshape(shape)
    torch.save(state, tmp_path / "m.pt")
    for load in (ckptool.load, by_dcp):
        filled = {n: torch.empty(shape, dtype=t.dtype) for n, t in state.items()}
        load(tmp_path / "m.pt", filled)
        assert {n: bits(t) for n, t in filled.items()} == {n: bits(t) for n, t in state.items()}


def by_dcp(path: Path, state: dict[str, Any]) -> None:
    dcp.load(state, storage_reader=CheckpointReader(path), no_dist=True)


def under(head: str, *more: str) -> dict[str, Any]:
    names = ("0.weight", "0.bias", "1.weight")
    return {f"{head}{name}": torch.zeros(2) for name in names} | dict.fromkeys(more, 1)


@pytest.mark.parametrize(
    ("there", "here", "keywords"),
    [
        ({"model": under(""), "optimizer": STATE["optimizer"]}, under(""), {"model_only": True}),
        (under(""), under("_orig_mod."), {"rename": ["^=_orig_mod."]}),
        (under("module."), under(""), {"strip_prefix": "module"}),
        (under("model."), under("model._orig_mod."), {"rename": [r"^model\.=model._orig_mod."]}),
        (under("net.", "step"), under("model.", "step"), {"rename": [r"^net\.=model."]}),
        (under("", "step"), under("module.", "step"), None),
        ({"a": torch.zeros(2)}, {"b": torch.zeros(2)}, None),
    ],
)
def test_the_keyword_that_fits_the_names_is_reported(
    tmp_path: Path, there: dict[str, Any], here: dict[str, Any], keywords: Any
) -> None:
    torch.save(there, tmp_path / "m.pt")
    with pytest.raises(ckptool.KeysDiffer) as caught:
        ckptool.load(tmp_path / "m.pt", here)
    if keywords is None:
        assert "to match the names" not in str(caught.value.hint)
        return
    ((name, value),) = keywords.items()
    assert str(caught.value.hint).startswith(f"use {name}={value!r}")
    ckptool.load(tmp_path / "m.pt", here, **keywords)


def test_keys_that_are_not_words(tmp_path: Path) -> None:
    state = {"state": {0: {"step": 5, "x": torch.ones(2)}, ("a", 1): 7}, "pair": (torch.ones(3),)}
    torch.save(state, tmp_path / "m.pt")
    filled: dict[str, Any] = {
        "state": {0: {"step": 0, "x": torch.zeros(2)}, ("a", 1): 0},
        "pair": (torch.zeros(3),),
    }
    ckptool.load(tmp_path / "m.pt", filled)
    assert (filled["state"][0]["step"], filled["state"]["a", 1]) == (5, 7)
    assert filled["state"].keys() == state["state"].keys()  # type: ignore[attr-defined]
    assert torch.equal(filled["pair"][0], torch.ones(3))


def test_a_value_in_a_tuple_cannot_be_replaced(tmp_path: Path) -> None:
    torch.save({"pair": (torch.ones(3), 5)}, tmp_path / "m.pt")
    with pytest.raises(Unsupported, match=r"pair\.1: a value in a tuple"):
        ckptool.load(tmp_path / "m.pt", {"pair": (torch.zeros(3), 0)})


@given(tree=trees)
def test_leaves_are_called_as_dcp_calls_them(tree: dict[str, Any]) -> None:
    wanted, _ = flatten_state_dict(tree)
    assert {n: leaf.value for n, leaf in leaves_of(tree).items()} == wanted


@pytest.mark.parametrize("workers", [0, -1])
def test_nobody_loads_nothing(saved: Path, workers: int) -> None:
    with pytest.raises(UsageError, match=f"workers {workers}: at least 1"):
        ckptool.load(saved, zeros(STATE), workers=workers)


def test_many_names_stay_readable(saved: Path) -> None:
    state = {f"layers.{n}.w": torch.zeros(1) for n in range(3000)}
    with pytest.raises(ckptool.KeysDiffer, match="and 2,988 more") as caught:
        ckptool.load(saved, state)
    assert len(str(caught.value)) < 600
    assert len(caught.value.missing) == 3000


@pytest.mark.parametrize(
    ("state", "error", "says"),
    [
        (torch.nn.Linear(1, 1), TypeError, r"a Linear; give its state_dict\(\)"),
        ([torch.zeros(1)], TypeError, "not a list"),
        ({"model": torch.nn.Linear(1, 1)}, TypeError, "model is a Linear; give its state_dict"),
        ({"a.b": 1, "a": {"b": 2}}, UsageError, "two values .* are named 'a.b'"),
    ],
)
def test_what_is_not_a_state_dict(saved: Path, state: Any, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        ckptool.load(saved, state)


@pytest.mark.parametrize(
    ("dtype", "hint"),
    [(torch.bfloat16, "silently: use cast=True"), (torch.int32, "nothing is cast silently$")],
)
def test_the_keyword_that_casts_is_reported(saved: Path, dtype: torch.dtype, hint: str) -> None:
    with pytest.raises(Unsupported) as caught:
        ckptool.load(saved, {"w": torch.zeros(3, 4, dtype=dtype)}, model_only=True, strict=False)
    assert re.search(hint, str(caught.value.hint))
    assert caught.value.__notes__ == [f"hint: {caught.value.hint}"]


def test_a_value_of_a_class_of_its_own_is_never_rebuilt(tmp_path: Path) -> None:
    import argparse

    torch.save({"args": argparse.Namespace(a=1), "w": torch.ones(2)}, tmp_path / "m.pt")
    state = {"w": torch.zeros(2)}
    ckptool.load(tmp_path / "m.pt", state, strict=False)
    assert torch.equal(state["w"], torch.ones(2))
    with pytest.raises(
        Unsupported, match=r"args: a argparse.Namespace, made of argparse.Namespace"
    ):
        ckptool.load(tmp_path / "m.pt", {"args": None}, strict=False)
