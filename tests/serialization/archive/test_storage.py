"""Tensors that torch quantised, as their parts; torch's own functions are the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recipes.common import quantised

import ckptool
from ckptool.serialization.archive.storage import quantised_parts
from ckptool.serialization.pickle.records import Call, Global


def saved(tensor: Any, path: Path, *, as_zip: bool) -> ckptool.Checkpoint:
    import torch

    torch.save({"q": tensor}, path, _use_new_zipfile_serialization=as_zip)
    return ckptool.open(path)


ONE_SCALE = {
    "whole": lambda: quantised("q", 4, 6),
    "strided": lambda: quantised("q", 4, 6)[1:, ::2].t(),
    "parameter": lambda: __import__("torch").nn.Parameter(quantised("q", 4), requires_grad=False),
}


@pytest.mark.parametrize("as_zip", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("made", ONE_SCALE.values(), ids=ONE_SCALE)
def test_one_scale(made: Any, as_zip: bool, tmp_path: Path) -> None:
    tensor = made()
    found = saved(tensor, tmp_path / "q.pt", as_zip=as_zip)
    assert found.read("q.int_repr").equal(tensor.int_repr())
    assert found.objects["q.q_scale"] == tensor.q_scale()
    assert found.objects["q.q_zero_point"] == tensor.q_zero_point()


@pytest.mark.parametrize("as_zip", [True, False], ids=["zip", "legacy"])
def test_a_scale_a_channel(as_zip: bool, tmp_path: Path) -> None:
    tensor = quantised("q", 4, 3, channels=True)
    found = saved(tensor, tmp_path / "q.pt", as_zip=as_zip)
    assert found.read("q.int_repr").equal(tensor.int_repr())
    assert found.read("q.q_per_channel_scales").equal(tensor.q_per_channel_scales())
    assert found.read("q.q_per_channel_zero_points").equal(tensor.q_per_channel_zero_points())
    assert found.objects["q.q_per_channel_axis"] == tensor.q_per_channel_axis()


@pytest.mark.parametrize("dtype", ["qint8", "quint8", "qint32"])
def test_integers_of_every_size(dtype: str, tmp_path: Path) -> None:
    import torch

    tensor = torch.quantize_per_tensor(torch.arange(6.0), 0.5, 1, getattr(torch, dtype))
    found = saved(tensor, tmp_path / "q.pt", as_zip=True)
    assert found.tensors["q.int_repr"].dtype.name == dtype.removeprefix("q")
    assert found.read("q.int_repr").equal(tensor.int_repr())


def test_it_is_said_what_the_parts_are(tmp_path: Path) -> None:
    notes = saved(quantised("q", 4), tmp_path / "q.pt", as_zip=True).catalog.notes
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
def test_what_is_no_quantised_tensor_has_no_parts(value: Any) -> None:
    assert quantised_parts(value) is None
