"""Tensors of subclasses that wrap a plain one, as torchao's training leaves in checkpoints.

torchao 0.9 to 0.18 pickles them as here: under these names of modules, with these attributes.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import bits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import return_and_correct_aliasing

import ckptool
from ckptool.errors import Damaged, Unsupported

PLAIN = {
    "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor": "_tensor",
    "torchao.prototype.quantized_training.bitnet.BitNetTrainingLinearWeight": "_data",
    "torchao.prototype.quantized_training.int8_mixed_precision"
    ".Int8MixedPrecisionTrainingLinearWeight": "_data",
    "torchao.prototype.moe_training.tensor.ScaledGroupedMMTensor": "_data",
    "torchao.prototype.moe_training.tensor.Float8TrainingWeightWrapperTensor": "_data",
    "torchao.prototype.moe_training.tensor.MXFP8TrainingWeightWrapperTensor": "_data",
}
OTHER = "torchao.dtypes.nf4tensor.NF4Tensor"


class Wrapper(torch.Tensor):
    """A tensor in an attribute of a subclass, and what else the subclass keeps."""

    of = "_tensor"

    def __new__(cls, tensor: torch.Tensor, **more: Any) -> Any:
        shape = more.pop("shape", tensor.shape)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=tensor.dtype)

    def __init__(self, tensor: torch.Tensor, **more: Any) -> None:
        more.pop("shape", None)
        vars(self).update({self.of: tensor, **more})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.is_pinned.default:
            return False
        assert func.overloadpacket in (torch.ops.aten.detach, torch.ops.aten.view)
        rest = {name: part for name, part in vars(args[0]).items() if name != cls.of}
        found = cls(getattr(args[0], cls.of).detach(), **rest)
        return return_and_correct_aliasing(func, args, kwargs or {}, found)

    def __repr__(self, **ignored: Any) -> str:  # type: ignore[override]
        return type(self).__name__


Make = Callable[..., Any]


@pytest.fixture(params=[*PLAIN, OTHER], ids=lambda name: name.rpartition(".")[2])
def make(request: Any, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a class that pickle knows by torchao's name."""
    return named(request.param, monkeypatch)


def named(full: str, monkeypatch: pytest.MonkeyPatch) -> Make:
    module, _, name = full.rpartition(".")
    made = type(name, (Wrapper,), {"__module__": module, "of": PLAIN.get(full, "quantized_data")})
    home = types.ModuleType(module)
    setattr(home, name, made)
    steps = module.split(".")
    for end in range(1, len(steps)):
        parent = ".".join(steps[:end])
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    monkeypatch.setitem(sys.modules, module, home)
    return made


@contextmanager
def mesh_of(rank: int) -> Iterator[Any]:
    """Give the device mesh of two ranks, as one of them has it."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


WEIGHT = torch.arange(24.0).reshape(4, 6).bfloat16()


def is_plain(make: Make) -> bool:
    return f"{make.__module__}.{make.__name__}" in PLAIN


@pytest.mark.parametrize("parameter", [False, True])
def test_a_file_has_the_plain_tensor_inside(make: Make, parameter: bool, tmp_path: Path) -> None:
    inner = torch.nn.Parameter(WEIGHT) if parameter else WEIGHT
    weight = make(inner, config={"a": 1}, _precomputed_scale=None)
    torch.save({"w": torch.nn.Parameter(weight) if parameter else weight}, tmp_path / "m.pt")
    found = ckptool.open(tmp_path / "m.pt")
    name = "w" if is_plain(make) else "w.quantized_data"
    assert {n: bits(found.read(n)) for n in found.tensors} == {name: bits(WEIGHT)}


def test_dtensors_of_it_are_read_or_refused(make: Make, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    for rank, value in enumerate((WEIGHT, WEIGHT + 100)):
        with mesh_of(rank) as mesh:
            local = DTensor.from_local(make(value), mesh, [Shard(0)], run_check=False)
            torch.save({"w": local, "b": torch.ones(2)}, tmp_path / "m" / f"model_rank{rank}.pt")
    if is_plain(make):
        read = ckptool.open(tmp_path / "m").read("w")
        assert bits(read) == bits(torch.cat([WEIGHT, WEIGHT + 100]))
        return
    with pytest.raises(Unsupported, match=r"w: not a plain tensor, but .*DTensor of .*NF4Tensor"):
        ckptool.convert(tmp_path / "m", tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
    with pytest.raises(Unsupported, match="w: not a plain"):
        ckptool.convert(tmp_path / "m", tmp_path / "out.safetensors", model_only=True)
    report = ckptool.compare(tmp_path / "m", tmp_path / "m")
    assert not report.ok
    assert report.verify.summary == "FAILED: not compared: 1 tensor of an unsupported kind"
    with pytest.raises(Unsupported):
        ckptool.open(tmp_path / "m").read("w")
    with pytest.raises(Unsupported):
        dict(ckptool.open(tmp_path / "m").state_dict())
    done = ckptool.convert(tmp_path / "m", tmp_path / "out.safetensors", drop="w")
    assert (done.tensors, done.objects) == (1, 0)


def test_a_wrapper_of_a_dtensor_is_that_dtensor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make = named(next(iter(PLAIN)), monkeypatch)
    for rank, value in enumerate((WEIGHT, WEIGHT + 100)):
        with mesh_of(rank) as mesh:
            local = DTensor.from_local(value, mesh, [Shard(0)], run_check=False)
            torch.save({"w": make(local)}, tmp_path / f"model_rank{rank}.pt")
    assert bits(ckptool.open(tmp_path).read("w")) == bits(torch.cat([WEIGHT, WEIGHT + 100]))


def test_a_dcp_item_is_the_plain_tensor_inside(make: Make, tmp_path: Path) -> None:
    for folder, plus in (("a", 0), ("b", 100)):
        state = {"w": make(WEIGHT + plus), "b": torch.ones(2)}
        dcp.save(state, checkpoint_id=tmp_path / folder, no_dist=True)
    if is_plain(make):
        assert bits(ckptool.open(tmp_path / "a").read("w")) == bits(WEIGHT)
    same = ckptool.compare(tmp_path / "a", tmp_path / "a").verify
    assert same.summary == "EQUAL: 2 tensors (56 bytes) bit by bit"
    assert ckptool.compare(tmp_path / "a", tmp_path / "b").verify.summary.startswith("DIFFERENT: 1")


def test_what_else_it_holds_is_not_dropped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only what is known to be computed from the value: other tensors are read beside it."""
    make = named(next(iter(PLAIN)), monkeypatch)
    weights = {
        "computed": make(WEIGHT, _precomputed_scale=torch.ones(())),
        "more": make(WEIGHT, amax=torch.ones(3)),
    }
    torch.save(weights, tmp_path / "m.pt")
    assert [*ckptool.open(tmp_path / "m.pt").tensors] == ["computed", "more._tensor", "more.amax"]


def test_a_wrapper_of_another_shape_is_a_contradiction(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make = named(next(iter(PLAIN)), monkeypatch)
    torch.save({"w": make(WEIGHT, shape=(6, 4))}, tmp_path / "m.pt")
    with pytest.raises(Damaged, match=r"of bfloat16 \[6, 4\] around a tensor of bfloat16 \[4, 6\]"):
        ckptool.convert(tmp_path / "m.pt", tmp_path / "out.pt")


def test_what_an_unknown_package_wraps_alone_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whether it is the value of the whole tensor nobody says."""
    make = named("megablocks.weights.ExpertTensor", monkeypatch)
    torch.save({"w": torch.nn.Parameter(make(WEIGHT)), "b": torch.ones(2)}, tmp_path / "m.pt")
    with pytest.raises(Unsupported, match=r"w: not a plain tensor, but megablocks\.weights\.Exp"):
        ckptool.convert(tmp_path / "m.pt", tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
