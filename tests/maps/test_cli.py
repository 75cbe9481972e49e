"""Key maps on the command line: output, notes and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import run_command
from torchtitan_states import recorded


@pytest.fixture
def source(tmp_path: Path) -> Path:
    state = {n: torch.from_numpy(a).float() for n, a in recorded("llama3")["trainer"].items()}
    dcp.save(state, checkpoint_id=tmp_path / "step-1000", no_dist=True)
    return tmp_path / "step-1000"


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    (tmp_path / "assets").mkdir()
    config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "assets" / "config.json").write_text(json.dumps(config))
    return tmp_path / "assets"


def test_the_whole_way_in_one_command(source: Path, assets: Path, out: Path) -> None:
    words = ["--to", "safetensors", "--model-only", "--dtype", "bf16", "--hf-assets", assets]
    done = run_command("convert", source, out / "hf", *words, "--map", "torchtitan-llama3")
    assert done.code == 0, done.stderr
    assert "map torchtitan-llama3, torchtitan to Hugging Face" in done.stderr
    assert (out / "hf" / "config.json").exists()


def test_a_dry_run_shows_what_becomes_of_each_tensor(source: Path, out: Path) -> None:
    words = ["--to", "dcp", "--map", "auto", "--dim", "head=4", "--dim", "kv=2", "--dry-run"]
    done = run_command("convert", source, out / "x", *words)
    assert done.code == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if " -> " in line]
    query = next(row for row in rows if "wq" in row[0])
    assert query[0] == "layers.{0,1}.attention.qkv_linear.wq.weight"
    assert query[2:] == ["model.layers.{0,1}.self_attn.q_proj.weight", "[16,", "16]", "permute"]
    assert not (out / "x").exists()


def test_the_report_as_json(source: Path, out: Path) -> None:
    words = ["--map", "torchtitan-llama3", "--dim", "head=4", "--dim", "kv=2", "--json", "-q"]
    done = run_command("reshard", source, out / "x", "--mesh", "2", *words)
    assert done.code == 0, done.stderr
    said = json.loads(done.stdout)["map"]
    assert (said["name"], said["from"], said["to"]) == (
        "torchtitan-llama3",
        "torchtitan",
        "Hugging Face",
    )
    rows = {row["to"]: row for row in said["tensors"]}
    assert rows["model.norm.weight"] == {
        "from": ["norm.weight"],
        "to": "model.norm.weight",
        "dtype": "float32",
        "shape": [16],
        "operation": "rename",
    }


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--map", "bert"], 2, "hint: the nearest are meta-llama,"),
        (["--map", "torchtitan-llama3"], 2, "pass --dim head=N --dim kv=N, or"),
        (["--map", "torchtitan-llama3", "--dim", "head"], 2, "expected NAME=SIZE"),
        (["--map", "torchtitan-llama3", "--dim", "x=1"], 2, "hint: known dims: head, kv"),
        (["--dim", "head=4"], 2, "--map"),
        (["--map", "torchtitan-qwen3", "--inverse"], 2, "has no rule for 20 of the tensors"),
        (["--map", "torchtitan-llama3", "--dim", "head=4", "--dim", "kv=8"], 4, "kv 8"),
    ],
)
def test_refusals(words: list[str], code: int, said: str, source: Path, out: Path) -> None:
    done = run_command("convert", source, out / "x", "--to", "dcp", *words)
    assert done.code == code
    assert said in done.stderr
    assert not (out / "x").exists()


def test_maps_are_listed_and_printed() -> None:
    listed = run_command("maps").stdout
    assert "torchtitan-deepseek-v3" in listed
    assert "meta-llama" in listed
    printed = run_command("maps", "meta-llama").stdout
    assert 'from = "output.weight"' in printed
    as_json = json.loads(run_command("maps", "meta-llama", "--json").stdout)
    assert as_json["maps"][0]["toml"] == printed


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("x = [", [], "Invalid value"),
        ('[[rule]]\nfrom = "a"\nto = "b"\noperation = "t"', [], "'operation' is not one of"),
        (
            '[[rule]]\nfrom = "a"\nto = "b"',
            [],
            "m.toml (one side to the other) has no rule for 1 of",
        ),
        (
            '[[rule]]\nfrom = "{t} [(x y)]"\nto = "{t} [(y x)]"',
            ["--no-inverse"],
            "hint: --dim x=N --dim y=N",
        ),
        (
            '[[rule]]\nfrom = "{t} [(x y)]"\nto = "{t} [(y x)]"',
            ["--no-inverse", "--dim", "z=2"],
            "known dims: ",
        ),
    ],
)
def test_maps_of_ones_own_that_do_not_work(
    text: str, words: list[str], said: str, tmp_path: Path
) -> None:
    torch.save({"0": torch.arange(6)}, tmp_path / "a.pt")
    (tmp_path / "m.toml").write_text(text)
    line = ["convert", tmp_path / "a.pt", tmp_path / "x", "--to", "dcp"]
    done = run_command(*line, "--map", tmp_path / "m.toml", *words)
    assert (done.code, said in done.stderr) == (2, True), done.stderr


def test_a_dim_of_ones_own_map_needs_no_table(tmp_path: Path) -> None:
    torch.save({"0": torch.arange(6)}, tmp_path / "a.pt")
    (tmp_path / "m.toml").write_text('[[rule]]\nfrom = "{t} [(x y)]"\nto = "{t} [(y x)]"')
    line = ["convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "torch-save", "--dim", "x=2"]
    assert run_command(*line, "--map", tmp_path / "m.toml", "--no-inverse").code == 0
    assert torch.load(tmp_path / "b.pt")["0"].tolist() == [0, 3, 1, 4, 2, 5]
