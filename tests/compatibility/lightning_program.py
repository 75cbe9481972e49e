"""FSDP2 saved and resumed by Lightning's Trainer, which starts the ranks itself."""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from ranks import LAST, SAVED
from torch.distributed.fsdp import fully_shard

LOSSES: list[str] = []


class Average(pl.Callback):  # type: ignore[misc]
    """Holds a tensor and a number, which ``meta.pt`` must bring back."""

    def __init__(self) -> None:
        self.average, self.steps = torch.zeros(3), 0

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.steps += 1
        self.average = self.average * 0.5 + self.steps

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average, self.steps = state["average"], state["steps"]


class Net(pl.LightningModule):  # type: ignore[misc]
    def configure_model(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 1))
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss = (self.net(batch[0][:, :6]) - batch[0][:, 6:]).square().mean()
        LOSSES.append(loss.item().hex())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main(mode: str, path: str, world: str) -> None:
    """Train from the start and save, or resume; print the losses."""
    generator = torch.Generator().manual_seed(7)
    data = torch.utils.data.TensorDataset(torch.randn(64, 7, generator=generator))
    callback = Average()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(world),
        strategy=ModelParallelStrategy(data_parallel_size=int(world), tensor_parallel_size=1),
        max_steps=SAVED if mode == "write" else LAST,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[callback],
    )
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    trainer.fit(Net(), loader, ckpt_path=path if mode == "resume" else None)
    if mode == "write":
        trainer.save_checkpoint(path)
    if trainer.global_rank == 0:
        print("LOSSES", LOSSES, callback.average.tolist(), callback.steps, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
