"""Several ranks save together: torch loads each one's output, equal to its own saves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import bits, flat, load_dcp, on_ranks

import ckptool

WORKERS = Path(__file__).with_name("save_workers.py")
REFUSED = {
    "again": r"Unsupported: rank 0: .*already exists",
    "one file": "Unsupported: model.rows: this process holds only a part of its 45 .*to='dcp'",
    "values": "seed: ranks 0 and 1 hold different values",
    "kinds": "seed: a tensor on rank 0, a value on rank 1",
    "places": r"rng.seed: at \['rng', 'seed'\] on rank 0, \['rng.seed'\] on rank 1",
    "replicas": r"buffer .*: rank 0 and rank 2 hold different values",
    "shapes": r"buffer: float32 \[1\] on rank 0, float32 \[2\] on rank 3",
    "partial": "a partial placement",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("saved")
    ended = on_ranks(4, [WORKERS, out])
    assert [one.code for one in ended] == [0] * 4, ended[0].stderr
    return out


def test_torch_finds_what_it_saves_itself(saved: Path) -> None:
    ours, theirs = (load_dcp(saved / name) for name in ("ours", "theirs"))
    found = {name: bits(tensor) for name, tensor in flat(ours).items()}
    assert found == {name: bits(tensor) for name, tensor in flat(theirs).items()}
    assert {"model.stage0", "model.stage1", "model.short"} <= found.keys()
    for name, whole in torch.load(saved / "whole.pt").items():
        assert found[f"model.{name}"] == bits(whole)
    assert (ours["step"], str(ours["optimizer"]["betas"])) == (4, "(0.9, nan)")


def test_ranks_that_hold_no_shards_save_with_the_others(saved: Path) -> None:
    found = load_dcp(saved / "stages-dcp")
    assert {n: tuple(t.shape) for n, t in found.items() if not t.numel()} == {"none": (0, 4)}
    assert found["first"].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert found["second"].tolist() == [0, 1, 2]
    assert ckptool.diff(saved / "stages-dcp", saved / "stages-dcp-safetensors", values=True).ok
    assert ckptool.open(saved / "alone.safetensors").tensors.keys() == {"alone"}


def test_each_rank_writes_its_own_shards_once(saved: Path) -> None:
    def boxes(name: str) -> Any:
        entries = ckptool.open(saved / name).tensors.values()
        return {e.name: sorted((c.rank, str(c.box)) for c in e.chunks) for e in entries}

    ours, theirs = boxes("ours"), boxes("theirs")
    cut = ["model.rows", "model.both"]
    assert {name: ours[name] for name in cut} == {name: theirs[name] for name in cut}
    written = [rank for chunks in ours.values() for rank, _ in chunks]
    assert sorted({*written}) == [0, 1, 2, 3]
    assert len(ours["model.hybrid"]) == 2
    assert ckptool.diff(saved / "ours", saved / "theirs", values=True).ok


@pytest.mark.parametrize("what", REFUSED)
def test_all_ranks_refuse_alike(what: str, saved: Path) -> None:
    ends = {json.loads((saved / f"rank-{r}.json").read_text())[what] for r in range(4)}
    assert len(ends) == 1
    assert re.search(REFUSED[what], ends.pop())
    assert {p.name for p in saved.iterdir()} == {
        "alone.safetensors", "ours", "stages-dcp", "stages-dcp-safetensors", "theirs", "whole.pt",
        *(f"rank-{r}.json" for r in range(4)),
    }  # fmt: skip
