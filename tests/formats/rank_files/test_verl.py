"""The files of verl's checkpoint manager, written again for other ranks."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor  # its files hold DTensors
from conftest import bits, case, flat, load_torch
from safetensors.torch import save_file

import ckptool
from ckptool.errors import Unsupported

SOURCE = case("rank_verl").path / "global_step_5" / "actor"
FAMILIES = ("model", "optim", "extra_state")


def state(path: Path, family: str, rank: int, size: int) -> Any:
    return load_torch(path / f"{family}_world_size_{size}_rank_{rank}.pt")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_rank_finds_its_files_and_no_others_are_there(size: int, out: Path) -> None:
    report = ckptool.reshard(SOURCE, out / "r", mesh=str(size), fsync=False)
    assert report.target_format == "verl"
    files = {str(p.relative_to(out / "r")) for p in (out / "r").rglob("*") if p.is_file()}
    ranks = {f"{f}_world_size_{size}_rank_{r}.pt" for f in FAMILIES for r in range(size)}
    assert files == {"fsdp_config.json", "huggingface/config.json", *ranks}
    config = json.loads((out / "r" / "fsdp_config.json").read_text())
    assert config == {"FSDP_version": 2, "world_size": size}
    truth = case("rank_verl").truth
    for rank in range(size):
        extra = state(out / "r", "extra_state", rank, size)
        assert extra["lr_scheduler"] == {"last_epoch": 5}
        assert ("rng" in extra) == (size == 2), "as many ranks find their own states again"
        for family in FAMILIES[:2]:
            tensors = flat(state(out / "r", family, rank, size))
            assert tensors.keys() == {
                name.removeprefix(f"{family}.") for name in truth if name.startswith(family)
            }
            for name, tensor in tensors.items():
                if hasattr(tensor, "device_mesh"):
                    assert tensor.device_mesh.mesh_dim_names == ("fsdp",)
                else:
                    assert bits(tensor) == truth[f"{family}.{name}"]


@pytest.mark.parametrize("by_way_of_dcp", [False, True])
def test_as_many_ranks_find_their_random_states_again(by_way_of_dcp: bool, out: Path) -> None:
    source = out / "source"
    shutil.copytree(SOURCE, source)
    kept: list[dict[str, Any]] = []
    for rank in range(2):
        numpy_state = np.random.RandomState(rank).get_state()
        rng = {
            "cpu": torch.arange(8) + rank,
            "numpy": numpy_state,
            "random": random.Random(rank).getstate(),
        }
        extra: dict[str, Any] = {"lr_scheduler": None, "rng": rng}
        torch.save(extra, source / f"extra_state_world_size_2_rank_{rank}.pt")
        kept.append(extra)
    if by_way_of_dcp:
        ckptool.convert(source, out / "dcp", to="dcp", per_rank=True, fsync=False)
        source = out / "dcp"
    ckptool.reshard(source, out / "r", mesh="2", to="verl", fsync=False)
    for rank, saved in enumerate(kept):
        found, rng = state(out / "r", "extra_state", rank, 2), saved["rng"]
        assert found["lr_scheduler"] is None
        assert torch.equal(found["rng"]["cpu"], rng["cpu"])
        assert found["rng"]["random"] == rng["random"]
        kind, words, *rest = found["rng"]["numpy"]
        assert (kind, rest) == ("MT19937", list(rng["numpy"][2:]))
        assert np.array_equal(words, rng["numpy"][1])
    again = ckptool.reshard(out / "r", out / "again", mesh="3", fsync=False)
    assert {dropped.name for dropped in again.dropped} == {
        f"extra_state.rng.{name}" for name in ("cpu", "numpy", "random")
    }


@pytest.mark.parametrize("mesh", ["2", "fsdp=2"])
def test_on_demand_from_a_dcp_folder(mesh: str, out: Path) -> None:
    names = {"model": {"w": torch.ones(4, 3)}, "optim": {"state": {"w": torch.zeros(4, 3)}}}
    extra = {"lr_scheduler": {"last_epoch": 1}}
    dcp.save({**names, "extra_state": extra}, checkpoint_id=out / "dcp", no_dist=True)
    ckptool.reshard(out / "dcp", out / "r", mesh=mesh, to="verl", fsync=False)
    weight = state(out / "r", "model", 1, 2)["w"]
    assert weight.device_mesh.mesh_dim_names == ("fsdp",)
    assert weight.to_local().shape == (2, 3)
    assert state(out / "r", "extra_state", 1, 2) == extra


def test_an_optimizer_finds_the_state_of_its_parameters_by_way_of_dcp(out: Path) -> None:
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state_dict = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    dcp.save(state_dict, checkpoint_id=out / "dcp", no_dist=True)
    ckptool.reshard(out / "dcp", out / "r", mesh="1", to="verl", fsync=False)
    again = torch.optim.AdamW(model.parameters())
    again.load_state_dict(state(out / "r", "optim", 0, 1))
    for parameter, moments in optimizer.state.items():
        assert torch.equal(again.state[parameter]["exp_avg"].full_tensor(), moments["exp_avg"])


def test_what_verl_has_no_file_for_is_refused(out: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "ema": {"m": torch.ones(2)}}, out / "a.pt")
    with pytest.raises(Unsupported, match=r"ema\.m: verl has only files of model, optim"):
        ckptool.reshard(out / "a.pt", out / "r", mesh="2", to="verl", fsync=False)


@pytest.mark.parametrize("given", [False, True])
def test_config_and_tokenizer_lie_where_verl_opens_them(given: bool, out: Path) -> None:
    """Those beside a DCP folder, and those of ``--hf-assets`` in their place."""
    ckptool.convert(SOURCE, out / "dcp", to="dcp", fsync=False)
    (out / "dcp" / "tokenizer.json").write_text("{}")
    assets = out / "assets"
    assets.mkdir()
    (assets / "config.json").write_text('{"mine": true}')
    options: dict[str, Any] = {"hf_assets": assets} if given else {}
    ckptool.reshard(out / "dcp", out / "r", mesh="1", to="verl", fsync=False, **options)
    files = {str(p.relative_to(out / "r")) for p in (out / "r").rglob("*.json")}
    assert files >= {"huggingface/config.json", "huggingface/tokenizer.json"}
    assert not files & {"config.json", "tokenizer.json"}
    source = assets if given else SOURCE / "huggingface"
    written = (out / "r" / "huggingface" / "config.json").read_bytes()
    assert written == (source / "config.json").read_bytes()


def test_a_model_alone_is_written_as_verls(out: Path) -> None:
    """As from the Hub: the names have no ``model.`` before their own."""
    weights = {"model.embed_tokens.weight": torch.randn(6, 4), "lm_head.weight": torch.ones(6, 4)}
    (out / "hf").mkdir()
    save_file(weights, out / "hf" / "model.safetensors")
    report = ckptool.reshard(out / "hf", out / "r", mesh="2", to="verl", fsync=False)
    assert any("all names are written as model.*" in note for note in report.notes)
    parts = [state(out / "r", "model", rank, 2) for rank in range(2)]
    assert parts[0].keys() == weights.keys()
    whole = {n: torch.cat([part[n].to_local() for part in parts]) for n in weights}
    assert all(torch.equal(whole[name], tensor) for name, tensor in weights.items())
    assert not list((out / "r").glob("optim*"))


@pytest.mark.parametrize(
    ("to", "given", "own"), [("verl", "optimizer", "optim"), ("accelerate", "optim", "optimizer")]
)
def test_an_optimizer_gets_the_name_that_the_format_has(
    to: str, given: str, own: str, out: Path
) -> None:
    moments = {"state": {"a": {"exp_avg": torch.randn(4, 3), "step": torch.tensor(3.0)}}}
    saved = {"model": {"a": torch.randn(4, 3)}, given: moments}
    dcp.save(saved, checkpoint_id=out / "dcp", no_dist=True)
    report = ckptool.reshard(out / "dcp", out / "r", mesh="2", to=to, fsync=False)
    assert f"{given}.* is written as {own}.*" in report.notes
    found = ckptool.open(out / "r")
    assert torch.equal(found.read(f"{own}.state.a.exp_avg"), moments["state"]["a"]["exp_avg"])
    assert found.tensors.keys() == {"model.a", f"{own}.state.a.exp_avg", f"{own}.state.a.step"}


def test_a_model_among_other_names_is_refused(out: Path) -> None:
    dcp.save({"a": torch.ones(4), "step": 3}, checkpoint_id=out / "dcp", no_dist=True)
    with pytest.raises(Unsupported, match="verl has only files of model, optim"):
        ckptool.reshard(out / "dcp", out / "r", mesh="2", to="verl", fsync=False)
