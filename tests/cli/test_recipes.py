"""Every command of the recipes runs as written, on a run that torch saved."""

from __future__ import annotations

import json
import re
import shlex
import types
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

import ckptool
from ckptool.cli.app import app

PAGE = (Path(ckptool.__file__).parent / "docs" / "recipes.md").read_text()
COMMANDS = re.findall(r"^\$ ckptool (.*)$", PAGE, re.M)
OF_THIS_RUN = re.compile(r"(^| )(runs/?|runs/step-[12]000|export/)( |$)")
ELSEWHERE = ("--experts", "--peft-adapter", "torchrun")
"""What needs another model, or several processes; these have tests of their own."""
RUN = [c for c in COMMANDS if OF_THIS_RUN.search(c) and not any(word in c for word in ELSEWHERE)]
DIFFERENT = ("diff runs/step-1000 model", "diff runs/step-1000 runs/step-2000 --values")
"""Questions whose answer here is that something differs."""
SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def model() -> dict[str, torch.Tensor]:
    """Make a small Llama under torchtitan's names."""
    shapes = {"tok_embeddings": (128, 64), "output": (128, 64), "norm": (64,)}
    for layer in range(2):
        attention = {"wq": (64, 64), "wk": (32, 64), "wv": (32, 64), "wo": (64, 64)}
        forward = {"w1": (96, 64), "w2": (64, 96), "w3": (96, 64)}
        shapes |= {f"layers.{layer}.attention.{n}": s for n, s in attention.items()}
        shapes |= {f"layers.{layer}.feed_forward.{n}": s for n, s in forward.items()}
        shapes |= {f"layers.{layer}.{n}": (64,) for n in ("attention_norm", "ffn_norm")}
    return {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    for step in (1000, 2000):
        torch.manual_seed(step)
        weights = model()
        moments = {name: {"exp_avg": torch.randn_like(w)} for name, w in weights.items()}
        state = {
            "model": weights,
            "optimizer": {"state": moments, "param_groups": [{"lr": 3e-4}]},
            "args": types.SimpleNamespace(seq_len=128),
            "step": step,
        }
        dcp.save(state, checkpoint_id=folder / "runs" / f"step-{step}", no_dist=True)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES, **HEADS}
    for name in ("model", "assets"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "assets" / "tokenizer.json").write_text("{}")
    return folder


ANSWERS = {
    "runs/step-1000": "step    1,000",
    "inspect runs/step-1000 --depth 3 --sort size": "model.layers.0",
    "inspect runs/step-1000 --shards 'model.layers.0.*'": "__0_0.distcp",
    "runs/step-1000 attention.wq": "model.layers.1.attention.wq.weight",
    "inspect runs/step-1000 --stats model.layers.0": "nan",
    "inspect runs/step-1000 --values": "args.seq_len",
    "inspect runs/step-1000 --values | grep '\\.lr '": "0.0003",
    "runs/": "optimizer",
    "verify runs/step-1000 --quick": "OK: ",
    "verify runs/step-1000 --like model/config.json": "21 of 21 tensors of model/config.json",
    "diff runs/step-1000 model/config.json": "only in A",
    "extract runs/step-1000 'model.layers.0.attention.wq.weight[0:4, :8]'": "[4, 8] of [64, 64]",
    "diff runs/step-1000 runs/step-2000 --values": "DIFFERENT: 42 tensors changed",
    "convert runs/step-1000 half/ --to dcp --dtype bf16": "cast: 21 tensors",
    "convert runs/step-1000 renamed/ --to dcp --rename '^model\\.=policy.'": "wrote renamed",
    "convert runs/step-1000 model.pt --model-only": "excluded: 21 tensors",
    "reshard runs/step-1000 on-8/ --mesh 8": "for mesh 8",
    "merge average/ --average runs/ --last 2 --to dcp": "21 tensors = (step-1000 + step-2000) / 2",
    "merge whole/ runs/step-2000 --take 'output=runs/step-1000' --to dcp": "1 tensor = step-1000",
    "prune runs --keep-last 3 --keep-every 1000": "2 good steps are kept",
}
"""What is in the answer to some of the questions."""


@pytest.mark.parametrize("line", RUN)
def test_a_recipe_answers(line: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace)
    words = shlex.split(re.split(r" [|>] ", line)[0])
    done = CliRunner().invoke(app, words)
    assert done.exit_code == (1 if line.startswith(DIFFERENT) else 0), (done.output, done.exception)
    assert ANSWERS.get(line, "") in done.output
    assert "EQUAL: " in done.output or "--against" not in line


def test_the_recipes_find_a_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        "inspect runs/step-1000 --stats model.layers.0",
        "verify runs/step-1000 --fail-nonfinite",
    )
    assert set(lines) <= set(RUN)
    weights = model()
    weights["layers.0.attention.wk.weight"][3, 5] = torch.nan
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "runs" / "step-1000", no_dist=True)
    monkeypatch.chdir(tmp_path)
    shown, verified = (CliRunner().invoke(app, line.split()) for line in lines)
    rows = [line.split() for line in shown.stdout.splitlines() if "wk.weight" in line]
    assert [row[-2:] for row in rows] == [["1", "0"]], shown.output
    assert (shown.exit_code, verified.exit_code) == (0, 1)
    assert "model.layers.0.attention.wk.weight: 1 NaN" in verified.stdout
    assert "--fail-nonfinite" not in verified.stdout


def test_the_recipes_have_what_is_expected_of_them() -> None:
    assert set(ANSWERS) <= set(RUN)
