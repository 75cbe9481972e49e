"""What makes a model of tensors lies beside them: config.json and the tokenizer go along."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from conftest import convert_to

from ckptool.commands.options.rewrite import MapOptions

transformers = pytest.importorskip("transformers")
import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402

FILES = {"tokenizer.json": b'{ "version":\t"1.0"}\r\n', "modeling_own.py": b"x = 1\n"}


@pytest.fixture(scope="module")
def model() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(config).eval()


def saved(model: Any, tensors: Path, files: Path, **changed: Any) -> dict[str, bytes]:
    """Save the tensors as DCP, and in a folder what transformers has beside; return its content."""
    files.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(files)
    config = files / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changed, indent=3))
    for name, content in FILES.items():
        (files / name).write_bytes(content)
    dcp.save(model.state_dict(), checkpoint_id=tensors, no_dist=True)
    return {name: (files / name).read_bytes() for name in (*FILES, "config.json")}


@pytest.mark.parametrize(
    ("tensors", "files", "said"),
    [
        ("step-5", "step-5", "the source's folder"),
        ("actor/dist_ckpt", "actor/huggingface", "huggingface"),
        ("checkpoint-5/pytorch_model_fsdp_0", "checkpoint-5", "checkpoint-5"),
    ],
)
def test_files_of_the_model_are_carried(
    tensors: str, files: str, said: str, model: Any, out: Path
) -> None:
    content = saved(model, out / tensors, out / files)
    if files == "checkpoint-5":
        (out / files / "trainer_state.json").write_text("{}")
    done = convert_to("hf", out / tensors, out / "hf")
    assert {name: (out / "hf" / name).read_bytes() for name in content} == content
    assert not (out / "hf" / "trainer_state.json").exists()
    (note,) = (note for note in done.notes if note.startswith("carried from"))
    assert f"{said}: config.json" in note.replace("generation_config.json, ", "")
    assert not [note for note in done.notes if "missing" in note]
    again = transformers.AutoModelForCausalLM.from_pretrained(out / "hf").eval()
    tokens = torch.arange(8)[None]
    assert torch.equal(again(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"vocab_size": 40}, "vocab_size 40, but model.embed_tokens.weight has 32 rows"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16 casts the weights"),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_left_with_a_note(
    changed: dict[str, Any], words: str, model: Any, out: Path
) -> None:
    saved(model, out / "step-5", out / "step-5", **changed)
    done = convert_to("hf", out / "step-5", out / "hf")
    (note,) = (note for note in done.notes if note.startswith("not carried from"))
    assert words in note
    assert not (out / "hf" / "config.json").exists()
    assert not (out / "hf" / "tokenizer.json").exists()


def test_the_next_folder_is_asked_and_none_is_named_that_contradicts(model: Any, out: Path) -> None:
    saved(model, out / "step-5", out / "step-5", vocab_size=40)
    missing = "config.json and a tokenizer are missing: copy with --hf-assets FOLDER"
    assert missing in convert_to("hf", out / "step-5", out / "hf").notes
    model.config.save_pretrained(out / "huggingface")
    done = convert_to("hf", out / "step-5", out / "again")
    config = (out / "huggingface" / "config.json").read_bytes()
    assert (out / "again" / "config.json").read_bytes() == config
    assert not [note for note in done.notes if note.startswith("not carried")]


@pytest.mark.parametrize("has_config", [False, True])
def test_an_adapter_gets_no_config_of_its_base_model(
    has_config: bool, model: Any, out: Path
) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    state = {name.format("A"): torch.ones(2, 16), name.format("B"): torch.ones(16, 2)}
    dcp.save(state, checkpoint_id=out / "step-5", no_dist=True)
    model.config.save_pretrained(out / "huggingface")
    if has_config:
        (out / "huggingface" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    convert_to("hf", out / "step-5", out / "hf")
    assert (out / "hf" / "config.json").exists() == has_config
    assert (out / "hf" / "adapter_config.json").exists() == has_config


def test_no_config_comes_with_a_part_that_it_contradicts(model: Any, out: Path) -> None:
    saved(model, out / "step-5", out / "step-5", vocab_size=40)
    for part, carried in (("model.layers.*", True), ("model.embed*", False)):
        done = convert_to("hf", out / "step-5", target := out / f"hf-{carried}", select=(part,))
        assert (target / "config.json").exists() == carried
        assert any(note.startswith("not carried") for note in done.notes) != carried


@pytest.mark.parametrize("files", ["run", "step-5"])
def test_a_config_of_another_program_and_one_of_the_run_are_left(
    files: str, model: Any, out: Path
) -> None:
    saved(model, out / "run/step-5", out / "run" / files.replace("run", "."))
    config = out / "run" / files.replace("run", ".") / "config.json"
    if files == "step-5":
        config.write_text('{"learning_rate": 1e-3}')
    done = convert_to("hf", out / "run/step-5", out / "hf")
    assert not (out / "hf" / "config.json").exists()
    assert [note for note in done.notes if "config.json and a tokenizer are missing" in note]


def test_those_that_are_asked_for_come_alone(model: Any, out: Path) -> None:
    saved(model, out / "step-5", out / "step-5")
    (out / "assets").mkdir()
    config = (out / "step-5" / "config.json").read_bytes() + b"\n"
    (out / "assets" / "config.json").write_bytes(config)
    convert_to("hf", out / "step-5", out / "hf", map=MapOptions(assets=out / "assets"))
    assert (out / "hf" / "config.json").read_bytes() == config
    assert not (out / "hf" / "tokenizer.json").exists()


def test_a_config_that_is_no_file_is_not_waited_for(model: Any, out: Path) -> None:
    dcp.save(model.state_dict(), checkpoint_id=out / "step-5", no_dist=True)
    os.mkfifo(out / "config.json")
    done = convert_to("hf", out / "step-5", out / "hf")
    assert "config.json and a tokenizer are missing: copy with --hf-assets FOLDER" in done.notes
