"""Whatever is excluded from a DeepSpeed checkpoint's conversion cannot stop the rest."""

from __future__ import annotations

import copy
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import case, flat
from msgspec.structs import replace
from refused_values import REFUSED, Trap

import ckptool
from ckptool.core.catalog import Catalog
from ckptool.errors import Damaged, Hostile, Problem, Refusal
from ckptool.formats import FORMATS
from ckptool.formats.base import ScanOptions
from ckptool.formats.deepspeed import states as _deepspeed_read
from ckptool.formats.deepspeed import universal as _deepspeed_zero_folder
from ckptool.serialization.archive.read import TorchFile, read_torch_file
from ckptool.serialization.pickle.records import Call, Global
from ckptool.serialization.source import Source
from ckptool.storage.local import LocalSource

CLASSES = {
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.utils.tensor_fragment": "fragment_address",
    "deepspeed.runtime.fp16.loss_scaler": "LossScaler",
}
TORCH = "optimizer_state_dict"
BASE = "base_optimizer_state"
TRAP, BROKEN = "hostile", "damaged"
STATE_0 = (TORCH, BASE, "state", 0)

Place = tuple[str, str, tuple[Any, ...], str]
"""A fixture, one of its files, what lies there, and what is put in its place."""

PLACES: dict[str, tuple[Place, list[str], list[str]]] = {
    "a moment that is none": (
        ("deepspeed_zero_2", "*optim_states.pt", (*STATE_0, "hook"), TRAP), ["*hook*"], []
    ),
    "moments that can run code": (
        ("deepspeed_zero_2", "*optim_states.pt", (*STATE_0, "exp_avg"), TRAP),
        ["*exp_avg", "exp_avg.*"], [],
    ),
    "moments that are damaged": (
        ("deepspeed_zero_2", "*pp_rank_1*optim_states.pt", (*STATE_0, "exp_avg"), BROKEN),
        ["*exp_avg", "exp_avg.*"], [],
    ),
    "a group's setting": (
        ("deepspeed_zero_2", "*optim_states.pt", (TORCH, BASE, "param_groups", 0, "hook"), TRAP),
        ["*hook*"], [],
    ),
    "an option": (("deepspeed_zero_2", "*optim_states.pt", (TORCH, "hook"), TRAP), ["*hook*"], []),
    "beside the optimizer": (
        ("deepspeed_zero_2", "*optim_states.pt", ("hook",), TRAP), ["*hook*"], []
    ),
    "what places masters": (
        ("deepspeed_zero_2", "*optim_states.pt", (TORCH, "partition_count"), TRAP),
        ["optimizer.partition_count", "fp32"], ["fp32.*", "exp_avg*", "step.*"],
    ),
    "a master": (
        ("deepspeed_zero_2", "*optim_states.pt", (TORCH, "single_partition_of_fp32_groups", 0),
         BROKEN), ["optimizer*", "fp32"], ["fp32.*", "exp_avg*", "step.*"],
    ),
    "a whole optimizer": (
        ("deepspeed_zero_2", "*optim_states.pt", (TORCH,), TRAP),
        ["optimizer*", "fp32"], ["fp32.*", "exp_avg*", "step.*"],
    ),
    "a weight": (
        ("deepspeed_zero_2", "mp_rank_00*", ("module", "first.bias"), BROKEN),
        ["module.first.bias"], [],
    ),
    "no weight": (
        ("deepspeed_zero_2", "mp_rank_00*", ("module", "first.bias"), TRAP),
        ["module.first.bias"], [],
    ),
    "a layer's weight": (
        ("deepspeed_pipeline", "layer_02-model_00*", ("bias",), TRAP), ["module.2.bias"], []
    ),
    "a frozen weight": (
        ("deepspeed_zero_2", "mp_rank_00*", ("module", "fixed.weight"), BROKEN),
        ["frozen.fixed.weight"], [],
    ),
    "moments of ZeRO 3": (
        ("deepspeed_zero_3", "*optim_states.pt", (TORCH, TORCH, "state", 0, "exp_avg"), BROKEN),
        ["*exp_avg", "exp_avg.*"], [],
    ),
    "masters of ZeRO 3, its weights": (
        ("deepspeed_zero_3", "*optim_states.pt", (TORCH, "fp32_flat_groups", 0), BROKEN),
        ["optimizer*", "fp32"], ["fp32.*", "exp_avg*", "step.*"],
    ),
    "a frozen piece of ZeRO 3": (
        ("deepspeed_zero_3", "*rank_2*model_states.pt", ("frozen_param_fragments", "fixed.weight"),
         TRAP), ["frozen*"], [],
    ),
    "a moment without ZeRO": (
        ("deepspeed_experts", "expp_rank_0*", ("optimizer", "state", 0, "exp_avg"), TRAP),
        ["*exp_avg", "exp_avg.dense.weight"], [],
    ),
    "the numbers of parameters": (
        ("deepspeed_experts", "expp_rank_1*", ("optimizer", "param_groups", 0, "params"), TRAP),
        ["optimizer*", "fp32"], ["fp32.*", "exp_avg*", "step.*"],
    ),
    "an optimizer in the model's file": (
        ("deepspeed_experts", "mp_rank_00*", ("optimizer", "hook"), TRAP), ["*hook*"], []
    ),
    "an expert that can run code": (
        ("deepspeed_experts", "layer_0_expert_1_*", ("hook",), TRAP), ["*hook*"], []
    ),
    "a stage's optimizer": (
        ("deepspeed_pipeline", "*mp_rank_02*optim_states.pt", (TORCH, "partition_count"), TRAP),
        ["optimizer*", "fp32"], ["fp32.*", "exp_avg*", "step.*"],
    ),
    "a stage's layer": (
        ("deepspeed_pipeline", "layer_02-model_00*", ("hook",), TRAP), ["*hook*"], []
    ),
    "what is left of a universal optimizer": (
        ("deepspeed_universal", "zero/optimizer_state.pt", ("hook",), TRAP), ["*hook*"], []
    ),
    "a universal state": (
        ("deepspeed_universal", "zero/first.bias/exp_avg.pt", ("param",), TRAP),
        ["exp_avg.first.bias"], [],
    ),
    "a universal master": (
        ("deepspeed_universal", "zero/first.bias/fp32.pt", ("param",), BROKEN),
        ["fp32.first.bias"], [],
    ),
}  # fmt: skip
"""What is refused, what must be dropped for all else to be read, and what is lost with it."""

OF_THE_MODEL = (
    "a weight",
    "no weight",
    "a layer's weight",
    "a frozen weight",
    "masters of ZeRO 3, its weights",
    "a frozen piece of ZeRO 3",
)


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes that DeepSpeed pickles, by their names."""
    for name, kind in CLASSES.items():
        module = ModuleType(name)
        setattr(module, kind, type(kind, (int,) if kind == "ZeroStageEnum" else (), {}))
        getattr(module, kind).__module__ = name
        steps = name.split(".")
        for count in range(1, len(steps)):
            parent = ".".join(steps[:count])
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, name, module)


def with_value(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of nested dicts and lists, with another value at a path."""
    if not path:
        return new
    copied = copy.copy(value)
    copied[path[0]] = with_value(value[path[0]] if len(path) > 1 else None, path[1:], new)
    return copied


def damaged(place: Place, copy_of: Callable[[str], Path]) -> Path:
    fixture, pattern, path, kind = place
    source = copy_of(fixture)
    file = min(file for file in source.rglob("*.pt") if file.match(pattern))
    new = Trap() if kind == TRAP else REFUSED["damaged"][0]["exp_avg"]
    torch.save(with_value(torch.load(file, weights_only=False), path, new), file)
    return source


def converted(source: Path, target: Path, **choice: Any) -> dict[str, torch.Tensor]:
    ckptool.convert(source, target, to="torch-save", **choice)
    found = flat(torch.load(target, weights_only=False))
    target.unlink()
    return found


@pytest.mark.usefixtures("classes")
@pytest.mark.parametrize("what", PLACES)
def test_what_is_refused_stops_only_who_wants_it(
    what: str, tmp_path: Path, copy_of: Callable[[str], Path]
) -> None:
    place, drop, lost = PLACES[what]
    source, whole = damaged(place, copy_of), case(place[0]).path
    _, error, code = REFUSED[place[3]]
    choices: list[dict[str, Any]] = [{}, {"select": ["*"]}, {"drop": ["global_steps"]}]
    for everything in choices:
        with pytest.raises(error) as raised:
            ckptool.convert(source, tmp_path / "b.pt", to="torch-save", **everything)
        assert all(problem.tensor for problem in raised.value.problems)
    known = converted(whole, tmp_path / "a.pt")
    expected = {n for n in known if not any(fnmatchcase(n, glob) for glob in drop + lost)}
    found = converted(source, tmp_path / "a.pt", drop=drop)
    assert found.keys() == expected
    assert all(torch.equal(found[name], known[name]) for name in expected)
    if what in OF_THE_MODEL:
        with pytest.raises(error):
            ckptool.convert(source, tmp_path / "b.pt", to="torch-save", model_only=True)
    else:
        known = converted(whole, tmp_path / "a.pt", model_only=True)
        found = converted(source, tmp_path / "a.pt", model_only=True)
        assert found.keys() == known.keys()
        assert all(torch.equal(found[name], known[name]) for name in known)
    report = ckptool.verify(source)
    assert code in {finding.code for finding in report.findings}
    assert not report.ok


@pytest.mark.parametrize(
    ("fixture", "pattern"),
    [
        ("deepspeed_zero_2", "*pp_rank_1*optim_states.pt"),
        ("deepspeed_experts", "expp_rank_1*"),
        ("deepspeed_universal", "zero/optimizer_state.pt"),
        ("deepspeed_universal", "zero/first.weight/exp_avg.pt"),
    ],
)
def test_a_cut_file_of_an_optimizer_does_not_stop_the_model(
    fixture: str, pattern: str, tmp_path: Path, copy_of: Callable[[str], Path]
) -> None:
    source = copy_of(fixture)
    file = min(file for file in source.rglob("*.pt") if file.match(pattern))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(Damaged):
        ckptool.convert(source, tmp_path / "b.pt", to="torch-save")
    known = converted(case(fixture).path, tmp_path / "a.pt", model_only=True)
    found = converted(source, tmp_path / "a.pt", model_only=True)
    assert found.keys() == known.keys()
    assert all(torch.equal(found[name], known[name]) for name in known)
    assert not ckptool.verify(source).ok


def test_masters_are_the_model_of_a_universal_checkpoint_of_zero_3(
    tmp_path: Path, copy_of: Callable[[str], Path]
) -> None:
    """Its model files are those of ZeRO 3, which hold no weights."""
    source = copy_of("deepspeed_universal")
    folder = min(source.glob("*_universal"))
    (folder / "mp_rank_00_model_states.pt").unlink()
    for file in case("deepspeed_zero_3").path.rglob("*model_states.pt"):
        shutil.copy(file, folder)
    known = converted(source, tmp_path / "a.pt", model_only=True)
    torch.save(Trap(), folder / "zero/first.bias/exp_avg.pt")
    found = converted(source, tmp_path / "a.pt", model_only=True)
    assert "first.bias" in known
    assert found.keys() == known.keys()
    for value in (Trap(), {"param": Trap()}):
        torch.save(value, folder / "zero/first.bias/fp32.pt")
        with pytest.raises(Hostile, match=r"fp32\.first\.bias"):
            ckptool.convert(source, tmp_path / "b.pt", to="torch-save", model_only=True)
    found = converted(source, tmp_path / "a.pt", drop=["*first.bias"], model_only=True)
    assert found.keys() == known.keys() - {"first.bias"}


@pytest.mark.parametrize(
    "field", ["param_shapes", "buffer_names", "shared_params", "mp_world_size"]
)
def test_what_says_how_all_tensors_lie_stops_all(
    field: str, tmp_path: Path, copy_of: Callable[[str], Path]
) -> None:
    source = copy_of("deepspeed_zero_2")
    file = min(source.rglob("mp_rank_00*"))
    torch.save(torch.load(file, weights_only=False) | {field: [Trap()]}, file)
    for choice in ({}, {"model_only": True}, {"select": ["module.*"]}):
        with pytest.raises(Hostile, match=field):
            ckptool.convert(source, tmp_path / "b.pt", to="torch-save", **choice)


# Every place of every file

EVIL = Global("os", "system")
ODD = {
    "hostile": Call(EVIL, ("x",)),
    "hostile tensor": Call(Global("torch._utils", "_rebuild_parameter"), (Call(EVIL, ("x",)),)),
    "damaged": Call(Global("torch._utils", "_rebuild_tensor_v2"), (1,)),
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def sampled(file: str, files: dict[str, TorchFile]) -> list[tuple[Any, ...]]:
    """The places of a file; half of them, in turns, where those of four ranks or more are alike."""
    found = [*places(files[file].inert)]
    alike = [one for one in files if re.sub(r"\d+", "", one) == re.sub(r"\d+", "", file)]
    return found[alike.index(file) % 2 :: 2] if len(alike) >= 4 else found


@pytest.mark.parametrize(
    "name",
    ["deepspeed_zero_2", "deepspeed_zero_3", "deepspeed_pipeline", "deepspeed_experts",
     "deepspeed_experts_zero_2"],
)  # fmt: skip
def test_wherever_it_lies_it_is_refused_and_moves_nothing_else(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = LocalSource.folder(case(name).path)
    reader = FORMATS[case(name).facts["format"]]
    known = reader.scan(source, ScanOptions())
    files = {file: read_torch_file(source, file) for file in source.files if file.endswith(".pt")}
    outcomes: Counter[str] = Counter()
    spots = [(file, path) for file in files for path in sampled(file, files)]
    for number, (target, path) in enumerate(spots):
        kind = [*ODD][number % len(ODD)]
        evil = {} if kind == "damaged" else {EVIL: Problem("runs code", "hostile-global")}
        inert = with_value(files[target].inert, path, ODD[kind])
        changed = {**files, target: replace(files[target], inert=inert, hostile=evil)}

        def read(_: Source, file: str, found: dict[str, TorchFile] = changed) -> TorchFile:
            return found[file]

        for module in (_deepspeed_read, _deepspeed_zero_folder):
            monkeypatch.setattr(module, "read_torch_file", read)
        error = Damaged if kind == "damaged" else Hostile
        try:
            require_same(known, reader.scan(source, ScanOptions()))
            outcomes["read"] += 1
        except error:
            outcomes["refused"] += 1
    assert outcomes["read"] > 2 * outcomes["refused"]


def require_same(known: Catalog, found: Catalog) -> None:
    """Something is refused by name, and what is not lies where it lay."""
    refused = {n: why for n, why in found.conflicts.items() if isinstance(why, Refusal)}
    assert any(not why.derived for why in refused.values())
    for name, entry in found.tensors.items():
        if name in known.tensors:
            here, there = known.tensors[name], entry
            assert (there.dtype, there.shape) == (here.dtype, here.shape)
            held = {chunk.box: {chunk.at, *(c.at for c in chunk.copies)} for chunk in here.chunks}
            assert all(chunk.at in held[chunk.box] for chunk in there.chunks), name
    placed = {name for name in known.tensors if name.partition(".")[0] in ("fp32", "exp_avg")}
    if "fp32" in refused:
        assert not placed & found.tensors.keys()
    else:
        assert placed <= found.tensors.keys() | refused.keys()
