"""The files that Lightning opens: its folder with ``meta.pt``, or a checkpoint of one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from conftest import bits, case

import ckptool
from ckptool.errors import Unsupported

SOURCE = case("dcp_lightning").path


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def flat(value: Any) -> Any:
    """Return a nested value whose tensors are their bits, so that two can be compared."""
    if isinstance(value, dict):
        return {key: flat(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [flat(inner) for inner in value]
    return bits(value) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("mesh", ["1", "3"])
def test_a_reshard_has_the_rest_in_meta_pt(mesh: str, out: Path) -> None:
    ckptool.reshard(SOURCE, out / "r", mesh=mesh, fsync=False)
    ranks = {f"__{rank}_0.distcp" for rank in range(int(mesh))}
    assert {path.name for path in (out / "r").iterdir()} == {".metadata", "meta.pt", *ranks}
    assert flat(load(out / "r" / "meta.pt")) == flat(load(SOURCE / "meta.pt"))
    saved = torch.distributed.checkpoint.FileSystemReader(out / "r").read_metadata()
    assert not [name for name in saved.state_dict_metadata if name.startswith("meta")]


def test_one_file_has_the_state_of_each_optimizer_in_a_list(out: Path) -> None:
    ckptool.convert(SOURCE, out / "r.ckpt", fsync=False)
    written, meta = flat(load(out / "r.ckpt")), flat(load(SOURCE / "meta.pt"))
    assert written.keys() == {"state_dict", "optimizer_states", *meta}
    assert {name: written[name] for name in meta} == meta
    truth = case("dcp_lightning").truth
    (optimizer,) = written["optimizer_states"]
    for name, inner in written["state_dict"].items():
        assert inner == truth[f"state_dict.{name}"]
    assert optimizer["param_groups"][0]["params"] == list(optimizer["state"])
    for name, state in optimizer["state"].items():
        for key, inner in state.items():
            assert inner == truth[f"optimizer_0.state.{name}.{key}"]


def test_what_fabric_saved_keeps_its_names(out: Path) -> None:
    """Fabric's users name the model and the optimizer, and no version lies beside them."""
    state = {"net": {"w": torch.ones(2)}, "optimizer_0": {"state": {"w": torch.zeros(2)}}}
    torch.distributed.checkpoint.save(state, checkpoint_id=out / "f", no_dist=True)
    torch.save({"step": 3}, out / "f" / "meta.pt")
    ckptool.convert(out / "f", out / "f.ckpt", fsync=False)
    assert flat(load(out / "f.ckpt")) == flat(state | {"step": 3})


def test_two_values_of_one_place_are_refused(out: Path) -> None:
    state = {"net": {"w": torch.ones(2)}}
    torch.distributed.checkpoint.save(state, checkpoint_id=out / "f", no_dist=True)
    torch.save({"net": 3, "a": 1}, out / "f" / "meta.pt")
    with pytest.raises(Unsupported, match=r"meta\.net: 'net' is also beside meta\.pt"):
        ckptool.convert(out / "f", out / "f.ckpt", fsync=False)
