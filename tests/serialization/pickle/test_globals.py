"""Arrays, scalars, element types and random generators of numpy among a checkpoint's values."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import numpy_globals

import ckptool
from ckptool.errors import Unsupported

ARRAYS: dict[str, Any] = {
    "uint32": np.arange(6, dtype=np.uint32).reshape(2, 3),
    "big endian": np.arange(3, dtype=">i4"),
    "fortran": np.asfortranarray(np.ones((2, 3), np.float16)),
    "empty": np.zeros((0, 4)),
    "no dims": np.array(2.5),
    "text": np.array(["a", "bcd"]),
    "bytes": np.array([b"a", b"bcd"]),
    "bool": np.array([True, False]),
    "complex": np.array([1 + 2j]),
    "dates": np.array(["2020-01-01"], "datetime64[ns]"),
    "structure": np.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i4"), ("b", "f8", (1,))]),
    "aligned": np.zeros(2, np.dtype({"names": ["x"], "formats": ["u1"], "itemsize": 8})),
}
SCALARS: dict[str, Any] = {
    "float64": np.float64(3.5),
    "int64": np.int64(-4),
    "bool": np.bool_(True),
    "date": np.datetime64("2020-01-01", "s"),
    "text": np.str_("abc"),
}
TYPES: dict[str, Any] = {"dtype": np.dtype("<f4"), "class": np.float32}
STATE = {"arrays": ARRAYS, "scalars": SCALARS, "types": TYPES, "w": torch.arange(4.0)}
SAFE = numpy_globals()
GENERATORS: dict[str, Any] = {
    "default": np.random.default_rng(7),
    "philox": np.random.Generator(np.random.Philox(3)),
    "sfc64": np.random.SFC64(3),
    "state": np.random.RandomState(5),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray | np.generic):
        alike = (type(one), one.dtype, one.shape) == (type(other), other.dtype, other.shape)
        return alike and one.tobytes() == other.tobytes()
    return bool(torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other)


def with_old_names(source: Path, target: Path) -> Path:
    """The file as numpy 1 writes it."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("data.pkl"):
                data = data.replace(b"numpy._core.", b"numpy.core.")
            new.writestr(name, data)
    return target


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_arrays_and_scalars_are_carried(protocol: int, tmp_path: Path) -> None:
    source, target = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save(STATE, source, pickle_protocol=protocol)
    report = ckptool.convert(source, target, to="torch-save")
    as_loaded = torch.load(source, weights_only=False)
    assert same(torch.load(target, weights_only=False), as_loaded)
    assert ckptool.verify(source).findings == ()
    assert ckptool.compare(target, source).verify.ok
    assert any("contains numpy data" in note for note in report.notes)
    with torch.serialization.safe_globals(SAFE):
        assert same(torch.load(target, weights_only=True), as_loaded)


def test_names_of_numpy_1_are_carried(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "new.pt")
    source = with_old_names(tmp_path / "new.pt", tmp_path / "old.pt")
    ckptool.convert(source, tmp_path / "dcp", to="dcp")
    ckptool.convert(tmp_path / "dcp", tmp_path / "b.pt", to="torch-save")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = torch.load(tmp_path / "b.pt", weights_only=False)
    assert same(found, torch.load(tmp_path / "new.pt", weights_only=False))
    assert ckptool.verify(source).findings == ()


def test_random_states_of_ranks_are_carried(tmp_path: Path) -> None:
    source, target = tmp_path / "ranks", tmp_path / "again"
    source.mkdir()
    state: Any = np.random.RandomState(3).get_state()
    for rank in range(2):
        torch.save({"w": torch.arange(4.0), "rng": state}, source / f"model_rank{rank}.pt")
    ckptool.reshard(source, target, mesh="1", to="rank-local")
    again = torch.load(target / "checkpoint_0.pt", weights_only=False)["rng"]
    assert same(again[1], state[1])
    assert (again[0], *again[2:]) == (state[0], *state[2:])


@pytest.mark.parametrize("protocol", [2, 4])
def test_generators_are_data(protocol: int, tmp_path: Path) -> None:
    source, target = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"w": torch.ones(2), "rng": GENERATORS}, source, pickle_protocol=protocol)
    assert ckptool.verify(source).findings == ()
    ckptool.convert(source, target, to="torch-save")
    seen = []
    for path in (source, target):
        found = torch.load(path, weights_only=False)["rng"]
        drawn = [found["default"].random(), found["philox"].random(), found["state"].rand()]
        drawn.append(np.random.Generator(found["sfc64"]).random())
        seen.append(drawn)
    assert seen[0] == seen[1]


def test_arrays_of_python_objects_are_refused(tmp_path: Path) -> None:
    source, target = tmp_path / "a.pt", tmp_path / "b.pt"
    odd = {"plain": np.array([1, "a"], object), "inside": np.zeros(1, [("a", "O")])}
    torch.save({"w": torch.ones(2), **odd}, source)
    report = ckptool.convert(source, target, to="torch-save")
    assert torch.load(target, weights_only=True).keys() == {"w"}
    assert sum("Python objects" in note for note in report.notes) == 2


def test_values_of_numpy_are_loaded_in_place(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "a.pt")
    mine: dict[str, Any] = {"arrays": dict.fromkeys(ARRAYS), "scalars": dict.fromkeys(SCALARS)}
    mine |= {"types": dict.fromkeys(TYPES), "w": torch.zeros(4)}
    ckptool.load(tmp_path / "a.pt", mine)
    assert same(mine, torch.load(tmp_path / "a.pt", weights_only=False))


def test_a_generator_is_not_rebuilt(tmp_path: Path) -> None:
    torch.save({"rng": np.random.default_rng(0)}, tmp_path / "a.pt")
    with pytest.raises(Unsupported, match="rng: a numpy random generator"):
        ckptool.load(tmp_path / "a.pt", {"rng": None})


def test_safetensors_leave_numpy_out_and_say_so(tmp_path: Path) -> None:
    """The file beside them is one that ``weights_only=True`` opens."""
    torch.save(STATE, tmp_path / "a.pt")
    report = ckptool.convert(tmp_path / "a.pt", tmp_path / "out", to="safetensors")
    assert any("not carried: scalars.float64 (numpy scalar)" in note for note in report.notes)


def test_memory_formats_of_protocol_4_are_no_code(tmp_path: Path) -> None:
    """Their name has a dot, as has one that reaches hidden attributes of a class."""
    state = {"w": torch.ones(2), "format": torch.channels_last}
    torch.save(state, tmp_path / "m.pt", pickle_protocol=4)
    report = ckptool.convert(tmp_path / "m.pt", tmp_path / "out.pt", to="torch-save", fsync=False)
    assert [note for note in report.notes if note.startswith("not carried: format")]
    codes = {finding.code for finding in ckptool.verify(tmp_path / "m.pt").findings}
    assert "hostile-global" not in codes
