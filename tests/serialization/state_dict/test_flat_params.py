"""FSDP1's flat parameters: unflattened if their members are given, refused if not."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Bits, bits, case, convert_to, read_back
from hypothesis import given
from hypothesis import strategies as st
from recipes.common import seeded

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, Extent, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.sharding.coverage import coverage_problem
from ckptool.errors import Damaged, Unsupported, UsageError
from ckptool.serialization.state_dict.flat_params import find_members, unflatten

FLOAT = BY_NAME["float32"]
SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6)


def flat_of(name: str, length: int, cuts: list[int]) -> TensorEntry:
    """A flat parameter whose element i has the value i and lies at byte 4 i, cut anywhere."""
    edges = sorted({0, length, *(min(cut, length) for cut in cuts)})
    chunks = tuple(
        Chunk(Box((low,), (high,)), Extent("f", 4 * low, (4,)), rank)
        for rank, (low, high) in enumerate(itertools.pairwise(edges))
    )
    return TensorEntry(name, (name,), FLOAT, (length,), chunks)


def values(entry: TensorEntry) -> np.ndarray[Any, Any]:
    """The values of a tensor, gathered from where its chunks say they lie."""
    found = np.full(entry.shape, -1)
    for chunk in entry.chunks:
        at = chunk.at
        assert isinstance(at, Extent)
        for index in np.ndindex(*chunk.box.shape):
            spot = tuple(i + low for i, low in zip(index, chunk.box.lo, strict=True))
            found[spot] = (at.offset + sum(map(np.multiply, index, at.strides))) // 4
    return found


@given(shapes=SHAPES, cuts=st.lists(st.integers(0, 300), max_size=5), aligned=st.booleans())
def test_members_are_what_lies_between(
    shapes: list[tuple[int, ...]], cuts: list[int], aligned: bool
) -> None:
    step, starts, length = 4 if aligned else 1, [], 0
    for shape in shapes:
        starts.append(-(-length // step) * step)
        length = starts[-1] + math.prod(shape)
    flat = flat_of("u._flat_param", length, cuts)
    told = [(f"u.p{i}", shape) for i, shape in enumerate(shapes)]
    for member in find_members({flat.name: flat}, told)[flat.name]:
        expected = np.arange(math.prod(member.shape)).reshape(member.shape) + member.start
        entries = list(unflatten(flat, [member]))
        assert [entry.shape for entry in entries] == [member.shape]
        assert not coverage_problem(entries[0])
        assert (values(entries[0]) == expected).all()
        assert member.start == starts[int(str(member.path[0]).removeprefix("u.p"))]


def test_a_parameter_belongs_to_the_innermost_unit() -> None:
    flats = {f.name: f for f in (flat_of("_flat_param", 5, []), flat_of("b.1._flat_param", 6, []))}
    told = [("b.0.w", (5,)), ("b.1.w", (2, 3))]
    found = find_members(flats, told)
    assert [m.path for m in found["_flat_param"]] == [("b.0.w",)]
    assert [m.path for m in found["b.1._flat_param"]] == [("b.1.w",)]


def test_names_below_a_family() -> None:
    flats = {f.name: f for f in (flat_of("model._flat_param", 2, []),)}
    assert find_members(flats, [("w", (2,))])["model._flat_param"][0].path == ("model.w",)


@pytest.mark.parametrize("told", [[("w", (3, 3))], [("w", (3, 3)), ("v", (2,))], []])
def test_what_does_not_fill_it_is_refused(told: list[tuple[str, tuple[int, ...]]]) -> None:
    flat = flat_of("_flat_param", 10, [])
    with pytest.raises(Unsupported, match="_flat_param has 10 elements"):
        find_members({flat.name: flat}, told)


# Rank files by torch


LINEAR = {"0.weight": (7, 5), "0.bias": (7,), "1.weight": (3, 7), "1.bias": (3,)}


def given_file(out: Path, shapes: Any) -> Path:
    path = out / "shapes.json"
    path.write_text(json.dumps(shapes))
    return path


def test_rank_files_are_split(out: Path) -> None:
    """By the values that the recipe gave the model."""
    expected: dict[str, Bits] = {n: bits(seeded(n, *shape)) for n, shape in LINEAR.items()}
    source = case("rank_fsdp1_local").path
    for target in ("safetensors", "dcp"):
        convert_to(target, source, out / target, flat_params=given_file(out, LINEAR))
        assert read_back(target, out / target) == expected


def test_a_dcp_folder_is_split(out: Path) -> None:
    import torch.distributed.checkpoint as dcp

    flat = torch.cat([seeded(name, *shape).reshape(-1) for name, shape in LINEAR.items()])
    dcp.save({"model": {"_flat_param": flat}}, checkpoint_id=out / "flat", no_dist=True)
    report = convert_to("safetensors", out / "flat", out / "whole")
    assert any("flat parameters are kept as they are" in note for note in report.notes)
    convert_to("safetensors", out / "flat", out / "parts", flat_params=given_file(out, LINEAR))
    expected = {f"model.{n}": bits(seeded(n, *shape)) for n, shape in LINEAR.items()}
    assert read_back("safetensors", out / "parts") == expected


def test_without_shapes_the_error_says_how_to_make_them(out: Path) -> None:
    with pytest.raises(Damaged, match="which parameters it is made of") as caught:
        convert_to("safetensors", case("rank_fsdp1_local").path, out / "m")
    assert "--flat-params" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("shapes", "error"),
    [
        ({name: LINEAR[name] for name in reversed(LINEAR)}, Damaged),
        (LINEAR | {"2.weight": (3, 3)}, Unsupported),
        ({"0.weight": "five"}, UsageError),
        (["0.weight"], UsageError),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes: Any, error: type[Exception], out: Path) -> None:
    """With ``use_orig_params`` the pieces in the files show a wrong order too."""
    path = given_file(out, shapes)
    with pytest.raises(error):
        convert_to("safetensors", case("rank_fsdp1_local").path, out / "m", flat_params=path)
