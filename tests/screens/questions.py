"""Thirty questions of users: the command that is typed first, and words of its answer.

The words of a command name checkpoints as those of ``screen_table.py`` do, or what ``write_more``
makes. ``questions.txt`` has the screens. All run in one folder, one after the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch


class Question(NamedTuple):
    """What a user wants to know or have, what is typed, and what the answer says."""

    asks: str
    command: str
    answer: str


QUESTIONS = (
    Question("What is in here?", "dcp_fsdp2_tp", "mesh    2 x 2"),
    Question("How many parameters has it?", "inspect deepspeed_zero_2", "parameters"),
    Question("Which step is it?", "inspect megatron_torch_dist", "step "),
    Question("What was the learning rate?", "inspect deepspeed_zero_3", "optimizer lr"),
    Question("What were the learning rates?", "inspect dcp_fsdp2_tp lr", "param_groups.0.lr"),
    Question("What takes up the space?", "inspect llama_consolidated --sort size", "attention.wq"),
    Question("Which shape has q?", "inspect llama_consolidated wq", "[16, 16]"),
    Question("Which rank holds this tensor?", "inspect dcp_fsdp2 --shards embed", "rank"),
    Question("Is there a NaN?", "verify broken.pt", "first nan at [1, 2]"),
    Question("What would each of 8 GPUs hold?", "inspect dcp_fsdp2 --mesh 8", "8 ranks: mean"),
    Question("Which steps are there?", "inspect run", "6 steps, 4 complete"),
    Question("From which step can I go on?", "verify run --latest-good", "run/step-600"),
    Question("Is it sound?", "verify dcp_base", "OK"),
    Question("Why does it not load?", "verify truncated", "file-truncated"),
    Question("What can be saved of it?", "verify truncated --salvage saved.pt", "wrote"),
    Question("What are its values like?", "inspect broken.pt --stats '*'", "mean"),
    Question("Is the copy the same?", "verify dcp_fsdp2 --against dcp_fsdp2", "EQUAL"),
    Question("What differs between two?", "diff dcp_fsdp2 dcp_fsdp2_tp", "only in B"),
    Question("What has changed?", "diff run/step-500 run/step-600 --values", "EQUAL"),
    Question("Does it fit the model?", "diff llama_consolidated llama.json", "--map"),
    Question("I want this tensor in numpy.", "extract dcp_fsdp2 embed.weight embed.npy", "wrote"),
    Question("What are its first numbers?", "extract dcp_fsdp2 'embed.weight[:2, :3]'", "[2, 3]"),
    Question("I want one file of all ranks'.", "convert rank_fsdp1 whole.pt", "wrote whole.pt"),
    Question(
        "I want safetensors, without the optimizer.",
        "convert dcp_fsdp2 model.safetensors --no-optimizer",
        "wrote model.safetensors",
    ),
    Question("I want it for vLLM.", "convert llama_consolidated llama --to hf --map auto", "hf"),
    Question("I want it in bf16.", "convert dcp_fsdp2 half --dtype bf16", "cast: "),
    Question(
        "The names begin with module.",
        "convert broken.pt plain.pt --strip-prefix module",
        "renamed: ",
    ),
    Question("I have two GPUs now.", "reshard dcp_fsdp2 on-2 --mesh 2", "for mesh 2"),
    Question("What would that write?", "reshard dcp_fsdp2 on-8 --mesh 2x4 --dry-run", "per rank"),
    Question(
        "I want all steps for evaluation.", "convert run all --all-steps --to hf", "4 written"
    ),
    Question("I want the average of two.", "merge mean --average run/step-500 run/step-600", "/ 2"),
    Question("The disk is full.", "prune run --keep-last 2", "would remove"),
)


def write_more(folder: Path) -> None:
    """Write a model with a NaN, and the configuration of a model."""
    weight = torch.ones(4, 3)
    weight[1, 2] = float("nan")
    torch.save(
        {"module.head.weight": weight, "module.head.bias": torch.zeros(4)}, folder / "broken.pt"
    )
    (folder / "llama.json").write_text(LLAMA)


LLAMA = """{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16,
 "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
 "num_key_value_heads": 2, "vocab_size": 70}
"""
