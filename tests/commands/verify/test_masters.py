"""Weights that are not their masters rounded, and those that rightly are others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import FIXTURES
from verify.verify_runs import checked

from ckptool.commands.open import open_checkpoint
from ckptool.commands.verify.checks.meaning import master_bits
from ckptool.commands.verify.checks.meaning.masters import Masters
from ckptool.commands.verify.findings import Finding
from ckptool.core.box import Box
from ckptool.core.catalog import TensorEntry
from ckptool.engine.read.gather import Gatherer
from ckptool.errors import Damaged

ROUNDED = [
    "deepspeed_zero_2", "deepspeed_frozen_excluded", "deepspeed_pipeline", "deepspeed_universal",
    "deepspeed_experts", "deepspeed_zero_3", "megatron_torch", "megatron_torch_distributed",
    "megatron_torch_dist", "megatron_torch_dist_mixed", "megatron_fsdp_dtensor", "megatron_local",
]  # fmt: skip


def found(path: Path, code: str = "weights-differ-from-masters") -> list[Finding]:
    return [finding for finding in checked(path).findings if finding.code == code]


@pytest.mark.parametrize("name", ROUNDED)
def test_real_weights_are_their_masters_rounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(master_bits, "differences")  # all is known from the one reading
    report = checked(FIXTURES / name / "ckpt")
    assert not [finding for finding in report.findings if finding.code.startswith("weights")]


@pytest.mark.parametrize("name", ROUNDED)
def test_every_master_has_its_weight(name: str) -> None:
    catalog = open_checkpoint(FIXTURES / name / "ckpt").catalog
    heads = ("fp32.", "optimizer.state.module")
    masters = {n for n in catalog.tensors if n.startswith(heads) and ".exp_avg" not in n}
    if name in ("deepspeed_zero_3", "deepspeed_experts"):
        masters = set()  # saves masters alone, or weights that are their own
    assert {n for n in Masters(catalog).probes if n.startswith(heads)} == masters


def test_an_expert_in_a_stack_that_is_not_its_master(tmp_path: Path) -> None:
    master = {f"{e}": torch.randn(3, 6, generator=torch.Generator().manual_seed(e)) for e in (0, 1)}
    stack = torch.stack([master["0"], master["1"]]).bfloat16()
    stack[1, 2, 5] += 1
    key = "decoder.layers.0.mlp.experts{0}.linear_fc2.weight"
    state = {f"fp32.{key.format(f'.local_experts.{n}')}": t for n, t in master.items()}
    state[key.format(".experts")] = stack
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    (finding,) = found(tmp_path / "c")
    text = "decoder.layers.0.mlp.experts.experts.linear_fc2.weight[1]: 1 of 18 values"
    assert finding.message.startswith(text)
    assert "at [2, 5]" in finding.message


def changed(source: Path, file: str, change: Callable[[Any], None], into: Path) -> Path:
    """A copy of a fixture of which one torch.save file was read, changed and saved again."""
    shutil.copytree(source, into)
    (path,) = into.rglob(file)
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)
    return into


def test_a_weight_of_deepspeed_that_is_not_its_master(tmp_path: Path) -> None:
    def change(state: Any) -> None:
        state["module"]["embed.weight"][7, 2] = 3.0
        state["module"]["embed.weight"][12, 0] = -3.0

    file = "mp_rank_00_model_states.pt"
    source = FIXTURES / "deepspeed_zero_2" / "ckpt"
    (finding,) = found(changed(source, file, change, tmp_path / "c"))
    assert finding.severity.value == "warning"
    assert finding.tensor == "module.embed.weight"
    assert finding.message.startswith(
        "module.embed.weight: 2 of 78 values are not those of fp32.embed.weight as bf16,"
        " first 3 at [7, 2], where the master gives "
    )


def with_other_masters(folder: Path) -> Path:
    """Copy a universal checkpoint of DeepSpeed, with masters that are not those of its weights."""
    copy = shutil.copytree(FIXTURES / "deepspeed_universal" / "ckpt", folder / "c")
    for path in copy.rglob("fp32.pt"):
        state = torch.load(path, weights_only=False)
        state["param"] = state["param"] + 0.25
        torch.save(state, path)
    return copy


def test_masters_of_deepspeed_of_another_step(tmp_path: Path) -> None:
    copy = with_other_masters(tmp_path)
    (finding,) = found(copy)
    assert len(finding.affected) > 1


def test_a_weight_that_cannot_be_read_again_leaves_the_others_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = with_other_masters(tmp_path)
    (finding,) = found(copy)
    lost, read = min(finding.names), Gatherer.read_values

    def refuse(self: Gatherer, entry: TensorEntry, box: Box) -> Any:
        if entry.name == lost:
            raise Damaged(f"{lost}: cannot be read")
        return read(self, entry, box)

    monkeypatch.setattr(Gatherer, "read_values", refuse)
    (rest,) = found(copy)
    assert rest.names == finding.names - {lost}


def test_a_weight_of_one_tensor_parallel_rank_of_megatron(tmp_path: Path) -> None:
    def change(state: Any) -> None:
        state["model"]["decoder.layers.0.mlp.linear_fc1.weight"] += 1

    copy = shutil.copytree(FIXTURES / "megatron_torch" / "ckpt", tmp_path / "c")
    (path,) = copy.rglob("mp_rank_01/*.pt")
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)
    (finding,) = found(copy)
    assert finding.tensor == "model.decoder.layers.0.mlp.linear_fc1.weight"
    assert "96 of 192 values" in finding.message


SHAPE = (200, 100)
TYPES = {torch.bfloat16: 16, torch.float16: 13}
"""Types of weights, and how many bits of a float they lack."""


def masters(seed: int = 0) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) / 50


def written(path: Path, weight: torch.Tensor, master: torch.Tensor, **more: torch.Tensor) -> Path:
    state = more | {
        "decoder.w.weight": weight,
        "optimizer.state.fp32_param.decoder.w.weight": master,
        "decoder.frozen.weight": masters(9).bfloat16(),
        "optimizer.state.exp_avg.decoder.w.weight": masters(8),
    }
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def cut(master: torch.Tensor, dtype: torch.dtype, add: torch.Tensor | int = 0) -> torch.Tensor:
    bits = (master.view(torch.int32) + add) >> TYPES[dtype] << TYPES[dtype]
    return bits.view(torch.float32).to(dtype)


def stochastic(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    chance = torch.randint(0, 1 << TYPES[dtype], SHAPE, generator=generator, dtype=torch.int32)
    return cut(master, dtype, chance)


def of_8_bits(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scale = master.abs().max() / 448
    return ((master / scale).to(torch.float8_e4m3fn).float() * scale).to(dtype)


@pytest.mark.parametrize("dtype", [*TYPES, torch.float32])
def test_weights_to_the_nearest_are_nothing_to_report(dtype: torch.dtype, tmp_path: Path) -> None:
    master = masters()
    master[0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-42])
    weight = master.to(dtype)
    assert not found(written(tmp_path / "same", weight, master))
    weight[0, 2] = 0.0  # zero has two signs
    assert not found(written(tmp_path / "zero", weight, master))


def test_a_number_in_the_middle_may_be_rounded_either_way(tmp_path: Path) -> None:
    middle = (masters().view(torch.int32) & ~0xFFFF | 0x8000).view(torch.float32)
    for add in (0, 0x8000):
        weight = cut(middle, torch.bfloat16, add)
        assert not found(written(tmp_path / f"{add}", weight, middle))
        path = written(tmp_path / f"{add}-as-float", weight.float(), middle)
        (finding,) = found(path, "weights-rounded-otherwise")
        assert "rounded through bfloat16 from masters" in finding.message


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("way", "rounded"),
    [("stochastically", stochastic), ("toward zero", cut), ("to 8 bits", of_8_bits)],
)
def test_other_ways_to_round_are_told_apart(
    way: str, rounded: Callable[..., torch.Tensor], dtype: torch.dtype, tmp_path: Path
) -> None:
    values = masters()
    master = values.abs().clamp(min=1e-4) * values.sign()  # normal numbers of both types
    path = written(tmp_path / "c", rounded(master, dtype), master)
    assert not found(path)
    (finding,) = found(path, "weights-rounded-otherwise")
    assert finding.message == f"decoder.w.weight: rounded {way} from masters, as the values show"


@pytest.mark.parametrize("dtype", TYPES)
def test_weights_that_are_all_a_little_smaller_are_of_no_8_bits(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    values = masters()
    master = values.abs().clamp(min=1e-4) * values.sign()
    assert len(found(written(tmp_path / "c", (master * 0.97).to(dtype), master))) == 1


@pytest.mark.parametrize(
    ("trained", "stored"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float16),
    ],
)
def test_weights_that_were_trained_in_another_type_are_told_apart(
    trained: torch.dtype, stored: torch.dtype, tmp_path: Path
) -> None:
    values = masters()
    master = values.abs().clamp(min=1e-4) * values.sign()
    path = written(tmp_path / "c", master.to(trained).to(stored), master)
    assert not found(path)
    (finding,) = found(path, "weights-rounded-otherwise")
    assert f"rounded through {str(trained).removeprefix('torch.')} from masters" in finding.message


@pytest.mark.parametrize("step", [1e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("dtype", [*TYPES, torch.float32])
def test_weights_of_an_earlier_step_are_reported(
    dtype: torch.dtype, step: float, tmp_path: Path
) -> None:
    master = masters()
    update = step * torch.sign(masters(1))
    (finding,) = found(written(tmp_path / "c", (master - update).to(dtype), master))
    assert finding.tensor == "decoder.w.weight"


def test_the_first_value_and_the_number_of_those_in_several_tiles(tmp_path: Path) -> None:
    master = torch.ones(3, 1 << 20)
    weight = master.bfloat16()
    weight[1, 5], weight[2, (1 << 20) - 1] = 2.0, 0.5
    (finding,) = found(written(tmp_path / "c", weight, master))
    assert "2 of 3,145,728 values" in finding.message
    assert finding.message.endswith("first 2 at [1, 5], where the master gives 1")


def test_the_remainders_of_16_bits_are_no_masters(tmp_path: Path) -> None:
    master = masters()
    remainders = torch.zeros(SHAPE, dtype=torch.int16)
    assert not found(written(tmp_path / "c", master.bfloat16(), remainders))


def test_remainders_that_are_stored_as_floats_are_no_masters(tmp_path: Path) -> None:
    master = masters()
    lower = master.view(torch.int16).reshape(*SHAPE, 2)[..., 0].float()
    path = written(tmp_path / "c", master.bfloat16(), lower)
    assert not found(path)
    (finding,) = found(path, "weights-rounded-otherwise")
    assert "decoder.w.weight: beside remainders of 16 bits as floats" in finding.message


@pytest.mark.parametrize("master", [torch.zeros(SHAPE), torch.ones(SHAPE)])
def test_masters_that_are_small_integers_are_reported(master: torch.Tensor, tmp_path: Path) -> None:
    assert found(written(tmp_path / "c", masters().bfloat16(), master))


def averaged(master: torch.Tensor) -> torch.Tensor:
    return (master + 0.002 * masters(1).sign()).bfloat16()


@pytest.mark.parametrize(
    ("name", "weight", "is_average"),
    [
        ("step_9-EMA", averaged(masters()), True),
        ("schemas", averaged(masters()), False),
        ("step_9-EMA", masters(1).bfloat16(), False),
    ],
)
def test_averages_of_weights_are_named_as_such(
    name: str, weight: torch.Tensor, is_average: bool, tmp_path: Path
) -> None:
    path = written(tmp_path / name, weight, masters())
    assert bool(found(path)) != is_average
    messages = [each.message for each in found(path, "weights-rounded-otherwise")]
    said = "decoder.w.weight: averages, as step_9-EMA says, beside masters, as the values show"
    assert messages == ([said] if is_average else [])


def test_averages_beside_the_model_are_none(tmp_path: Path) -> None:
    master = masters()
    other = {"model.decoder.w.weight": averaged(master)}
    assert not found(written(tmp_path / "c", master.bfloat16(), master, **other))
    assert found(written(tmp_path / "d", averaged(master), master, **other))


def test_a_master_that_is_damaged_is_one_finding(tmp_path: Path) -> None:
    copy = shutil.copytree(FIXTURES / "deepspeed_universal" / "ckpt", tmp_path / "c")
    path = next(copy.rglob("embed.weight/fp32.pt"))
    data = bytearray(path.read_bytes())
    flat = torch.load(path, weights_only=False)["param"].detach().numpy().tobytes()
    data[data.index(flat) + 3] ^= 0x40
    path.write_bytes(data)
    codes = [finding.code for finding in checked(copy).findings]
    assert "crc-mismatch" in codes
    assert "weights-differ-from-masters" not in codes


@pytest.mark.parametrize(("shift", "count"), [(0.0, 0), (0.5, 1)])
def test_masters_that_nemo_joins_from_remainders_of_apex(
    shift: float, count: int, tmp_path: Path
) -> None:
    """Apex rounds up where the lower bits, as an integer of 16, are negative: half, too."""
    master = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(3))
    master.view(torch.int32)[0, :, :4] = 0x3F808000 + torch.arange(6)[:, None] * 0x10000
    bits = master.view(torch.int16).unflatten(-1, (-1, 2))
    weight = (bits[..., 1] + (bits[..., 0] < 0).short()).view(torch.bfloat16)
    assert not torch.equal(weight, master.bfloat16())
    weight[2, 3, 4] += shift
    name = "model.decoder.layers.mlp.linear_fc1.weight"
    state = {name: weight, f"optimizer.state.fp32_from_fp16.{name}": master}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    assert len(found(tmp_path / "c")) == count
    assert not found(tmp_path / "c", "weights-rounded-otherwise")


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_1.distcp"])
def test_weights_of_which_a_file_lost_a_part_are_not_compared(
    file: str, copy_of: Callable[[str], Path]
) -> None:
    root = copy_of("megatron_torch_dist")
    (path,) = root.rglob(file)
    os.truncate(path, path.stat().st_size // 3)
    codes = {finding.code for finding in checked(root).findings}
    assert "file-truncated" in codes
    assert not {code for code in codes if code.startswith(("weights-", "moments-"))}
