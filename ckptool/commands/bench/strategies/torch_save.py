"""``torch.save`` of every rank's state into a file of its own: the loop waits for all of it."""

from __future__ import annotations

from pathlib import Path

from ckptool.commands.bench.strategies.base import Basis, State, Strategy, Written


class TorchSave(Basis):
    """A file a rank, ``checkpoint_{rank}.pt``, as torch's ``_experimental`` names them."""

    name = "torch-save"
    says = "torch.save"

    def save(self, state: State, path: Path) -> Written:
        """Write this rank's file; then wait for the others."""
        import torch
        import torch.distributed as dist

        path.mkdir(parents=True, exist_ok=True)
        torch.save(state, path / f"checkpoint_{dist.get_rank()}.pt")
        dist.barrier()
        return Written()

    def load(self, state: State, path: Path) -> State:
        """This rank's own file."""
        import torch
        import torch.distributed as dist

        loaded: State = torch.load(path / f"checkpoint_{dist.get_rank()}.pt", weights_only=True)
        return loaded


STRATEGIES: tuple[Strategy, ...] = (TorchSave(),)
