"""What a name says a file is for, and that no name takes long."""

from __future__ import annotations

import pytest

from ckptool.commands.runs.names import is_part_folder, parse_name
from ckptool.serialization.file_roles import (
    is_beside_model,
    is_of_training,
    may_be_empty,
    role_of,
)

BESIDE, TRAINING, EMPTY = is_beside_model, is_of_training, may_be_empty


@pytest.mark.parametrize(
    ("name", "role", "says"),
    [
        ("optim.pt", "optimizer", {BESIDE, TRAINING}),
        ("optimG.pth", "optimizer", {BESIDE, TRAINING}),
        ("model_optim_rng.pt", "optimizer", {BESIDE, TRAINING}),
        ("unet_adam.pt", "optimizer", {BESIDE}),
        ("lr_scheduler.bin", "scheduler", {BESIDE, TRAINING, EMPTY}),
        ("scaler_1.pt", "scaler", {BESIDE, TRAINING, EMPTY}),
        ("rng.pt", "rng", {BESIDE, TRAINING, EMPTY}),
        ("random_states_0.pkl", "rng", {EMPTY}),
        ("training_states", "record", {BESIDE, EMPTY}),
        ("extra_state_rank_0.pt", "record", {BESIDE}),
        ("dataloader-TRAIN.ckpt", "dataloader", {BESIDE, EMPTY}),
        ("loader.pt", "dataloader", {BESIDE, EMPTY}),
        ("mp_rank_00", "rank", set()),
        ("ema_0.9999.pt", "model", {BESIDE}),
        ("swa.pt", None, {BESIDE}),
        ("critic.pt", "model", {BESIDE}),
        ("unet.pt", "model", set()),
        ("netD.pth", None, {BESIDE}),
        ("netG.pth", None, set()),
        ("enc.ckpt", None, set()),
        ("encoder.pt", None, set()),
        ("discriminator.pt", None, {BESIDE}),
        ("state.pt", None, {EMPTY}),
        ("train_state.pt", "record", {BESIDE, EMPTY}),
        ("model_state_dict.pt", "model", set()),
        ("10_D_5.pth", None, {BESIDE}),
        ("training_args.bin", None, {EMPTY}),
        ("counter.ckpt", None, {EMPTY}),
        ("adamw.pt", "optimizer", {BESIDE}),
        ("optimizerG.pth", "optimizer", {BESIDE, TRAINING}),
        ("lrscheduler_state.pt", "scheduler", {BESIDE, TRAINING, EMPTY}),
        ("upscaler.safetensors", "scaler", {EMPTY}),
        ("resampler.safetensors", "dataloader", {EMPTY}),
        ("optimized.safetensors", "optimizer", set()),
    ],
)
def test_what_a_name_says(name: str, role: str | None, says: set[object]) -> None:
    assert role_of(name) == role
    assert {each for each in (BESIDE, TRAINING, EMPTY) if each(name)} == says


@pytest.mark.parametrize("piece", ["_", "-", "0", "optim_", "state.", "rank", "ema1", "0.", "d-"])
def test_a_long_name_is_read_at_once(piece: str) -> None:
    """Some took minutes: patterns began anew at each digit, dash or word."""
    name = piece * (30_000 // len(piece)) + "!"
    for each in (role_of, BESIDE, TRAINING, EMPTY, is_part_folder):
        each(name)
    assert not parse_name(name, is_folder=False).position
