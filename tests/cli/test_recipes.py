"""Every recipe runs as written, in a folder that has nothing but what the recipe names."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import Ended, case, run_command

import ckptool

PAGE = (Path(ckptool.__file__).parent / "docs" / "recipes.md").read_text()
COMMAND = re.compile(r"^\$ (?:step=\$\()?ckptool (.*?)(?:\) && .*)?$|^\$ (cp .*)$", re.M)
ELSEWHERE = ("inspect s3://", "bench ", "verify runs --follow")
"""What needs a store, or minutes, or never ends; these have tests of their own."""
DIFFERENT = ("diff runs/step-1000 model", "diff runs/step-1000 runs/step-2000 --values")
"""Questions whose answer here is that something differs."""
SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def recipes() -> dict[str, list[str]]:
    """The commands by the question that they answer."""
    sections = re.split(r"^## (.*)$", PAGE, flags=re.M)[1:]
    found = {}
    for title, text in zip(sections[::2], sections[1::2], strict=True):
        lines = ["".join(groups) for groups in COMMAND.findall(text)]
        found[title] = [line for line in lines if not line.startswith(ELSEWHERE)]
    return found


RECIPES = recipes()


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


def make_run(path: Path) -> None:
    """Save two steps of a run."""
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
        dcp.save(state, checkpoint_id=path / f"step-{step}", no_dist=True)


def make_experts(path: Path) -> None:
    """Save a step of a mixture of experts as transformers 5 has it in memory."""
    mlp = "model.model.layers.0.mlp"
    shapes = {"experts.gate_up_proj": (3, 24, 16), "experts.down_proj": (3, 16, 12)}
    state = {f"{mlp}.{name}": torch.randn(shape) for name, shape in shapes.items()}
    state[f"{mlp}.gate.weight"] = torch.randn(3, 16)
    dcp.save(state, checkpoint_id=path / "step-1000", no_dist=True)


def make_adapter(path: Path) -> None:
    """Save a step of a model with a LoRA adapter, and the adapter's config beside."""
    query = "base_model.model.model.layers.0.self_attn.q_proj"
    parts = {"base_layer": (16, 16), "lora_A.default": (4, 16), "lora_B.default": (16, 4)}
    state = {f"{query}.{part}.weight": torch.randn(shape) for part, shape in parts.items()}
    for step in ("global_step_100/actor", "step-100"):
        dcp.save({"model": state}, checkpoint_id=path / step, no_dist=True)


def make_config(path: Path) -> None:
    """Write a model's config and tokenizer."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES, **HEADS}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")


def make_experts_config(path: Path) -> None:
    """Write the config of the mixture of experts."""
    sizes = {"num_experts": 3, "hidden_size": 16, "moe_intermediate_size": 12}
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **sizes}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))


def make_adapter_config(path: Path) -> None:
    """Write the config of the adapter."""
    path.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))


def copied(name: str, inner: str = ".") -> Callable[[Path], None]:
    """Copy a fixture's checkpoint, or what is in it."""

    def copy(path: Path) -> None:
        source = case(name).path / inner
        (shutil.copytree if source.is_dir() else shutil.copy)(source, path)

    return copy


MADE: dict[str, Callable[[Path], None]] = {
    "runs": make_run,
    "model": make_config,
    "assets": make_config,
    "out/checkpoint-500": copied("accelerate_folders"),
    "out/global_step_100/actor": copied("rank_verl", "global_step_5/actor"),
    "lightning/step=100.ckpt": copied("dcp_lightning"),
    "zero": copied("deepspeed_zero_3"),
}
"""What recipes are about."""
OTHERS: dict[str, dict[str, Callable[[Path], None]]] = {
    "Export a mixture of experts for vLLM": {"runs": make_experts, "assets": make_experts_config},
    "Get the LoRA out of an FSDP or ZeRO checkpoint": {
        "runs": make_adapter,
        "adapter-config": make_adapter_config,
    },
}
"""What recipes are about that need another model."""


def prepare(folder: Path, title: str) -> None:
    """Make what the commands of a recipe read, and no command of it writes before."""
    words = {word for line in RECIPES[title] for word in shlex.split(line)}
    for name, make in (OTHERS.get(title) or MADE).items():
        if any(word.rstrip("/") == name or word.startswith(f"{name}/") for word in words):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            make(folder / name)


ANSWERS = {
    "runs/step-1000": "step    1,000",
    "inspect runs/step-1000 --depth 3 --sort size": "model.layers.0",
    "inspect runs/step-1000 --shards 'model.layers.0.*'": "__0_0.distcp",
    "runs/step-1000 attention.wq": "model.layers.1.attention.wq.weight",
    "inspect runs/step-1000 --stats model.layers.0": "nan",
    "inspect runs/step-1000 --values": "args.seq_len",
    "inspect runs/step-1000 lr": "0.0003",
    "runs/": "optimizer",
    "verify runs/step-1000 --quick": "OK: ",
    "verify runs/ --latest-good": "runs/step-2000\n",
    "verify runs/ --all": "2 of 2 steps OK; latest good: runs/step-2000",
    "verify copy --manifest step-1000.json": "OK: ",
    "verify runs/step-1000 --like model/config.json": "21 of 21 tensors of model/config.json",
    "diff runs/step-1000 model/config.json": "only in A",
    "extract runs/step-1000 'model.layers.0.attention.wq.weight[0:4, :8]'": "[4, 8] of [64, 64]",
    "diff runs/step-1000 runs/step-2000 --values": "DIFFERENT: 42 tensors changed",
    "convert runs/step-1000 whole.pt": "42 tensors",
    "convert runs/step-1000 half/ --to dcp --dtype bf16": "cast: 21 tensors",
    "convert runs/step-1000 renamed/ --to dcp --rename '^model\\.=policy.'": "wrote renamed",
    "convert runs/step-1000 model.pt --model-only": "excluded: 21 tensors",
    "reshard runs/step-1000 on-8/ --mesh 8": "for mesh 8",
    "merge average/ --average runs/ --last 2 --to dcp": "21 tensors = (step-1000 + step-2000) / 2",
    "merge whole/ runs/step-2000 --take 'output.*' FROM runs/step-1000 --to dcp": "1 tensor =",
    "reshard out/global_step_100/actor on-8/global_step_100/actor --mesh 8": "for mesh fsdp=8",
    "convert runs small/ --every 1000 --dtype bf16": "OK: 2 written",
    "prune runs --keep-last 3 --keep-every 1000": "2 good steps are kept",
    "convert runs/step-100 lora/ --to hf --peft-adapter --hf-assets adapter-config/": "wrote lora",
}
"""What is in the answer to some of the questions."""


def asked(line: str, folder: Path) -> Ended:
    """What a command of the page ends with, without what comes after a pipe."""
    words = shlex.split(re.split(r" [|>] ", line)[0])
    if words[0] == "cp":
        subprocess.run(words, cwd=folder, check=True)
        return Ended(0, "", "")
    return run_command(*words, cwd=folder)


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_answers(title: str, tmp_path: Path) -> None:
    prepare(tmp_path, title)
    for line in RECIPES[title]:
        done = asked(line, tmp_path)
        assert done.code == (1 if line.startswith(DIFFERENT) else 0), (line, done)
        assert ANSWERS.get(line, "") in done.stdout
        assert "EQUAL: " in done.stdout or "--against" not in line


def test_the_recipes_find_a_nan(tmp_path: Path) -> None:
    lines = (
        "inspect runs/step-1000 --stats model.layers.0",
        "verify runs/step-1000 --fail-nonfinite",
    )
    assert set(lines) <= set(RECIPES["Which rank holds this tensor? Where is a NaN?"])
    weights = model()
    weights["layers.0.attention.wk.weight"][3, 5] = torch.nan
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "runs" / "step-1000", no_dist=True)
    shown, verified = (asked(line, tmp_path) for line in lines)
    rows = [line.split() for line in shown.stdout.splitlines() if "wk.weight" in line]
    assert [row[-2:] for row in rows] == [["1", "0"]], shown.stdout
    assert (shown.code, verified.code) == (0, 1)
    assert "model.layers.0.attention.wk.weight: 1 NaN" in verified.stdout
    assert "--fail-nonfinite" not in verified.stdout


def test_the_recipes_have_what_is_expected_of_them() -> None:
    assert set(ANSWERS) <= {line for lines in RECIPES.values() for line in lines}
    assert all(RECIPES.values())
