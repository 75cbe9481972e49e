"""Folders of torch.distributed.checkpoint that no fixture is like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptool
from ckptool.errors import CkptoolError


def save(state: dict[str, Any], folder: Path, **options: Any) -> None:
    dcp.save(state, checkpoint_id=folder, no_dist=True, **options)


def test_metadata_of_each_rank_beside_that_of_all_is_another_save(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path)
    (tmp_path / "__0.metadata").write_bytes((tmp_path / ".metadata").read_bytes())
    (note,) = ckptool.open(tmp_path).catalog.notes
    assert "__0.metadata is not read" in note


def test_a_name_inside_a_value_is_no_other_tensors(tmp_path: Path) -> None:
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    state = {"model": {"w": torch.ones(3)}, "model.w": torch.zeros(3)}
    save(state, tmp_path, planner=planner)
    with pytest.raises(CkptoolError, match=r"model\.w: a tensor, and one inside another value"):
        ckptool.open(tmp_path)
