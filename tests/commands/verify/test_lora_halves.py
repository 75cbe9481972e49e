"""Halves of LoRA that are zero though no training leaves them so, and those that rightly are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from verify.verify_runs import checked

LAYERS = 5
NAMES = {
    "PEFT": ("lora_A.weight", "lora_B.weight"),
    "kohya": ("lora_down.weight", "lora_up.weight"),
}
States = dict[str, torch.Tensor]


def adapter(first: str, second: str) -> States:
    torch.manual_seed(0)
    found: States = {}
    for layer in range(LAYERS):
        for module in ("q_proj", "v_proj"):
            head = f"base_model.model.layers.{layer}.{module}"
            found[f"{head}.{first}"] = torch.randn(4, 32)
            found[f"{head}.{second}"] = torch.randn(32, 4)
    return found


def save(path: Path, weights: States, unmoved: set[str], rates: tuple[Any, ...]) -> Path:
    """Save an adapter, and an optimizer without gradients of some."""
    state = {
        number: {
            "step": torch.tensor(9.0),
            "exp_avg": torch.zeros_like(tensor) if name in unmoved else torch.randn(tensor.shape),
            "exp_avg_sq": torch.zeros_like(tensor) if name in unmoved else torch.rand(tensor.shape),
        }
        for number, (name, tensor) in enumerate(weights.items())
    }
    groups: list[dict[str, Any]] = [{"lr": rate, "params": [*range(len(state))]} for rate in rates]
    optimizer = {"state": state, "param_groups": groups}
    torch.save({"model": weights, "optimizer": optimizer}, path)
    return path


def zero(path: Path) -> list[str]:
    return [f.message for f in checked(path).findings if f.code == "weight-zero"]


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("half", [0, 1])
def test_a_half_that_is_zero(kind: str, half: int, tmp_path: Path) -> None:
    weights = adapter(*NAMES[kind])
    assert zero(save(tmp_path / "sound.pt", weights, set(), (1e-3,))) == []
    lost = f"base_model.model.layers.2.q_proj.{NAMES[kind][half]}"
    weights[lost] = torch.zeros_like(weights[lost])
    (message,) = zero(save(tmp_path / "lost.pt", weights, set(), (1e-3,)))
    assert lost in message
    gradients = "but 10 of 10 tensors of this shape have had gradients"
    why = ("but of none of 9 others like lora_", gradients)
    assert why[half] in message
    assert zero(save(tmp_path / "ended.pt", weights, set(), (0.0,))) != []  # rates end at zero


def test_a_first_half_in_a_model_of_few_layers(tmp_path: Path) -> None:
    weights = {n: w for n, w in adapter(*NAMES["PEFT"]).items() if ".layers.0." in n}
    other = "base_model.model.layers.0.k_proj.lora_A.weight"
    weights[other] = torch.randn(4, 32)
    assert zero(save(tmp_path / "sound.pt", weights, set(), (1e-3,))) == []
    weights["base_model.model.layers.0.q_proj.lora_A.weight"].zero_()
    (message,) = zero(save(tmp_path / "lost.pt", weights, set(), (1e-3,)))
    assert "q_proj.lora_A.weight: all values are zero" in message
    assert message.endswith("but of none of 2 others like lora_A")


def test_an_embedding_that_has_not_been_stepped_yet(tmp_path: Path) -> None:
    """loralib 0.1.2, layers.py: the first half of an embedding begins as zeros."""
    weights = adapter(*NAMES["PEFT"]) | {"embed_tokens.lora_A": torch.zeros(4, 100)}
    weights |= {"embed_tokens.lora_B": torch.randn(32, 4)}
    torch.save(weights, tmp_path / "m.pt")
    assert zero(tmp_path / "m.pt") == []


def test_halves_that_rightly_are_zero(tmp_path: Path) -> None:
    weights = adapter(*NAMES["PEFT"])
    unused = f"base_model.model.layers.{LAYERS - 1}.q_proj.lora_B.weight"
    weights[unused] = torch.zeros(32, 4)
    assert zero(save(tmp_path / "unused.pt", weights, {unused}, (1e-3,))) == []
    assert zero(save(tmp_path / "held.pt", weights, set(), (1e-3, 0.0))) == []
    first = {n: t * 0 if "lora_B" in n else t for n, t in weights.items()}
    assert zero(save(tmp_path / "first.pt", first, set(), (1e-3,))) == []
    weights[unused.replace("_B", "_A")] = torch.zeros(4, 32)  # as where adapters are combined
    assert zero(save(tmp_path / "none.pt", weights, {unused}, (1e-3,))) == []


@pytest.mark.parametrize("rate", [[], {}, [0.1], "0.1", None])
def test_rates_that_are_no_numbers(rate: Any, tmp_path: Path) -> None:
    weights = adapter(*NAMES["PEFT"])
    assert zero(save(tmp_path / "odd.pt", weights, set(), (rate, 1e-3))) == []
