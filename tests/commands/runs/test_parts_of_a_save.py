"""Steps whose parts are files beside each other, as trainers without a library for it save them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest.mock import patch
from zipfile import ZipFile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import case
from safetensors.torch import save_file
from trainer_runs import OPTIMIZER, WEIGHT, age, checked, of_dcp

import ckptool
from ckptool.commands.open import survey_readable
from ckptool.commands.runs import assessment
from ckptool.commands.runs.assessment import Assessor
from ckptool.errors import Several, Unrecognized


def nanochat(run: Path, *steps: int, ranks: int) -> Path:
    """nanochat 0.1, checkpoint_manager.py: each rank has the moments of the rows it updates."""
    for step in steps:
        torch.save({"_orig_mod.w": WEIGHT}, run / f"model_{step:06d}.pt")
        for rank in range(ranks):
            moments = {"exp_avg": torch.rand(2) + rank, "exp_avg_sq": torch.rand(2) + rank}
            state = {"state": {0: {"step": step, **moments}}, "param_groups": [{"params": [0]}]}
            torch.save(state, run / f"optim_{step:06d}_rank{rank}.pt")
        (run / f"meta_{step:06d}.json").write_text(f'{{"step": {step}}}')
    return run


def test_slices_of_an_optimizer_beside_a_whole_model_are_one_step(tmp_path: Path) -> None:
    run = nanochat(tmp_path, 20, 25, ranks=2)
    assert [(step.number, step.reasons, len(step.beside)) for step in checked(run).steps] == [
        (25, (), 2), (20, (), 2)
    ]  # fmt: skip
    assert ckptool.verify(run / "optim_000025_rank1.pt").ok
    with pytest.raises(Several) as several:
        ckptool.verify(run)
    assert str(several.value).count("(torch-save)") == 6
    (run / "optim_000025_rank0.pt").unlink()
    newest, before = checked(run).steps
    assert "optim rank0 is missing" in newest.reasons[0]
    assert before.ok


@pytest.mark.parametrize(
    "name", ["{}_000020", "{}_step20", "{}_state_20", "step20_{}", "epoch_3-{}"]
)
def test_slices_lie_beside_the_model_of_their_name(name: str, tmp_path: Path) -> None:
    torch.save({"w": WEIGHT}, tmp_path / f"{name.format('model')}.pt")
    slices = [tmp_path / f"{name.format('optim')}_rank{rank}.pt" for rank in range(2)]
    for rank, path in enumerate(slices):
        torch.save({"state": {0: {"exp_avg": torch.rand(2) + rank}}}, path)
    with pytest.raises(Several):
        ckptool.verify(tmp_path)
    (step,) = checked(tmp_path).steps
    assert (step.ok, step.beside) == (True, tuple(slices))
    slices[1].write_bytes(slices[1].read_bytes()[:200])
    (step,) = checked(tmp_path).steps
    assert "zip-structure" in step.reasons[0]
    slices[1].unlink()
    slices[0].rename(slices[1])
    (step,) = checked(tmp_path).steps
    assert "the file of rank 0 of 2 is missing" in step.reasons[0]


def test_the_runs_of_several_trainings_whose_ranks_save_beside_each_other(tmp_path: Path) -> None:
    for training in ("base_checkpoints", "mid_checkpoints"):
        (folder := tmp_path / training / "d20").mkdir(parents=True)
        nanochat(folder, 20, 25, ranks=2)
    report = checked(tmp_path)
    assert report.ok
    assert [(step.path.name, len(step.beside)) for step in report.steps] == [
        *[("model_000025.pt", 2)] * 2, *[("model_000020.pt", 2)] * 2
    ]  # fmt: skip


def test_slices_without_checksums_are_no_replicas(tmp_path: Path) -> None:
    torch.save({"w": WEIGHT}, tmp_path / "model.pt")
    for rank in range(2):
        state = {"state": {0: {"exp_avg": torch.rand(2) + rank}}}
        torch.save(state, tmp_path / f"optim_rank{rank}.pt", _use_new_zipfile_serialization=False)
    assert [step.ok for step in checked(tmp_path).steps] == [True]


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("number", ["_000020", ""])
def test_a_rank_without_its_slice_is_missing(rank: int, number: str, tmp_path: Path) -> None:
    nanochat(tmp_path, 20, ranks=4)
    for path in [*tmp_path.iterdir()]:
        path.rename(tmp_path / path.name.replace("_000020", number))
    assert [step.ok for step in checked(tmp_path).steps] == [True]
    (tmp_path / f"optim{number}_rank{rank}.pt").unlink()
    (step,) = checked(tmp_path).steps
    assert f"the file of rank {rank} of 4 is missing" in step.reasons[0]


def test_one_rank_of_each_node_may_have_saved_what_all_have(tmp_path: Path) -> None:
    """nvidia-resiliency-ext 0.6, with replicas; in others local rank 0 of each node saves."""
    files = [f"nv/0/iter_{step:07}_{{}}_local.pt" for step in (100, 200)]
    files += [f"own/{kind}_step{n}_rank{{}}.pt" for kind in ("model", "optim") for n in (5, 10)]
    for file in files:
        for rank in (0, 8):
            (path := tmp_path / file.format(rank)).parent.mkdir(parents=True, exist_ok=True)
            torch.save({"w": WEIGHT, "optimizer": OPTIMIZER}, path)
    assert [step.reasons for step in checked(tmp_path / "nv").steps] == [(), ()]
    assert [step.reasons for step in checked(tmp_path / "own").steps] == [(), ()]
    torch.save({"w": WEIGHT}, tmp_path / "own" / "model_step10_rank40.pt")
    step, _ = checked(tmp_path / "own").steps
    assert "rank 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13 and 26 more of 41" in step.reasons[0]


def test_ranks_are_counted_for_each_optimizer(tmp_path: Path) -> None:
    (folder := tmp_path / "step_5").mkdir()
    torch.save({"w": WEIGHT}, folder / "model.pt")
    for name in ("muon_optim_rank{}", "adamw_optim_rank{}", "expert_{0}_optim_rank{0}"):
        for rank in range(4):
            torch.save({"e": torch.rand(2)}, folder / f"{name.format(rank)}.pt")
    assert [step.reasons for step in checked(tmp_path).steps] == [()]
    (folder / "muon_optim_rank2.pt").unlink()
    assert (
        "muon_optim_rank0.pt and its like: the file of rank 2"
        in checked(tmp_path).steps[0].reasons[0]
    )


def test_the_rank_of_an_adapter_is_no_process(tmp_path: Path) -> None:
    for rank in (4, 8):
        torch.save({"w": WEIGHT}, tmp_path / f"lora_rank{rank}_step5.pt")
        torch.save(OPTIMIZER, tmp_path / f"lora_rank{rank}_step5_optim.pt")
    assert all(step.ok for step in checked(tmp_path).steps)


@pytest.mark.parametrize(
    ("other", "ranks"), [("model", (0, 0)), ("model_args", (0, 1)), ("model", (0, 0, 1, 0))]
)
def test_replicas_of_an_optimizer_beside_a_model_are_no_slices(
    other: str, ranks: tuple[int, ...], tmp_path: Path
) -> None:
    torch.save({"w": WEIGHT}, tmp_path / f"{other}.pt")
    for at, rank in enumerate(ranks):
        torch.save({"exp_avg": torch.ones(2) + rank}, tmp_path / f"optim_rank{at}.pt")
    report = ckptool.verify(tmp_path)
    codes = {finding.code for finding in report.findings}
    assert codes == {"file-unused"} | ({"replicas-differ"} if any(ranks) else set())


@pytest.mark.parametrize("rows", [2, 4])
def test_replicas_that_diverged_have_state_of_whole_parameters(rows: int, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4, 3), "b": torch.ones(4)}, tmp_path / "model.pt")
    for rank in range(2):
        state = {0: {"exp_avg": torch.ones(rows, 3) + rank}, 1: {"exp_avg": torch.ones(4)}}
        torch.save({"state": state}, tmp_path / f"optim_rank{rank}.pt")
    if rows < 4:
        with pytest.raises(Several):
            ckptool.verify(tmp_path)
        return
    assert "replicas-differ" in {each.code for each in ckptool.verify(tmp_path).findings}


@pytest.mark.parametrize(
    "names", ["model_000020 model_000025", "ckpt_095000 ckpt_100000", "ckpt_29999 ckpt_6999"]
)
def test_files_of_ranks_of_two_saves_are_two(names: str, tmp_path: Path) -> None:
    first, second = names.split()
    for name in (first, second):
        for rank in range(2):
            torch.save({"w": WEIGHT}, tmp_path / f"{name}_rank{rank}.pt")
    of = rf"several saves: .*{first[-5:]} \(2 files.*{second[-4:]}"
    with pytest.raises(Several, match=of):
        ckptool.verify(tmp_path)


def test_a_model_and_its_optimizer_of_one_bare_number_are_one_step(tmp_path: Path) -> None:
    for step in (10, 20):
        torch.save({"w": WEIGHT}, tmp_path / f"model_{step}.pt")
        torch.save(OPTIMIZER, tmp_path / f"optim_{step}.pt")
    assert [(step.number, step.ok) for step in checked(tmp_path).steps] == [(20, True), (10, True)]
    (tmp_path / "model_20.pt").unlink()
    assert not checked(tmp_path).steps[0].ok


def speechbrain(folder: Path, loss: float) -> None:
    """SpeechBrain 1.1, utils/checkpoints.py: a file for each object, some are texts of numbers."""
    folder.mkdir()
    for name, state in (("enc", {"w": WEIGHT}), ("lr", {"steps": 3}), ("optimizer", OPTIMIZER)):
        torch.save(state, folder / f"{name}.ckpt")
    (folder / "counter.ckpt").write_text("2")
    (folder / "brain.ckpt").write_text(f"avg_train_loss: {loss}\noptimizer_step: 8\nstep: 4\n")


@pytest.mark.parametrize("lost", ["CKPT.yaml", "counter.ckpt", "model.ckpt", "normalizer.ckpt"])
def test_a_save_that_its_date_names_has_what_earlier_ones_have(lost: str, tmp_path: Path) -> None:
    for at in range(3):  # as SpeechBrain saves
        (folder := tmp_path / f"CKPT+2026-11-30+02-10-11+0{at}").mkdir()
        (folder / "CKPT.yaml").write_text(f"epoch: {at}")
        (folder / "counter.ckpt").write_text(str(at))
        torch.save({"w": WEIGHT + at}, folder / "model.ckpt")
        torch.save({"glob_mean": torch.ones(3)}, folder / "normalizer.ckpt")
        torch.save(OPTIMIZER, folder / "optimizer.ckpt")
    assert checked(tmp_path).ok
    (folder / lost).unlink()
    newest, *others = checked(tmp_path).steps
    assert newest.path == folder
    assert "is missing; every earlier whole step has it" in newest.reasons[0]
    assert all(step.ok for step in others)


def test_a_save_lacks_what_it_is_resumed_by(tmp_path: Path) -> None:
    for step in (1, 2, 3):  # as by DeepSpeed inside another trainer, which reads no other name
        shutil.copytree(case("deepspeed_zero_2").path, tmp_path / f"step-{step}")
    assert checked(tmp_path).ok
    (tmp_path / "step-3" / "latest").unlink()
    newest, *others = checked(tmp_path).steps
    assert newest.reasons == ("latest is missing; every earlier whole step has it",)
    assert all(step.ok for step in others)


def test_folders_of_numbers_with_all_state_in_a_record_are_steps(tmp_path: Path) -> None:
    """As SAELens 6.54 saves: the record has the optimizer, and how often each feature was seen."""
    for at in (1100, 2100, 3100):
        (folder := tmp_path / str(at)).mkdir()
        save_file({"W_dec": WEIGHT + at}, folder / "sae_weights.safetensors")
        save_file({"sparsity": WEIGHT}, folder / "sparsity.safetensors")
        state = {"optimizer": OPTIMIZER, "act_freq_scores": WEIGHT, "n_training_samples": at}
        torch.save(state, folder / "trainer_state.pt")
        age(folder, at)
    assert [(s.path.name, s.ok, s.number) for s in checked(tmp_path).steps] == [
        ("3100", True, 3100), ("2100", True, 2100), ("1100", True, 1100)
    ]  # fmt: skip
    (folder / "trainer_state.pt").unlink()
    newest, *others = checked(tmp_path).steps
    assert newest.reasons == ("trainer_state.pt is missing; every earlier whole step has it",)
    assert all(step.ok for step in others)


def test_an_adapter_lacks_the_config_by_which_it_is_loaded(tmp_path: Path) -> None:
    for step in (1, 2):
        (folder := tmp_path / f"checkpoint-{step}").mkdir()
        halves = {"A": torch.rand(2, 4), "B": torch.rand(4, 2)}
        weights = {f"base_model.model.q.lora_{half}.weight": halves[half] for half in halves}
        save_file(weights, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    assert checked(tmp_path).ok
    (folder / "adapter_config.json").unlink()
    newest, before = checked(tmp_path).steps
    assert newest.reasons == ("adapter_config is missing; every earlier whole step has it",)
    assert before.ok


def save_model_of_trainer(run: Path, step: int) -> Path:
    (folder := run / f"checkpoint-{step}").mkdir()
    save_file({"w": WEIGHT + step}, folder / "model.safetensors")
    torch.save({"lr": 0.1}, folder / "training_args.bin")
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    (folder / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    return folder


def test_a_model_lacks_the_config_by_which_it_is_loaded(tmp_path: Path) -> None:
    folders = [save_model_of_trainer(tmp_path, step) for step in (1, 2, 3)]
    assert checked(tmp_path).ok
    (folders[2] / "config.json").unlink()
    newest, *others = checked(tmp_path).steps
    assert newest.reasons == ("config is missing; every earlier whole step has it",)
    assert all(step.ok for step in others)


def test_arguments_that_are_cut_off_as_by_a_sync_that_ended(tmp_path: Path) -> None:
    folders = [save_model_of_trainer(tmp_path, step) for step in (1, 2)]
    (folders[1] / "notes.pt").write_bytes(b"no archive")
    assert checked(tmp_path).ok
    file = folders[1] / "training_args.bin"
    file.write_bytes(file.read_bytes()[:400])
    newest, before = checked(tmp_path).steps
    assert before.ok
    assert "training_args.bin: " in newest.reasons[0]


@pytest.mark.parametrize("left", ['{"global_step": ', ""])
def test_a_record_of_training_that_is_cut_off(left: str, tmp_path: Path) -> None:
    """Whichever trainer writes it: here SimpleTuner, beside what accelerate saves."""
    for step in (1, 2):
        (folder := tmp_path / f"checkpoint-{step}").mkdir()
        torch.save({"w": WEIGHT + step}, folder / "model.pt")
        torch.save(OPTIMIZER, folder / "optimizer.pt")
        (folder / "training_state.json").write_text(f'{{"global_step": {step}}}')
    assert checked(tmp_path).ok
    (folder / "training_state.json").write_text(left)
    newest, before = checked(tmp_path).steps
    assert before.ok
    assert "training_state.json: " in newest.reasons[0]


@pytest.mark.parametrize(
    ("left", "is_whole"),
    [
        ('{"groups": [{"lr": 0.1}', False),
        ('{"groups": [{"l', False),
        ('{"groups": [], // one by one\n}', True),
        ('{"step": 1}\n{"step": 2}\n', True),
        ('[\n{"step": 1},\n{"step": 2},\n', True),
        ("", True),
        ("\0" * 14, False),
    ],
)
def test_any_file_in_json_that_ends_too_early(left: str, is_whole: bool, tmp_path: Path) -> None:
    """LeRobot's groups of the optimizer; comments, lines of JSON and open lists are meant."""
    for step in (1, 2):
        (folder := tmp_path / f"checkpoint-{step}").mkdir()
        torch.save({"model": {"w": WEIGHT + step}, "optimizer": OPTIMIZER}, folder / "state.pt")
        (folder / "training_state").mkdir()
        (file := folder / "training_state" / "groups.json").write_text('{"groups": []}')
    assert checked(tmp_path).ok
    file.write_text(left)
    newest, before = checked(tmp_path).steps
    assert before.ok
    assert newest.ok == is_whole
    assert all("metadata-unreadable: training_state/groups.json: " in r for r in newest.reasons)


@pytest.mark.parametrize(
    "record",
    [
        "training_state/training_step.json",
        "optimizer_param_groups.json",
        "train_state_00001.json",
        "running_states.json",
    ],
)
def test_a_record_in_json_that_each_earlier_step_has(record: str, tmp_path: Path) -> None:
    """LeRobot, lingua and Open-Sora cannot go on without it."""
    for step in (1, 2, 3):
        (folder := tmp_path / f"step_{step}").mkdir()
        torch.save({"model": {"w": WEIGHT + step}, "optimizer": OPTIMIZER}, folder / "state.pt")
        for file in (record, record.replace("1", "0"), "eval/results.json"):
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text("{}")
    assert checked(tmp_path).ok
    (folder / "eval" / "results.json").unlink()
    assert checked(tmp_path).ok
    (folder / record).unlink()
    newest, *others = checked(tmp_path).steps
    assert all(step.ok for step in others)
    assert "is missing; every earlier whole step has it" in newest.reasons[0]


def test_shards_lack_the_index_by_which_they_are_loaded(tmp_path: Path) -> None:
    """Without it transformers finds no model; torch's own writer of shards writes none."""
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for step in (1, 2, 3, 4):
        (folder := tmp_path / f"checkpoint-{step}").mkdir()
        files = shards if step < 4 else ["model.safetensors"]
        for file in files:
            save_file({file[6:11]: WEIGHT + step}, folder / file)
        if step < 4:
            index = {"metadata": {}, "weight_map": {file[6:11]: file for file in shards}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checked(tmp_path).ok
    (tmp_path / "checkpoint-3/model.safetensors.index.json").unlink()
    reasons = {step.number: step.reasons for step in checked(tmp_path).steps}
    why = "model.safetensors.index.json is missing; every earlier whole step has it"
    assert reasons == {4: (), 3: (why,), 2: (), 1: ()}
    (tmp_path / "checkpoint-2/model.safetensors.index.json").unlink()
    (tmp_path / "checkpoint-1/model.safetensors.index.json").unlink()
    assert checked(tmp_path).ok


@pytest.mark.parametrize("kind", ["dcp", "file"])
def test_what_had_files_of_its_own_may_be_saved_otherwise(kind: str, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        (folder := tmp_path / f"step-{step}").mkdir()
        torch.save({"cpu": torch.ones(2)}, folder / "rng_state.pth")
        if step < 3:
            save_file({"w": WEIGHT}, folder / "model.safetensors")
            torch.save(OPTIMIZER, folder / "optimizer.pt")
    parts = {"model": {"w": WEIGHT}, "optimizer": OPTIMIZER}
    write = {"dcp": of_dcp(*parts), "file": lambda path: torch.save(parts, path / "all.pt")}[kind]
    write(folder)
    assert checked(tmp_path).ok
    write = {"dcp": of_dcp("model"), "file": lambda path: (path / "all.pt").write_bytes(b"")}[kind]
    write(folder)
    assert not checked(tmp_path).steps[0].ok


def test_the_parts_of_the_best_are_one_save(tmp_path: Path) -> None:
    for name in ("7", "9", "best"):  # as skrl saves, with store_separately
        torch.save({"w": WEIGHT}, tmp_path / f"policy_{name}.pt")
        torch.save({"w": WEIGHT}, tmp_path / f"value_{name}.pt")
        torch.save(OPTIMIZER, tmp_path / f"optimizer_{name}.pt")
    report = checked(tmp_path)
    assert {step.path.name: len(step.beside) for step in report.steps} == {
        "policy_9.pt": 2, "policy_7.pt": 2, "policy_best.pt": 2
    }  # fmt: skip
    assert report.ok
    (tmp_path / "value_best.pt").write_bytes(b"")
    assert not checked(tmp_path).ok


def test_files_beside_an_optimizer_in_a_folder_of_their_own_are_one_save(tmp_path: Path) -> None:
    names = [f"CKPT+2026-11-29+06-00-0{second}+00" for second in (3, 4)]
    for name in names:
        speechbrain(tmp_path / name, 0.5)
    steps = checked(tmp_path).steps
    assert {(step.path.name, step.number, step.reasons) for step in steps} == {
        (name, None, ()) for name in names
    }
    alone = ckptool.list_steps(tmp_path / names[0])
    assert [(step.path.name, step.complete) for step in alone.steps] == [(names[0], True)]
    (tmp_path / names[1] / "enc.ckpt").write_text("Access denied")
    assert [step.ok for step in checked(tmp_path).steps].count(False) == 1


def test_a_text_in_place_of_a_checkpoint_is_no_count(tmp_path: Path) -> None:
    torch.save({"w": WEIGHT}, tmp_path / "model_2.pt")
    (tmp_path / "model_3.pt").write_text("\n\n\n")
    (tmp_path / "model_4.pt").write_text("0")
    assert [(step.number, step.ok) for step in checked(tmp_path).steps] == [
        (4, False), (3, False), (2, True)
    ]  # fmt: skip
    for name, text in (("model.pt", "1"), ("x.pt", "\n"), ("x.pt", "word:\n"), ("last.pt", "0")):
        (folder := tmp_path / f"{name}-{len(text)}").mkdir()
        (folder / name).write_text(text)
        assert "file-type-mismatch" in [each.code for each in ckptool.verify(folder).findings]


def test_a_text_of_numbers_is_no_count_where_another_save_has_tensors(tmp_path: Path) -> None:
    for second in (3, 4):
        speechbrain(folder := tmp_path / f"CKPT+2026-11-29+06-00-0{second}+00", 0.5)
        torch.save({"w": WEIGHT}, folder / "wav2vec2.ckpt")
        (folder / "counter_2.ckpt").write_text("3")
        (folder / "flag.ckpt").write_text("True\n")
    assert [step.ok for step in checked(tmp_path).steps] == [True, True]
    (folder / "wav2vec2.ckpt").write_text("0")
    steps = {step.path: step.reasons for step in checked(tmp_path).steps}
    assert "wav2vec2.ckpt: a text file" in steps.pop(folder)[0]
    assert [*steps.values()] == [()]


def test_a_part_with_nothing_in_it_is_no_fault_beside_a_model(tmp_path: Path) -> None:
    """As stable-baselines3 2.7 saves pytorch_variables.pth of most algorithms."""
    (folder := tmp_path / "final").mkdir()
    torch.save(OPTIMIZER, folder / "policy.optimizer.pth")
    torch.save({}, folder / "pytorch_variables.pth")
    torch.save({}, folder / "policy.pth")
    assert "empty state dict" in checked(tmp_path).steps[0].reasons[0]
    torch.save({"w": WEIGHT}, folder / "policy.pth")
    assert checked(tmp_path).ok


@pytest.mark.parametrize("part", ["pytorch_variables.pth", "extra_state.pt", "dl_state_dict.pt"])
def test_a_part_that_is_empty_in_every_step_is_no_fault(part: str, tmp_path: Path) -> None:
    for step in (10, 20):
        (folder := tmp_path / f"step_{step}").mkdir()
        torch.save({"w": WEIGHT}, folder / "policy.pth")
        torch.save(OPTIMIZER, folder / "policy.optimizer.pth")
        torch.save({}, folder / part)
    assert [step.ok for step in checked(tmp_path).steps] == [True, True]
    torch.save({"x": WEIGHT}, (older := tmp_path / "step_10" / part))
    assert [step.ok for step in checked(tmp_path).steps] == [False, True]
    older.write_bytes(older.read_bytes()[:100])
    assert [step.ok for step in checked(tmp_path).steps] == [True, False]


def test_names_and_empty_parts_of_older_steps_are_looked_at_once(tmp_path: Path) -> None:
    for step in range(1, 7):
        (folder := tmp_path / f"step_{step}").mkdir()
        for name, state in (("policy.pth", {"w": WEIGHT}), ("policy.optimizer.pth", OPTIMIZER)):
            torch.save(state, folder / name)
        torch.save({}, folder / "pytorch_variables.pth")
    looks_at_names = Assessor._by_names
    with (
        patch.object(Assessor, "_by_names", autospec=True, side_effect=looks_at_names) as names,
        patch.object(assessment, "survey_readable", side_effect=survey_readable) as opened,
    ):
        assert checked(tmp_path).ok
    assert names.call_count == opened.call_count == 6


@pytest.mark.parametrize("part", ["critic", "netD", "optim", "ema", "swa", "speaker"])
def test_an_emptied_part_of_a_step_is_damage(part: str, tmp_path: Path) -> None:
    for step in (10, 20):
        (folder := tmp_path / f"step_{step}").mkdir()
        state = OPTIMIZER if part == "optim" else {"w": WEIGHT}
        torch.save({"w": WEIGHT}, folder / "actor.pt")
        torch.save(state, folder / f"{part}.pt")
        torch.save({"w": WEIGHT}, tmp_path / f"model_{step}.pt")
        torch.save(state, tmp_path / f"{part}_{step}.pt")
    torch.save({}, tmp_path / "step_20" / f"{part}.pt")
    torch.save({}, tmp_path / f"{part}_20.pt")
    good = {step.path.name: step.ok for step in checked(tmp_path).steps}
    assert good["step_10"]
    assert not good["step_20"]
    assert not all(ok for name, ok in good.items() if name.endswith("_20.pt"))


def test_an_emptied_model_or_optimizer_of_the_only_step_is_damage(tmp_path: Path) -> None:
    for part in ("optim", "critic", "ema"):
        (run := tmp_path / f"run-{part}").mkdir()
        torch.save({"w": WEIGHT}, run / "model_10.pt")
        torch.save({}, run / f"{part}_10.pt")
        assert not checked(run).ok


def test_one_save_in_the_folder_itself_is_called_as_its_model(tmp_path: Path) -> None:
    (run := tmp_path / "flat2").mkdir()
    for name, state in (("args.pt", {"x": 1}), ("model.pth", {"w": WEIGHT}), ("opt.pt", OPTIMIZER)):
        torch.save(state, run / name)
    newest = checked(run).latest_good
    assert newest is not None
    assert (newest.path, newest.number) == (run / "model.pth", None)
    converted = ckptool.convert(run / "model.pth", tmp_path / "alone.safetensors")
    assert converted.target == tmp_path / "alone.safetensors"
    report = ckptool.convert_run(run, tmp_path / "out", to="safetensors")
    assert run / "model.pth" in {step.path for step in report.of_state("written")}


@pytest.mark.parametrize("other", ["amp", "args", "trainer", "extra"])
def test_one_save_is_called_after_what_has_weights(other: str, tmp_path: Path) -> None:
    for name, state in (
        (other, {"scale": 1.0}),
        ("bert", {"w": WEIGHT}),
        ("optimizer", OPTIMIZER),
        ("rng", {"cpu": torch.get_rng_state()}),
    ):
        torch.save(state, tmp_path / f"{name}.pt")
    report = checked(tmp_path)
    (step,) = report.steps
    assert (step.path.name, report.chosen) == ("bert.pt", "as the only step")
    (tmp_path / "bert.pt").write_bytes(b"\0" * 200)
    assert [(step.path.name, step.ok) for step in checked(tmp_path).steps] == [("bert.pt", False)]
    (tmp_path / "bert.pt").unlink()
    assert checked(tmp_path).steps[0].path.name == "optimizer.pt"


def test_one_save_in_a_folder_that_counts_has_its_number(tmp_path: Path) -> None:
    speechbrain(tmp_path / "step-5", 0.5)
    assert [step.number for step in checked(tmp_path / "step-5").steps] == [5]
    assert [step.number for step in ckptool.list_steps(tmp_path / "step-5").steps] == [5]


@pytest.mark.parametrize("names", [("resnet50", "optimizer"), ("unet_512", "vae_512")])
def test_a_number_in_a_name_in_a_folder_that_counts_is_no_step(
    names: tuple[str, str], tmp_path: Path
) -> None:
    (folder := tmp_path / "epoch_10").mkdir()
    for name in names:
        torch.save(OPTIMIZER if name == "optimizer" else {"w": WEIGHT}, folder / f"{name}.pth")
    for place in (folder, tmp_path):
        assert [(step.path, step.number) for step in checked(place).steps] == [(folder, 10)]


def test_a_lost_optimizer_does_not_make_files_of_one_save_steps(tmp_path: Path) -> None:
    for name in ("best", "last"):
        (folder := tmp_path / name).mkdir()
        torch.save({"w": WEIGHT}, folder / "model.pt")
        torch.save(OPTIMIZER, folder / "optimizer.pt")
        torch.save({"last_epoch": 3}, folder / "scheduler.pt")
    (tmp_path / "last" / "optimizer.pt").unlink()
    assert {step.path.name for step in checked(tmp_path).steps} == {"best", "last"}


def test_an_empty_folder_leads_to_what_is_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "my runs" / "new").mkdir(parents=True)
    monkeypatch.chdir(folder)
    for find in (checked, ckptool.verify):
        with pytest.raises(Unrecognized, match="the folder is empty") as refused:
            find(Path())
        assert refused.value.hint == f"`ckptool inspect '{folder.parent}'` shows what is beside it"


def test_a_run_of_nothing_but_an_empty_step_names_it(tmp_path: Path) -> None:
    (tmp_path / "step-10").mkdir()
    for find in (checked, ckptool.verify):
        with pytest.raises(Unrecognized, match="no file in it, nor in step-10"):
            find(tmp_path)


def test_a_folder_of_zip_archives_that_are_no_checkpoints(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "rl_model_40_steps.zip", "w") as archive:
        archive.writestr("data", "{}")
        archive.writestr("policy.pth", b"x" * 600)
    with pytest.raises(Unrecognized, match="a zip archive of other files") as refused:
        checked(tmp_path)
    assert "unzip rl_model_40_steps.zip -d FOLDER" in str(refused.value.hint)


def test_the_training_states_of_basicsr_belong_to_its_models(tmp_path: Path) -> None:
    """BasicSR 1.4, models/base_model.py: two folders, whose files have a number in common."""
    for folder in ("models", "training_states"):
        (tmp_path / folder).mkdir()
    for step in (5000, 10000, 15000):
        torch.save({"params": {"w": WEIGHT}}, tmp_path / f"models/net_g_{step}.pth")
        torch.save(
            {"iter": step, "optimizers": [OPTIMIZER]}, tmp_path / f"training_states/{step}.state"
        )
    steps = checked(tmp_path).steps
    assert [(s.number, s.ok, len(s.beside)) for s in steps] == [
        (15000, True, 1), (10000, True, 1), (5000, True, 1)
    ]  # fmt: skip
    state = tmp_path / "training_states" / "15000.state"
    state.write_bytes(bytes(state.stat().st_size))
    assert [step.ok for step in checked(tmp_path).steps] == [False, True, True]
    state.unlink()
    assert [step.ok for step in checked(tmp_path).steps] == [False, True, True]


@pytest.mark.parametrize("name", ["resnet_100_epochs", "epoch_100"])
def test_a_run_named_by_its_length_is_no_step(name: str, tmp_path: Path) -> None:
    (run := tmp_path / name).mkdir()
    for epoch in (50, 100):
        torch.save({"w": WEIGHT}, run / f"model_{epoch}.pt")
    assert [step.number for step in checked(run).steps] == [100, 50]


@pytest.mark.parametrize(
    ("ranks", "is_whole"), [((0, 8), True), ((0, 2), False), ((0, 2, 4), False)]
)
def test_few_lost_ranks_between_others_are_no_nodes(
    ranks: tuple[int, ...], is_whole: bool, tmp_path: Path
) -> None:
    """A node has several processes, of which one saves: all others are missing."""
    for step in (10, 20):
        for rank in ranks:
            torch.save({"w": WEIGHT}, tmp_path / f"model_step{step}_rank{rank}.pt")
    assert [step.ok for step in checked(tmp_path).steps] == [is_whole] * 2


def test_what_lies_in_folders_of_parts_is_one_step(tmp_path: Path) -> None:
    """LeRobot 0.4, train_utils.py and processor/pipeline.py, whose steps are no training's."""
    for number in (100, 200):
        step = tmp_path / "checkpoints" / f"{number:06d}"
        model, state = step / "pretrained_model", step / "training_state"
        model.mkdir(parents=True)
        state.mkdir()
        save_file({"w": torch.rand(16, 8)}, model / "model.safetensors")
        (model / "config.json").write_text("{}")
        processor = "policy_preprocessor_step_5_normalizer_processor.safetensors"
        save_file({"action.mean": torch.rand(6)}, model / processor)
        moments = {"exp_avg": torch.zeros(16, 8), "exp_avg_sq": torch.rand(16, 8)}
        moments["step"] = torch.tensor(float(number))
        saved = {f"state/0/{name}": value for name, value in moments.items()}
        save_file(saved, state / "optimizer_state.safetensors")
        save_file({"torch_rng_state": torch.get_rng_state()}, state / "rng_state.safetensors")
    (tmp_path / "checkpoints" / "last").symlink_to("000200")
    report = checked(tmp_path)
    assert [step.path.name for step in report.steps] == ["000200", "last", "000100"]
    assert all(step.ok for step in report.steps), report.steps
    assert report.chosen == "by checkpoints/last"
    (state / "rng_state.safetensors").unlink()
    assert (
        "training_state/rng_state.safetensors is missing" in checked(tmp_path).steps[0].reasons[0]
    )


def test_a_sharded_optimizer_in_the_folder_of_a_part_is_of_the_model_beside(tmp_path: Path) -> None:
    """LeRobot, train_utils.py: a run on several GPUs has training_state/optimizer_0 in DCP."""
    for number in (100, 200):
        step = tmp_path / "checkpoints" / f"{number:06d}"
        (step / "pretrained_model").mkdir(parents=True)
        save_file({"w": WEIGHT}, step / "pretrained_model" / "model.safetensors")
        (step / "pretrained_model" / "config.json").write_text("{}")
        state = {"optim": {"state.w.exp_avg": torch.ones(2), "state.w.exp_avg_sq": torch.ones(2)}}
        dcp.save(state, checkpoint_id=step / "training_state" / "optimizer_0")
        rng = {"torch_rng_state": torch.get_rng_state()}
        save_file(rng, step / "training_state" / "rng_state.safetensors")
    report = checked(tmp_path)
    assert [(each.path.name, each.ok) for each in report.steps] == [
        ("000200", True), ("000100", True)
    ]  # fmt: skip
    (step / "training_state" / "optimizer_0" / "__0_0.distcp").unlink()
    assert [each.ok for each in checked(tmp_path).steps] == [False, True]


@pytest.mark.parametrize(
    "folders", [["model_1", "model_2"], ["net_100", "net_200"], ["teacher", "student"]]
)
def test_folders_called_as_parts_that_are_saves_are_steps_of_their_own(
    folders: list[str], tmp_path: Path
) -> None:
    for name in folders:
        (folder := tmp_path / name).mkdir()
        torch.save({"w": WEIGHT}, folder / "model.pt")
        torch.save(OPTIMIZER, folder / "optimizer.pt")
    assert {step.path.name for step in checked(tmp_path).steps} == set(folders)


def test_a_run_may_be_called_as_a_part(tmp_path: Path) -> None:
    for name in ("encoder", "decoder"):
        (folder := tmp_path / "weights" / "teacher_student" / name).mkdir(parents=True)
        torch.save({"w": WEIGHT}, folder / "model.pt")
    torch.save(OPTIMIZER, folder / "optimizer.pt")
    assert all(step.ok for step in checked(tmp_path / "weights" / "teacher_student").steps)


def test_a_checkpoint_in_a_zip_archive_is_to_be_unpacked(tmp_path: Path) -> None:
    """PhysicsNeMo 2.2, core/module.py: ``model.pt`` begins within what tells kinds apart."""
    torch.save({"w": WEIGHT}, tmp_path / "model.pt")
    with ZipFile(tmp_path / "MLP.0.1.mdlus", "w") as archive:
        archive.write(tmp_path / "model.pt", "model.pt")
        archive.writestr("args.json", "{}")
    (tmp_path / "model.pt").unlink()
    for path in (tmp_path, tmp_path / "MLP.0.1.mdlus"):
        with pytest.raises(Unrecognized, match="a zip archive of other files") as refused:
            ckptool.inspect(path)
        assert "unzip MLP.0.1.mdlus -d FOLDER" in str(refused.value.hint)


@pytest.mark.parametrize("names", ["{}_net_G_A {}_net_G_B {}_net_D_A {}_net_D_B",
                                   "netG_A2B_{} netG_B2A_{} netD_A_{} netD_B_{}"])  # fmt: skip
def test_networks_of_two_domains_are_one_step(names: str, tmp_path: Path) -> None:
    """CycleGAN's, models/base_model.py: no network of a step is a step of its own."""
    for epoch in (5, 10):
        for name in names.format(*[epoch] * 4).split():
            torch.save({"0.weight": torch.rand(8, 4)}, tmp_path / f"{name}.pth")
    assert [(s.number, s.ok, len(s.beside)) for s in checked(tmp_path).steps] == [
        (10, True, 3), (5, True, 3)
    ]  # fmt: skip
