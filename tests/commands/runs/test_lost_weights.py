"""A step whose model has lost a matrix of earlier ones is not the newest good one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from prune_runs import fates, pruned
from safetensors.torch import save_file

import ckptool

Model = dict[str, torch.Tensor]
Change = Callable[[Model], object]
LOST = "blocks.2.up.weight"


def model() -> Model:
    torch.manual_seed(0)
    kinds = {"up": (16, 8), "down": (8, 16)}
    found = {f"blocks.{n}.{k}.weight": torch.randn(*kinds[k]) for n in range(5) for k in kinds}
    found |= {f"blocks.{n}.bias": torch.zeros(8) for n in range(5)}
    found |= {f"blocks.{n}.mask": torch.ones(8, 8).tril() for n in (1, 3)}
    return found | {"embed.weight": torch.randn(24, 8), "head.weight": torch.randn(24, 8)}


def without(*parts: str) -> Change:
    def lose(model: Model) -> None:
        for name in [name for name in model if any(part in name for part in parts)]:
            del model[name]

    return lose


WRITERS: dict[str, Callable[[Model, Path], object]] = {
    "safetensors": lambda model, path: save_file(model, path / "model.safetensors"),
    "dcp": lambda model, path: dcp.save({"model": model}, checkpoint_id=path, no_dist=True),
}


def run_of(tmp_path: Path, change: Change, write: str = "safetensors") -> Path:
    for step in (1, 2, 3):
        made = model()
        if step > 1:
            change(made)
        (tmp_path / f"step-{step}").mkdir()
        WRITERS[write](made, tmp_path / f"step-{step}")
    return tmp_path


@pytest.mark.parametrize("write", WRITERS)
def test_steps_that_lost_one_are_passed_over_and_kept_for_none(write: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, without(LOST), write)
    report = ckptool.verify_run(run, quick=True)
    assert report.latest_good is not None
    assert report.latest_good.path.name == "step-1"
    accepts = "(--ignore like-missing counts it as good)"
    for passed in report.steps[:2]:
        (reason,) = passed.reasons
        assert reason.startswith("like-missing: ")
        assert reason.endswith(f"{LOST}: missing, step-1 has it {accepts}")
    assert fates(pruned(run))["step-1"] == "keep"
    accepted = ckptool.verify_run(run, ignore=["like-missing"]).latest_good
    assert accepted is not None
    assert accepted.path.name == "step-3"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(without("bias"), id="buffers that a version does not save"),
        pytest.param(without("mask"), id="matrices of masks that a version does not save"),
        pytest.param(without("head"), id="a head that was tied since"),
        pytest.param(
            lambda m: m.update({LOST: m[LOST].to(torch.int8), "scale": torch.ones(1)}),
            id="a weight that was quantized",
        ),
        pytest.param(without("down", "embed"), id="what is left out on purpose"),
        pytest.param(lambda m: m.update({"x.weight": m.pop(LOST)}), id="another name"),
        pytest.param(
            lambda m: m.update({"head.weight": torch.ones(24, 9), LOST: m.pop(LOST)[:8]}),
            id="another model",
        ),
    ],
)
def test_what_is_no_loss(change: Change, tmp_path: Path) -> None:
    found = ckptool.verify_run(run_of(tmp_path, change)).latest_good
    assert found is not None
    assert found.path.name == "step-3"


@pytest.mark.parametrize("apart", [False, True])
def test_a_head_is_lost_if_its_optimizer_has_as_much_state(apart: bool, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        made = model()
        moments = {n: {"exp_avg": torch.randn_like(each)} for n, each in enumerate(made.values())}
        optimizer = {"state": moments, "param_groups": [{"params": [*moments]}]}
        if step > 1:
            without("head")(made)
        folder = tmp_path / f"step_{step}"
        (folder / "model").mkdir(parents=True)
        (folder / "optimizer").mkdir()
        whole = {"model": made} if apart else {"model": made, "optimizer": optimizer}
        torch.save(whole, folder / "model/rank.pt")
        if apart:
            torch.save(optimizer, folder / "optimizer/rank.pt")
    found = ckptool.verify_run(tmp_path)
    assert found.latest_good is not None
    assert found.latest_good.path.name == "step_1"
    assert "head.weight: missing, step_1 has it" in str(found.steps[0].reasons)


@pytest.mark.parametrize(("trained", "good"), [(4, "ckpt_1.pt"), (2, "ckpt_3.pt")])
def test_much_of_a_small_model_is_lost_if_its_optimizer_trains_more(
    trained: int, good: str, tmp_path: Path
) -> None:
    """Else later steps may leave out what is frozen."""
    for step in (1, 2, 3):
        made = {f"{at}.{kind}": torch.ones(8, 8) * at for at in (1, 2) for kind in ("up", "down")}
        state = {at: {"exp_avg": torch.randn(8, 8)} for at in range(trained)}
        if step > 1:
            del made["2.up"], made["2.down"]
        torch.save({"model": made, "optimizer": {"state": state}}, tmp_path / f"ckpt_{step}.pt")
    found = ckptool.verify_run(tmp_path).latest_good
    assert found is not None
    assert found.path.name == good


@pytest.mark.parametrize(("layers", "good"), [(4, "step-3"), (5, "step-1"), (None, "step-1")])
def test_layers_that_a_config_says_were_removed(
    layers: int | None, good: str, tmp_path: Path
) -> None:
    run = run_of(tmp_path, without("blocks.4."))
    for step in (1, 2, 3):
        count = 5 if step == 1 else layers
        config = json.dumps({"model_type": "own", "num_hidden_layers": count})
        if count is not None:
            (run / f"step-{step}" / "config.json").write_text(config)
    found = ckptool.verify_run(run).latest_good
    assert found is not None
    assert found.path.name == good


def test_a_matrix_that_one_of_several_ranks_files_lost(tmp_path: Path) -> None:
    """As fairseq2 saves parts of each tensor side by side; layers may move to another file."""
    for step in (10, 20, 30):
        for rank in range(2):
            file = tmp_path / f"step_{step}/model/pp_00/tp_00/sdp_{rank:02}.pt"
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(model(), file)
    assert ckptool.verify_run(tmp_path, every=True).ok
    made = model()
    del made[LOST]
    torch.save(made, file)
    (reason,) = ckptool.verify_run(tmp_path, every=True).steps[0].reasons
    assert reason.startswith(f"like-missing: model/pp_00/tp_00/sdp_01.pt: {LOST}: missing, step_10")
    without(LOST)(moved := model())
    for step in (10, 20):
        torch.save(moved, tmp_path / f"step_{step}/model/pp_00/tp_00/sdp_00.pt")
    torch.save(moved, file)
    torch.save(model(), file.with_name("sdp_00.pt"))
    assert ckptool.verify_run(tmp_path, every=True).ok
