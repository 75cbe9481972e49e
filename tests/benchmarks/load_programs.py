"""Programs that load a model onto a device, each in a process of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MODEL = "model.safetensors"
_TENSORS = 64
_COLUMNS = 1024

State = dict[str, Any]


def write_loads(folder: str, size: int) -> None:
    """Write about ``size`` bytes of bf16 in tensors alike: in safetensors, DCP and torch.save."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    place, rows = Path(folder), max(1, size // _TENSORS // (2 * _COLUMNS))
    random = torch.Generator().manual_seed(0)
    state = {
        f"layers.{number}.weight": torch.randn(rows, _COLUMNS, generator=random).bfloat16()
        for number in range(_TENSORS)
    }
    place.mkdir()
    save_file(state, place / _MODEL)
    torch.save(state, place / "model.pt")
    dcp.save(state, checkpoint_id=place / "dcp", no_dist=True)


def measure_load_onto(way: str, source: str, device: str, result: str) -> None:
    """Load a model twice, into tensors that are there, and write the seconds of the second load.

    The first makes buffers and starts the device. ``load_file`` makes tensors of its own on a
    device. Raises ValueError if not all bits arrive.
    """
    import torch
    from safetensors.torch import load_file

    truth = load_file(Path(source).parent / _MODEL)
    state: State = {name: torch.zeros_like(t, device=device) for name, t in truth.items()}
    for _ in range(2):
        got: State = {}  # of a loader that makes tensors of its own none are left
        for tensor in state.values():
            tensor.zero_()
        _wait(device)
        begin = time.perf_counter()
        got = _WAYS[way](source, state, device)
        _wait(device)
        seconds = time.perf_counter() - begin
    wrong = [
        name
        for name, tensor in truth.items()
        if not torch.equal(got[name].cpu().view(torch.int16), tensor.view(torch.int16))
    ]
    if wrong:
        raise ValueError(f"{way}: {len(wrong)} tensors differ, such as {wrong[0]}")
    Path(result).write_text(json.dumps({"load": seconds}))


def _wait(device: str) -> None:
    if device != "cpu":
        import torch

        torch.accelerator.synchronize()


def _ckptool(source: str, state: State, device: str) -> State:
    import ckptool

    ckptool.load(source, state)
    return state


def _dcp(source: str, state: State, device: str) -> State:
    import torch.distributed.checkpoint as dcp

    dcp.load(state, checkpoint_id=source, no_dist=True)
    return state


def _dcp_by_ckptool(source: str, state: State, device: str) -> State:
    import torch.distributed.checkpoint as dcp

    from ckptool.dcp import CheckpointReader

    dcp.load(state, storage_reader=CheckpointReader(source), no_dist=True)
    return state


def _safetensors(source: str, state: State, device: str) -> State:
    from safetensors.torch import load_file

    loaded: State = load_file(source, device=device)
    if device != "cpu":
        return loaded
    for name, tensor in state.items():  # what is mapped is read when it is copied
        tensor.copy_(loaded[name])
    return state


def _torch_save(source: str, state: State, device: str) -> State:
    import torch

    loaded = torch.load(source, mmap=True, weights_only=True)
    for name, tensor in state.items():
        tensor.copy_(loaded[name])
    return state


def _fastsafetensors(source: str, state: State, device: str) -> State:
    from fastsafetensors import fastsafe_open

    where = "cuda:0" if device == "cuda" else device
    with fastsafe_open(filenames=[source], nogds=True, device=where, debug_log=False) as file:
        for name in file.keys():  # noqa: SIM118 (it is no mapping)
            state[name].copy_(file.get_tensor(name))
    return state


def _runai(source: str, state: State, device: str) -> State:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(source)
        for name, tensor in streamer.get_tensors():
            state[name].copy_(tensor)
    return state


_WAYS: dict[str, Callable[[str, State, str], State]] = {
    "ckptool": _ckptool,
    "dcp": _dcp,
    "dcp-by-ckptool": _dcp_by_ckptool,
    "safetensors": _safetensors,
    "torch-save": _torch_save,
    "fastsafetensors": _fastsafetensors,
    "runai": _runai,
}
