"""The maps of torchtitan's models agree with torchtitan's own adapters, tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torchtitan_states
from conftest import convert_to, flat, load_torch
from safetensors.numpy import load_file, save_file
from torchtitan_states import FAMILIES, States, recorded, write_config

from ckptool.commands.options.rewrite import MapOptions

UNKNOWN_TO_HF = "expert_bias_E"
"""What Qwen3Moe and gpt-oss have no name for: the adapters leave it out, and so do the maps."""


def require_agreement(family: str, truth: States, out: Path) -> None:
    """From the trainer's state dict to Hugging Face's and back, as the adapter makes them."""
    assets = write_config(family, out / "assets")
    torch.save({n: torch.from_numpy(a) for n, a in truth["trainer"].items()}, out / "trainer.pt")
    options = MapOptions("auto", assets=assets)
    done = convert_to("safetensors", out / "trainer.pt", out / "hf", map=options)
    require_equal(load_file(out / "hf" / "model.safetensors"), truth["hf"])
    known = family.startswith(("deepseek", "kimi"))
    dropped = {n for n in truth["trainer"] if UNKNOWN_TO_HF in n and not known}
    assert done.map is not None
    assert set(done.map.excluded) == dropped

    save_file(truth["hf"], out / "theirs.safetensors")
    back = MapOptions(done.map.name, assets=assets)
    convert_to("dcp", out / "theirs.safetensors", out / "dcp", map=back)
    convert_to("torch-save", out / "dcp", out / "back.pt")
    found = {n: t.numpy() for n, t in flat(load_torch(out / "back.pt")).items()}
    require_equal(found, truth["back"])


def require_equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_as_torchtitan_0_3_mapped_when_it_was_recorded(family: str, out: Path) -> None:
    require_agreement(family, recorded(family), out)


@pytest.mark.parametrize("family", FAMILIES)
def test_as_the_installed_torchtitan_maps(family: str, out: Path) -> None:
    pytest.importorskip("torchtitan")
    require_agreement(family, torchtitan_states.states(family), out)
