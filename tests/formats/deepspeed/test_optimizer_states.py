"""State of optimizers beyond Adam under ZeRO 2 and 3: scalars, and state in 8 and 4 bits.

The states are laid out as the real optimizers have them after DeepSpeed 0.19.8 saved two ranks:
transformers' Adafactor, bitsandbytes 0.50 ``AdamW8bit`` and ``Lion``, torch's NAdam, and torchao
0.18 ``AdamW8bit``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import convert_to, read_back

import ckptool
from ckptool.errors import SourceError, Unsupported

WEIGHT = torch.arange(12.0).reshape(4, 3)
BNB = "__bnb_optimizer_quant_state__"
State = Callable[[int], dict[str, Any]]


AO = "torchao.optim.subclass_8bit"


class OptimState8bit(torch.Tensor):
    """A tensor of three others, which is pickled as torchao's class of this name is."""

    __module__ = AO

    @staticmethod
    def __new__(cls, codes: Any, scale: Any, qmap: Any) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale, made.qmap = codes, scale, qmap
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return args[0]

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale", "qmap"], []


def saved(folder: Path, state: State, stage: int, *, crc: bool = True) -> Path:
    """A checkpoint of two ranks with half of one weight each."""
    folder.mkdir()
    torch.serialization.set_crc32_options(crc)
    shapes = {"w": torch.Size(WEIGHT.shape)}
    for rank in range(2):
        half = WEIGHT.flatten()[6 * rank :][:6].clone()
        optimizer = {"state": {0: state(rank)}, "param_groups": [{"params": [0]}]}
        inner: dict[str, Any] = {"zero_stage": stage, "partition_count": 2}
        if stage == 3:
            inner |= {"optimizer_state_dict": optimizer, "fp32_flat_groups": [half]}
        else:
            inner |= {
                "base_optimizer_state": optimizer,
                "single_partition_of_fp32_groups": [half],
                "group_paddings": [0],
            }
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": inner}, folder / name)
        module = {"w": torch.zeros(0 if stage == 3 else (4, 3))}
        model = {"module": module, "param_shapes": [shapes], "dp_world_size": 2}
        file = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
        torch.save(model, folder / f"{file}_model_states.pt")
    torch.serialization.set_crc32_options(True)
    return folder


def bytes_of(tensor: Any) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def written(folder: Path, tmp_path: Path) -> dict[str, bytes]:
    assert ckptool.verify(folder).ok
    convert_to("safetensors", folder, tmp_path / "out")
    return {name: item[2] for name, item in read_back("safetensors", tmp_path / "out").items()}


@pytest.fixture(params=[2, 3])
def stage(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_a_scalar_of_each_partition_is_kept_for_its_rank(tmp_path: Path, stage: int) -> None:
    def adafactor(rank: int) -> dict[str, Any]:
        moments = torch.full((6,), float(rank))
        return {"step": 2, "exp_avg_sq": moments, "RMS": torch.tensor(0.5 + rank)}

    found = written(saved(tmp_path / "step", adafactor, stage), tmp_path)
    for rank in range(2):
        assert found[f"optimizer.state.0.RMS@rank{rank}"] == bytes_of(torch.tensor(0.5 + rank))
    assert found["fp32.w"] == bytes_of(WEIGHT)
    assert found["exp_avg_sq.w"] == bytes_of(torch.arange(2.0).repeat_interleave(6))


def test_a_number_of_each_partition_is_kept_as_a_value(tmp_path: Path, stage: int) -> None:
    folder = saved(tmp_path / "step", lambda rank: {"step": 2, "d": 0.5 + rank}, stage)
    assert ckptool.verify(folder).ok
    values = ckptool.open(folder).objects
    assert [values[f"optimizer.state.0.d@rank{rank}"] for rank in range(2)] == [0.5, 1.5]
    assert values["step.w"] == 2


@pytest.mark.parametrize("crc", [True, False], ids=["checksums", "no checksums"])
def test_a_scalar_that_all_partitions_share_is_the_parameters(
    tmp_path: Path, stage: int, crc: bool
) -> None:
    product = torch.tensor(0.25)
    state = {"step": torch.tensor(3.0), "mu_product": product, "exp_avg": torch.ones(6)}
    found = written(saved(tmp_path / "step", lambda _: state, stage, crc=crc), tmp_path)
    assert found["mu_product.w"] == bytes_of(product)


def test_steps_that_differ_are_still_a_fault(tmp_path: Path, stage: int) -> None:
    folder = saved(tmp_path / "step", lambda rank: {"step": torch.tensor(float(rank))}, stage)
    with pytest.raises(SourceError, match=r"step\.w"):
        convert_to("safetensors", folder, tmp_path / "out")


def test_state_in_full_precision_of_bitsandbytes_is_placed(tmp_path: Path, stage: int) -> None:
    def lion(rank: int) -> dict[str, Any]:
        return {"step": 3, BNB: {"state1": torch.full((6,), float(rank))}}

    found = written(saved(tmp_path / "step", lion, stage), tmp_path)
    assert found["state1.w"] == bytes_of(torch.arange(2.0).repeat_interleave(6))


def test_state_in_8_bits_of_bitsandbytes_is_kept_for_each_rank(tmp_path: Path, stage: int) -> None:
    """Its blocks belong to partitions: they begin and end without regard to parameters."""

    def adamw(rank: int) -> dict[str, Any]:
        codes, scale = torch.full((6,), rank, dtype=torch.uint8), torch.tensor([1.0 + rank])
        return {"step": 3, BNB: {"state1": codes, "qmap1": torch.ones(256), "absmax1": scale}}

    folder = saved(tmp_path / "step", adamw, stage)
    found = written(folder, tmp_path)
    prefix = f"optimizer.state.0.{BNB}"
    assert found[f"{prefix}.qmap1"] == bytes_of(torch.ones(256))
    for rank in range(2):
        kept = adamw(rank)[BNB]
        for kind in ("state1", "absmax1"):
            assert found[f"{prefix}.{kind}@rank{rank}"] == bytes_of(kept[kind])
    with pytest.raises(Unsupported, match="no place for"):
        convert_to("deepspeed-universal", folder, tmp_path / "universal")


def test_state_in_8_bits_of_torchao_is_kept_for_each_rank(
    tmp_path: Path, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torchao", "torchao.optim", AO):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[AO], "OptimState8bit", OptimState8bit, raising=False)
    qmap = torch.ones(256)

    def adamw(rank: int) -> dict[str, Any]:
        codes, scale = torch.full((6,), rank, dtype=torch.uint8), torch.tensor([1.0 + rank])
        return {"exp_avg": OptimState8bit(codes, scale, qmap)}

    found = written(saved(tmp_path / "step", adamw, stage), tmp_path)
    for rank in range(2):
        codes = bytes_of(torch.full((6,), rank, dtype=torch.uint8))
        assert found[f"optimizer.state.0.exp_avg.codes@rank{rank}"] == codes
        scale = bytes_of(torch.tensor([1.0 + rank]))
        assert found[f"optimizer.state.0.exp_avg.scale@rank{rank}"] == scale
    assert found["optimizer.state.0.exp_avg.qmap"] == bytes_of(qmap)


def test_state_of_bitsandbytes_without_zero_has_its_parameters_name(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    codes, scale = torch.arange(12, dtype=torch.uint8).reshape(4, 3), torch.ones(1)
    state = {0: {"step": 3, BNB: {"state1": codes, "absmax1": scale, "qmap1": torch.ones(256)}}}
    recorded = {"state": state, "param_groups": [{"params": [0]}]}
    optimizer = {"optimizer_state_dict": recorded, "fp32_groups": [[WEIGHT]]}
    model = {"module": {"w": WEIGHT.bfloat16()}, "optimizer": optimizer, "dp_world_size": 1}
    torch.save(model, tmp_path / "step" / "mp_rank_00_model_states.pt")
    found = written(tmp_path / "step", tmp_path)
    assert found["state1.w"] == bytes_of(codes)
    assert found["absmax1.w"] == bytes_of(scale)
