"""ckptool.open: the contents of a checkpoint, and any part of any tensor."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
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


NAMES: Any = {"rename": [r"^model\.=net."], "select": ["model.*"]}


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


def steps_of(size: int) -> st.SearchStrategy[Any]:
    some = st.none() | st.integers(-size - 2, size + 2)
    by = st.none() | st.integers(1, size + 2)
    return st.builds(slice, some, some, by) | st.integers(-size, size - 1)


@given(
    index=st.tuples(steps_of(7), steps_of(5), steps_of(3)),
    dims=st.integers(0, 3),
    dots=st.integers(0, 3),
)
def test_an_index_means_what_torch_means(
    saved: tuple[Path, torch.Tensor], index: tuple[Any, ...], dims: int, dots: int
) -> None:
    """Also in an array of numpy, and into memory that is given, of any strides."""
    path, tensor = saved
    asked = (*index[:dots], ..., *index[3 - dims + dots :]) if dots <= dims else index[:dims]
    one, expected = ckptool.open(path), tensor[asked]
    assert torch.equal(one.read("x", asked), expected)
    assert torch.equal(one[("x", *asked)], expected)
    found = one.read("x", asked, as_="numpy")
    assert np.array_equal(found, expected.numpy())
    assert found.shape == expected.shape
    out = torch.zeros((*expected.shape, 2), dtype=torch.int16)[..., 0]
    assert one.read("x", asked, out=out) is out
    assert torch.equal(out, expected)
    array = np.zeros((*expected.shape, 2), np.int16)[..., 0]
    one.read("x", asked, as_="numpy", out=array)
    assert np.array_equal(array, expected.numpy())


def test_integers_of_dims_of_one_and_nothing_at_all(tmp_path: Path) -> None:
    tensor = torch.arange(5.0).reshape(1, 5, 1)
    save_file({"x": tensor, "none": torch.zeros(0, 3)}, tmp_path / "m.safetensors")
    one = ckptool.open(tmp_path / "m.safetensors")
    assert torch.equal(one["x", 0], tensor[0])
    assert torch.equal(one["x", ..., 0], tensor[..., 0])
    assert one["none"].shape == (0, 3)
    assert one["none", :, 1].shape == (0,)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ((slice(0, 2, -1),), "the step -1 is less than 1"),
        ((slice(0, 2, 0),), "the step 0 is less than 1"),
        ((slice(None),) * 4, "4 subscripts for 3 dims"),
        ((..., 0, ...), "3 subscripts for 3 dims"),
        (True, "invalid index True"),
        ("a", "invalid index 'a'"),
        ([0, 1], r"invalid index \[0, 1\]"),
        (torch.tensor([1]), r"invalid index tensor\(\[1\]\)"),
        (torch.tensor(True), "invalid index tensor"),
        (np.array(1.5), "invalid index array"),
        (slice("a"), "invalid index 'a'"),
        ((0, 5), "index 5 is out of range for a dim of 5"),
        (-8, "index -8 is out of range for a dim of 7"),
        (ckptool.Box((0,), (2,)), "does not fit shape"),
        (ckptool.Box((0, 0, 0), (8, 1, 1)), "does not fit shape"),
        (ckptool.Box((2, 0, 0), (1, 1, 1)), "does not fit shape"),
    ],
)
def test_indexes_that_make_no_sense(
    saved: tuple[Path, torch.Tensor], index: Any, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        ckptool.open(saved[0]).read("x", index)


@pytest.mark.parametrize(
    ("out", "says"),
    [
        (torch.zeros(7, 5, 3), "int16 .* is read, but out is float32"),
        (torch.zeros(7, 5, 2, dtype=torch.int16), r"\[7, 5, 3\] is read, .* int16 \[7, 5, 2\]"),
        (torch.zeros(7, 5, 3, dtype=torch.int16, device="meta"), "on the meta device"),
        (torch.zeros(1, 1, 1, dtype=torch.int16).expand(7, 5, 3), "an expanded view"),
    ],
)
def test_memory_that_does_not_fit_is_refused(
    saved: tuple[Path, torch.Tensor], out: torch.Tensor, says: str
) -> None:
    with pytest.raises(Unsupported, match=says):
        ckptool.open(saved[0]).read("x", out=out)


def test_a_type_and_a_device_to_read_to(saved: tuple[Path, torch.Tensor]) -> None:
    one = ckptool.open(saved[0])
    assert one.read("half", dtype=torch.float32, device="cpu").dtype == torch.float32
    assert one.read("half", dtype="fp64").dtype == torch.float64
    assert one.read("x", dtype=torch.int16).dtype == torch.int16
    for kind in ("bf16", torch.float32):
        with pytest.raises(Unsupported, match="x: int16 is not cast to"):
            one.read("x", dtype=kind)
    with pytest.raises(UsageError, match="numpy has no devices"):
        one.read("x", as_="numpy", device="cpu")  # type: ignore[call-overload]
    with pytest.raises(Unsupported, match=r"int16 .* is read, but out is >i2"):
        one.read("x", as_="numpy", out=np.zeros((7, 5, 3), ">i2"))
    read_only = np.zeros((7, 5, 3), np.int16)
    read_only.flags.writeable = False
    with pytest.raises(Unsupported, match="read-only"):
        one.read("x", as_="numpy", out=read_only)
    with pytest.raises(UsageError, match=r"numpy.ndarray: give a torch tensor"):
        one.read("x", out=read_only)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match=r"torch.Tensor: give a numpy array"):
        one.read("x", as_="numpy", out=torch.zeros(7, 5, 3))  # type: ignore[call-overload]


# As a mapping


def test_it_is_a_mapping_of_tensors_and_values(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    torch.save({"w": weight, "step": 7, "tags": {"a": [1, (2, "x")]}}, tmp_path / "m.pt")
    one = ckptool.open(tmp_path / "m.pt")
    assert list(one) == ["w", "step", "tags.a"]
    assert (len(one), one.step) == (3, 7)
    assert "w" in one
    assert "v" not in one
    assert 3 not in one  # type: ignore[comparison-overlap]
    assert torch.equal(dict(one.items())["w"], weight)
    assert {name: one[name] for name in one.keys() - {"w"}} == {"step": 7, "tags.a": [1, (2, "x")]}
    assert torch.equal(one["w", 1, ::2], weight[1, ::2])
    assert one.get("v") is None
    with pytest.raises(KeyError, match="no tensor named 'v'"):
        one["v"]
    with pytest.raises(KeyError, match="step is a value"):
        one["step", 0]
    assert {one: 1}[one] == 1
    assert (one.tensors["w"].ndim, one.tensors["w"].numel) == (2, 6)


def test_a_model_on_the_meta_device_is_loaded_from_its_state_dict(tmp_path: Path) -> None:
    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))

    expected = model()
    torch.save({"model": expected.state_dict(), "step": 3}, tmp_path / "m.pt")
    with torch.device("meta"):
        loaded = model()
    one = ckptool.open(tmp_path / "m.pt", model_only=True)
    state = one.state_dict(device="cpu")
    assert state.keys() == expected.state_dict().keys()
    loaded.load_state_dict(state, assign=True)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_nothing_is_read_of_what_was_closed(saved: tuple[Path, torch.Tensor]) -> None:
    with ckptool.open(saved[0]) as one:
        assert torch.equal(one["x"], saved[1])
        state = one.state_dict()
    assert repr(one).endswith("closed>")
    uses: list[Callable[[], object]] = [
        lambda: one.read("x"),
        lambda: len(one),
        lambda: list(one),
        lambda: dict(state),
        lambda: "x" in one,
        lambda: one.step,
        lambda: one.tensors,
        lambda: ckptool.load(one, {"x": saved[1]}, strict=False),
        lambda: ckptool.inspect(one),
    ]
    for use in uses:
        with pytest.raises(UsageError, match="was closed"):
            use()
    one.close()


def test_what_a_notebook_shows_is_inert(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>"
    save_file(
        {name: torch.zeros(2)} | {f"n{i}": torch.zeros(1) for i in range(60)},
        tmp_path / "m.safetensors",
    )
    shown = ckptool.open(tmp_path / "m.safetensors")._repr_html_()
    assert "<script>" not in shown
    assert "and 11 more" in shown


def test_a_notebook_shows_what_it_is_and_its_tensors_folded() -> None:
    one = ckptool.open(case("dcp_fsdp2_tp").path)
    shown = one._repr_html_()
    for said in ("step 7", "mesh 2 x 2", "23 tensors, 1,739 bytes, 4 non-tensor values"):
        assert f"<div>{said}</div>" in shown
    assert "<td>optim.state.*.step</td><td>fp32</td><td>[]</td>" in shown
    assert shown.count('<td title="') == 4
    assert 'title="50.4%"><div style="width:60px' in shown


def test_tensors_print_one_line_each(tmp_path: Path) -> None:
    names = ["w", "bad\x1b[2J", *(f"layers.{at}.w" for at in range(100))]
    save_file({name: torch.zeros(2, 3) for name in names}, tmp_path / "m.safetensors")
    one = ckptool.open(tmp_path / "m.safetensors")
    lines = repr(one.tensors).splitlines()
    assert len(lines) == 61
    assert lines[-1] == "... and 42 more"
    assert not any("\x1b" in line for line in lines)
    assert repr(one.tensors["w"]) == "<ckptool.TensorEntry 'w' [2, 3] float32>"
    assert "w" in one.tensors
    assert len(one.tensors) == len([*one.tensors.values()]) == 102
    assert {**one.tensors} == one.tensors
    split = ckptool.open(case("dcp_fsdp2_tp").path).tensors["model.blocks.0.down.weight"]
    assert repr(split).endswith(" [6, 10] float32 Shard(0), Shard(1)>")


def test_without_torch_numpy_is_read_and_said(
    saved: tuple[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = ckptool.open(saved[0])
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.warns(UserWarning, match="torch is not installed: tensors are read as numpy"):
        found = one.read("x")
    assert isinstance(found, np.ndarray)
    assert np.array_equal(found, saved[1].numpy())


def test_inspect_of_a_run_gives_its_steps(tmp_path: Path) -> None:
    for step in (1, 2):
        shutil.copytree(case("dcp_base").path, tmp_path / f"step-{step}")
    assert ckptool.inspect(tmp_path) == ckptool.list_steps(tmp_path)
    steps = ckptool.list_steps(tmp_path)
    assert [step.number for step in steps.steps] == [2, 1]
    assert steps._repr_html_().count("<tr>") == 3
    assert f"<td>{tmp_path / 'step-1'}</td>" in steps._repr_html_()


def test_numpy_where_it_has_the_type(saved: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    one = ckptool.open(saved[0])
    found = one.read("x", slice(2, 4), as_="numpy")
    assert found.dtype == np.int16
    assert np.array_equal(found, saved[1][2:4].numpy())
    packed = torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    torch.save({"packed": packed}, tmp_path / "m.pt")
    with pytest.raises(Unsupported, match="packed: numpy has no float4_e2m1fn_x2") as refused:
        ckptool.open(tmp_path / "m.pt").read("packed", as_="numpy")
    assert refused.value.hint == "read it as torch"


@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_numpy_has_the_types_of_ml_dtypes(kind: str, tmp_path: Path) -> None:
    values = torch.tensor([0.0, 1.5, -2.0, 448.0]).to(getattr(torch, kind))
    save_file({"x": values}, tmp_path / "m.safetensors")
    found = ckptool.open(tmp_path / "m.safetensors").read("x", as_="numpy")
    assert found.dtype.name == kind
    assert found.astype(np.float32).tolist() == values.float().tolist()


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
