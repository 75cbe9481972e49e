"""Lost, exchanged or renumbered files of experts: never another expert's moments."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import case, convert_to, read_back

from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.verify import verify
from ckptool.errors import Damaged
from ckptool.formats.deepspeed import states
from ckptool.serialization.archive.read import TorchFile, read_torch_file
from ckptool.serialization.source import Source

Copy = Callable[[str], Path]
BOTH = ("deepspeed_experts", "deepspeed_experts_zero_2")


def expert(layer: int, number: int) -> str:
    return f"layer_{layer}_expert_{number}_mp_rank_00_model_states.pt"


def expert_rank(number: int) -> str:
    return f"expp_rank_{number}_mp_rank_00_optim_states.pt"


def move(folder: Path, moves: dict[str, str | None]) -> None:
    """Give files other names, all at once; None removes one."""
    for old in moves:
        (folder / old).rename(folder / f"{old}.old")
    for old, new in moves.items():
        if new is None:
            (folder / f"{old}.old").unlink()
        else:
            (folder / f"{old}.old").rename(folder / new)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    ("moves", "words"),
    [
        pytest.param({expert(0, 3): None}, r"layer_0_expert_3 are missing: 5 of 6", id="last lost"),
        pytest.param({expert(0, 1): None}, r"layer_0_expert_1 are missing: 5 of 6", id="lost"),
        pytest.param(
            {expert(1, 0): None, expert(1, 1): None},
            r"layer_1_expert_0, layer_1_expert_1 are missing: 4 of 6",
            id="a layer lost",
        ),
        pytest.param({expert(0, 3): expert(0, 7)}, r"expert_3 are missing", id="renumbered"),
        pytest.param(
            {expert(0, 0): expert(0, 1), expert(0, 1): expert(0, 0)},
            r"holds moe.*1.weight, not expert 0",
            id="exchanged",
        ),
        pytest.param(
            {expert(0, 1): expert(1, 1), expert(1, 1): expert(0, 1)}, r"holds more.*, not expert 1",
            id="exchanged between layers",
        ),
    ],
)  # fmt: skip
def test_the_file_of_an_expert_that_is_not_its_own(
    name: str, moves: dict[str, str | None], words: str, copy_of: Copy, out: Path
) -> None:
    folder = copy_of(name)
    move(folder / "global_step1", moves)
    with pytest.raises(Damaged, match=words):
        convert_to("safetensors", folder, out / "m", model_only=True)
    assert not verify(folder, VerifyOptions(workers=1)).ok


@pytest.mark.parametrize("name", BOTH)
def test_a_file_of_one_expert_too_many(name: str, copy_of: Copy, out: Path) -> None:
    folder = copy_of(name)
    shutil.copy(folder / "global_step1" / expert(1, 1), folder / "global_step1" / expert(1, 2))
    with pytest.raises(
        Damaged, match=r"to no expert of this model, whose MoE layers have \[4, 2\]"
    ):
        convert_to("safetensors", folder, out / "m")


@pytest.mark.parametrize(
    ("moves", "words"),
    [
        pytest.param({expert_rank(0): None}, r"expp_rank_0 are missing: 1 of 2", id="first lost"),
        pytest.param({expert_rank(1): None}, r"expp_rank_1 are missing: 1 of 2", id="last lost"),
        pytest.param({expert_rank(1): expert_rank(2)}, r"_rank_2.* no rank of 2", id="other"),
        pytest.param(
            {expert_rank(0): None, expert_rank(1): None}, r"expp_rank_0 are missing: 0 of 1",
            id="all lost",
        ),
    ],
)  # fmt: skip
def test_the_optimizer_of_experts_is_complete_or_excluded(
    moves: dict[str, str | None], words: str, copy_of: Copy, out: Path
) -> None:
    folder = copy_of("deepspeed_experts")
    move(folder / "global_step1", moves)
    with pytest.raises(Damaged, match=words):
        convert_to("safetensors", folder, out / "m")
    assert not verify(folder, VerifyOptions(workers=1)).ok
    convert_to("safetensors", folder, out / "m", model_only=True)
    truth = case("deepspeed_experts").truth
    weights = {n.removeprefix("module."): t for n, t in truth.items() if n.startswith("module.")}
    assert read_back("safetensors", out / "m") == weights


@pytest.mark.parametrize("name", [*BOTH, "deepspeed_pipeline"])
def test_a_file_is_opened_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: Counter[str] = Counter()

    def read(source: Source, file: str) -> TorchFile:
        opened[file] += 1
        return read_torch_file(source, file)

    monkeypatch.setattr(states, "read_torch_file", read)
    open_checkpoint(case(name).path)
    assert len(opened) > 2
    assert set(opened.values()) == {1}


def test_as_many_experts_as_a_file_may_say_are_not_listed(tmp_path: Path) -> None:
    model = {"module": {"a": torch.zeros(2)}, "num_experts": [10**12]}
    torch.save(model, tmp_path / "mp_rank_00_model_states.pt")
    torch.save({}, tmp_path / expert(0, 0))
    with pytest.raises(Damaged, match=r"layer_0_expert_6 and more are missing: 1 of 1,000,000,0"):
        open_checkpoint(tmp_path)
