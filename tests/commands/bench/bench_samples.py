"""Reports made by hand."""

from __future__ import annotations

from typing import Any

from ckptool.commands.bench.report import (
    CONSISTENT,
    DIRTY,
    BenchReport,
    Consistency,
    Measured,
    Settings,
)

GIB = 1 << 30


def measured(name: str, blocked: float, durable: float, **more: Any) -> Measured:
    """A strategy whose first save took three times as long as each of the others."""
    facts: dict[str, Any] = {
        "says": f"the {name} way",
        "library": "torch",
        "before": (0.1, 0.1),
        "during": ((), (), ()),
        "after": (0.1,),
        "host_base": 100 << 20,
        "host_peak": 300 << 20,
        "device_peak": 0,
        "nbytes": GIB,
        "files": 3,
        "consistency": Consistency(CONSISTENT, "after the call", (), 9),
        "abort": None,
        "remark": None,
    }
    for key, value in (("blocked", blocked), ("written", durable - 0.2), ("durable", durable)):
        facts[key] = (3 * value, value, value)
    facts["loaded"] = (2 * blocked,)
    return Measured(name=name, **{**facts, **more})


def dirty(*tensors: str) -> Consistency:
    return Consistency(DIRTY, "after the call", tensors, 9)


def report(*results: Measured, **more: Any) -> BenchReport:
    """A report of 1 GiB on 2 CPU ranks; memory copies 10 GiB/s, the disk writes 1 GiB/s."""
    settings = Settings("a model", GIB, 9, 2, "cpu", 2, "/work", more.pop("aborted", False))
    limits = {
        "memory_copy": 10.0 * GIB,
        "write": 1.0 * GIB,
        "device_to_host_pageable": None,
        "device_to_host_pinned": None,
    }
    facts: dict[str, Any] = {
        "machine": {"cores": 2, "processor": "P", "memory_bytes": GIB, "filesystem": "ext4"},
        "versions": {"torch": "2.13.0"},
        "limits": limits,
        "skipped": {},
        "failed": {},
    }
    return BenchReport(settings=settings, results=results, **{**facts, **more})


SYNC = measured("dcp-sync", 2.0, 2.5)
FAST = measured("fast", 0.5, 4.0, during=((9.0, 9.0, 9.0), (0.12, 0.2), (0.12,)))
QUICKEST = measured("quickest", 0.1, 1.0, consistency=dirty("model.w"))
"""Blocks least, and is dirty."""
