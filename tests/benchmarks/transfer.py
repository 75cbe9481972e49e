"""Measure whole commands against ``cp`` and torch's own tools, interleaved, as ratios with memory.

A row of the report is one of ``rows.ROWS``: a name, a command line and its peers. Every sample is
one process from start to end, its output removed afterwards; before it, all is synced and its
source is read, so that the page cache is warm, or given up. A round is every row once, but for some
that take long. The checkpoints are what torch itself wrote: ``torch.distributed.checkpoint.save``
on four gloo ranks, tensors sharded as FSDP2 shards them.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from benchmarks.page_cache import walk_files
from benchmarks.programs import RANKS
from benchmarks.report import TransferBenchReport
from benchmarks.rows import OTHERS, PROGRAM, ROWS, Other, Row
from benchmarks.samples import run_sample
from benchmarks.scene import (
    Progress,
    Scene,
    bench_folder,
    count_bytes,
    measure,
    missing_package,
)
from ckptool.commands.bench.machine import describe_machine, list_versions
from ckptool.commands.bench.save_folders import DiskFolder
from ckptool.commands.bench.specs import parameter_shapes
from ckptool.errors import Unsupported

_LIGHT_BYTES = 4_000_000
_MANY = ("1000", "64")
_NAMES = "100000"


def transfer_bench(
    source: Path | None,
    size: int,
    workdir: Path,
    repeat: int,
    *,
    rows: tuple[Row, ...] = ROWS,
    progress: Progress = lambda line: None,
) -> TransferBenchReport:
    """Measure ``rows`` on the checkpoint ``source``, or on a generated one of ``size`` bytes.

    Works in a folder of its own below ``workdir`` and removes it in every case. Raises Unsupported
    where the disk will not hold it, or torch is missing to generate with.
    """
    if source is None:
        require_torch()
    has_torch = importlib.util.find_spec("torch") is not None
    opened, nbytes, dcp = (None, size, True) if source is None else _open_source(source)
    # room for the largest output, and for the sources too where they are made here
    times = [other.times for other in OTHERS.values()]
    checkpoints = 1.0 if source else 1 + sum(times) + max(times)
    needed = int(nbytes * checkpoints * 1.05) + 4 * _LIGHT_BYTES
    with bench_folder(workdir, needed) as scratch:
        paths = _prepare_paths(rows, opened, size, scratch, has_torch, progress)
        obstacles = {row.name: _obstacle(row, paths, dcp=dcp) for row in rows}
        skipped = {name: reason for name, reason in obstacles.items() if reason}
        before = os.getloadavg()[0]
        results = measure(rows, Scene(paths), repeat, skipped, progress)
        load = f"load {before:.0f} before, {os.getloadavg()[0]:.0f} after"
        measured = Path(paths["{source}"])
        return TransferBenchReport(
            source=str(source) if source else f"written by torch on {RANKS} gloo ranks",
            conditions=f"page cache warm unless a row says cold, {load}",
            nbytes=count_bytes(measured),
            files=sum(1 for _ in walk_files(measured)),
            light_tensors=len(parameter_shapes()) * 3 if has_torch else 0,
            repeat=repeat,
            machine=describe_machine(DiskFolder(workdir)),
            versions=list_versions("torch", "safetensors", "numpy") | {"cp": _version_of_cp()},
            results=results,
            skipped=skipped,
        )


def require_torch() -> None:
    """Raise Unsupported if torch is missing to write a checkpoint with."""
    if importlib.util.find_spec("torch") is None:
        raise Unsupported(
            "torch is not installed, so no checkpoint can be generated",
            hint="pip install 'ckptool[torch]', or name a checkpoint to measure",
        )


def _version_of_cp() -> str:
    ran = subprocess.run(["cp", "--version"], capture_output=True, text=True, check=False)
    return ran.stdout.partition("\n")[0].removeprefix("cp ") or "unknown"


def _open_source(source: Path) -> tuple[Path, int, bool]:
    """Return where the given checkpoint lies, its bytes, and whether torch's DCP tools read it."""
    from ckptool.commands.open import open_checkpoint

    opened = open_checkpoint(source)
    path = Path(str(opened.path)).absolute()
    return path, count_bytes(path), opened.format.name == "dcp"


def _prepare_paths(
    rows: tuple[Row, ...],
    opened: Path | None,
    size: int,
    scratch: Path,
    has_torch: bool,
    progress: Progress,
) -> dict[str, str]:
    """Return what the placeholders of the rows stand for; write checkpoints that are missing."""
    paths = output_paths(scratch)
    tasks: dict[str, tuple[str, ...]] = {}
    if opened is not None:
        paths["{source}"] = str(opened)
    else:
        for mark, (times, shape, dtype) in {"{source}": Other(1.0), **OTHERS}.items():
            nbytes = str(int(size * times))
            if shape is None:
                tasks[mark] = ("write", nbytes)
            else:
                tasks[mark] = ("write-shape", nbytes, *map(str, shape), dtype)
    if has_torch:
        tasks |= {"{light}": ("write", str(_LIGHT_BYTES)), "{many}": ("write-many", *_MANY)}
    tasks["{names}"] = ("write-names", _NAMES)
    used = {"{source}"} | {word.partition("/")[0] for row in rows for word in row.command}
    for mark, (task, *words) in tasks.items():
        if mark in used:
            progress("writing " + _describe(task, *words))
            paths[mark] = str(scratch / mark.strip("{}"))
            run_sample((*PROGRAM, task, paths[mark], *words))
    paths.setdefault("{light}", paths["{source}"])
    return paths


def output_paths(scratch: Path) -> dict[str, str]:
    """Make the folder of what commands write; return the placeholders of what lies there."""
    outputs = scratch / "outputs"
    outputs.mkdir()
    return {"{target}": str(outputs / "target"), "{result}": str(outputs / "result")}


def _describe(task: str, number: str, *words: str) -> str:
    if task == "write-many":
        return f"what {words[0]} ranks save of {number} tensors"
    if task == "write-names":
        return f"two files of {number} tensors"
    shape = f" in {words[2]} of {words[1]} columns" if words else ""
    return f"a checkpoint of {int(number):,} bytes{shape} with torch on {RANKS} gloo ranks"


def _obstacle(row: Row, paths: Mapping[str, str], *, dcp: bool) -> str | None:
    """Return why a row cannot be measured here, or None."""
    absent = {"{many}", *OTHERS}.intersection(row.command) - paths.keys()
    if (missing := missing_package(row)) is not None:
        return missing
    if "torch" in row.needs and "{source}" in row.command and not dcp:
        return "torch's own tools read only its DCP format"
    if "{many}" in absent:
        return "torch is not installed to write a checkpoint"
    return "not measured with a given checkpoint" if absent else None
