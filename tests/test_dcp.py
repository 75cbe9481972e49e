"""ckptool.dcp.CheckpointReader: torch's own planner and loader on any format."""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import case
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader

import ckptool
from ckptool.dcp import CheckpointReader
from ckptool.errors import CkptoolError, Damaged, Unsupported

WEIGHT = torch.arange(12.0).reshape(3, 4)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {"model": {"w": WEIGHT}, "lr": 0.5, "args": argparse.Namespace(a=1)}
    torch.save(state, tmp_path / "m.pt")
    return tmp_path / "m.pt"


def load(state: dict[str, Any], reader: CheckpointReader, **planner: Any) -> None:
    dcp.load(state, storage_reader=reader, planner=DefaultLoadPlanner(**planner), no_dist=True)


def test_it_is_a_storage_reader(saved: Path) -> None:
    assert isinstance(CheckpointReader(saved), StorageReader)
    assert CheckpointReader.validate_checkpoint_id(case("dcp_base").path)
    assert CheckpointReader.validate_checkpoint_id(saved)
    assert not CheckpointReader.validate_checkpoint_id(saved.parent / "nothing")


def test_nested_names_and_values(saved: Path) -> None:
    state = {"model": {"w": torch.zeros(3, 4)}, "lr": 0.0}
    load(state, CheckpointReader(saved))
    assert torch.equal(state["model"]["w"], WEIGHT)  # type: ignore[index]
    assert state["lr"] == 0.5


def test_a_checkpoint_that_is_open_already(saved: Path) -> None:
    state = {"net.w": torch.zeros(3, 4)}
    load(state, CheckpointReader(ckptool.open(saved, rename=[r"^model\.=net."])))
    assert torch.equal(state["net.w"], WEIGHT)


def test_a_part_of_it(saved: Path) -> None:
    state = {"model": {"w": torch.zeros(3, 4), "new": torch.ones(2)}}
    error = failure(state, saved)
    assert "missing (1): model.new" in error.message
    assert "planner=DefaultLoadPlanner(allow_partial_load=True) loads what" in error.hint
    load(state, CheckpointReader(saved), allow_partial_load=True)
    assert torch.equal(state["model"]["w"], WEIGHT)
    assert torch.equal(state["model"]["new"], torch.ones(2))


def test_another_checkpoint_after_a_reset(saved: Path, tmp_path: Path) -> None:
    torch.save({"model": {"w": WEIGHT + 1}}, tmp_path / "other.pt")
    reader, state = CheckpointReader(saved), {"model": {"w": torch.zeros(3, 4)}}
    load(state, reader)
    reader.reset(tmp_path / "other.pt")
    load(state, reader)
    assert torch.equal(state["model"]["w"], WEIGHT + 1)
    assert reader.checkpoint_id == tmp_path / "other.pt"


def trained(step: bool) -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(step)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 if step else 0.5)
    if step:
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def first_weight(model: torch.nn.Sequential) -> torch.Tensor:
    return model[0].get_parameter("weight")


class App(Stateful):
    """What training loops hand to ``dcp.load`` whole."""

    def __init__(self, step: bool) -> None:
        self.model, self.optimizer = trained(step)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "m.pt"
    torch.save({"app": App(step=True).state_dict(), "step": 3}, path)
    return path


def test_a_stateful_object_with_an_optimizer(run: Path) -> None:
    there, here = App(step=True), App(step=False)
    load({"app": here, "step": 0}, CheckpointReader(run))
    assert all(
        map(torch.equal, here.model.state_dict().values(), there.model.state_dict().values())
    )
    one, other = here.optimizer.state_dict(), there.optimizer.state_dict()
    assert one["param_groups"] == other["param_groups"]
    for number, state in other["state"].items():
        assert all(torch.equal(tensor, one["state"][number][n]) for n, tensor in state.items())


@pytest.mark.parametrize(
    "options",
    [{"flatten_sharded_tensors": False}, {"allow_partial_load": True}, {}],
    ids=["sharded as they are", "partial", "plain"],
)
def test_planners_with_options_of_their_own(run: Path, options: dict[str, bool]) -> None:
    model = trained(step=False)[0]
    load({"app": {"model": model.state_dict()}}, CheckpointReader(run), **options)
    assert torch.equal(first_weight(model), first_weight(trained(step=True)[0]))


def test_names_that_are_flat_already(run: Path) -> None:
    model = trained(step=False)[0]
    state = {f"app.model.{name}": tensor for name, tensor in model.state_dict().items()}
    load(state, CheckpointReader(run), flatten_state_dict=False)
    assert torch.equal(first_weight(model), first_weight(trained(step=True)[0]))


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable")
def test_a_part_is_rebuilt_by_its_keys(run: Path) -> None:
    reader = CheckpointReader(run, select="app.model.*", rename=r"^app\.=")
    found = _load_state_dict_from_keys({"model"}, storage_reader=reader)
    assert found.keys() == {"model"}
    assert torch.equal(found["model"]["0.weight"], first_weight(trained(step=True)[0]))


def test_memory_that_two_names_share(saved: Path, tmp_path: Path) -> None:
    torch.save({"a": WEIGHT, "b": WEIGHT.clone(), "c": WEIGHT + 1}, tmp_path / "m.pt")
    memory = torch.zeros(3, 4)
    load({"a": memory, "b": memory}, CheckpointReader(tmp_path / "m.pt"))
    assert torch.equal(memory, WEIGHT)
    found = failure({"a": memory, "c": memory}, tmp_path / "m.pt")
    assert "a and c share memory" in found.message


def test_a_keyword_that_is_none_is_reported_at_once(saved: Path) -> None:
    with pytest.raises(TypeError, match=r"CheckpointReader\(\) got an unexpected .* 'modelonly'"):
        CheckpointReader(saved, modelonly=True)  # type: ignore[call-arg]


def test_names_that_are_missing_are_named_together_with_what_would_fit(saved: Path) -> None:
    """torch names the first one alone; who asks for a partial load gets it."""
    names = [*ckptool.open(saved).tensors]
    state = {f"other.{name}": torch.zeros(1) for name in names}
    with pytest.raises(CheckpointException) as failed:
        dcp.load(state, storage_reader=CheckpointReader(saved), no_dist=True)
    ((error, _),) = failed.value.failures.values()
    assert isinstance(error, CkptoolError)
    assert f"missing ({len(names)})" in str(error)
    assert "rename=" in str(error.hint)
    partial = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, storage_reader=CheckpointReader(saved), planner=partial, no_dist=True)


def test_errors_travel_between_ranks(saved: Path) -> None:
    found = failure({"model": {"w": torch.zeros(3, 4, dtype=torch.float16)}}, saved)
    there = pickle.loads(pickle.dumps(found))
    assert (type(there), there.message, there.hint) == (Unsupported, found.message, found.hint)
    assert there.__notes__ == ["hint: nothing is cast silently: use cast=True"]


def failure(state: dict[str, Any], path: Path) -> Any:
    """What the reader raised, which torch wraps for every rank."""
    with pytest.raises(CheckpointException) as caught:
        load(state, CheckpointReader(path))
    return next(error for error, _ in caught.value.failures.values())


def test_nothing_is_cast(saved: Path) -> None:
    found = failure({"model": {"w": torch.zeros(3, 4, dtype=torch.float16)}}, saved)
    assert isinstance(found, Unsupported)
    assert "float32 [3, 4] in the checkpoint, float16 [3, 4]" in found.message


def test_a_value_of_a_class_of_its_own_is_never_rebuilt(saved: Path) -> None:
    found = failure({"args": None}, saved)
    assert isinstance(found, Unsupported)
    assert "argparse.Namespace" in found.message


def test_damage_is_found(saved: Path) -> None:
    data = bytearray(saved.read_bytes())
    data[data.index(WEIGHT.numpy().tobytes()) + 5] ^= 1
    saved.write_bytes(data)
    assert isinstance(failure({"model": {"w": torch.zeros(3, 4)}}, saved), Damaged)


def bytes_read() -> int:
    said = Path("/proc/self/io").read_text().split()
    return int(said[said.index("rchar:") + 1])


def test_only_the_bytes_of_the_boxes_are_read(tmp_path: Path) -> None:
    """Columns of row shards: torch's own reader reads every shard whole."""
    halves = {f"w{half}": torch.randn(64, 64 << 10) for half in range(2)}
    dcp.save(halves, checkpoint_id=tmp_path / "m", no_dist=True)
    one = ckptool.open(tmp_path / "m")
    one.read("w0", (slice(1),))
    before = bytes_read()
    found = one.read("w0", (slice(None), slice(0, 16 << 10)))
    assert bytes_read() - before < 1.1 * found.nbytes
    assert torch.equal(found, halves["w0"][:, : 16 << 10])
