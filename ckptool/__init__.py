"""ckptool: see, prove, convert and reshard distributed PyTorch checkpoints.

``open`` gives a :class:`Checkpoint`, ``load`` fills a state dict, the commands are functions, and
``ckptool.dcp.CheckpointReader`` lets ``torch.distributed.checkpoint.load`` read every format.
Each part is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptool import dcp as dcp
    from ckptool import errors as errors
    from ckptool.api.checkpoint import Checkpoint as Checkpoint
    from ckptool.api.checkpoint import open as open
    from ckptool.api.commands import compare as compare
    from ckptool.api.commands import convert as convert
    from ckptool.api.commands import inspect as inspect
    from ckptool.api.commands import reshard as reshard
    from ckptool.api.commands import verify as verify
    from ckptool.api.load import KeysDiffer as KeysDiffer
    from ckptool.api.load import LoadReport as LoadReport
    from ckptool.api.load import load as load
    from ckptool.core.box import Box as Box
    from ckptool.errors import CkptoolError as CkptoolError

__version__ = "0.1.0"

_PLACES = {
    "Box": "core.box.Box",
    "Checkpoint": "api.checkpoint.Checkpoint",
    "CkptoolError": "errors.CkptoolError",
    "KeysDiffer": "api.load.KeysDiffer",
    "LoadReport": "api.load.LoadReport",
    "compare": "api.commands.compare",
    "convert": "api.commands.convert",
    "inspect": "api.commands.inspect",
    "load": "api.load.load",
    "open": "api.checkpoint.open",
    "reshard": "api.commands.reshard",
    "verify": "api.commands.verify",
}

__all__ = [*_PLACES, "__version__", "dcp", "errors"]


def __getattr__(name: str) -> Any:
    """What is imported when it is first used."""
    if name in ("dcp", "errors"):
        return import_module(f"ckptool.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'ckptool' has no attribute {name!r}")
    module, _, attribute = _PLACES[name].rpartition(".")
    return getattr(import_module(f"ckptool.{module}"), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
