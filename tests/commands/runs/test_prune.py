"""prune: what stays and what goes."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import CASES, Case, by_name, case
from prune_runs import damage, fates, hashes, names_in, pruned
from pruned_runs import SOURCE, run_of
from safetensors.numpy import save_file

import ckptool
from ckptool.commands.options.prune import PruneOptions
from ckptool.commands.runs.prune.prune import prune
from ckptool.errors import CkptoolError, Unrecognized, Unsupported


def test_nothing_goes_unless_it_is_reported(tmp_path: Path) -> None:
    run = run_of(tmp_path, 100, 200, 300)
    report = pruned(run)
    assert fates(report) == {"step-300": "keep", "step-200": "remove", "step-100": "remove"}
    assert report.freed == 2 * sum(p.stat().st_size for p in SOURCE.iterdir())
    assert names_in(run) == ["step-100", "step-200", "step-300"]
    assert not report.removed


def test_what_only_removed_steps_have_is_named(tmp_path: Path) -> None:
    run = run_of(tmp_path, 1, 2, 3)
    (run / "step-1" / "eval").mkdir()
    (run / "step-1" / "eval" / "results.json").write_text("{}")
    (run / "step-1" / "__9_0.distcp").write_bytes(next(SOURCE.glob("__0_0.*")).read_bytes())
    (run / "step-2" / "notes.txt").write_text("")
    (run / "step-3" / "notes.txt").write_text("")
    for file in run.rglob("*.*"):
        os.utime(file, (0, 0))  # or training would seem to have begun again
    reasons = {step.path.name: step.reason for step in pruned(run).steps}
    assert reasons["step-2"] == "no rule keeps it"
    own_file = "no step that stays has its eval/results.json"
    assert reasons["step-1"] == f"no rule keeps it; {own_file}"


def test_what_the_rules_keep_stays_as_it_was(tmp_path: Path) -> None:
    run = run_of(tmp_path, 100, 200, 300, 400, 500, 600)
    report = pruned(run, 2, keep_every=300, yes=True)
    assert report.removed
    assert report.good == 3
    assert names_in(run) == ["step-300", "step-500", "step-600"]
    assert all(hashes(step) == hashes(SOURCE) for step in run.iterdir())


def test_a_damaged_step_is_none_of_the_promised(tmp_path: Path) -> None:
    run = run_of(tmp_path, 1, 2, 3, 4)
    damage(run / "step-4")
    damage(run / "step-2")
    report = pruned(run, 2, yes=True)
    assert fates(report) == {
        "step-4": "leave", "step-3": "keep", "step-2": "leave", "step-1": "keep"
    }  # fmt: skip
    assert len(names_in(run)) == 4
    assert report.ok


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("latest", "global_step1"),
        ("latest_checkpointed_iteration.txt", "1\n"),
        ("last_checkpoint", "/other/machine/run/global_step1/"),
    ],
)
def test_what_the_trainer_points_to_stays(tmp_path: Path, file: str, text: str) -> None:
    run = run_of(tmp_path, 1, 2, 3, name="global_step{}")
    (run / file).write_text(text)
    report = pruned(run, yes=True)
    assert names_in(run) == sorted([file, "global_step1", "global_step3"])
    assert report.steps[-1].reason == f"{file} points to it"


def test_what_a_link_leads_to_stays(tmp_path: Path) -> None:
    run = run_of(tmp_path, 1, 2, 3, 4)
    (run / "best").symlink_to("step-1")
    shared = next((run / "step-4").glob("*.distcp"))
    shared.unlink()
    shared.symlink_to(f"../step-2/{shared.name}")
    report = pruned(run, yes=True)
    assert names_in(run) == ["best", "step-1", "step-2", "step-4"]
    assert fates(report)["best"] == "leave"
    assert (run / "best").is_symlink()


def test_the_best_of_the_trainer_stays(tmp_path: Path) -> None:
    run = run_of(tmp_path, 1, 2, 3, 4, name="checkpoint-{}")
    for step, best in ((2, "checkpoint-1"), (4, "checkpoint-2")):
        state = {"best_model_checkpoint": f"out/{best}"}
        (run / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    pruned(run, yes=True)
    assert names_in(run) == ["checkpoint-2", "checkpoint-4"]


def test_what_is_not_a_step_stays(tmp_path: Path) -> None:
    run = run_of(tmp_path, 1, 2, 3)
    shutil.copytree(SOURCE, run / "final")
    (run / "step-0").mkdir()
    (run / "step-0" / "notes.txt").write_text("mine")
    (run / "config.yaml").write_text("a: 1")
    pruned(run, yes=True)
    assert names_in(run) == ["config.yaml", "final", "step-0", "step-3"]


def model_at(folder: Path) -> None:
    folder.mkdir(parents=True)
    save_file({"w": np.ones(4, "f4")}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")


def test_shards_of_the_final_model_beside_the_steps_are_not_steps(tmp_path: Path) -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for at, shard in enumerate(shards):
        save_file({f"w{at}": np.ones(4, "f4")}, tmp_path / shard)
    index = {"metadata": {}, "weight_map": {f"w{at}": shard for at, shard in enumerate(shards)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model_at(tmp_path / "checkpoint-500")
    (tmp_path / "checkpoint-1000").mkdir()
    shutil.copy(tmp_path / "checkpoint-500" / "model.safetensors", tmp_path / "checkpoint-1000")
    report = pruned(tmp_path, yes=True)
    assert fates(report) == {"checkpoint-1000": "keep", "checkpoint-500": "remove"}
    assert names_in(tmp_path) == ["checkpoint-1000", *shards, "model.safetensors.index.json"]


def test_files_of_one_step_are_counted_by_their_kind(tmp_path: Path) -> None:
    for step in (10000, 20000):
        for kind in ("model_", "opt_", "ema_0.9999_"):
            torch.save({kind: torch.ones(2)}, tmp_path / f"{kind}step{step:06}.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "final_v2.pt")
    pruned(tmp_path, yes=True)
    kept = ["ema_0.9999_step020000.pt", "final_v2.pt", "model_step020000.pt", "opt_step020000.pt"]
    assert names_in(tmp_path) == kept


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["checkpoint_1.pt", "checkpoint_2.pt", "checkpoint_3.pt"], "does not say"),
        (["qwen-7.pt", "qwen-14.pt"], "does not say"),
        (["model010000.pt", "model020000.pt"], "does not say"),
        (["llama-7b.pt", "llama-70b.pt"], "does not say"),
        (["step-1.pt", "step-01.pt"], "2 entries have"),
        (["step1/checkpoint-50.pt", "step2/checkpoint-90.pt"], "holds steps"),
    ],
)
def test_what_may_be_no_step_is_left(tmp_path: Path, names: list[str], reason: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    report = pruned(tmp_path, yes=True)
    assert [step.fate for step in report.steps] == ["leave"] * len(names)
    assert all(reason in step.reason for step in report.steps)
    assert all((tmp_path / name).exists() for name in names)


@pytest.mark.parametrize(
    ("recorded", "remaining"),
    [
        ([{"iteration": 19}, {"iteration": 29}, {"iteration": 39}], 1),
        ([{"epoch": 10}, {"epoch": 20}, {"epoch": 30}], 1),
        ([{"trainer": {"iteration": 20}}, {"trainer": {"iteration": 30}}, {"epoch": 39}], 3),
        ([{"epoch": 50}, {"epoch": 50}, {"epoch": 50}], 3),
    ],
)
def test_a_number_is_a_step_if_what_each_records_goes_with_it(
    tmp_path: Path, recorded: list[dict[str, object]], remaining: int
) -> None:
    for number, values in zip((20, 30, 40), recorded, strict=True):
        torch.save({"model": {"w": torch.ones(2)}, **values}, tmp_path / f"checkpoint_{number}.pt")
    report = pruned(tmp_path, yes=True)
    assert len(names_in(tmp_path)) == remaining
    assert report.ok == (remaining == 1)


def test_a_pointer_into_a_step_keeps_it_wherever_it_lies(tmp_path: Path) -> None:
    run = run_of(tmp_path, 1, 2, 3, 4, 5)
    (run / "latest").write_text("/other/run/step-1/.metadata\n")
    (run / "eval" / "deep").mkdir(parents=True)
    (run / "eval" / "best").symlink_to("../step-2")
    (run / "eval" / "deep" / "head").symlink_to("../../step-3/.metadata")
    pruned(run, yes=True)
    assert names_in(run) == ["eval", "latest", "step-1", "step-2", "step-3", "step-5"]


def test_a_second_way_to_the_same_steps_is_left(tmp_path: Path) -> None:
    run = run_of(tmp_path, 1, 2)
    run.rename(tmp_path / "all")
    (tmp_path / "by-name").symlink_to("all")
    pruned(tmp_path, yes=True)
    assert names_in(tmp_path / "all") == ["step-2"]


@pytest.mark.parametrize("inner", ["checkpoint-500", "checkpoint-500/actor"])
def test_a_checkpoint_with_steps_inside_is_left(inner: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, 1, 2)
    shutil.copytree(SOURCE, run / "step-1" / "inner" / inner)
    (run / "step-1" / "epoch_7").mkdir()
    report = pruned(run, yes=True)
    within = {"checkpoint-500": "keep"}
    assert fates(report) == {"step-2": "keep", "step-1": "leave"} | within
    reason = {s.path.name: s.reason for s in report.steps}["step-1"]
    assert reason == f"holds steps of its own, as inner/{inner}/.metadata"
    newest = ckptool.verify_run(run).latest_good
    assert newest is not None
    assert newest.path == run / "step-1" / "inner" / "checkpoint-500"
    shutil.rmtree(run / "step-1" / "inner")
    assert fates(pruned(run)) == {"step-2": "keep", "step-1": "remove"}


def test_a_step_with_a_file_of_another_in_it_is_left(tmp_path: Path) -> None:
    run = run_of(tmp_path, 1, 2)
    ckptool.convert(SOURCE, stray := run / "step-1" / "step-7.pt", to="torch-save")
    report = pruned(run, yes=True)
    assert fates(report) == {"step-7.pt": "keep", "step-2": "keep", "step-1": "leave"}
    stray.unlink()
    assert fates(pruned(run)) == {"step-2": "keep", "step-1": "remove"}


def test_a_step_goes_with_the_folder_that_it_is_read_from(tmp_path: Path) -> None:
    """DeepSpeed counts steps of its own, in the folder that ``latest`` names."""
    for step in (100, 200):
        shutil.copytree(case("deepspeed_zero_2").path, tmp_path / f"step-{step}")
    shutil.copytree(tmp_path / "step-100" / "global_step1", tmp_path / "step-100" / "global_step7")
    assert fates(pruned(tmp_path, quick=True))["step-100"] == "leave"
    shutil.rmtree(tmp_path / "step-100" / "global_step7")
    assert fates(pruned(tmp_path, quick=True)) == {"step-200": "keep", "step-100": "remove"}


def test_files_go_with_what_is_beside_them(tmp_path: Path) -> None:
    for step in (1, 2):
        ckptool.convert(SOURCE, tmp_path / f"step-{step}.safetensors", to="safetensors")
    assert len(names_in(tmp_path)) == 4
    pruned(tmp_path, yes=True)
    assert names_in(tmp_path) == ["step-2.extra.pt", "step-2.safetensors"]


def test_a_file_beside_a_step_that_is_not_ckptool_s_stays(tmp_path: Path) -> None:
    import torch

    for step in (1, 2):
        ckptool.convert(SOURCE, tmp_path / f"step-{step}.safetensors", to="safetensors")
    torch.save({"notes": 1}, tmp_path / "step-1.extra.pt")
    report = pruned(tmp_path, yes=True)
    assert len(names_in(tmp_path)) == 4
    assert "step-1.extra.pt beside it was not written" in report.of_fate("leave")[0].reason


@pytest.mark.parametrize("late", [True, False])
def test_what_comes_to_lie_beside_a_step_stays(tmp_path: Path, late: bool) -> None:
    for step in (1, 2):
        ckptool.convert(SOURCE, tmp_path / f"step-{step}.safetensors", to="safetensors")
    side = tmp_path / "step-1.extra.pt"

    def replace_side(_: str = "") -> None:
        if side.is_file():
            side.unlink()
            side.mkdir()

    if not late:
        replace_side()
    options = PruneOptions(keep_last=1, yes=True)
    prune(tmp_path, options, lambda said: replace_side() if "removing" in said else None)
    assert side.is_dir()
    assert (tmp_path / "step-1.safetensors").exists() is not late


def test_one_checkpoint_is_not_a_run(tmp_path: Path) -> None:
    run = run_of(tmp_path, 1, 2)
    with pytest.raises(Unsupported, match="is one checkpoint"):
        pruned(run / "step-2")
    (tmp_path / "empty").mkdir()
    with pytest.raises(Unrecognized):
        pruned(tmp_path / "empty")


@pytest.mark.parametrize("name", ["hf_shards", "hf_sharded", "bin_shards", "rank_base"])
def test_the_files_of_one_checkpoint_are_not_steps(name: str, tmp_path: Path) -> None:
    shutil.copytree(case(name).path, tmp_path / "run")
    with pytest.raises(Unsupported, match="is one checkpoint"):
        pruned(tmp_path / "run", yes=True)
    assert names_in(tmp_path / "run") == names_in(case(name).path)


@pytest.mark.parametrize("one", [c for c in CASES if c.path.is_dir()], ids=by_name)
def test_nothing_of_one_checkpoint_would_go(one: Case) -> None:
    with suppress(CkptoolError):
        report = pruned(one.path, quick=True)
        assert not report.of_fate("remove")


def test_steps_that_are_all_called_the_last_are_steps(tmp_path: Path) -> None:
    """rl_games 1.6, common/a2c_common.py: each save is the last, and says its reward."""
    for epoch in (10, 20, 30):
        state = {"model": {"w": torch.rand(4)}, "optimizer": {"state": {}}, "epoch": epoch}
        torch.save(state, tmp_path / f"last_Ant_ep_{epoch}_rew_{epoch * 3.5 - 50}.pth")
        torch.save(state, tmp_path / f"best-last_ep_{epoch}.pth")
    torch.save(state, tmp_path / "last_ep_40.pth")
    assert fates(pruned(tmp_path, 1)) == {
        "last_Ant_ep_30_rew_55.0.pth": "keep", "last_Ant_ep_20_rew_20.0.pth": "remove",
        "last_Ant_ep_10_rew_-15.0.pth": "remove", "last_ep_40.pth": "keep",
        **{f"best-last_ep_{epoch}.pth": "keep" for epoch in (10, 20, 30)},
    }  # fmt: skip
