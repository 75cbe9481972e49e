"""What parts are written from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from parts.part_runs import MANY, asked, convert, save, write

from ckptool.commands.options.target import ReshardOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.core.sharding.placement import parse_mesh


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors that are cut by rows and by columns, replicated, small and empty, and values."""
    return save(tmp_path_factory.mktemp("source") / "ckpt", seed=5)


@pytest.fixture
def three(source: Path, tmp_path: Path) -> tuple[Callable[..., Any], Path]:
    """Two of three parts of a conversion."""
    planned, target = convert("hf", **MANY), tmp_path / "m"
    write(planned, source, target, "1/3", "3/3")
    return planned, target


@pytest.fixture(scope="module", params=[4, 64])
def rows(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Two tensors in which few or many ranks have saved rows; seven cut them elsewhere.

    Smaller ones are read whole by each part.
    """
    folder = tmp_path_factory.mktemp("rows")
    state = {f"blocks.{n}.w": torch.randn(384, 256) for n in range(2)}
    dcp.save(state, checkpoint_id=folder / "one", no_dist=True)
    options = ReshardOptions(parse_mesh(str(request.param)), transfer=asked())
    prepare_reshard(folder / "one", folder / "rows", options).run()
    return folder / "rows"
