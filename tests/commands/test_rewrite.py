"""``--dtype`` on checkpoints of training runs, and without torch; what is renamed is counted."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import case, convert_to, load_torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import ckptool
from ckptool.api.checkpoint import open as open_checkpoint
from ckptool.cli.app import app
from ckptool.core.casts import Casts
from ckptool.core.dtype import BY_NAME
from ckptool.core.state_category import state_category
from ckptool.errors import Unsupported, UsageError

BF16 = BY_NAME["bfloat16"]
RUNS = [
    "dcp_fsdp2_tp",
    "deepspeed_zero_2",
    "deepspeed_zero_3",
    "deepspeed_universal",
    "megatron_torch",
    "megatron_torch_dist",
    "megatron_local",
    "rank_verl",
    "torch_checkpointing",
    "bytecheckpoint_flat",
    "accelerate_folders",
]
STEP = struct.pack("<f", 4001.0)


@pytest.mark.parametrize("name", RUNS)
def test_only_the_model_is_cast(name: str) -> None:
    source = case(name)
    one, plain = open_checkpoint(source.path, dtype="bf16"), open_checkpoint(source.path)
    beside = 0
    for tensor, entry in plain.tensors.items():
        of_model = state_category(one.tensors[tensor]) == "model"
        beside += not of_model
        floating = of_model and entry.dtype.kind == "float" and entry.shape
        assert one.tensors[tensor].dtype.name == ("bfloat16" if floating else entry.dtype.name)
        if not of_model:
            assert torch.equal(one.read(tensor), plain.read(tensor))
    assert beside


def with_step(source: Path, folder: Path) -> Path:
    """A copy of a run whose float step counters are 4001, which bfloat16 has no number for."""
    shutil.copytree(source, folder)
    old = {struct.pack("<f", float(step)) for step in range(1, 100)}
    for path in [p for p in folder.rglob("*.pt") if zipfile.is_zipfile(p)]:
        with zipfile.ZipFile(path) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in records.items():
                archive.writestr(name, STEP if "/data/" in name and data in old else data)
    return folder


@pytest.mark.parametrize(
    "name", ["deepspeed_zero_2", "deepspeed_zero_3", "torch_checkpointing", "rank_verl"]
)
def test_a_step_counter_stays_what_it_is_in_files_of_ranks(name: str, out: Path) -> None:
    source = with_step(case(name).path, out / "run")
    convert_to("torch-save", source, out / "m.pt", casts=Casts(BF16))
    one = open_checkpoint(out / "m.pt")
    steps = [n for n in one.tensors if "step" in n.split(".")]
    assert steps
    for step in steps:
        assert one.read(step).numpy().tobytes() == STEP


def state() -> dict[str, Any]:
    moments = {"exp_avg": torch.randn(6, 4), "step": torch.tensor(4001.0)}
    groups = [{"lr": 1e-3, "params": ["w"]}]
    return {"model": {"w": torch.randn(6, 4)}, "optim": {"state": {"w": moments}, "g": groups}}


NESTED = {
    "optimizer": lambda s: {"model": s["model"], "optimizer": s["optim"]},
    "state_dicts": lambda s: {"model_state_dict": s["model"], "optimizer_state_dict": s["optim"]},
    "app": lambda s: {"app": s},
    "composer": lambda s: {"state": {"model": s["model"], "optimizers": {"Adam": s["optim"]}}},
    "megatron": lambda s: {
        "embedding.w": s["model"]["w"],
        "optimizer.state.exp_avg.embedding.w": s["optim"]["state"]["w"]["exp_avg"],
        "optimizer.state.step": torch.tensor(4001.0),
    },
}


@pytest.mark.parametrize("target", ["dcp", "torch-save", "safetensors"])
@pytest.mark.parametrize("shape", NESTED)
def test_however_a_trainer_nests_its_state(shape: str, target: str, out: Path) -> None:
    whole = NESTED[shape](state())
    dcp.save(whole, checkpoint_id=out / "run", no_dist=True)
    path = out / {"dcp": "d", "torch-save": "m.pt", "safetensors": "m.safetensors"}[target]
    report = convert_to(target, out / "run", path, casts=Casts(BF16))
    assert report.cast == {"float32": 1}
    assert any("1 tensor (" in note and "exp_avg" in note for note in report.notes)
    one, plain = open_checkpoint(path), open_checkpoint(out / "run")
    for name, entry in plain.tensors.items():
        values = plain.read(name)
        if "exp_avg" not in name and entry.shape:
            values = values.to(torch.bfloat16)
        assert one.read(name).dtype == values.dtype
        assert torch.equal(one.read(name), values)


def test_what_a_glob_asks_for_is_cast_too(out: Path) -> None:
    dcp.save(NESTED["app"](state()), checkpoint_id=out / "run", no_dist=True)
    asked = ["bf16", "*exp_avg=fp16"]
    ckptool.convert(out / "run", out / "m.pt", to="torch-save", dtype=asked, fsync=False)
    kinds = {n: e.dtype.name for n, e in ckptool.open(out / "m.pt").tensors.items()}
    assert kinds == {
        "app.model.w": "bfloat16",
        "app.optim.state.w.exp_avg": "float16",
        "app.optim.state.w.step": "float32",
    }
    assert {n: e.dtype.name for n, e in ckptool.open(out / "run", dtype=asked).tensors.items()} == (
        kinds
    )


def test_masters_that_are_chosen_as_the_model_are_cast(out: Path) -> None:
    options = {"select": ("fp32.*",), "model_only": True, "casts": Casts(BF16)}
    convert_to("safetensors", case("deepspeed_zero_2").path, out / "m", **options)
    found = load_file(out / "m" / "model.safetensors")
    assert {values.dtype for values in found.values()} == {torch.bfloat16}


# Comparing and loading go by the same rule


def test_a_step_counter_that_was_cast_is_a_difference(out: Path) -> None:
    whole = NESTED["optimizer"](state())
    torch.save(whole, out / "a.pt")
    whole["model"]["w"] = whole["model"]["w"].bfloat16()
    torch.save(whole, out / "b.pt")
    assert ckptool.compare(out / "a.pt", out / "b.pt", cast=True).verify.ok
    moments = whole["optimizer"]["state"]["w"]
    moments |= {name: values.bfloat16() for name, values in moments.items()}
    torch.save(whole, out / "c.pt")
    found = ckptool.compare(out / "a.pt", out / "c.pt", cast=True).verify
    assert [(finding.code, finding.count) for finding in found.findings] == [("dtype-differs", 2)]


def test_loading_casts_no_step_counter(out: Path) -> None:
    torch.save(NESTED["optimizer"](state()), out / "a.pt")
    whole = NESTED["optimizer"](state())
    whole["model"]["w"] = whole["model"]["w"].bfloat16()
    ckptool.load(out / "a.pt", whole, cast=True)
    assert whole["optimizer"]["state"]["w"]["step"] == 4001.0
    moments = whole["optimizer"]["state"]["w"]
    moments["step"] = moments["step"].bfloat16()
    with pytest.raises(Unsupported, match="step") as caught:
        ckptool.load(out / "a.pt", whole, cast=True)
    assert "never cast" in (caught.value.hint or "")


# Without torch

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from ckptool.cli import main
sys.argv = ["ckptool", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(
    ("dtype", "code"), [("bf16", 0), ("fp16", 0), ("fp32", 0), ("float8_e4m3fn", 4)]
)
def test_casts_need_no_torch(dtype: str, code: int, out: Path) -> None:
    source = case("dcp_fsdp2_tp").path
    words = ["convert", source, out / "m", "--to", "safetensors", "--model-only", "--dtype", dtype]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    assert code == 0 or "needs torch" in done.stderr


def test_what_is_copied_as_it_is_needs_no_numpy(out: Path) -> None:
    save_file({"w": torch.zeros(4)}, out / "m.safetensors")
    words = ["convert", out / "m.safetensors", out / "m.pt", "--to", "torch-save", "--no-verify"]
    without = WITHOUT_TORCH.replace("torch", "numpy")
    done = subprocess.run(
        [sys.executable, "-c", without, *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(out / "m.pt")["w"], torch.zeros(4))


def test_what_is_so_already_is_not_a_cast_and_needs_nothing(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": torch.zeros(4).to(torch.float8_e4m3fn)}, out / "m.safetensors")
    monkeypatch.setitem(sys.modules, "torch", None)
    eight = BY_NAME["float8_e4m3fn"]
    report = convert_to("safetensors", out / "m.safetensors", out / "n", casts=Casts(eight))
    assert report.cast == {}


def test_what_is_renamed_is_counted(tmp_path: Path) -> None:
    one = torch.ones(1)
    torch.save({"module.w": one, "module.b": one.clone(), "module.n": 1}, tmp_path / "m.pt")
    torch.save({"w": one, "n": 1}, tmp_path / "other.pt")
    command = ["convert", str(tmp_path / "m.pt"), str(tmp_path / "out.pt"), "--rename", "^module.="]
    done = CliRunner().invoke(app, [*command, "--dry-run"])
    assert "  renamed: 2 tensors, 1 value\n" in done.stdout
    done = CliRunner().invoke(app, [*command, "--json"])
    assert json.loads(done.stdout)["renamed"] == {"tensors": 2, "values": 1}
    command[1] = str(tmp_path / "other.pt")
    done = CliRunner().invoke(app, [*command, "--overwrite"])
    assert isinstance(done.exception, UsageError)
    assert "matches none of 2 names" in str(done.exception)


def test_an_exact_name_is_cast_alone(tmp_path: Path) -> None:
    torch.save({"x[0]": torch.ones(2), "x0": torch.ones(2)}, tmp_path / "m.pt")
    ckptool.convert(tmp_path / "m.pt", tmp_path / "o.pt", dtype=["x[0]=bf16"])
    found = {name: str(each.dtype) for name, each in load_torch(tmp_path / "o.pt").items()}
    assert found == {"x[0]": "torch.bfloat16", "x0": "torch.float32"}
