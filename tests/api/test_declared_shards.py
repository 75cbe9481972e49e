"""Plain tensors whose attributes say which part of a global one they hold (torch 2.15)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import bits, case
from safetensors.torch import save_file

import ckptool
from ckptool.errors import Damaged, Unsupported

TRUTH = torch.arange(6 * 4.0).reshape(6, 4)

HALF = {
    "global_shape": (6, 4),
    "global_offsets": ((3, 0),),
    "local_offsets": ((0, 0),),
    "local_sizes": ((3, 4),),
}


def part(local: torch.Tensor, **attributes: Any) -> torch.Tensor:
    for name, value in attributes.items():
        setattr(local, name, value)
    return local


def swapped() -> torch.Tensor:
    """The whole tensor, its lower rows first: of the same shape as the global one."""
    return part(
        torch.zeros(6, 4),
        global_shape=(6, 4),
        global_offsets=((3, 0), (0, 0)),
        local_offsets=((0, 0), (3, 0)),
        local_sizes=((3, 4), (3, 4)),
    )


def padded() -> torch.Tensor:
    """Four rows of two shards with padding before, between and after."""
    return part(
        torch.zeros(7, 5),
        global_shape=torch.Size([6, 4]),
        global_offsets=[torch.Size([4, 1]), torch.Size([0, 0])],
        local_offsets=[(1, 0), (4, 1)],
        local_sizes=[(2, 3), (2, 4)],
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_file({"w": TRUTH}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def test_each_shard_is_filled_where_the_attributes_say(saved: Path) -> None:
    state = {"w": swapped()}
    report = ckptool.load(saved, state)
    assert bits(state["w"]) == bits(torch.cat([TRUTH[3:], TRUTH[:3]]))
    assert report.nbytes == TRUTH.nbytes


def test_padding_stays_as_it_was(saved: Path) -> None:
    state = {"w": torch.nn.Parameter(padded())}
    for name, value in vars(padded()).items():
        setattr(state["w"], name, value)
    ckptool.load(saved, state)
    expected = torch.zeros(7, 5)
    expected[1:3, :3], expected[4:6, 1:] = TRUTH[4:6, 1:], TRUTH[:2]
    assert bits(state["w"]) == bits(expected)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"global_shape": (6, 5)}, r"float32 \[6, 4\] in the checkpoint, float32 \[6, 5\]"),
        ({"local_sizes": ((3, 4),)}, "2 global_offsets, 2 local_offsets and 1 local_sizes"),
        ({"global_offsets": ((4, 0), (0, 0))}, r"is outside global_shape \[6, 4\]"),
        ({"local_offsets": ((0, 0), (4, 0))}, r"is outside its own shape \[6, 4\]"),
        ({"local_offsets": ((0,), (3, 0))}, "at an offset of 1"),
        ({"local_offsets": ((0, 0), (1, 0))}, "two of its shards share elements"),
        ({"global_shape": None}, "contradict one another"),
    ],
)
def test_what_does_not_fit_is_refused(saved: Path, changed: dict[str, Any], says: str) -> None:
    state = {"w": part(swapped(), **changed)}
    with pytest.raises(Unsupported, match=says):
        ckptool.load(saved, state)
    assert not state["w"].any()


def test_memory_of_another_part_is_not_loaded_with_it(tmp_path: Path) -> None:
    save_file({"x": TRUTH}, tmp_path / "m.safetensors")
    memory = torch.zeros(3, 4)
    upper, lower = (
        part(
            memory.view(3, 4),
            global_shape=(6, 4),
            global_offsets=((row, 0),),
            local_offsets=((0, 0),),
            local_sizes=((3, 4),),
        )
        for row in (0, 3)
    )
    with pytest.raises(ckptool.KeysDiffer, match=r"missing \(1\): y"):
        ckptool.load(tmp_path / "m.safetensors", {"x": upper, "y": lower})


@pytest.mark.parametrize("fixture", ["torch_2_15_dcp", "torch_2_15_rank_files"])
def test_what_torch_2_15_wrote_is_loaded_as_it_would(fixture: str) -> None:
    one = case(fixture)
    whole = {
        name: torch.frombuffer(bytearray(data), dtype=getattr(torch, kind)).reshape(shape)
        for name, (kind, shape, data) in one.truth.items()
    }
    state = {
        "model.table": part(
            torch.full((9, 6), -1.0),
            global_shape=(10, 6),
            global_offsets=((6, 0), (0, 0)),
            local_offsets=((1, 0), (5, 0)),
            local_sizes=((4, 6), (3, 6)),
        )
    }
    ckptool.load(one.path, state, select="model.table")
    expected = torch.full((9, 6), -1.0)
    expected[1:5], expected[5:8] = whole["model.table"][6:], whole["model.table"][:3]
    assert bits(state["model.table"]) == bits(expected)


def test_one_rank_s_file_is_not_the_whole_tensor(tmp_path: Path) -> None:
    torch.save({"w": part(torch.ones(3, 4), **HALF)}, tmp_path / "m.pt")
    checkpoint = ckptool.open(tmp_path / "m.pt")
    assert checkpoint.tensors["w"].shape == (6, 4)
    with pytest.raises(Damaged, match="chunks hold 12 of 24 elements"):
        checkpoint.read("w")


def test_attributes_that_contradict_one_another_are_damage(tmp_path: Path) -> None:
    torch.save({"w": part(torch.ones(3, 4), **HALF | {"global_shape": (5, 4)})}, tmp_path / "m.pt")
    with pytest.raises(Damaged, match=r"w: m.pt: attributes .* is outside global_shape \[5, 4\]"):
        ckptool.open(tmp_path / "m.pt")


def test_other_attributes_are_named(tmp_path: Path) -> None:
    """As Megatron's parameters have them; a DTensor's own are read."""
    state = {name: torch.nn.Parameter(torch.ones(2)) for name in ("a", "b")}
    for one in state.values():
        vars(one)["partition_dim"] = 0
    vars(state["a"])["tensor_model_parallel"] = True
    torch.save(state, tmp_path / "m.pt")
    (note,) = ckptool.open(tmp_path / "m.pt").catalog.notes
    assert note == (
        "tensor attributes not carried over: partition_dim of 2 tensors, tensor_model_parallel of a"
    )
    assert (
        note
        in ckptool.convert(tmp_path / "m.pt", tmp_path / "m.safetensors", to="safetensors").notes
    )
