"""Seeded damage to real checkpoints: an error, or the very tensors that were saved.

Formats without a checksum cannot notice a flip in tensor data; for these the row says which bytes
may change unseen.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from attack_harness import Outcome, attack_all
from trials import trials

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.trials
COUNT = trials(24)
"""Mutations of a format."""
SEED = 20260


def state() -> dict[str, object]:
    base = torch.arange(40, dtype=torch.float32)
    return {
        "w": base[:24].reshape(4, 6).clone(),
        "view": base[3:33].reshape(5, 6).t(),
        "half": torch.linspace(-2, 2, 16).to(torch.bfloat16),
        "fp8": torch.linspace(-2, 2, 16).to(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "step": 12,
        "betas": [0.9, 0.99],
    }


def zip_file(folder: Path) -> Path:
    torch.save(state(), folder / "x.pt")
    return folder / "x.pt"


def legacy_file(folder: Path) -> Path:
    kept = {name: value for name, value in state().items() if name != "fp8"}
    torch.save(kept, folder / "x.pt", _use_new_zipfile_serialization=False)
    return folder / "x.pt"


def dcp_folder(folder: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    dcp.save(state(), checkpoint_id=str(folder / "ck"), no_dist=True)
    return folder / "ck"


def safetensors_file(folder: Path) -> Path:
    save_file = pytest.importorskip("safetensors.torch").save_file
    tensors = {n: v.contiguous() for n, v in state().items() if isinstance(v, torch.Tensor)}
    save_file(tensors, str(folder / "x.safetensors"))
    return folder / "x.safetensors"


def rank_files(folder: Path) -> Path:
    """Two ranks' files with real DTensors, each made by a process group of one fake rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    (folder / "ck").mkdir()
    for rank in range(2):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
            local = torch.arange(12, dtype=torch.float32).reshape(3, 4) + 12 * rank
            whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            torch.save({"w": whole, "b": torch.ones(3)}, folder / "ck" / f"checkpoint_{rank}.pt")
        finally:
            torch.distributed.destroy_process_group()
    return folder / "ck"


@dataclass(frozen=True)
class Row:
    """``unseen`` says whether a changed value in this mutated file may pass unnoticed."""

    make: Callable[[Path], Path]
    unseen: Callable[[str], bool]


ROWS = {
    "zip": Row(zip_file, lambda file: False),
    "legacy": Row(legacy_file, lambda file: True),
    "dcp": Row(dcp_folder, lambda file: file == ".metadata"),
    "safetensors": Row(safetensors_file, lambda file: True),
    "ranks": Row(rank_files, lambda file: False),
}


def mutated(data: bytes, dice: random.Random) -> tuple[str, bytes]:
    spot = dice.randrange(len(data))
    kind = dice.choice(["flip", "flip", "flip", "byte", "cut", "zero", "insert", "drop"])
    if kind == "flip":
        return f"bit at {spot}", data[:spot] + bytes([data[spot] ^ 1 << dice.randrange(8)]) + data[
            spot + 1 :
        ]
    if kind == "byte":
        return f"byte at {spot}", data[:spot] + bytes([dice.randrange(256)]) + data[spot + 1 :]
    if kind == "cut":
        return f"cut at {spot}", data[:spot]
    if kind == "zero":
        return f"zeros at {spot}", data[:spot] + bytes(len(data[spot : spot + 16])) + data[
            spot + 16 :
        ]
    if kind == "insert":
        return f"one more at {spot}", data[:spot] + bytes([dice.randrange(256)]) + data[spot:]
    return f"one less at {spot}", data[:spot] + data[spot + 1 :]


def copies(source: Path, folder: Path, count: int) -> list[tuple[str, str, Path]]:
    """(what, file, mutated copy) of a checkpoint, a file or a folder."""
    dice = random.Random(f"{SEED} {source.name}")
    found = []
    files = [source] if source.is_file() else sorted(source.iterdir())
    weights = [file.stat().st_size for file in files]
    for number in range(count):
        victim = dice.choices(files, weights)[0]
        what, data = mutated(victim.read_bytes(), dice)
        copy = folder / "src" / str(number) / source.name
        copy.parent.mkdir(parents=True)
        if source.is_file():
            copy.write_bytes(data)
        else:
            shutil.copytree(source, copy)
            (copy / victim.name).write_bytes(data)
        found.append((what, victim.name, copy))
    return found


@pytest.mark.parametrize("name", list(ROWS))
def test_damage(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    source = row.make(tmp_path)
    mutations = copies(source, tmp_path / "mutated", COUNT)
    truth, *outcomes = attack_all(
        [source, *(copy for _, _, copy in mutations)], to=("safetensors",)
    )
    assert truth.kind == "ok", str(truth)
    wrong = []
    for (what, file, _), outcome in zip(mutations, outcomes, strict=True):
        if not outcome.answered:
            wrong.append(f"{file}, {what}: {outcome}")
        elif outcome.kind == "ok" and outcome.tensors != truth.tensors and not row.unseen(file):
            wrong.append(f"{file}, {what}: {changed(truth, outcome)}")
    assert wrong == []


def changed(truth: Outcome, found: Outcome) -> str:
    names = truth.tensors.keys() | found.tensors.keys()
    differing = [n for n in sorted(names) if truth.tensors.get(n) != found.tensors.get(n)]
    return f"unseen change of {differing}"
