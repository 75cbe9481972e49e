"""The optimizer that transformers' Trainer keeps beside a model is checked with the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import ckptool

torch = pytest.importorskip("torch")
State = dict[Any, Any]


def trained(
    folder: Path,
    change: Callable[[State], object] = lambda state: None,
    name: str = "layers.{}.weight",
) -> Path:
    """A step of the Trainer whose optimizer's state is changed."""
    folder.mkdir(parents=True)
    weights = [torch.nn.Parameter(torch.randn(8, 8)) for _ in range(3)]
    optimizer = torch.optim.AdamW(weights)
    for _ in range(3):
        sum((weight * torch.randn(8, 8)).sum() for weight in weights).backward()
        optimizer.step()
    state = optimizer.state_dict()
    change(state["state"])
    save_file(
        {name.format(n): each.detach() for n, each in enumerate(weights)},
        folder / "model.safetensors",
    )
    torch.save(state, folder / "optimizer.pt")
    torch.save({"last_epoch": 3}, folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text('{"global_step": 3}')
    return folder


def clear(state: State) -> None:
    for own in state.values():
        own["exp_avg"].zero_()
        own["exp_avg_sq"].zero_()


@pytest.mark.parametrize(
    ("change", "code", "place"),
    [
        (
            lambda s: s[1]["exp_avg_sq"][2, 1:3].neg_(),
            "moments-negative",
            "state.1.exp_avg_sq: 2 of",
        ),
        (clear, "moments-zero", "state.0.exp_avg: all moments of all parameters are zero"),
        (lambda s: s[1]["exp_avg"][0].fill_(torch.nan), "not-finite", "state.1.exp_avg: 8 NaN"),
    ],
)
def test_what_is_wrong_with_it_is_found_and_no_resume_is_offered(
    change: Callable[[State], object], code: str, place: str, tmp_path: Path
) -> None:
    whole, broken = trained(tmp_path / "checkpoint-3"), trained(tmp_path / "checkpoint-6", change)
    (found,) = (f for f in ckptool.verify(broken).findings if f.severity.value != "info")
    assert (found.code, found.message.startswith(f"optimizer.pt: {place}")) == (code, True)
    report = ckptool.verify_run(tmp_path)
    assert report.latest_good is not None
    assert report.latest_good.path == whole
    assert f"{code}: optimizer.pt: {place}" in report.steps[0].reasons[0]


@pytest.mark.parametrize(("steps", "count"), [(3, 1), (1, 0)])
def test_one_without_any_state_after_steps(steps: int, count: int, tmp_path: Path) -> None:
    whole = trained(tmp_path / "checkpoint-1")
    folder = trained(tmp_path / "checkpoint-9", dict.clear)
    torch.save({"last_epoch": steps}, folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text(f'{{"global_step": {steps}}}')
    found = [f for f in ckptool.verify(folder, quick=True).findings if f.severity.value != "info"]
    assert [(each.code, each.message) for each in found] == count * [
        (
            "moments-zero",
            "optimizer.pt: no optimizer state at all, but trainer_state.json: global_step is 3: a"
            " resume begins the optimizer again",
        )
    ]
    report = ckptool.verify_run(tmp_path)
    assert report.latest_good is not None
    assert report.latest_good.path == (whole if count else folder)


def test_state_of_numbers_in_no_group(tmp_path: Path) -> None:
    file = trained(tmp_path / "c") / "optimizer.pt"
    state = torch.load(file)
    state["param_groups"][0]["params"].pop()
    torch.save(state, file)
    (found,) = (f for f in ckptool.verify(tmp_path / "c").findings if f.severity.value != "info")
    assert found.code == "optimizer-extra"
    assert found.message.startswith("optimizer.pt: state.2.exp_avg, state.2.exp_avg_sq: ")
    assert ckptool.verify_run(tmp_path).latest_good is None


def test_a_sound_one_is_no_warning(tmp_path: Path) -> None:
    report = ckptool.verify(trained(tmp_path / "c"), strict=True)
    assert report.ok
    assert (report.files, report.tensors) == (2, 12)


def test_experts_that_are_chosen_less_often_are_no_mixed_saves(tmp_path: Path) -> None:
    def fewer(state: State) -> None:
        state[1]["step"] -= 2

    def steps(path: Path) -> list[tuple[str, str]]:
        findings = ckptool.verify(path, strict=True).findings
        return [(f.code, f.message[:14]) for f in findings if f.code.startswith("steps-")]

    assert steps(trained(tmp_path / "c", fewer)) == [("steps-apart", "optimizer.pt: ")]
    folder = trained(tmp_path / "d", fewer, "layers.0.experts.{}.weight")
    assert steps(folder) == []
    model = {f"experts.{n}.weight": torch.ones(8) for n in range(3)}
    state = {"model": model, "optimizer": torch.load(folder / "optimizer.pt")}
    torch.save(state, tmp_path / "one.pt")
    assert ckptool.verify(tmp_path / "one.pt", strict=True).ok


def test_one_that_is_cut_off_is_an_error(tmp_path: Path) -> None:
    file = trained(tmp_path / "c") / "optimizer.pt"
    file.write_bytes(file.read_bytes()[:2000])
    report = ckptool.verify(tmp_path / "c")
    assert [f.file for f in report.findings if f.severity.value == "error"] == ["optimizer.pt"]
    assert not report.ok


def test_the_first_part_reads_all_of_it(tmp_path: Path) -> None:
    folder = trained(tmp_path / "c", clear)
    reports = [ckptool.verify(folder, part=part) for part in ("1/2", "2/2")]
    odd = [{f.code for f in report.findings if f.severity.value != "info"} for report in reports]
    assert odd == [{"moments-zero"}, set()]
    assert all(report.depth == "part" for report in reports)
