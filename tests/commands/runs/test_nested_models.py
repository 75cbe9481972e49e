"""What a trainer saves inside a checkpoint is part of the step, whatever it is read with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from prune_runs import fates, pruned
from safetensors.torch import load_file, save_file

import ckptool

DIFFUSERS = "diffusion_pytorch_model.safetensors"
PLACES = {
    "a folder": f"unet/{DIFFUSERS}",
    "an average": f"unet_ema/{DIFFUSERS}",
    "a model in a model": "unet/refiner/model.safetensors",
    "an adapter": "pytorch_lora_weights.safetensors",
    "a file": "lora/loras.safetensors",
    "a file of torch": "2_Dense/pytorch_model.bin",
}


class Sampler:
    """What a trainer's arguments name that nobody else knows."""


def load(file: Path) -> dict[str, torch.Tensor]:
    return load_file(file) if file.suffix == ".safetensors" else torch.load(file)


def save(state: dict[str, torch.Tensor], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".safetensors":
        save_file(state, file)
    else:
        torch.save(state, file)


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {f"blocks.{n}.{k}.weight": torch.randn(16, 8) for n in range(4) for k in ("up", "to_q")}


def state_of_adam(step: int) -> dict[str, object]:
    one = {"step": torch.tensor(float(step)), "exp_avg": torch.randn(16, 8)}
    one["exp_avg_sq"] = torch.rand(16, 8) + 0.1
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [*range(8)]}]
    return {"state": {n: dict(one) for n in range(8)}, "param_groups": groups}


def save_step(run: Path, number: int) -> Path:
    """What accelerate saves of a training whose hooks save the models themselves."""
    step = run / f"checkpoint-{number}"
    for name in PLACES.values():
        save(weights(number), step / name)
    for name in ("unet", "unet_ema"):
        (step / name / "config.json").write_text(f'{{"optimization_step": {number}}}')
    torch.save(state_of_adam(number), step / "optimizer.bin")
    schedule = {"last_epoch": number, "_last_lr": [1e-3], "base_lrs": [1e-3]}
    torch.save(schedule, step / "scheduler.bin")
    generator = {"step": 0, "torch_manual_seed": torch.get_rng_state()}
    torch.save(generator, step / "random_states_0.pkl")
    return step


def set_nan(file: Path) -> None:
    state = load(file)
    state["blocks.1.up.weight"][3, 3] = torch.nan
    save(state, file)


def lose_one(file: Path) -> None:
    state = load(file)
    del state["blocks.1.up.weight"]
    save(state, file)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-30])


def newest_good(run: Path) -> str:
    found = ckptool.verify_run(run).latest_good
    assert found is not None
    return found.path.name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, all of them good, with nothing beside it; nobody changes it."""
    run = tmp_path_factory.mktemp("saved") / "own"
    for number in (1, 2, 3):
        save_step(run, number)
    assert newest_good(run) == "checkpoint-3"
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(saved, tmp_path, dirs_exist_ok=True)


DAMAGES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "NaN": (set_nan, ("not-finite: blocks.1.up.weight",)),
    "a tensor": (lose_one, ("blocks.1.up.weight: missing, checkpoint-1 has it",)),
    "bytes": (cut, ("truncated",)),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize(("damage", "reasons"), DAMAGES.values(), ids=DAMAGES)
def test_a_step_is_not_good_if_a_model_inside_is_not(
    damage: Callable[[Path], object], reasons: tuple[str, ...], place: str, run: Path
) -> None:
    damage(run / "checkpoint-3" / place)
    report = ckptool.verify_run(run)
    assert report.latest_good is not None
    assert report.latest_good.path.name == "checkpoint-2"
    (why,) = report.steps[0].reasons
    assert any(reason in why for reason in reasons)
    assert place.partition("/")[0] in why
    assert fates(pruned(run))["checkpoint-2"] == "keep"


@pytest.mark.parametrize(
    "name",
    [
        f"unet.tmp/{DIFFUSERS}",
        f".cache/{DIFFUSERS}",
        f"best/{DIFFUSERS}",
        "unet/last/model.safetensors",
        "eval/predictions.pt",
        "optimizer_state/model.safetensors",
    ],
)
def test_what_is_saved_no_model_of_the_step_says_nothing_of_it(name: str, run: Path) -> None:
    for step in run.iterdir():
        save(weights(0), step / name)
    set_nan(run / "checkpoint-3" / name)
    assert newest_good(run) == "checkpoint-3"


@pytest.mark.parametrize(
    "file",
    [
        "eval/predictions.safetensors",
        "eval/model_outputs.pt",
        "dataset/train.safetensors",
        "replay_buffer.safetensors",
    ],
)
def test_what_has_no_layers_is_no_model(file: str, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        step = save_step(tmp_path, number)
        values = {f"sample_{n}": torch.full((16, 8), torch.inf) for n in range(9 - (number == 3))}
        save(values, step / file)
    assert newest_good(tmp_path) == "checkpoint-3"


def test_a_folder_of_many_files_has_samples(tmp_path: Path) -> None:
    step = save_step(tmp_path, 1)
    for number in range(65):
        save({"weight": torch.full((4, 4), torch.nan)}, step / f"samples/{number}a.safetensors")
    assert newest_good(tmp_path) == "checkpoint-1"


def test_what_a_link_leads_to_is_not_saved_with_a_step(tmp_path: Path) -> None:
    save(weights(0), tmp_path / "base" / "model.safetensors")
    set_nan(tmp_path / "base" / "model.safetensors")
    step = save_step(tmp_path / "run", 1)
    (step / "base_model").symlink_to(tmp_path / "base")
    (step / "all").symlink_to(tmp_path)
    assert newest_good(tmp_path / "run") == "checkpoint-1"


def test_an_export_of_openvino_inside_says_nothing(tmp_path: Path) -> None:
    (folder := save_step(tmp_path, 1) / "openvino").mkdir()
    (folder / "openvino_model.bin").write_bytes(b"\x68\x9a\xf1" * 100)
    (folder / "openvino_model.xml").write_text("<net/>")
    assert newest_good(tmp_path) == "checkpoint-1"


def test_state_of_ranks_inside_may_differ(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        step = save_step(tmp_path, number)
        for folder in ("rng", "train", "loaders"):
            (step / folder).mkdir()
            for rank in range(2):
                torch.manual_seed(10 * number + rank)
                state = {"cpu": torch.get_rng_state(), "at": torch.tensor([rank])}
                torch.save(state, step / folder / f"rank{rank}.pt")
    assert newest_good(tmp_path) == "checkpoint-3"


def test_a_model_inside_that_is_another_has_lost_nothing(run: Path) -> None:
    smaller = {name: value for name, value in weights(3).items() if not name.startswith("blocks.3")}
    smaller["blocks.0.up.weight"] = torch.randn(32, 8)
    save(smaller, run / "checkpoint-3" / PLACES["a folder"])
    assert newest_good(run) == "checkpoint-3"


def test_what_is_inside_is_read_in_its_own_format(run: Path) -> None:
    set_nan(run / "checkpoint-3" / PLACES["an average"])
    report = ckptool.verify_run(run, from_format="rank-local")
    assert report.latest_good is not None
    assert report.latest_good.path.name == "checkpoint-2"


def test_steps_are_good_beside_the_final_model(run: Path) -> None:
    save(weights(3), run / "unet" / DIFFUSERS)
    report = ckptool.verify_run(run, every=True)
    assert report.ok
    assert report.latest_good is not None
    assert report.latest_good.path.name == "checkpoint-3"


def test_arguments_of_the_trainer_are_no_checkpoint(tmp_path: Path) -> None:
    """Beside two models in folders, as sentence-transformers' Router has, they lie alone."""
    for number in (1, 2, 3):
        step = tmp_path / f"checkpoint-{number}"
        for name in ("query_0_Transformer", "document_0_Transformer"):
            save(weights(number), step / name / "model.safetensors")
        torch.save(state_of_adam(number), step / "optimizer.pt")
        torch.save(Sampler(), step / "training_args.bin")
        (step / "trainer_state.json").write_text("{}")
    report = ckptool.verify_run(tmp_path, every=True)
    assert report.ok, [step.reasons for step in report.steps]


def test_a_loss_in_one_of_two_models_is_not_hidden_by_the_other(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        for name in ("actor", "critic"):
            save(weights(number), tmp_path / f"step_{number}" / name / "model.safetensors")
    lose_one(tmp_path / "step_3" / "critic" / "model.safetensors")
    assert newest_good(tmp_path) == "step_2"


def test_verify_of_one_step_says_that_it_reads_no_model_inside(tmp_path: Path) -> None:
    step = save_step(tmp_path, 1)
    set_nan(step / PLACES["a folder"])
    report = ckptool.verify(step)
    assert report.summary.endswith("; checkpoints inside it are not read")


@pytest.mark.parametrize("inside", ["", "ema/"])
def test_shards_may_be_cut_elsewhere(inside: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {f"blocks.{n}.{k}.weight": torch.randn(16, 8) for n in range(20) for k in ("up", "q")}
    for number, shards in ((1, 4), (2, 4), (3, 5)):
        step, size = save_step(tmp_path, number), len(state) // shards
        for at in range(shards):
            shard = dict([*state.items()][at * size : (at + 1) * size])
            save(shard, step / f"{inside}shard_{at}/model.safetensors")
    assert newest_good(tmp_path) == "checkpoint-3"


def test_a_model_beside_the_config_that_ranks_files_are_read_with(tmp_path: Path) -> None:
    """verl 0.9, with hf_model among what it saves."""
    for number in (1, 2, 3):
        actor = tmp_path / f"global_step_{number}" / "actor"
        save(weights(number), actor / "huggingface" / "model.safetensors")
        (actor / "huggingface" / "config.json").write_text('{"model_type": "llama"}')
        for rank in range(2):
            save(weights(number), actor / f"model_world_size_2_rank_{rank}.pt")
            torch.save(state_of_adam(number), actor / f"optim_world_size_2_rank_{rank}.pt")
    assert newest_good(tmp_path) == "global_step_3"
    set_nan(actor / "huggingface" / "model.safetensors")
    assert newest_good(tmp_path) == "global_step_2"


def test_what_a_few_steps_have_more_is_missed_in_none(tmp_path: Path) -> None:
    """An average every third step, a fine-tune that somebody keeps in the first."""
    for number in range(1, 8):
        step = tmp_path / f"checkpoint-{number}"
        save(weights(number), step / "model.safetensors")
        torch.save(state_of_adam(number), step / "optimizer.pt")
    for number in (1, 4):
        save(weights(number), tmp_path / f"checkpoint-{number}" / "ema" / "model.safetensors")
    tuned = tmp_path / "checkpoint-1" / "tuned"
    save(weights(99), tuned / "model.safetensors")
    torch.save(state_of_adam(99), tuned / "optimizer.pt")
    assert ckptool.verify_run(tmp_path, every=True)
    for number in (4, 5, 6, 7):
        (tmp_path / f"checkpoint-{number}" / "optimizer.pt").unlink()
    report = ckptool.verify_run(tmp_path, every=True)
    assert [step.ok for step in report.steps] == [False] * 4 + [True] * 3
