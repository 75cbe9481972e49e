"""Optimizers and records of another save than the model, and what a layer of it lacks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from verify.test_counts import of_trainer, said, with_values
from verify.verify_runs import checked

from ckptool.commands.model.architectures import HEAD, shapes_of
from ckptool.commands.open import survey
from ckptool.commands.verify.checks.meaning.counts import count_problems, optimizer_step_problems
from ckptool.commands.verify.checks.meaning.extra_state import stateless_problems

FILE = "model.safetensors"
KINDS = [("q", "weight"), ("q", "bias"), ("o", "weight")]


@pytest.mark.parametrize("kind", [torch.tensor, int])
@pytest.mark.parametrize(
    ("taken", "schedule", "rate", "expected"),
    [
        (9, 9, 0.5, ""),
        (10, 9, 0.5, ""),  # the first of which made the state
        (6, 6, 0.5, ""),  # both were begun again
        (15, 15, 0.5, ""),  # the trainer's record was
        (15, 9, 0.5, "counts-apart: optimizer.pt: the optimizer has taken 15 steps, but trainer"),
        (6, 9, 0.5, "counts-apart: optimizer.pt: the optimizer has taken 6 of 9 steps: it was"),
        (15, 9, 0.4, "counts-differ: optimizer.pt: the optimizer has taken 15 steps, but trainer"),
        (6, 9, 0.4, "counts-differ: optimizer.pt: the optimizer has taken 6 steps, but trainer"),
        (9, 6, 0.4, "counts-differ: optimizer.pt: scheduler.last_epoch is 6, but trainer"),
        (9, 9, None, ""),  # Adafactor finds its own
    ],
)
def test_an_optimizer_of_another_save_of_the_trainer(
    kind: Any, taken: int, schedule: int, rate: float, expected: str, tmp_path: Path
) -> None:
    """A second call of ``train()`` goes on with the optimizer, and begins a schedule for it."""
    scheduler = {"last_epoch": schedule, "_last_lr": [0.5]}
    path = of_trainer(tmp_path / "checkpoint-9", 9, scheduler=scheduler, epoch=2.5, ranks=[])
    state = {
        n: {"step": kind(count), "exp_avg": torch.ones(2)} for n, count in enumerate([3, taken])
    }
    torch.save({"state": state, "param_groups": [{"step": 90, "lr": rate}]}, path / "optimizer.pt")
    found = [f"{each.code}: {each.message}" for each in checked(path).findings]
    found = [text for text in found if text.startswith(("counts-differ", "counts-apart"))]
    assert len(found) == bool(expected)
    assert all(text.startswith(expected) for text in found)


LESS = "the optimizer has taken 2 of 5 steps: it was begun again, or is of an earlier save"
RATE = 0.0
"""The learning rate in the fixture."""
MORE = "the optimizer has taken 9 steps, but global_steps is 5: "


@pytest.mark.parametrize(
    ("taken", "counted", "expected"),
    [
        (5, {}, ""),
        (6, {}, ""),  # the first of which made the state
        (2, {"skipped_steps": 3}, ""),
        (2, {}, f"counts-apart: {LESS}"),
        (9, {}, f"counts-apart: {MORE}it had taken some before"),  # all may be set by hand
        (9, {"last_batch_iteration": 4}, f"counts-apart: {MORE}it had taken some before"),
        (9, {"_last_lr": [RATE]}, f"counts-apart: {MORE}it had taken some before"),
        (9, {"_last_lr": [0.5]}, f"counts-differ: {MORE}they are of two saves"),
        (9, {"global_steps": 0}, "counts-apart: the optimizer has taken 9 steps, but global_steps"),
    ],
)
def test_an_optimizer_of_another_save_of_deepspeed(
    taken: int, counted: dict[str, Any], expected: str, copy_of: Callable[[str], Path]
) -> None:
    root = copy_of("deepspeed_zero_3")
    counts: dict[str, Any] = {"global_steps": 5, "skipped_steps": 0, "global_samples": 10} | counted
    counts["lr_scheduler"] = {k: counts.pop(k) for k in counted if "last_" in k}
    for path in root.rglob("*model_states.pt"):
        torch.save(torch.load(path, weights_only=False) | counts, path)
    surveyed = survey(root)
    problems = optimizer_step_problems(surveyed, surveyed.catalog, {"": taken})
    found = [f"{each.code}: {each}" for each in problems]
    assert len(found) == bool(expected)
    assert all(text.startswith(expected) for text in found)
    assert surveyed.catalog is not None
    alone = replace(surveyed.catalog, files={"one.pt": 1})  # a file is of one save
    problems = optimizer_step_problems(replace(surveyed, catalog=alone), alone, {"": taken})
    assert [each.code for each in problems] == ["counts-apart"] * bool(expected)


def counted_by_lightning(
    path: Path, *, head: str = "", manual: int = 0, schedules: int = 1, **other: Any
) -> list[str]:
    """What is said of a file after 12 steps of the optimizer and of the scheduler."""
    loop = f"{head}loops.fit_loop.epoch_loop"
    steps = "optim_progress.optimizer.step.total.completed"
    values: dict[str, Any] = {
        f"{head}global_step": 12,
        f"{head}epoch": 1,
        f"{loop}.automatic_optimization.{steps}": 0 if manual else 12,
        f"{loop}.manual_optimization.optim_step_progress.total.completed": manual,
        f"{loop}.scheduler_progress.total.completed": 12 * schedules,
        f"{'optimizer_0' if head else 'optimizer_states.0'}.param_groups.0.lr": 0.5,
    }
    for n in range(schedules):
        one = {"last_epoch": 12, "_step_count": 13, "_last_lr": [0.5]}
        values |= {f"{head}lr_schedulers.{n}.{key}": value for key, value in one.items()}
    torch.save({"pytorch-lightning_version": "2.6.6", "state_dict": {}, "w": torch.ones(2)}, path)
    known = {key: other.pop(key.rpartition(".")[2], value) for key, value in values.items()}
    return [f"{each.code}: {each}" for each in count_problems(*with_values(path, known))]


@pytest.mark.parametrize("head", ["", "meta."])
@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({}, ""),
        ({"manual": 12}, ""),
        ({"global_step": 999}, "global_step is 999, but "),
        ({"last_epoch": 0}, "lr_schedulers.0.last_epoch is 0, as before the first step, but "),
        ({"last_epoch": 0, "_step_count": 1, "_last_lr": [1.0]}, "lr_schedulers.0.last_epoch is"),
        ({"last_epoch": 0, "_step_count": 1}, ""),  # a user steps it later
        ({"last_epoch": 0, "epoch": 0}, ""),  # to the number of the epoch
        ({"last_epoch": 3}, ""),
        ({"last_epoch": 3, "_step_count": 4, "_last_lr": [1.0]}, "lr_schedulers.0 has stepped 3 "),
        ({"last_epoch": 3, "_step_count": 4}, ""),  # one that was begun again gives the rate
        ({"last_epoch": 3, "_last_lr": [1.0]}, ""),  # to warm up, a user sets another
        ({"last_epoch": 0, "schedules": 2}, ""),  # one that steps after epochs
    ],
)
def test_what_lightning_counts(
    head: str, other: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    found = counted_by_lightning(tmp_path / "epoch=1-step=12.ckpt", head=head, **other)
    assert len(found) == bool(expected), found
    assert all(text.startswith(f"counts-differ: {head}{expected}") for text in found)


def test_one_of_several_schedulers_that_began_again(tmp_path: Path) -> None:
    path = tmp_path / "epoch=1-step=12.ckpt"
    assert counted_by_lightning(path, schedules=3) == []
    assert counted_by_lightning(path, schedules=3, _step_count=None) == []  # of a chain
    (found,) = counted_by_lightning(path, schedules=3, _step_count=9)
    each = ", ".join(f"{(8, 12, 12)[n]} of lr_schedulers.{n}" for n in range(3))
    assert found.startswith(f"counts-apart: {each} are fewer than the 36 steps of all schedulers: ")


@pytest.mark.parametrize(
    ("taken", "more", "expected"),
    [
        ((8, 16), {}, 0),  # as of a GAN
        ((16, 16), {}, 0),  # some of its own
        ((8, 14), {}, 0),  # one of no gradients
        ((8, 10), {}, 1),
        ((8, 10), {"MixedPrecision.scale": 1.0}, 0),  # loss scaling may have skipped some
        ((8,), {}, 0),  # the other keeps no count
    ],
)
def test_one_of_two_optimizers_of_an_earlier_save(
    taken: tuple[int, ...], more: dict[str, float], expected: int, tmp_path: Path
) -> None:
    loop = "loops.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total.completed"
    values: dict[str, Any] = {"global_step": 24, loop: 24} | more
    values |= {f"optimizer_states.{n}.param_groups.0.lr": 0.5 for n in range(2)}
    path = tmp_path / "c.ckpt"
    torch.save({"pytorch-lightning_version": "2.6.6", "state_dict": {}, "w": torch.ones(2)}, path)
    surveyed, catalog = with_values(path, values)
    steps = {f"optimizer_states.{n}": float(count) for n, count in enumerate(taken)}
    problems = optimizer_step_problems(replace(surveyed, catalog=catalog), catalog, steps)
    found = [f"{each.code}: {each}" for each in problems]
    said = "counts-apart: 8 of optimizer_states.0, 10 of optimizer_states.1 are fewer than the 24"
    assert [text.startswith(said) for text in found] == [True] * expected


QWEN = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "tie_word_embeddings": True,
}
NORM = "model.layers.1.input_layernorm.weight"


def of_a_model(path: Path, config: dict[str, Any], *lost: str) -> list[str]:
    """What is said of a model without some of its tensors, and without a head, which is tied."""
    path.mkdir()
    shapes = {name: shape for name, shape in (shapes_of(QWEN) or {}).items() if name != HEAD}
    kept = {name: torch.ones(shape) for name, shape in shapes.items() if name not in lost}
    save_file(kept | {name: torch.ones(1) for name in config.pop("more", ())}, path / FILE)
    (path / "config.json").write_text(json.dumps(QWEN | config))
    return said(path)


@pytest.mark.parametrize(
    ("config", "lost"),
    [
        ({}, []),
        ({"tie_word_embeddings": False, "architectures": ["Qwen2Model"]}, []),
        ({}, [f"model.layers.{layer}.input_layernorm.weight" for layer in range(3)]),
        ({}, [f"model.layers.{layer}.input_layernorm.weight" for layer in range(2)]),
        ({"more": ["model.layers.1.input_scale"]}, [NORM]),  # another's code
        ({"auto_map": {"AutoModel": "x.X"}}, [NORM]),
        ({"model_type": "mamba"}, [NORM]),
    ],
)
def test_a_model_that_may_have_no_more(
    config: dict[str, Any], lost: list[str], tmp_path: Path
) -> None:
    assert of_a_model(tmp_path / "m", dict(config), *lost) == []


def test_a_layer_that_lacks_what_others_have(tmp_path: Path) -> None:
    expected = f"config-mismatch: config.json says Qwen2ForCausalLM, but {NORM} not found, which"
    assert of_a_model(tmp_path / "m", {}, NORM) == [f"{expected} other layers have"]
    lost = [f"model.layers.2.self_attn.{part}_proj.{kind}" for part, kind in KINDS]
    (found,) = of_a_model(tmp_path / "n", {}, *lost)
    assert all(name in found for name in lost)


UP = "model.layers.{}.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("layers", "shape", "count"), [([1], (16, 4), 1), ([1], (0,), 0), (range(3), (16, 4), 0)]
)
def test_a_layer_that_has_what_others_have_in_another_shape(
    layers: Iterable[int], shape: tuple[int, ...], count: int, tmp_path: Path
) -> None:
    of_a_model(tmp_path / "m", {})
    odd = {UP.format(layer): torch.ones(shape) for layer in layers}
    save_file(load_file(tmp_path / "m" / FILE) | odd, tmp_path / "m" / FILE)
    message = f"{UP.format(1)} is [16, 4], not [16, 8] as in other layers"
    expected = f"config-mismatch: config.json says Qwen2ForCausalLM, but {message}"
    assert [text for text in said(tmp_path / "m") if "as in other" in text] == [expected] * count


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_a_model_that_lacks_what_is_outside_of_its_layers(name: str, tmp_path: Path) -> None:
    expected = f"config-mismatch: config.json says Qwen2ForCausalLM, but {name} not found, and all"
    assert of_a_model(tmp_path / "m", {}, name) == [f"{expected} layers are there"]
    assert of_a_model(tmp_path / "n", {"more": ["score.weight"]}, name) == []
    first = [each for each in shapes_of(QWEN) or {} if each.startswith("model.layers.0.")]
    found = of_a_model(tmp_path / "o", {}, name, *first)  # a stage of a pipeline
    assert not [text for text in found if "all layers are there" in text]
    shapes = shapes_of(QWEN) or {}
    tensors = {each: torch.ones(shape) for each, shape in shapes.items() if each != name}
    save_file(tensors, tmp_path / "m" / FILE)  # the head is there, and tied to the embedding
    assert len(said(tmp_path / "m")) == (name == "model.norm.weight")


def test_a_layer_that_shares_what_another_has(tmp_path: Path) -> None:
    """As it is where ``save_model`` of safetensors leaves one of both out."""
    layer = {name: name.replace(".1.", ".0.") for name in shapes_of(QWEN) or {} if ".1." in name}
    for number, left_out in enumerate([[NORM], layer]):
        path = tmp_path / str(number)
        assert of_a_model(path, {}, *left_out)
        shared = {name: layer[name] for name in left_out}
        save_file(load_file(path / FILE), path / FILE, metadata=shared)
        assert said(path) == []


@pytest.mark.parametrize(("steps", "count"), [(7, 1), (1, 0)])
def test_an_optimizer_of_deepspeed_that_has_masters_alone(
    steps: int, count: int, copy_of: Callable[[str], Path]
) -> None:
    root = copy_of("deepspeed_zero_3")
    surveyed, catalog = with_values(root, {"global_steps": steps})
    kept = {name: each for name, each in catalog.tensors.items() if name.startswith("fp32.")}
    assert not list(stateless_problems(surveyed, catalog))
    problems = list(stateless_problems(surveyed, replace(catalog, tensors=kept)))
    assert [problem.code for problem in problems] == ["moments-zero"] * count
