"""What is saved."""

from __future__ import annotations

import msgspec
import pytest
from conftest import case

from ckptool.commands.bench.launch import Task
from ckptool.commands.bench.report import Settings
from ckptool.commands.bench.scratch import Folders
from ckptool.commands.bench.specs import TensorSpec, specs_like, specs_of_size, total

MIB = 1 << 20


@pytest.mark.parametrize("nbytes", [10 * MIB, 256 * MIB, 4096 * MIB, 512 * 1024 * MIB])
def test_the_state_is_of_the_size_asked(nbytes: int) -> None:
    specs = specs_of_size(nbytes)
    assert total(specs) == pytest.approx(nbytes, rel=0.15)
    assert len({spec.path for spec in specs}) == len(specs)


def test_every_parameter_has_two_moments_and_a_step() -> None:
    specs = specs_of_size(10 * MIB)
    model = {spec.path[1]: spec.shape for spec in specs if spec.path[0] == "model"}
    for key in ("exp_avg", "exp_avg_sq"):
        assert {s.path[2]: s.shape for s in specs if s.path[-1] == key} == model
    assert sum(spec.path[-1] == "step" for spec in specs) == len(model)


def test_the_state_may_be_shaped_like_a_checkpoint() -> None:
    source = case("torch_checkpointing")
    found = sorted((spec.dtype, spec.shape) for spec in specs_like(source.path))
    assert found == sorted(source.shapes.values())


def test_a_model_alone_gets_the_state_of_adamw() -> None:
    source = case("hf_full")
    found = specs_like(source.path)
    assert len(found) == 4 * len(source.shapes)
    assert sum(spec.path[0] == "model" for spec in found) == len(source.shapes)


def test_the_ranks_read_the_task_as_it_was_given() -> None:
    settings = Settings("parameters", 8, 1, 2, "cpu", 1, "/f", abort=False)
    specs = [TensorSpec(("model", "w"), (2, 2), "float16")]
    task = Task(settings, specs, ["dcp"], Folders("/t", "/s", "ckptool-abcdefgh"))
    assert msgspec.json.decode(msgspec.json.encode(task), type=Task) == task
