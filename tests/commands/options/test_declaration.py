"""Classes of options: fields with defaults, immutable, equal by value."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import NODEFAULT
from msgspec.structs import replace

from ckptool.commands.options.declaration import (
    COUNT,
    OptionGroup,
    OptionSet,
    build,
    changed,
    group,
    option,
)


class Inner(OptionSet):
    """Options that another class nests."""

    seed: int = option("--seed", COUNT, default=0, help="A seed.")


class Outer(OptionSet):
    """One required option, one with a default of its own, and nested ones."""

    to: str = option("--to", default=NODEFAULT, help="A format.")
    dims: dict[str, int] = option("--dim", default={}, help="A size.")
    inner: Inner = group(Inner, seed=3)


def test_defaults_are_made_for_each() -> None:
    first, second = Outer("dcp"), Outer(to="dcp")
    assert first == second
    assert first.dims is not second.dims
    assert first.inner == Inner(3) != Inner()
    assert hash(Inner(3)) == hash(Inner(seed=3))


def test_they_are_replaced_and_never_changed() -> None:
    outer = replace(Outer("dcp"), inner=Inner(5))
    assert (outer.to, outer.inner.seed) == ("dcp", 5)
    assert changed(outer) == ["--seed"]
    with pytest.raises(AttributeError, match="immutable type: 'Inner'"):
        outer.inner.seed = 1


@pytest.mark.parametrize(("values", "named"), [((), {}), ((), {"to": "a", "x": 1}), ("abcd", {})])
def test_what_is_not_a_field_or_lacks_is_refused(values: Any, named: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="argument"):
        Outer(*values, **named)


def test_they_are_built_from_keywords() -> None:
    built = build(OptionGroup(Outer), {"to": "dcp", "seed": 4})
    assert built == Outer("dcp", inner=Inner(4))
    assert repr(built) == "Outer(to='dcp', dims={}, inner=Inner(seed=4))"
