"""State that each rank holds for itself: dropped if it is meaningless elsewhere, or refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import bits, case, read_back
from typer.testing import CliRunner

import ckptool
from ckptool.cli.app import app
from ckptool.errors import Unsupported

RANDOM, NUMBER = "random number state", "rank number"
ACCELERATE = {
    f"random_states.{name}": RANDOM
    for name in ("torch_manual_seed", "random_state", "numpy_random_seed")
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("accelerate_folders", ACCELERATE),
        ("accelerate_rank_files", ACCELERATE),
        ("accelerate_whole", ACCELERATE),
        ("bytecheckpoint_ddp", {"extra_state.r": NUMBER}),
        ("rank_experimental", {"rank": NUMBER}),
        ("rank_verl", {"extra_state.rng.cpu": RANDOM}),
    ],
)
def test_what_frameworks_save_is_resharded(
    name: str, expected: dict[str, str], tmp_path: Path
) -> None:
    """By default; all that is dropped is said, and all else comes out bit for bit."""
    one = case(name)
    source = ckptool.open(one.path, per_rank=True)
    report = ckptool.reshard(one.path, tmp_path / "out", mesh="3", to="dcp")
    assert {state.name: state.kind for state in report.dropped} == expected
    gone = {f"{state.name}@rank{rank}" for state in report.dropped for rank in state.ranks}
    kept = ckptool.open(tmp_path / "out")
    assert set(kept.tensors) == set(source.tensors) - gone
    assert set(kept.objects) == set(source.objects) - gone
    found = read_back("dcp", tmp_path / "out")
    assert found == {name: value for name, value in one.truth.items() if name in found}
    assert found.keys() == kept.tensors.keys()


def rank_files(folder: Path, extra: Any) -> Path:
    folder.mkdir()
    for rank in range(2):
        state = {"model": {"weight": torch.ones(4)}, "step": 7, **extra(rank)}
        torch.save(state, folder / f"model_rank{rank}.pt")
    return folder


def generators(seed: int) -> dict[str, Any]:
    """Return the states of generators, as verl and transformers save them."""
    return {
        "cpu": torch.Generator().manual_seed(seed).get_state(),
        "numpy": np.random.RandomState(seed).get_state(),
        "random": random.Random(seed).getstate(),
    }


def test_generators_that_agree_go_with_those_that_do_not(tmp_path: Path) -> None:
    """verl's loader takes all of the states in ``rng``, or none where ``rng`` is missing."""

    def extra(rank: int) -> dict[str, Any]:
        states = generators(rank) | {"cpu": generators(0)["cpu"], "step": 3}
        return {"extra_state": {"rng": states, "lr": 0.5}}

    source = rank_files(tmp_path / "ranks", extra)
    report = ckptool.reshard(source, tmp_path / "out", mesh="1", to="dcp")
    names = {state.name: state.ranks for state in report.dropped}
    assert names == {
        "extra_state.rng.numpy": (0, 1),
        "extra_state.rng.random": (0, 1),
        "extra_state.rng.cpu": (),
    }
    written = ckptool.open(tmp_path / "out")
    assert set(written.tensors) == {"model.weight"}
    assert written.objects == {"extra_state.lr": 0.5, "extra_state.rng.step": 3, "step": 7}


def test_generators_are_known_by_their_values(tmp_path: Path) -> None:
    def extra(rank: int) -> dict[str, Any]:
        states = generators(rank)
        return {"meta": {"np": states["numpy"], "py": states["random"]}}

    source = rank_files(tmp_path / "ranks", extra)
    report = ckptool.reshard(source, tmp_path / "out", mesh="1")
    assert {state.kind for state in report.dropped} == {RANDOM}


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (lambda rank: {"dataloader": {"position": 10 + rank}}, "dataloader.position"),
        (lambda rank: {"module": {"rng": torch.full((4,), rank)}}, "module.rng"),
        (lambda rank: {"optimizer": {"rng": torch.full((4,), rank)}}, "optimizer.rng"),
        (lambda rank: {"rank": 1 - rank}, "rank"),
        (lambda rank: {"meta": {"pair": (3, (rank,), None)}}, "meta.pair"),
    ],
    ids=["position", "buffer", "optimizer", "another rank", "tuple"],
)
def test_what_could_matter_is_refused(extra: Any, named: str, tmp_path: Path) -> None:
    """Alone it is named, not the random number states beside it."""
    source = rank_files(tmp_path / "ranks", lambda r: {"rng_state": generators(r), **extra(r)})
    with pytest.raises(Unsupported, match=f"1 value of the source differs .*: {named}\\nhint"):
        ckptool.reshard(source, tmp_path / "out", mesh="1")
    assert not (tmp_path / "out").exists()
    ckptool.reshard(source, tmp_path / "out", mesh="1", rank_state="drop")


def test_states_that_all_ranks_share_are_kept(tmp_path: Path) -> None:
    source = rank_files(tmp_path / "ranks", lambda rank: {"rng_state": generators(5)})
    report = ckptool.reshard(source, tmp_path / "out", mesh="1", to="dcp")
    assert report.dropped == ()
    state = generators(5)["cpu"]
    assert read_back("dcp", tmp_path / "out")["rng_state.cpu"] == bits(state)


def test_it_is_reported_on_the_screen_and_in_the_json(tmp_path: Path) -> None:
    words = ["reshard", str(case("rank_verl").path), str(tmp_path / "out"), "--mesh", "3"]
    done = CliRunner().invoke(app, [*words, "--dry-run"])
    note = "note: dropped 1 random number state of the source's ranks 0,1: extra_state.rng.cpu"
    assert note in done.stderr.splitlines()
    report = json.loads(CliRunner().invoke(app, [*words, "--json", "-q"]).stdout)
    name = "extra_state.rng.cpu"
    assert report["dropped"] == [{"name": name, "kind": RANDOM, "ranks": [0, 1]}]


@pytest.mark.parametrize(("mesh", "is_said"), [("1", False), ("2", True)])
def test_positions_that_another_mesh_cannot_use_are_named(
    mesh: str, is_said: bool, tmp_path: Path
) -> None:
    state: dict[str, Any] = {"model": {"w": torch.ones(4)}, "train_state": {"step": 7}}
    state["dataloader"] = {"dp_rank_0": b"", "world_size": 1}
    dcp.save(state, checkpoint_id=tmp_path / "in", no_dist=True)
    report = ckptool.reshard(tmp_path / "in", tmp_path / "out", mesh=mesh, dry_run=True)
    note = "dataloader: positions of 1 data-parallel rank: with more or fewer, torchtitan resumes"
    assert [str(each).startswith(note) for each in report.notes] == [True] * is_said
