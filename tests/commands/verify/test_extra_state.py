"""Optimizer state of layers, experts and numbers that are not there, and what only seems so."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from verify.verify_runs import checked, saved

from ckptool.commands.verify.findings import Finding

State = dict[str, Any]


def found(path: Path, code: str = "optimizer-extra") -> list[Finding]:
    codes = checked(path, quick=True).findings
    return [finding for finding in codes if finding.code == code]


def moments(names: Iterable[str], width: int = 3) -> State:
    return {n: {"exp_avg": torch.ones(2, width), "exp_avg_sq": torch.ones(2, width)} for n in names}


def layers(count: int, *others: str) -> list[str]:
    return [*(f"layers.{n}.up.weight" for n in range(count)), *others]


def state(model: Iterable[str], optimizer: Iterable[str]) -> State:
    weights = {name: torch.ones(2, 3) for name in model}
    return {"model": weights, "optimizer": {"state": moments(optimizer)}}


def written(path: Path, content: State) -> Path:
    dcp.save(content, checkpoint_id=path, no_dist=True)
    return path


def test_the_state_of_layers_that_the_model_does_not_have(tmp_path: Path) -> None:
    (finding,) = found(written(tmp_path / "c", state(layers(4), layers(6))))
    assert finding.severity.value == "warning"
    assert finding.message == (
        "optimizer.state.layers.4.up.weight.exp_avg, optimizer.state.layers.4.up.weight.exp_avg_sq"
        " and 2 more: optimizer state of 2 parameters that the model does not have"
    )


def test_it_is_by_kind_as_megatron_names_it(tmp_path: Path) -> None:
    content = {f"decoder.{name}": torch.ones(2, 3) for name in layers(4)}
    content |= {f"optimizer.state.exp_avg.decoder.{name}": torch.ones(2, 3) for name in layers(5)}
    (finding,) = found(written(tmp_path / "c", content))
    assert finding.tensor == "optimizer.state.exp_avg.decoder.layers.4.up.weight"


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        (layers(6), layers(4)),  # frozen, or experts never chosen
        (layers(4), layers(4)),
        (layers(4, "layers.9.up.weight"), layers(4, "layers.8.up.weight")),  # tied: another name
        (layers(4, "a.w1", "a.w2"), layers(4, "a.w12")),  # saved in parts
        (layers(2), layers(9)),  # most are others: another way to name them
        (layers(4), [f"_orig_mod.{name}" for name in layers(4)]),
    ],
)
def test_state_that_may_be_right_is_none(
    model: list[str], optimizer: list[str], tmp_path: Path
) -> None:
    assert not found(written(tmp_path / "c", state(model, optimizer)))


@pytest.mark.parametrize("groups", [[[0, 1, 2]], [[0], [1, 2]]])
def test_numbers_that_no_group_has(groups: list[list[int]], tmp_path: Path) -> None:
    own = {int(name): values for name, values in moments("0123").items()}
    listed = [{"lr": 0.1, "params": numbers} for numbers in groups]
    content: State = {"model": {"w": torch.ones(2)}, "optimizer": {}}
    content["optimizer"] = {"state": own, "param_groups": listed}
    (finding,) = found(saved(tmp_path / "c", state=content))
    assert "optimizer state of 1 parameter that the optimizer's groups do not" in finding.message
    assert finding.tensor == "optimizer.state.3.exp_avg"
    listed[-1]["params"] = [*groups[-1], 3, 4]  # one without state
    assert not found(saved(tmp_path / "whole", state=content))


@pytest.mark.parametrize(
    ("lost", "count"),
    [
        ([], 0),
        ([9], 1),  # of the third layer of seven
        ([10], 1),
        ([9, 10], 0),  # a branch that is not used
        ([1], 0),  # of the first layer
        ([27], 0),  # of the last one
        ([28], 0),  # what follows the layers
    ],
)
@pytest.mark.parametrize("experts", [False, True])
def test_one_number_without_state_among_its_like(
    lost: list[int], count: int, experts: bool, tmp_path: Path
) -> None:
    shapes = [(8, 8), (8, 4), (4, 8), (8,)] * 7 + [(5, 8), (8, 6), (7,), (2, 2)]
    own = {n: {"exp_avg": torch.ones(shape)} for n, shape in enumerate(shapes) if n not in lost}
    groups = [{"lr": 0.1, "params": [*range(len(shapes))]}]
    model = {"experts.w" if experts else "w": torch.ones(2)}
    content: State = {"model": model, "optimizer": {"state": own, "param_groups": groups}}
    findings = found(saved(tmp_path / "c", state=content), "optimizer-incomplete")
    assert [each.message for each in findings] == [
        f"optimizer.state.{number}: without optimizer state, which 4 others between parameters of"
        " the same shapes have"
        for number in (() if experts else lost[:count])
    ]


def test_what_a_lost_file_explains_is_none(tmp_path: Path) -> None:
    path = written(tmp_path / "c", state(layers(4), layers(6)))
    for file in path.glob("*.distcp"):
        file.unlink()
    assert not found(path)


@pytest.mark.parametrize(
    ("shape", "count"), [((2, 3), 0), ((6,), 0), ((3, 2), 1), ((1, 3), 1), ((4, 3), 1)]
)
def test_moments_by_kind_have_the_shape_of_their_parameter(
    shape: tuple[int, ...], count: int, tmp_path: Path
) -> None:
    content = {f"decoder.{name}": torch.ones(2, 3) for name in layers(3)}
    content |= {f"optimizer.state.exp_avg.{name}": torch.ones(2, 3) for name in content}
    content["optimizer.state.exp_avg.decoder.layers.1.up.weight"] = torch.ones(shape)
    messages = [f.message for f in found(written(tmp_path / "c", content), "optimizer-shape")]
    name = "decoder.layers.1.up.weight"
    said = f"optimizer.state.exp_avg.{name}: {[*shape]}, but {name} is [2, 3]"
    assert messages == [said] * count


PARTS = ("up", "down", "norm", *(f"attention.{part}.weight" for part in "qkvo"))
MATRICES = [f"layers.{n}.{part}" for n in range(6) for part in PARTS]


@pytest.mark.parametrize(
    ("without", "count"),
    [
        ({"layers.3.up"}, 1),
        (set(), 0),
        ({f"layers.3.{part}" for part in PARTS}, 0),  # frozen
        ({"layers.3.up", "layers.3.down", "layers.3.norm"}, 0),  # not used
        ({f"layers.3.{part}" for part in PARTS[3:]}, 0),
        ({"layers.3.up", "layers.3.attention.v.weight"}, 1),
        ({"layers.5.up"}, 0),  # not used in the last layer
        ({"layers.2.up", "layers.3.up"}, 0),
    ],
)
def test_a_weight_of_one_layer_without_state(without: set[str], count: int, tmp_path: Path) -> None:
    path = written(tmp_path / "c", state(MATRICES, [n for n in MATRICES if n not in without]))
    messages = [finding.message for finding in found(path, "optimizer-incomplete")]
    said = ": without optimizer state, which all other layers have of it"
    names = sorted(f"model.{name}" for name in without)
    assert messages == [f"{', '.join(names)}{said}"] * count


@pytest.mark.parametrize("number", ["9" * 5000, "\u00b2", 7], ids=["long", "power", "seven"])
def test_state_of_a_number_that_no_group_has(number: str | int, tmp_path: Path) -> None:
    """Python refuses to read some thousands of digits, and some digits."""
    moments = {kind: torch.ones(2) for kind in ("exp_avg", "exp_avg_sq")}
    groups = [{"params": [0], "lr": 0.1}]
    optimizer = {"state": {0: moments, number: moments}, "param_groups": groups}
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": optimizer}, tmp_path / "c.pt")
    assert len(found(tmp_path / "c.pt")) == 1
