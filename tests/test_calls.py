"""Calls point down as imports do: a lower layer is given values, no functions of a higher one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from conftest import case
from test_architecture import ALLOWED, PACKAGE, layer_of

import ckptool

PROBES = "commands/verify/checks/"
"""What looks at elements while the engine reads them: each check has its own."""


def calls_up(work: Callable[[], object]) -> set[tuple[str, str]]:
    """The files of callers and called where a layer runs a function of one that imports it."""
    found: set[tuple[str, str]] = set()
    inside = f"{PACKAGE}/"

    def watch(frame: FrameType, event: str, arg: Any) -> None:
        called = frame.f_code.co_filename
        if event != "call" or not called.startswith(inside) or frame.f_code.co_name[0] == "<":
            return
        back = frame.f_back
        while back is not None and not back.f_code.co_filename.startswith(inside):
            back = back.f_back
        if back is not None:
            found.add((back.f_code.co_filename, called))

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    pairs = {(Path(caller), Path(called)) for caller, called in found}
    return {
        (str(caller.relative_to(PACKAGE)), str(called.relative_to(PACKAGE)))
        for caller, called in pairs
        if layer_of(caller) in ALLOWED[layer_of(called)] - {layer_of(called)}
    }


@pytest.mark.parametrize("name", ["dcp_fsdp2_tp", "rank_base", "hf_sharded"])
def test_no_layer_runs_functions_of_a_higher_one(name: str, out: Path) -> None:
    source = case(name).path

    def work() -> None:
        ckptool.convert(source, out / "m.safetensors", dtype="bf16")
        ckptool.reshard(source, out / "r", mesh="2x2", rank_state="drop")
        ckptool.verify(source)
        ckptool.compare(source, out / "r")

    assert {pair for pair in calls_up(work) if not pair[1].startswith(PROBES)} == set()
