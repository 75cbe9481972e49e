"""Saves for which the loop waits until everything is written: ``torch.save`` and DCP's."""

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


class DcpSync(Basis):
    """DCP's synchronous save, with its defaults."""

    name = "dcp-sync"
    says = "DCP's synchronous save"
    to_urls = True

    def save(self, state: State, path: Path | str) -> Written:
        """Plan together, write, commit the metadata; torch writes to URLs by fsspec."""
        from torch.distributed.checkpoint.state_dict_saver import save

        save(state, checkpoint_id=path)
        return Written()

    def load(self, state: State, path: Path | str) -> State:
        """Load into ``state``, each rank its shards."""
        return load_dcp(state, path)


def load_dcp(state: State, path: Path | str) -> State:
    """``torch.distributed.checkpoint.load`` into ``state``; torch reads URLs by fsspec."""
    from torch.distributed.checkpoint.state_dict_loader import load

    load(state, checkpoint_id=path)
    return state


STRATEGIES: tuple[Strategy, ...] = (TorchSave(), DcpSync())
