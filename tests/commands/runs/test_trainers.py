"""Runs of every trainer of the table: the newest good step, half-saved ones, and what goes."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from conftest import case
from prune_runs import fates, hashes, names_in, pruned
from trainer_runs import (
    OPTIMIZER,
    TRAINERS,
    WEIGHT,
    Kind,
    age,
    deepspeed,
    megatron,
    of_dcp,
    run_of,
    saved,
    text,
    timm,
    weights,
    write,
    write_step,
)

import ckptool
from ckptool.commands.runs.trainers import LAST_RECORD
from ckptool.commands.runs.trainers import TRAINERS as TABLE

BOTH = {"model": {"w": WEIGHT}, "optimizer": OPTIMIZER}


def latest(run: Path) -> str | None:
    found = ckptool.verify_run(run, quick=True).latest_good
    return None if found is None else str(found.path).removeprefix(f"{run}/")


def prune(run: Path, keep_last: int = 1) -> set[str]:
    """Prune, and return what is gone: the topmost of its paths."""
    before = {str(path.relative_to(run)) for path in run.rglob("*")}
    pruned(run, keep_last, yes=True, quick=True)
    gone = before - {str(path.relative_to(run)) for path in run.rglob("*")}
    return {path for path in gone if os.path.dirname(path) not in gone}


def by_name(kinds: dict[str, Kind]) -> list[ParameterSet]:
    return [pytest.param(kind, id=name) for name, kind in kinds.items()]


def test_every_row_names_its_source() -> None:
    assert all(len(row.source) > 12 and "." in row.source for row in TABLE)
    assert len({row.name for row in TABLE}) == len(TABLE)


@pytest.mark.parametrize("kind", by_name(TRAINERS))
def test_the_newest_is_the_latest_good_and_older_ones_go(kind: Kind, tmp_path: Path) -> None:
    run = run_of(tmp_path, kind)
    assert latest(run) == kind.name(3)
    assert prune(run) == ({kind.name(1), kind.name(2)} if kind.goes else set())


@pytest.mark.parametrize("kind", by_name({n: k for n, k in TRAINERS.items() if k.half}))
def test_a_save_in_its_middle_is_not_good_and_not_counted(kind: Kind, tmp_path: Path) -> None:
    run = run_of(tmp_path, kind)
    for step in (4, 5):  # a trainer that crashes, is started again, and crashes at the same place
        write_step(run, kind, step, kind.half)
    assert latest(run) == kind.name(3)
    assert prune(run) == {kind.name(1), kind.name(2)}


@pytest.mark.parametrize("kind", by_name({n: k for n, k in TRAINERS.items() if k.staging}))
def test_a_staging_folder_is_no_step(kind: Kind, tmp_path: Path) -> None:
    run = run_of(tmp_path, kind)
    assert kind.staging is not None
    write_step(run, kind, 4, name=kind.staging(4))
    assert latest(run) == kind.name(3)
    assert prune(run) == {kind.name(1), kind.name(2)}
    listed = {step.path.name: step for step in ckptool.list_steps(run).steps}
    assert not listed[kind.staging(4)].complete


def test_the_first_save_of_the_trainer_is_unfinished_without_its_last_file(tmp_path: Path) -> None:
    run = run_of(tmp_path, TRAINERS["transformers"], (1,))
    (run / "checkpoint-1" / "trainer_state.json").unlink()
    assert latest(run) is None


@pytest.mark.parametrize("kind", by_name(TRAINERS))
def test_a_record_that_is_cut_off_is_no_end_of_a_save(kind: Kind, tmp_path: Path) -> None:
    run = run_of(tmp_path, kind)
    write_step(run, kind, 4)
    files = (path for path in (run / kind.name(4)).rglob("*") if path.is_file())
    cut = [path for path in files if re.fullmatch(LAST_RECORD, path.name)]
    for path in cut:
        path.write_text('{"model": ')
    assert latest(run) == kind.name(3 if cut else 4)


def test_a_sharded_save_of_olmo_writes_its_config_last(tmp_path: Path) -> None:
    """OLMo 0.5, checkpoint.py; OLMo-core writes another file."""
    run = run_of(tmp_path, TRAINERS["OLMo-core"])
    for step in run.iterdir():
        (step / ".metadata.json").rename(step / "config.yaml")
    assert ckptool.verify_run(run, every=True).ok
    (run / "step3" / "config.yaml").unlink()
    assert latest(run) == "step2"


def test_the_shards_of_an_epoch_are_one_step(tmp_path: Path) -> None:
    """torchtune 0.4: the shard's number stands before that of the epoch."""
    for epoch in (0, 1, 2):
        for shard in (1, 2):
            torch.save({f"w{shard}": WEIGHT}, tmp_path / f"hf_model_{shard:04d}_{epoch}.pt")
    torch.save({"optimizer": OPTIMIZER, "epochs_run": 3}, tmp_path / "recipe_state.pt")
    report = ckptool.verify_run(tmp_path, every=True)
    assert report.ok
    assert [(step.number, len(step.beside)) for step in report.steps if not step.export] == [
        (2, 1), (1, 1), (0, 1)
    ]  # fmt: skip
    (tmp_path / "hf_model_0002_2.pt").write_bytes(b"PK")
    assert latest(tmp_path) == "hf_model_0001_1.pt"


def test_timm_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    run = run_of(tmp_path, TRAINERS["timm"], (2, 9, 10))
    os.link(run / "checkpoint-10.pth.tar", run / "last.pth.tar")
    os.link(run / "checkpoint-2.pth.tar", run / "model_best.pth.tar")
    for epoch, batch in ((9, 900), (10, 50)):
        write(run, {f"recovery-{epoch}-{batch}.pth.tar": timm(epoch)[""]})
    assert latest(run) in ("checkpoint-10.pth.tar", "recovery-10-50.pth.tar")
    assert prune(run) == {
        "checkpoint-2.pth.tar", "checkpoint-9.pth.tar", "recovery-9-900.pth.tar"
    }  # fmt: skip


def local_files(
    run: Path, iteration: int, ranks: tuple[int, ...], holder: int | None = None
) -> None:
    for rank in ranks:
        folder = run / "session" / str(rank if holder is None else holder)
        write(folder, {f"iter_{iteration:07d}_{rank}_local.pt": saved(BOTH)})
        age(folder / f"iter_{iteration:07d}_{rank}_local.pt", iteration)


def test_a_local_checkpoint_needs_each_rank_in_some_holder(tmp_path: Path) -> None:
    for iteration in (100, 200):
        local_files(tmp_path, iteration, (0, 1))
    local_files(tmp_path, 300, (0,))
    write(tmp_path / "session" / "1", {"iter_0000400_1_local.dirty.pt": saved(BOTH)})
    assert latest(tmp_path) == "session/0/iter_0000200_0_local.pt"
    assert prune(tmp_path) == {f"session/{r}/iter_0000100_{r}_local.pt" for r in (0, 1)}
    assert latest(tmp_path) == "session/0/iter_0000200_0_local.pt"
    assert prune(tmp_path) == set()
    local_files(tmp_path, 300, (1,), holder=0)
    assert latest(tmp_path) == "session/0/iter_0000300_0_local.pt"


@pytest.mark.parametrize("is_sharded", [True, False])
def test_the_ranks_of_several_steps_in_one_folder(is_sharded: bool, tmp_path: Path) -> None:
    """Composer, each of whose ranks saves a file."""
    shards = sorted(case("rank_base").path.iterdir())
    for step in (1, 2, 3, 4):
        for rank in range(4 if step < 4 else 3):
            file = tmp_path / f"ep{step}-ba{9 * step}-rank{rank}.pt"
            if is_sharded:
                shutil.copy(shards[rank], file)
            else:
                torch.save({"state": {"model": {"w": WEIGHT + rank}}}, file)
            age(file, step)
    (tmp_path / "latest-rank0.pt").symlink_to("ep3-ba27-rank0.pt")
    assert latest(tmp_path) == "ep3-ba27-rank0.pt"
    assert prune(tmp_path) == {f"ep{s}-ba{9 * s}-rank{r}.pt" for s in (1, 2) for r in range(4)}


def test_the_epoch_and_the_batch_in_names_of_allennlp(tmp_path: Path) -> None:
    for epoch in range(3):
        for part, state in (("model", {"w": WEIGHT}), ("training", {"optimizer": OPTIMIZER})):
            file = tmp_path / f"{part}_state_e{epoch}_b0.th"
            torch.save(state, file)
            age(file, epoch)
    torch.save({"w": WEIGHT}, tmp_path / "best.th")
    age(tmp_path / "best.th", 4)
    assert latest(tmp_path) == "model_state_e2_b0.th"
    assert [step.number for step in ckptool.list_steps(tmp_path).steps] == [2, 1, 0, None]
    gone = {f"{part}_state_e{n}_b0.th" for part in ("model", "training") for n in (0, 1)}
    assert prune(tmp_path) == gone


def test_a_link_of_a_rank_to_a_sharded_step_is_read_as_that_step(tmp_path: Path) -> None:
    """Composer, sharded: each rank links to the folder of the newest step."""
    for step in (1, 2):
        write(tmp_path / f"ep0-ba{step}", {"": of_dcp("model", "optimizer")})
        age(tmp_path / f"ep0-ba{step}", step)
    (tmp_path / "latest-rank0.pt").symlink_to("ep0-ba2")
    report = ckptool.verify_run(tmp_path, every=True)
    assert [(step.ok, list(step.reasons)) for step in report.steps] == [(True, [])] * 3


def test_a_marker_beside_all_parts_of_a_step_of_nemo(tmp_path: Path) -> None:
    for epoch in (1, 2, 3):
        for rank in ("mp_rank_00", "mp_rank_01"):
            file = f"gpt--val_loss=0.{epoch}2-epoch={epoch}.ckpt"
            write(tmp_path / rank, {file: saved(BOTH)})
            age(tmp_path / rank / file, epoch)
    (tmp_path / "gpt--val_loss=0.32-epoch=3-unfinished").touch()
    assert latest(tmp_path) == "mp_rank_00/gpt--val_loss=0.22-epoch=2.ckpt"
    assert prune(tmp_path) == {f"mp_rank_0{r}/gpt--val_loss=0.12-epoch=1.ckpt" for r in (0, 1)}


def test_markers_of_nemo_and_automodel(tmp_path: Path) -> None:
    run = run_of(tmp_path / "nemo", TRAINERS["NeMo"])
    (run / f"{TRAINERS['NeMo'].name(3)}-unfinished").touch()
    assert latest(run) == TRAINERS["NeMo"].name(2)
    run = run_of(tmp_path / "auto", TRAINERS["AutoModel"])
    (run / "epoch_0_step_3" / ".incomplete").touch()
    (run / "LOWEST_VAL.txt").write_text("epoch_0_step_1")
    assert latest(run) == "epoch_0_step_2"
    assert prune(run) == set()


def test_an_actor_and_its_critic_are_one_step(tmp_path: Path) -> None:
    """OpenRLHF; its exports beside the steps are never the newest, and stay."""
    for step in (5, 10, 15):
        for role in ("_actor", "_critic"):
            write(tmp_path / role / f"global_step{step}", deepspeed(step))
            (tmp_path / role / "latest").write_text(f"global_step{step}")
            age(tmp_path / role / f"global_step{step}", step)
        write(tmp_path / f"global_step{step}_hf", {"model.safetensors": weights})
    shutil.rmtree(tmp_path / "_critic" / "global_step15")
    assert latest(tmp_path) == "_actor/global_step10"
    assert prune(tmp_path) == {f"{role}/global_step5" for role in ("_actor", "_critic")}


def test_what_one_replica_saves_of_its_data_is_no_step(tmp_path: Path) -> None:
    """torchft in torchtitan."""
    run = run_of(tmp_path, TRAINERS["torchtitan"])
    for step in (1, 2, 3, 4):
        of_dcp("dataloader")(run / "ft-replicat-0" / f"step-{step}")
    assert latest(run) == "step-3"
    assert prune(run) == {"step-1", "step-2"}
    assert latest(run / "ft-replicat-0") is None


@pytest.mark.parametrize("format_", ["dcp", "safetensors"])
def test_a_last_step_of_the_model_alone_is_not_gone_on_from(format_: str, tmp_path: Path) -> None:
    """``last_save_model_only`` and ``last_save_in_hf`` of torchtitan."""
    run = run_of(tmp_path, TRAINERS["torchtitan"])
    if format_ == "dcp":
        of_dcp("model")(run / "step-4")
    else:
        write(run / "step-4", {"model.safetensors": weights, "config.json": text("{}")})
    report = ckptool.verify_run(run, every=True)
    assert [step.export for step in report.steps] == [True, False, False, False]
    assert report.ok
    for chosen in (report.chosen, ckptool.verify_run(run).chosen):
        assert chosen == "by the step in its name; step-4, which is newer, is a model alone"
    assert latest(run) == "step-3"
    assert prune(run) == {"step-1", "step-2"}


def test_a_last_step_that_lost_only_its_optimizer_is_not_good(tmp_path: Path) -> None:
    run = run_of(tmp_path, TRAINERS["torchtitan"])
    of_dcp("model", "train_state", "dataloader")(run / "step-4")
    assert not ckptool.verify_run(run, every=True).steps[0].ok


@pytest.mark.parametrize("name", ["torch_checkpointing", "torch_checkpointing_safetensors"])
def test_steps_of_torch_checkpointing(name: str, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        shutil.copytree(case(name).path, tmp_path / f"step-{step}")
    shutil.copytree(case(name).path, tmp_path / "tmp_step-4")
    next((tmp_path / "step-3").glob("*.*")).unlink()
    assert latest(tmp_path) == "step-2"
    assert prune(tmp_path) == {"step-1"}


def test_what_megatron_bridge_counts_in_a_file_of_torch(tmp_path: Path) -> None:
    run = run_of(tmp_path, TRAINERS["Megatron-LM"])
    state = {"step": torch.tensor(2, dtype=torch.int32), "consumed_train_samples": torch.tensor(8)}
    torch.save(state, run / "latest_train_state.pt")
    before = len(os.listdir("/proc/self/fd"))
    assert prune(run) == {"iter_0000001"}
    assert len(os.listdir("/proc/self/fd")) == before


def test_names_that_are_a_number_are_left(tmp_path: Path) -> None:
    """nanotron; its ``latest.txt`` says which is the latest."""
    for step in (100, 200, 300):
        write(tmp_path / str(step), {
            "model.safetensors": weights, "lr_scheduler/lr_scheduler.pt": saved({}),
            "checkpoint_metadata.json": lambda path: path.write_text("{}"),
            "model_config.json": lambda path: path.write_text("{}"),
        })  # fmt: skip
    (tmp_path / "latest.txt").write_text("200")
    assert latest(tmp_path) == "200"
    assert prune(tmp_path) == set()


@pytest.mark.parametrize("is_sharded", [True, False])
def test_folders_of_deepspeed_that_are_a_number(is_sharded: bool, tmp_path: Path) -> None:
    """SwissArmyTransformer, training/model_io.py; one alone is the checkpoint."""
    for step in (100, 200, 300):
        plain = {"mp_rank_00_model_states.pt": saved({"module": {"w": WEIGHT}})}
        write(tmp_path / str(step), deepspeed(step) if is_sharded else plain)
    (tmp_path / "latest").write_text("300")
    report = ckptool.verify_run(tmp_path, every=True)
    assert report.ok
    assert [step.path.name for step in report.steps] == ["300", "200", "100"]
    next((tmp_path / "300").glob("*model_states.pt")).write_bytes(b"PK")
    assert latest(tmp_path) == "200"
    for step in (100, 200):
        shutil.rmtree(tmp_path / str(step))
    assert [step.path for step in ckptool.verify_run(tmp_path, every=True).steps] == [tmp_path]


@pytest.mark.parametrize("inner", ["policy/weights/iter_0000000", "iter_0000001"])
def test_a_number_that_each_step_has_inside_counts_nothing(inner: str, tmp_path: Path) -> None:
    """NeMo RL with Megatron; ROLL, third_party/megatron: checkpoint-N/iter_0000001."""
    for step in (10, 20, 30):
        write(tmp_path / f"step_{step}" / inner, megatron(step))
        (tmp_path / f"step_{step}/training_info.json").write_text("{}")
    report = ckptool.verify_run(tmp_path, every=True)
    assert report.ok
    assert [step.path.name for step in report.steps] == ["step_30", "step_20", "step_10"]
    next((tmp_path / "step_30" / inner).glob("*.distcp")).unlink()
    assert latest(tmp_path) == "step_20"
    assert prune(tmp_path) == set()  # what lies inside may be of another training
    shutil.rmtree(tmp_path / "step_30")
    assert latest(tmp_path) == "step_20"


def test_nothing_of_orbax_goes(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path / str(step), {
            "default/_METADATA": lambda path: path.write_text("{}"),
            "_CHECKPOINT_METADATA": lambda path: path.write_text("{}"),
        })  # fmt: skip
    (tmp_path / "3.orbax-checkpoint-tmp-17").mkdir()
    with pytest.raises(ckptool.CkptoolError):
        pruned(tmp_path, yes=True)
    assert latest(tmp_path) is None
    assert len(names_in(tmp_path)) == 3


def test_the_last_and_the_best_of_lightning(tmp_path: Path) -> None:
    run = run_of(tmp_path, TRAINERS["Lightning, steps"])
    callbacks = {"ModelCheckpoint{'monitor': 'x'}": {"best_model_path": "/w/epoch=1-step=10.ckpt"}}
    state = {"epoch": 7, "global_step": 70, "state_dict": {"w": WEIGHT}, "callbacks": callbacks}
    torch.save(state | {"optimizer_states": [OPTIMIZER]}, run / "last.ckpt")
    shutil.copy(run / "epoch=2-step=20.ckpt", run / "epoch=1-step=10-v1.ckpt")
    assert latest(run) == "last.ckpt"
    assert prune(run) == {"epoch=2-step=20.ckpt"}
    (run / "last.ckpt").unlink()
    (run / "last.ckpt").symlink_to("epoch=3-step=30.ckpt")
    assert latest(run) == "epoch=3-step=30.ckpt"


def test_a_step_of_lightning_that_names_itself_as_the_best(tmp_path: Path) -> None:
    for step in (1, 2):
        path = tmp_path / f"epoch=0-step={step}.ckpt"
        callbacks = {"ModelCheckpoint": {"best_model_path": str(path)}}
        state = {"global_step": step, "state_dict": {"w": WEIGHT + step}, "callbacks": callbacks}
        torch.save(state | {"optimizer_states": [OPTIMIZER]}, path)
    report = ckptool.prune(tmp_path, keep_last=1)
    assert [(step.fate, step.reason) for step in report.steps] == [
        ("keep", "it names itself as the best"), ("remove", "no rule keeps it")
    ]  # fmt: skip


def test_a_link_has_the_name_of_the_step_that_it_leads_to(tmp_path: Path) -> None:
    run = tmp_path / "run"
    steps_in = run / "checkpoints"
    steps_in.mkdir(parents=True)
    for step in (1, 2):
        state = {"global_step": step, "state_dict": {"w": WEIGHT + step}}
        torch.save(
            state | {"optimizer_states": [OPTIMIZER]}, steps_in / f"epoch=0-step={step}.ckpt"
        )
    (run / "epoch=0-step=1.ckpt").symlink_to("checkpoints/epoch=0-step=1.ckpt")
    reasons = {step.path: step.reason for step in ckptool.prune(run, keep_last=1).steps}
    assert reasons[steps_in / "epoch=0-step=1.ckpt"] == "epoch=0-step=1.ckpt points to it"


def test_a_folder_of_lightning_without_what_its_first_rank_writes_last(tmp_path: Path) -> None:
    for epoch in (1, 2):
        folder = tmp_path / f"epoch={epoch}-val_loss=0.5.ckpt"
        of_dcp("model", "optimizer")(folder)
        if epoch == 1:
            torch.save({"epoch": 1}, folder / "meta.pt")
    assert latest(tmp_path) == "epoch=1-val_loss=0.5.ckpt"


@pytest.mark.parametrize(
    "name",
    [
        "tmp-step-9", "tmp_step_9", "step-9.tmp", "step-9-tmp", "step-9.partial", "_tmp_step-9",
        "step-9.tmp.1234abcd", "step-9.incomplete", "__tmp__step-9", "step-9_unfinished",
    ],
)  # fmt: skip
def test_names_of_what_is_being_written(name: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, TRAINERS["torchtitan"])
    shutil.copytree(run / "step-3", run / name)
    assert latest(run) == "step-3"
    assert prune(run) == {"step-1", "step-2"}


def test_folders_that_hold_the_runs_of_several_trainings(tmp_path: Path) -> None:
    """Each has its final model beside its steps, which is no step."""
    for name in ("exp-1", "exp-2"):
        run = run_of(tmp_path / name, TRAINERS["transformers"])
        write(run, {"model.safetensors": weights})
    report = pruned(tmp_path, 1, yes=True, quick=True)
    assert fates(report)["checkpoint-3"] == "keep"
    for name in ("exp-1", "exp-2"):
        assert names_in(tmp_path / name / "run") == ["checkpoint-3", "model.safetensors"]


def test_a_run_that_was_started_again_keeps_what_it_wrote_last(tmp_path: Path) -> None:
    """Its newest step, which is damaged, is left, and none of the first training is counted."""
    run = run_of(tmp_path, TRAINERS["transformers"], (100, 200, 300))
    for step in (40, 50, 60):
        write_step(run, TRAINERS["transformers"], step)
        age(run / f"checkpoint-{step}", 400 + step)
    os.truncate(run / "checkpoint-60" / "model.safetensors", 40)
    report = pruned(run, 1, yes=True, quick=True)
    assert names_in(run) == ["checkpoint-300", "checkpoint-50", "checkpoint-60"]
    assert {s.path.name: s.reason for s in report.steps}["checkpoint-50"] == (
        "the newest good step of those written after checkpoint-300"
    )
    before = hashes(run)
    pruned(run, 1, yes=True, quick=True, keep_every=50, no_optimizer=True)
    assert hashes(run) == before


@pytest.mark.parametrize(
    ("model", "state"),
    [
        ("weights/step_{}/model.pt", "checkpoints/step_{}/trainer.pt"),
        ("lora-step{:08d}.pt", "lora-step{:08d}-state/model.pt"),
        ("huggingface/ba{}/model.pt", "ep0-ba{}-rank0.pt"),
        ("hf-{}/model.pt", "checkpoints/ckpt-step-{}/state.pt"),
        ("checkpoint-{}-merged/model.pt", "checkpoint-{}/state.pt"),
    ],
    ids=["PRIME-RL", "kohya", "llm-foundry", "xtuner", "ms-swift"],
)
def test_the_newest_good_is_what_has_an_optimizer(model: str, state: str, tmp_path: Path) -> None:
    for number in (10, 20):
        for name, state_dict in (
            (model, {"w": WEIGHT}),
            (state, {"w": WEIGHT, "optimizer": OPTIMIZER}),
        ):
            path = tmp_path / name.format(number)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state_dict, path)
    newest, before = (state.format(number).rpartition("/")[0] for number in (20, 10))
    assert latest(tmp_path) == (newest or state.format(20))
    (tmp_path / state.format(20)).write_bytes(b"PK")
    assert latest(tmp_path) == (before or state.format(10))


def test_a_model_alone_is_good_in_a_run_of_its_own(tmp_path: Path) -> None:
    """Another training that counts the same steps, and keeps its optimizer, is not its."""
    for folder, state_dict in (("a", {"w": WEIGHT, "optimizer": OPTIMIZER}), ("b", {"w": WEIGHT})):
        (tmp_path / folder).mkdir()
        torch.save(state_dict, tmp_path / folder / "step_10.pt")
    report = ckptool.verify_run(tmp_path, every=True)
    assert [step.export for step in report.steps] == [False, False]
