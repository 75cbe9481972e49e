"""Moments of one layer or expert among those of others, in one tensor or each in its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from verify.test_moments import (
    KINDS_OF,
    LAYERS,
    State,
    copy_moments,
    found,
    of_layer,
    saved,
    trained,
    with_equal_weights,
)

LAYER = "decoder.layers.{}.{}.weight"


def stacked(state: State, *, are_moments: bool = True, head: str = "decoder.layers.") -> State:
    """The same as Megatron stacks it: all of it, or the weights alone (``dp_reshardable``)."""
    made: State = {}
    for part in ("up", "down"):
        names = [f"layers.{layer}.{part}.weight" for layer in range(LAYERS)]
        made[f"{head}{part}.weight"] = torch.stack([state["model"][name] for name in names])
        for kind in KINDS_OF:
            own = [state["optimizer"]["state"][name][kind] for name in names]
            if are_moments:
                made[f"optimizer.state.{kind}.{head}{part}.weight"] = torch.stack(own)
            else:
                made |= {f"{kind}.{head}{n}.{part}.weight": m for n, m in enumerate(own)}
    return made


def lost(state: State, layer: int, *parts: str) -> State:
    for part in parts or ("up", "down"):
        for kind in KINDS_OF:
            of_layer(state, layer, part)[kind].zero_()
    return state


@pytest.mark.parametrize("are_moments", [True, False])
@pytest.mark.parametrize(
    ("change", "code", "layer"),
    [
        (lambda state: state, "", 0),
        (lambda state: lost(state, 2), "moments-zero", 2),
        (lambda state: lost(state, 0, "up"), "moments-zero", 0),
        (lambda state: lost(state, 3, "up"), "moments-zero", 3),
        (lambda state: lost(state, 3), "", 0),  # of an encoder, it may not be used
        (lambda state: lost(lost(state, 2), 1), "", 0),
        (lambda state: copy_moments(state, "up", "down"), "moments-copied", 2),
        (lambda state: with_equal_weights(copy_moments(state, "up", "down")), "", 0),
    ],
)
def test_moments_of_one_layer_of_a_stack(
    change: Callable[[State], State], code: str, layer: int, are_moments: bool, tmp_path: Path
) -> None:
    state = stacked(change(trained()), are_moments=are_moments)
    findings = found(saved(tmp_path / "c", state))
    assert [finding.code for finding in findings] == [code] * bool(code)
    for finding in findings:
        names = [each.message for each in finding.affected] or [finding.message]
        place = f"[{layer}]: " if are_moments else f".layers.{layer}."
        assert all(place in name for name in names)
        tensors = {each.tensor for each in finding.affected} or {finding.tensor}
        assert tensors <= state.keys()


def test_the_last_layer_of_a_stack_if_its_output_is_used(tmp_path: Path) -> None:
    state = stacked(lost(trained(), 3))
    for name in ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq."):
        state[f"{name}decoder.final_layernorm.weight"] = torch.ones(30)
    (finding,) = found(saved(tmp_path / "c", state))
    assert finding.affected[0].message == (
        "optimizer.state.exp_avg.decoder.layers.up.weight[3]: all values are zero, and all squares,"
        " but of no other layer"
    )


def test_a_layer_that_fills_a_stack_up(tmp_path: Path) -> None:
    state = lost(trained(), 2)
    for part in ("up", "down"):
        state["model"][f"layers.2.{part}.weight"].zero_()
    assert not found(saved(tmp_path / "c", stacked(state)))


@pytest.mark.parametrize(
    ("change", "count"),
    [(lambda state: lost(state, 2), 0), (lambda state: copy_moments(state, "up", "down"), 4)],
)
def test_stacked_experts(change: Callable[[State], State], count: int, tmp_path: Path) -> None:
    """One is never chosen, or has the moments of another."""
    state = stacked(change(trained()), head="layers.0.mlp.experts.")
    findings = found(saved(tmp_path / "c", state))
    assert sum(len(finding.affected) for finding in findings) == count


@pytest.mark.parametrize(
    ("layer", "parts", "count"),
    [
        (2, ["attention.q"], 1),
        (2, ["attention.q", "attention.k"], 1),
        (2, ["up"], 1),
        (2, ["up", "down"], 0),  # the MLP may not be used
        (2, ["attention.q", "attention.k", "attention.v"], 0),
        (0, ["up"], 0),  # what goes into the first layer may be zero
        (5, ["up"], 1),
        (5, ["attention.q", "attention.k"], 0),  # the last layer may not be used whole
    ],
)
def test_matrices_of_one_layer_without_moments(
    layer: int, parts: list[str], count: int, tmp_path: Path
) -> None:
    kinds = [*(f"attention.{part}" for part in "qkv"), "up", "down"]
    names = [LAYER.format(n, kind) for n in range(6) for kind in kinds]
    state = {name: torch.randn(10, 10) for name in names}
    for kind in KINDS_OF:
        state |= {f"{kind}.{name}": torch.rand(10, 10) for name in names}
        for part in parts:
            state[f"{kind}.{LAYER.format(layer, part)}"].zero_()
    assert len(found(saved(tmp_path / "c", state))) == count
    counted = {f"step.{name}": torch.tensor(1.0) for name in names}  # what follows began as zeros
    assert not found(saved(tmp_path / "first", state | counted))
    masks = {f"{LAYER.format(layer, parts[0])}_mask": torch.zeros(10, 10)}
    assert not found(saved(tmp_path / "pruned", state | masks))
