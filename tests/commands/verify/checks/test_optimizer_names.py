"""Names of an optimizer's groups of parameters."""

from __future__ import annotations

import pytest

from ckptool.commands.verify.checks.optimizer_names import Group, groups_of
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
