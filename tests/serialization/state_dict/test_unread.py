"""Tensors that are not read, and objects that hold tensors: refused by name, wherever they are."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import inspect_one

import ckptool
from ckptool.errors import Unsupported


class Projector:
    """As GaLore's, which is in its optimizer's state: an object with a matrix."""

    def __init__(self, inside: Any) -> None:
        self.rank, self.ortho_matrix = 4, inside


class Settings:
    """An object without tensors."""

    def __init__(self) -> None:
        self.rank = 4


@dataclass
class Held:
    inside: Any


class Marked(torch.Tensor):
    """A subclass with elements of its own, whose meaning its class alone knows."""


class Numpy:
    """A tensor of a device whose tensors have no storage, as torch 2.0 reduces it."""

    def __reduce__(self) -> tuple[Any, ...]:
        data = torch.ones(3).numpy()
        arguments = (data, torch.float32, "xla:0", False)
        return torch._utils._rebuild_device_tensor_from_numpy, arguments


ONES = torch.ones(4, 4)
UNREAD = {
    "sparse": ONES.to_sparse(),
    "compressed": ONES.to_sparse_csr(),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "packed": torch.quantize_per_channel(ONES, torch.ones(4), torch.zeros(4), 0, torch.quint4x2),
    "subclass": ONES.as_subclass(Marked),
    "meta": torch.empty(3, device="meta"),
    "numpy": Numpy(),
    "storage": ONES.untyped_storage(),
    "object": Projector(ONES),
    "data class": Held({"a": [ONES]}),
    "user dict": UserDict({"a": ONES}),
    "deep": Projector(Projector((1, {"a": ONES}))),
}


@pytest.fixture(params=UNREAD)
def state(request: Any) -> dict[str, Any]:
    return {"w": torch.ones(2), "x": {"odd": UNREAD[request.param]}, "step": 3}


def save(state: dict[str, Any], path: Path, how: str) -> Path:
    if how == "dcp":
        dcp.save(state, checkpoint_id=path, no_dist=True)
    elif how == "rank files":
        path.mkdir()
        for rank in range(2):
            torch.save(state, path / f"model_rank{rank}.pt")
    else:
        path = path.with_suffix(".pt")
        torch.save(state, path, _use_new_zipfile_serialization=how == "zip")
    return path


@pytest.mark.parametrize("how", ["zip", "rank files"])
def test_it_is_refused_by_name(state: dict[str, Any], how: str, tmp_path: Path) -> None:
    source = save(state, tmp_path / "m", how)
    for target in ("out.safetensors", "out.pt"):
        with pytest.raises(Unsupported, match=r"^x\.odd: ") as caught:
            ckptool.convert(source, tmp_path / target)
        assert caught.value.exit_code == 4
        assert "--drop" in str(caught.value.hint)
    with pytest.raises(Unsupported, match=r"^x\.odd: "):
        ckptool.reshard(source, tmp_path / "out", mesh="2", to="dcp")
    report = ckptool.compare(source, source)
    assert not report.ok
    assert {one.code for one in report.verify.findings} == {"tensor-not-compared"}
    assert ckptool.verify(source, ignore=["unknown-callable"]).ok
    assert any(note.startswith("x.odd: ") for note in inspect_one(source).notes)
    done = ckptool.convert(source, tmp_path / "out.pt", drop="x.odd")
    assert (done.tensors, done.objects) == (1, 1)
    assert ckptool.compare(source, tmp_path / "out.pt", drop="x.odd").ok


@pytest.mark.parametrize("how", ["zip", "legacy", "dcp", "rank files"])
def test_an_object_of_an_optimizer_is_refused(how: str, tmp_path: Path) -> None:
    """Unless the model alone is wanted; objects without tensors are carried, or counted out."""
    of_w = {"exp_avg": torch.zeros(2), "projector": Projector(ONES), "plain": Settings()}
    state = {"model": {"w": torch.ones(2)}, "optimizer": {"state": {"w": of_w}}}
    source = save(state, tmp_path / "m", how)
    for to, name in (("dcp", "out"), ("torch-save", "out.pt")):
        with pytest.raises(Unsupported, match=r"projector: holds tensors that cannot be read"):
            ckptool.convert(source, tmp_path / name, to=to)
        done = ckptool.convert(source, tmp_path / name, to=to, drop="*.projector")
        assert (done.tensors, done.objects) == (2, 1 if to == "dcp" else 0)
    done = ckptool.convert(source, tmp_path / "out.safetensors", model_only=True)
    assert (done.tensors, done.objects) == (1, 0)
    assert ckptool.compare(source, source, model_only=True).ok


def test_attributes_with_tensors_are_refused(tmp_path: Path) -> None:
    """As those of bitsandbytes' 4-bit parameters, without which their bytes mean nothing."""
    weight = torch.nn.Parameter(torch.ones(8, dtype=torch.uint8), requires_grad=False)
    weight.quant_state = Held(ONES)  # type: ignore[attr-defined]
    weight.blocksize = 64  # type: ignore[attr-defined]
    for file, scale in (("a.pt", 1.0), ("b.pt", 2.0)):
        weight.quant_state = Held(ONES * scale)  # type: ignore[attr-defined]
        torch.save({"w": weight}, tmp_path / file)
    with pytest.raises(Unsupported, match=r"^w\.quant_state: holds tensors, but is an"):
        ckptool.convert(tmp_path / "a.pt", tmp_path / "out.safetensors")
    assert not ckptool.compare(tmp_path / "a.pt", tmp_path / "b.pt").ok
    done = ckptool.convert(tmp_path / "a.pt", tmp_path / "out.safetensors", drop="w.quant_state")
    assert any("blocksize of w" in note for note in done.notes)


@pytest.mark.parametrize("how", ["zip", "legacy", "rank files"])
@pytest.mark.parametrize("hidden", [ONES, {"": {"scale": [ONES]}}, Projector(ONES)])
def test_attributes_of_dicts_are_refused_alike(hidden: Any, how: str, tmp_path: Path) -> None:
    state = OrderedDict(w=torch.ones(2))
    state._metadata = hidden  # type: ignore[attr-defined]
    source = save({"model": state, "about": Projector(state)}, tmp_path / "m", how)
    with pytest.raises(Unsupported, match=r"model\._metadata: holds tensors, but is an attribute"):
        ckptool.convert(source, tmp_path / "out.safetensors", drop="about")
    assert not ckptool.compare(source, source, drop="about").ok
    del state._metadata  # type: ignore[attr-defined]
    of_object = OrderedDict(w=3)
    of_object.hidden = hidden  # type: ignore[attr-defined]
    source = save({"model": state, "about": Projector(of_object)}, tmp_path / "n", how)
    with pytest.raises(Unsupported, match=r"^about: holds tensors"):
        ckptool.convert(source, tmp_path / "out.safetensors")


def test_one_that_only_a_rank_holds_is_refused(tmp_path: Path) -> None:
    for rank, odd in enumerate((Settings(), Projector(ONES))):
        torch.save({"w": torch.ones(2), "odd": odd}, tmp_path / f"model_rank{rank}.pt")
    with pytest.raises(Unsupported, match=r"^odd: holds tensors"):
        ckptool.convert(tmp_path, tmp_path.with_suffix(".pt"))


def test_an_attribute_of_a_tensor_under_a_number_is_named(tmp_path: Path) -> None:
    tensor = torch.ones(3)
    attributes: dict[Any, Any] = vars(tensor)
    attributes[7] = "a note"
    torch.save({"w": tensor}, tmp_path / "m.pt")
    assert inspect_one(tmp_path / "m.pt").notes == ("tensor attributes not carried over: 7 of w",)
