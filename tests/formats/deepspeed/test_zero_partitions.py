"""State that DeepSpeed does not partition: by whole parameter or rank, and buffers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import convert_to, read_back

import ckptool

SHAPES = {"a": (3, 5), "b": (5,), "c": (2, 3)}
PARTITION = 14
MOMENTUM = {name: torch.rand(shape).bfloat16() for name, shape in SHAPES.items()}


def saved(folder: Path, kept: list[torch.Tensor], kind: str = "momentum_buffer") -> Path:
    """A checkpoint of two ranks, in whose partitions of 14 elements are a, and a, b and c."""
    flat = torch.cat([torch.full(s, float(at)).flatten() for at, s in enumerate(SHAPES.values())])
    folder.mkdir()
    for rank, momentum in enumerate(kept):
        optimizer = {
            "zero_stage": 2,
            "partition_count": [2],
            "group_paddings": [(0, 2)[rank]],
            "single_partition_of_fp32_groups": [flat[rank * PARTITION :][:PARTITION].clone()],
            "base_optimizer_state": {
                "state": {0: {kind: momentum}},
                "param_groups": [{"params": [0], "use_muon": True}],
            },
        }
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer}, folder / name)
    sizes = {name: torch.Size(shape) for name, shape in SHAPES.items()}
    model = {"module": {n: torch.zeros(s) for n, s in SHAPES.items()}, "param_shapes": [sizes]}
    torch.save({**model, "dp_world_size": 2}, folder / "mp_rank_00_model_states.pt")
    return folder


def joined(*names: str) -> torch.Tensor:
    return torch.cat([MOMENTUM[name].flatten() for name in names])


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param([joined("a"), joined("a", "b", "c")], id="whole parameters"),
        pytest.param(
            [joined("a")[:14], torch.cat([joined("a")[14:], joined("b", "c", "b")[:13]])],
            id="partitions, of an offloaded optimizer",
        ),
    ],
)
def test_the_momentum_of_muon(kept: list[torch.Tensor], tmp_path: Path) -> None:
    convert_to("safetensors", saved(tmp_path / "step", kept), tmp_path / "out")
    found = read_back("safetensors", tmp_path / "out")
    for name, momentum in MOMENTUM.items():
        wanted = momentum.view(torch.uint8).numpy().tobytes()
        assert found[f"momentum_buffer.{name}"][2] == wanted


def test_what_belongs_to_a_rank_is_kept_for_each(tmp_path: Path) -> None:
    """As the errors of compressed communication, or the scales of an optimizer in 8 bits."""
    errors = [torch.rand(3), torch.rand(3)]
    convert_to("safetensors", saved(tmp_path / "step", errors, "worker_error"), tmp_path / "out")
    found = read_back("safetensors", tmp_path / "out")
    for rank, error in enumerate(errors):
        assert found[f"optimizer.state.0.worker_error@rank{rank}"][2] == error.numpy().tobytes()


def test_buffers_of_every_stage_of_a_pipeline(
    tmp_path: Path, copy_of: Callable[[str], Path]
) -> None:
    source = copy_of("deepspeed_pipeline")
    for file in source.rglob("layer_*"):
        layer = int(file.name[6:8])
        torch.save(torch.load(file) | {"running": torch.full((2,), float(layer))}, file)
    for file in source.rglob("mp_rank_*"):
        state = torch.load(file, weights_only=False)
        state["buffer_names"] = [f"{layer}.running" for layer in range(3)]
        torch.save(state, file)
    convert_to("safetensors", source, tmp_path / "out")
    found = read_back("safetensors", tmp_path / "out")
    for name, layer in (("tied_modules.embed", 0), ("1", 1), ("2", 2)):
        wanted = torch.full((2,), float(layer)).numpy().tobytes()
        assert found[f"buffer.{name}.running"][2] == wanted


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("deepspeed_zero_2", "mp_rank_*model_states.pt"),
        ("deepspeed_zero_3", "zero_pp_rank_*model_states.pt"),
        ("deepspeed_universal", "mp_rank_*model_states.pt"),
        ("deepspeed_pipeline", "layer_01-model_00*"),
    ],
)
def test_what_is_not_a_tensor_in_a_module_is_noted_once(
    name: str, files: str, copy_of: Callable[[str], Path]
) -> None:
    """Such as the extra state of Transformer Engine's modules, which every rank's file has."""
    source = copy_of(name)
    paths = sorted(source.rglob(files))
    for path in paths:
        state = torch.load(path, weights_only=False)
        state.get("module", state)["norm._extra_state"] = b"scales"
        torch.save(state, path)
    notes = [note for note in ckptool.open(source).catalog.notes if "_extra_state" in note]
    assert len(notes) == 1
    assert "'norm._extra_state'" in notes[0]
    assert paths[0].name in notes[0]


def test_a_lost_file_of_model_states_is_named(copy_of: Callable[[str], Path]) -> None:
    """The ranks' files of optimizer states are no rank-local files that differ."""
    folder = copy_of("deepspeed_zero_2")
    next(folder.rglob("mp_rank_00_model_states.pt")).unlink()
    for place in (folder, folder / "global_step1"):
        (finding,) = ckptool.verify(place).findings
        assert finding.code == "file-missing"
        assert "no file of model states, such as mp_rank_00_model_states.pt" in finding.message
        assert finding.message.endswith("beside 2 files of optimizer states")
        assert "--from torch-save reads one of these by itself" in (finding.hint or "")
    one = next(folder.rglob("*_optim_states.pt"))
    assert ckptool.open(one, from_format="torch-save").tensors
