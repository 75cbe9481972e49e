"""What says of a save which it is, and whether it was finished, where it should lie."""

from __future__ import annotations

import re

from ckptool.commands.open import Survey
from ckptool.engine.remote_path import Location
from ckptool.errors import Problem
from ckptool.formats._tracker import MEGATRON

_ITERATION = re.compile(r"iter_[0-9]{7,}|release")


def unnamed_latest(asked: Location, found: Survey) -> list[Problem]:
    """A run's folder that was asked for and does not say which of its checkpoints is the latest.

    Megatron-LM writes ``latest_checkpointed_iteration.txt`` and DeepSpeed ``latest``, and resume
    by nothing else (megatron-core 0.20, DeepSpeed 0.19).
    """
    name = found.format.name
    if name.startswith("megatron") and _ITERATION.fullmatch(found.path.name):
        marker = MEGATRON
    elif name == "deepspeed":
        marker = "latest"
    else:
        return []
    run = found.path.parent
    if asked not in found.path.parents or (run / marker).exists():
        return []
    message = f"{run}: no {marker} beside {found.path.name}, so nothing says that it is the latest"
    return [Problem(message, "latest-unnamed", file=marker)]
