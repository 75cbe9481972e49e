"""FSDP2 saved and resumed by transformers' Trainer: its ``checkpoint-2/`` is the checkpoint.

accelerate selects FSDP where it believes in GPUs, so it is told that ranks have some.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks import FORGOTTEN, LAST, SAVED, spawn


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, world: int) -> None:
        """Give all ranks of a step the same rows, on any number of ranks."""
        rows = torch.randint(0, 37, (LAST, 4, 8), generator=torch.Generator().manual_seed(7))
        self.rows = [row for step in rows for row in step.repeat(world, 1)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[at], "labels": self.rows[at]}


def train(mode: str, path: str, rank: int, world: int) -> Any:
    """Train from the start to step 2 and save there, or resume from there to step 5."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    from accelerate import PartialState
    from accelerate.utils import DistributedType
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    losses: list[str] = []
    forgotten: str | None = None

    class Recorded(Trainer):  # type: ignore[misc]
        def training_step(self, *arguments: Any) -> torch.Tensor:
            nonlocal forgotten
            if not losses and mode == "resume" and not self.optimizer.state_dict()["state"]:
                forgotten = FORGOTTEN
            loss = super().training_step(*arguments)
            losses.append(loss.item().hex())
            return loss

    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "vocab_size": 37}
    dropout = 0.2 * (world == 2)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, attention_dropout=dropout))
    arguments = TrainingArguments(
        str(Path(path).parent), use_cpu=True, report_to=[], disable_tqdm=True, seed=rank,
        max_steps=SAVED if mode == "write" else LAST, save_steps=SAVED, learning_rate=1e-2,
        per_device_train_batch_size=4, train_sampling_strategy="sequential",
        fsdp=True,
        fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT",
                     "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    )  # fmt: skip
    arguments.device  # noqa: B018 - asking sets the state up
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = Recorded(model, arguments, train_dataset=Data(world))
    trainer.train(resume_from_checkpoint=path if mode == "resume" else None)
    draws = [torch.rand(1).item(), random.random(), np.random.rand()]
    epoch = trainer.lr_scheduler.last_epoch
    return losses, epoch, forgotten, draws if world == 2 else None


if __name__ == "__main__":
    spawn(train)
