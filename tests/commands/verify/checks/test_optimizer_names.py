"""What names of an optimizer's state and groups say, in the ways in which trainers name them."""

from __future__ import annotations

import pytest

from ckptool.commands.verify.checks.optimizer_names import Group, StateName, groups_of
from ckptool.core.catalog import Catalog, ObjectEntry


@pytest.mark.parametrize(
    ("name", "optimizer", "head"),
    [
        ("param_groups.0.params", "", "param_groups.0"),
        ("optim.param_groups.1.params", "optim", "optim.param_groups.1"),
        ("a.b.param_groups.0.params@rank12", "a.b", "a.b.param_groups.0"),
        ("a.param_groups.param_groups.0.params", "a", "a.param_groups.param_groups.0"),
        ("a_param_groups.0.params", None, ""),
        ("param_groups.params", None, ""),
        ("param_groups.0.lr", None, ""),
        ("a.param_groups." * 40_000, None, ""),  # a hostile one, which must not take minutes
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_groups_of_an_optimizer(name: str, optimizer: str | None, head: str) -> None:
    entry = ObjectEntry(name, (name,), [0, 1])
    expected = [] if optimizer is None else [Group(optimizer, head, [0, 1])]
    assert list(groups_of(Catalog("torch-save", {}, {name: entry}, {}))) == expected


@pytest.mark.parametrize(
    ("name", "optimizer", "parameter", "kind", "by_kind"),
    [
        ("optim.state.layers.0.w.exp_avg", "optim", "layers.0.w", "exp_avg", False),
        ("state.3.step", "", "3", "step", False),
        ("layers.0.w.exp_avg_sq", "", "layers.0.w", "exp_avg_sq", False),
        ("exp_avg.layers.0.w", "", "layers.0.w", "exp_avg", True),
        ("optimizer.state.exp_avg_sq.w", "optimizer", "w", "exp_avg_sq", True),
        ("step.layers.0.w", "", "layers.0.w", "step", True),
        ("state.optimizers.A.state.w.exp_avg", "state.optimizers.A", "w", "exp_avg", False),
        ("state.w.exp_avg.codes", "", "w.exp_avg", "codes", False),
        ("state.adam.state.0.exp_avg", "state.adam", "0", "exp_avg", False),
        ("state.0.state.w.exp_avg", "", "0.state.w", "exp_avg", False),
        ("optim.state.0.state.w.exp_avg", "optim", "0.state.w", "exp_avg", False),
        ("optimizer.state.exp_avg.0.state.w", "optimizer", "0.state.w", "exp_avg", True),
        ("state.optim.state.0.state.w.step", "state.optim", "0.state.w", "step", False),
    ],
)
def test_a_state_is_named_by_kind_or_by_parameter(
    name: str, optimizer: str, parameter: str, kind: str, by_kind: bool
) -> None:
    assert StateName.of(name)[:4] == (optimizer, parameter, kind, by_kind)


def test_what_counts_steps_is_in_a_state_or_of_a_kind() -> None:
    assert StateName.of("optim.state.w.step").counts_steps
    assert StateName.of("step.w").counts_steps
    assert not StateName.of("trainer.step").counts_steps
    assert not StateName.of("param_groups.0.step").counts_steps
