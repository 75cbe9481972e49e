"""ckptool.open: what a checkpoint holds, and any part of any tensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import case
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import ckptool
from ckptool.core.mesh import Shard
from ckptool.errors import Damaged, Unsupported, UsageError


def test_importing_costs_nothing() -> None:
    line = "import sys, ckptool; print('numpy' in sys.modules, 'typer' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["False", "False"]


def test_torch_is_imported_when_a_torch_tensor_is_asked_for() -> None:
    line = (
        "import sys, ckptool;"
        f"one = ckptool.open({str(case('dcp_base').path)!r});"
        "one.read(next(iter(one.tensors)), as_='numpy');"
        "print('torch' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["False"]


def test_what_it_holds() -> None:
    one = ckptool.open(case("dcp_fsdp2_tp").path)
    assert (one.path, one.format) == (case("dcp_fsdp2_tp").path, "dcp")
    assert one.mesh is not None
    assert one.mesh.shape == (2, 2)
    entry = one.tensors["model.embed.weight"]
    assert (entry.shape, str(entry.dtype)) == ((11, 6), "float32")
    assert entry.placements is not None
    assert Shard(0) in entry.placements
    assert len(entry.chunks) > 1


def test_values() -> None:
    values = ckptool.open(case("dcp_zoo").path).objects
    assert all(isinstance(name, str) for name in values)
    assert values


NAMES = {"rename": [r"^model\.=net."], "select": ["model.*"]}


def test_names_are_mapped_where_it_is_opened() -> None:
    plain = ckptool.open(case("dcp_fsdp2_tp").path)
    one = ckptool.open(case("dcp_fsdp2_tp").path, **NAMES)
    assert one.tensors
    for name in one.tensors:
        assert torch.equal(one.read(name), plain.read(name.replace("net.", "model.")))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    tensor = torch.arange(7 * 5 * 3, dtype=torch.int16).reshape(7, 5, 3)
    path = tmp_path_factory.mktemp("saved") / "m.safetensors"
    save_file({"x": tensor, "half": torch.zeros(2, dtype=torch.bfloat16)}, path)
    return path, tensor


def bounds(size: int) -> st.SearchStrategy[slice]:
    some = st.none() | st.integers(-size - 2, size + 2)
    return st.builds(slice, some, some)


@given(index=st.tuples(bounds(7), bounds(5), bounds(3)), dims=st.integers(0, 3))
def test_slices_mean_what_torch_means(
    saved: tuple[Path, torch.Tensor], index: tuple[slice, ...], dims: int
) -> None:
    path, tensor = saved
    assert torch.equal(ckptool.open(path).read("x", index[:dims]), tensor[index[:dims]])


@pytest.mark.parametrize(
    ("box", "says"),
    [
        ((slice(0, 2, 2),), "steps"),
        ((slice(None),) * 4, "invalid box"),
        ((1,), "invalid box"),
        (3, "invalid box 3"),
        (..., "invalid box Ellipsis"),
        (ckptool.Box((0,), (2,)), "does not fit shape"),
        (ckptool.Box((0, 0, 0), (8, 1, 1)), "does not fit shape"),
        (ckptool.Box((2, 0, 0), (1, 1, 1)), "does not fit shape"),
    ],
)
def test_boxes_that_make_no_sense(saved: tuple[Path, torch.Tensor], box: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ckptool.open(saved[0]).read("x", box)


def test_numpy_where_it_has_the_type(saved: tuple[Path, torch.Tensor]) -> None:
    one = ckptool.open(saved[0])
    found = one.read("x", slice(2, 4), as_="numpy")
    assert found.dtype == np.int16
    assert np.array_equal(found, saved[1][2:4].numpy())
    with pytest.raises(Unsupported, match="numpy has no bfloat16"):
        one.read("half", as_="numpy")


def test_a_name_that_is_not_there(saved: tuple[Path, torch.Tensor]) -> None:
    with pytest.raises(UsageError, match="no tensor named 'y'"):
        ckptool.open(saved[0]).read("y")


def test_what_ranks_disagree_on_is_refused_and_the_rest_is_read() -> None:
    one = ckptool.open(case("rank_differing").path)
    name = next(iter(one.catalog.conflicts))
    with pytest.raises(Damaged):
        one.read(name)
    for other in one.tensors:
        one.read(other)


def test_a_flipped_bit_is_found_where_all_that_a_checksum_covers_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"x": torch.arange(4096, dtype=torch.float32).reshape(64, 64)}, path)
    data = bytearray(path.read_bytes())
    at = data.index(torch.arange(4096, dtype=torch.float32).numpy().tobytes())
    data[at + 8000] ^= 1
    path.write_bytes(data)
    one = ckptool.open(path)
    assert torch.equal(one.read("x", slice(0, 2))[0], torch.arange(64.0))
    with pytest.raises(Damaged, match="CRC-32"):
        one.read("x")
