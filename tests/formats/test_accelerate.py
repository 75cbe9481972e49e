"""accelerate's folders as other versions and transformers' Trainer leave them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from conftest import case, convert_to, read_back

from ckptool.commands.open import open_checkpoint


def test_what_transformers_trainer_saves_beside(copy_of: Callable[[str], Path], out: Path) -> None:
    """Each rank's random state is its own; scheduler and model are one."""
    folder = copy_of("accelerate_folders")
    for name in ("scheduler.bin", "random_states_0.pkl", "random_states_1.pkl"):
        (folder / name).unlink()
    torch.save({"last_epoch": 5}, folder / "scheduler.pt")
    for rank in range(2):
        torch.save({"cpu": torch.arange(4) + rank}, folder / f"rng_state_{rank}.pth")
    catalog = open_checkpoint(folder).catalog
    assert {"rng_state.cpu@rank0", "rng_state.cpu@rank1"} <= catalog.tensors.keys()
    assert catalog.objects["scheduler.last_epoch"].value == 5
    convert_to("safetensors", folder, out / "m")
    found = read_back("safetensors", out / "m")
    whole = case("accelerate_folders").truth
    assert {name: found[name] for name in whole} == whole


def test_the_folder_names_of_old_versions(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("accelerate_folders")
    (folder / "pytorch_model_fsdp_0").rename(folder / "pytorch_model_0")
    found = open_checkpoint(folder).catalog
    assert found.format == "accelerate"
    assert case("accelerate_folders").truth.keys() <= found.tensors.keys()
