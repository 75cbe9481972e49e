"""Quantized tensors as their parts, with torch's own functions as the oracle, and subclasses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import bits
from msgspec.structs import replace
from recipes.common import quantized
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import return_and_correct_aliasing

import ckptool
from ckptool.core.box import Box
from ckptool.errors import Damaged, Unsupported
from ckptool.formats.dcp.items import locate
from ckptool.serialization.archive.quantized import split_quantized
from ckptool.serialization.pickle.records import Call, Global


def save_quantized(tensor: Any, path: Path, *, as_zip: bool) -> ckptool.Checkpoint:
    import torch

    torch.save({"q": tensor}, path, _use_new_zipfile_serialization=as_zip)
    return ckptool.open(path)


ONE_SCALE = {
    "whole": lambda: quantized("q", 4, 6),
    "strided": lambda: quantized("q", 4, 6)[1:, ::2].t(),
    "parameter": lambda: __import__("torch").nn.Parameter(quantized("q", 4), requires_grad=False),
}


@pytest.mark.parametrize("as_zip", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("made", ONE_SCALE.values(), ids=ONE_SCALE)
def test_one_scale(made: Any, as_zip: bool, tmp_path: Path) -> None:
    tensor = made()
    found = save_quantized(tensor, tmp_path / "q.pt", as_zip=as_zip)
    assert found.read("q.int_repr").equal(tensor.int_repr())
    assert found.objects["q.q_scale"] == tensor.q_scale()
    assert found.objects["q.q_zero_point"] == tensor.q_zero_point()


@pytest.mark.parametrize("as_zip", [True, False], ids=["zip", "legacy"])
def test_a_scale_a_channel(as_zip: bool, tmp_path: Path) -> None:
    tensor = quantized("q", 4, 3, channels=True)
    found = save_quantized(tensor, tmp_path / "q.pt", as_zip=as_zip)
    assert found.read("q.int_repr").equal(tensor.int_repr())
    assert found.read("q.q_per_channel_scales").equal(tensor.q_per_channel_scales())
    assert found.read("q.q_per_channel_zero_points").equal(tensor.q_per_channel_zero_points())
    assert found.objects["q.q_per_channel_axis"] == tensor.q_per_channel_axis()


@pytest.mark.parametrize("dtype", ["qint8", "quint8", "qint32"])
def test_integers_of_every_size(dtype: str, tmp_path: Path) -> None:
    import torch

    tensor = torch.quantize_per_tensor(torch.arange(6.0), 0.5, 1, getattr(torch, dtype))
    found = save_quantized(tensor, tmp_path / "q.pt", as_zip=True)
    assert found.tensors["q.int_repr"].dtype.name == dtype.removeprefix("q")
    assert found.read("q.int_repr").equal(tensor.int_repr())


def test_it_is_reported_what_the_parts_are(tmp_path: Path) -> None:
    notes = save_quantized(quantized("q", 4), tmp_path / "q.pt", as_zip=True).catalog.notes
    assert any("q.int_repr" in note and "q.q_scale" in note for note in notes)


REBUILD = Global("torch._utils", "_rebuild_qtensor")


@pytest.mark.parametrize(
    "value",
    [
        Call(REBUILD, ()),
        Call(REBUILD, (None, 0, (2,), (1,), (Global("torch", "per_tensor_affine"), 0.1, 2))),
        Call(Global("torch._utils", "_rebuild_tensor_v2"), (0, 0, (2,), (1,), ())),
        {"int_repr": 1},
        None,
    ],
)
def test_what_is_not_a_quantized_tensor_has_no_parts(value: Any) -> None:
    assert split_quantized(value) is None


class Scaled(torch.Tensor):
    """Integers with a scale a row, and nothing else of its own."""

    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.bfloat16)

    def __init__(self, values: Any, scale: torch.Tensor) -> None:
        self.values_, self.scale, self.block = values, scale, [1, values.shape[1]]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.is_pinned.default:
            return False
        assert func.overloadpacket in (torch.ops.aten.detach, torch.ops.aten.view)
        found = cls(args[0].values_.detach(), args[0].scale.detach())
        return return_and_correct_aliasing(func, args, kwargs or {}, found)

    def __repr__(self, **ignored: Any) -> str:  # type: ignore[override]
        return "Scaled"


class Marked(torch.Tensor):
    """A subclass with elements of its own, whose meaning its class alone knows."""


def scaled(rows: int = 4, fill: int = 1) -> Any:
    values = torch.arange(rows * 6, dtype=torch.int8).reshape(rows, 6) + fill
    return Scaled(values, torch.arange(rows * 1.0).reshape(rows, 1))


WEIGHT = scaled()
NESTED = Scaled(scaled(fill=7), torch.ones(4, 1))
STATE = {"m": {"w": WEIGHT, "deep": NESTED, "b": torch.ones(3)}, "step": 3}
INNER = {
    "m.w.values_": WEIGHT.values_,
    "m.w.scale": WEIGHT.scale,
    "m.deep.values_.values_": NESTED.values_.values_,
    "m.deep.values_.scale": NESTED.values_.scale,
    "m.deep.scale": NESTED.scale,
    "m.b": STATE["m"]["b"],  # type: ignore[index]
}


@pytest.fixture(params=["torch-save", "dcp", "rank files"])
def saved(request: Any, tmp_path: Path) -> Path:
    path = tmp_path / "saved"
    path.mkdir()
    if request.param == "dcp":
        dcp.save(STATE, checkpoint_id=path, no_dist=True)
    elif request.param == "torch-save":
        torch.save(STATE, path / "m.pt")
    else:
        for rank in range(2):
            torch.save(STATE, path / f"model_rank{rank}.pt")
    return path


def test_the_tensors_inside_come_out_under_names_of_their_own(saved: Path, tmp_path: Path) -> None:
    report = ckptool.convert(saved, tmp_path / "out.pt", to="torch-save")
    found = ckptool.open(tmp_path / "out.pt")
    assert {n: bits(found.read(n)) for n in found.tensors} == {n: bits(t) for n, t in INNER.items()}
    assert found.objects["m.w.block"] == [1, 6]
    (note,) = (one for one in report.notes if one.startswith("m.w is a tensor subclass"))
    assert "Scaled" in note
    assert "(values_, scale)" in note


def test_verify_reads_them_and_says_so(saved: Path) -> None:
    report = ckptool.verify(saved, ignore=["unknown-callable"])  # classes of this module
    assert report.ok
    assert any("is a tensor subclass" in one.message for one in report.findings)
    assert not {"item-mismatch", "tensor-unsupported"} & {one.code for one in report.findings}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = {
        "a": scaled(2),
        "b": scaled(2, 9),
        "n": torch.ones(2),
        "s": torch.ones(2).as_subclass(Marked),
    }
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def test_a_kind_that_is_not_read_is_not_damage(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"s .* of an unsupported kind \(.*Marked\)") as one:
        ckptool.convert(folder, tmp_path / "out.pt", to="torch-save")
    assert one.value.exit_code == 4
    assert "--drop" in str(one.value.hint)
    ckptool.convert(folder, tmp_path / "out.pt", to="torch-save", drop="s")
    report = ckptool.verify(folder, ignore=["unknown-callable"])  # a class of this module
    assert report.ok
    assert "tensor-unsupported" in {one.code for one in report.findings}


def test_one_in_several_chunks_is_refused(folder: Path) -> None:
    opened = ckptool.open(folder)._opened
    one, two = (opened.catalog.tensors[name] for name in "ab")
    lower = replace(two.chunks[0], box=Box((2, 0), (4, 6)))
    joined = replace(one, shape=(4, 6), chunks=(*one.chunks, lower))
    with pytest.raises(Unsupported, match=r"a \[.*Scaled"):
        locate(opened.source, opened.catalog.with_tensors({"a": joined}))
    lower = replace(two.chunks[0], box=Box((2, 0), (5, 6)))
    joined = replace(one, shape=(5, 6), chunks=(*one.chunks, lower))
    with pytest.raises(Damaged, match=r"a \[2:5, 0:6\]: its item .* not a plain tensor"):
        locate(opened.source, opened.catalog.with_tensors({"a": replace(joined, chunks=(lower,))}))


def test_it_cannot_be_read_as_the_tensor_it_seems_to_be(folder: Path) -> None:
    checkpoint = ckptool.open(folder)
    assert torch.equal(checkpoint.read("n"), torch.ones(2))
    with pytest.raises(Unsupported, match="a: a tensor subclass that wraps others"):
        checkpoint.read("a")
    with pytest.raises(Unsupported, match="a: a tensor subclass"):
        ckptool.load(folder, {"a": torch.zeros(2, 6, dtype=torch.bfloat16)}, select="a")


def test_dtensors_of_them_are_named(tmp_path: Path) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(scaled(), mesh, [Shard(0)], run_check=False)
        torch.save({"w": tensor, "n": torch.ones(2)}, tmp_path / "m.pt")
    finally:
        dist.destroy_process_group()
    catalog = ckptool.open(tmp_path / "m.pt").catalog
    assert [*catalog.tensors] == ["n"]
    (why,) = catalog.conflicts.values()
    assert re.fullmatch(r"w: not a plain tensor, but .*DTensor of .*Scaled", why)


def test_attributes_without_end_are_not_tensor(tmp_path: Path) -> None:
    tensor = torch.ones(2)
    vars(tensor).update((f"a{n}", n) for n in range(300))
    torch.save({"w": tensor}, tmp_path / "m.pt")
    with pytest.raises(Damaged, match=r"w: m\.pt: a tensor with 300 attributes"):
        ckptool.open(tmp_path / "m.pt")


def test_a_name_inside_a_value_of_a_dcp_folder_gives_way(tmp_path: Path) -> None:
    """DCP flattens no tuple, so its parts may have the name of another entry."""
    state = {"a": (torch.ones(2), 5), "a.0": torch.zeros(3), "a.1": 6}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    report = ckptool.convert(tmp_path / "dcp", tmp_path / "m.pt", to="torch-save")
    assert "a.0@2 is inside a value; 'a.0' is another one" in report.notes
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    assert (found["a.0"].tolist(), found["a.1"]) == ([0.0] * 3, 6)
    assert (found["a"][0].tolist(), found["a"][1]) == ([1.0] * 2, 5)
