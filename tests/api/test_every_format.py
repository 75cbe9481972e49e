"""Every real checkpoint, read in each of Python's ways, equals the truth bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import GOOD, REFUSED, Bits, Case, bits, by_name, case
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import ckptool
from ckptool.dcp import CheckpointReader

Tensors = dict[str, Any]


def empty(one: Case) -> Tensors:
    return {n: torch.empty(s, dtype=getattr(torch, d)) for n, (d, s) in one.shapes.items()}


def by_read(one: Case) -> Tensors:
    checkpoint = ckptool.open(one.path)
    return {name: checkpoint.read(name) for name in one.shapes}


def by_load(one: Case) -> Tensors:
    state = empty(one)
    ckptool.load(one.path, state, strict=False)
    return state


def by_dcp(one: Case) -> Tensors:
    state = empty(one)
    dcp.load(state, storage_reader=CheckpointReader(one.path), no_dist=True)
    return state


WAYS: dict[str, Callable[[Case], Tensors]] = {"read": by_read, "load": by_load, "dcp": by_dcp}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("one", GOOD, ids=by_name)
def test_tensors_are_the_truth(one: Case, way: str) -> None:
    found: dict[str, Bits] = {name: bits(t) for name, t in WAYS[way](one).items()}
    assert found == one.truth


def all_of(one: Case) -> Tensors:
    checkpoint = CheckpointReader(one.path).checkpoint
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


@pytest.mark.parametrize("one", REFUSED, ids=by_name)
def test_what_cannot_be_read_is_refused(one: Case) -> None:
    with pytest.raises(ckptool.CkptoolError):
        all_of(one)


@pytest.mark.parametrize("name", ["dcp_zoo", "dcp_fsdp2", "module_state", "rank_base", "zip_zoo"])
def test_an_empty_state_dict_is_rebuilt_as_torch_rebuilds_it(name: str) -> None:
    """Nested, with its values, from the metadata alone: as ``dcp_to_torch_save`` loads."""
    state: Tensors = {}
    reader = CheckpointReader(case(name).path)
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    flat, _ = dcp._nested_dict.flatten_state_dict(state)
    assert {n: bits(t) for n, t in flat.items() if isinstance(t, torch.Tensor)} == case(name).truth
