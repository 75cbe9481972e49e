"""Measure merges against copies and conversions of what they read, interleaved, as ratios.

The models are bf16 in one safetensors file each; a LoRA of rank 16 adapts every tensor of the
first. A merge of two reads both and writes one: three streams where a copy has two. Those of 70B
are sparse files, which are planned and not read.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.report import TransferBenchReport
from benchmarks.rows import CKPTOOL, CONVERT, PROGRAM, Row
from benchmarks.samples import run_sample
from benchmarks.scene import Progress, Scene, bench_folder, count_bytes, measure
from benchmarks.transfer import output_paths, require_torch
from ckptool.commands.bench.machine import describe_machine, list_versions
from ckptool.commands.bench.save_folders import DiskFolder

_MERGE = (*CKPTOOL, "merge", "--quiet", "{target}.safetensors")
_AVERAGE = (*_MERGE, "--average", "{source}", "{other}", "--no-fsync")
_LORA = (*_MERGE, "--lora", "{adapter}", "--onto", "{source}", "--no-fsync")
_COPY = ("cp", "{source}", "{target}.safetensors")
_CONVERT = (*CONVERT, "{source}", "{target}.safetensors", "--no-fsync")
_CAST = (*_CONVERT, "--dtype", "fp16")
_LARGE = ("--average", "{large}", "{twin}", "--dry-run")


def _both(name: str, command: tuple[str, ...], *peers: str) -> tuple[Row, Row]:
    """Return a row with its source in the page cache, and one without."""
    of_cold = tuple(f"{peer}, cold" for peer in peers)
    return Row(name, command, peers), Row(f"{name}, cold", command, of_cold, cold=True)


def _durable(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command as users give it, which waits until its output is on the disk."""
    return tuple(word for word in command if word != "--no-fsync")


MERGE_ROWS = (
    *_both("cp", _COPY),
    Row("cp, synced", ("sh", "-c", 'cp "$0" "$1" && sync "$1"', *_COPY[1:])),
    *_both("merge --average of two", (*_AVERAGE, "--no-verify"), "cp"),
    *_both("merge --average of two, verified", _AVERAGE, "cp"),
    Row("merge --average of two, verified, synced", _durable(_AVERAGE), ("cp, synced",)),
    *_both("convert, verified", _CONVERT),
    Row("convert, verified, synced", _durable(_CONVERT)),
    *_both("convert --dtype fp16, verified", _CAST),
    *_both("merge --lora, verified", _LORA, "convert, verified", "convert --dtype fp16, verified"),
    Row("merge --lora, verified, synced", _durable(_LORA), ("convert, verified, synced",)),
    Row("plan an average of two of 70B", (*CKPTOOL, "merge", "{large}-average", *_LARGE)),
)
_WRITTEN = {
    "{source}": ("write-model", 1),
    "{other}": ("write-model", 2),
    "{adapter}": ("write-adapter", 16),
    "{large}": ("write-sparse", 80),
    "{twin}": ("write-sparse", 80),
}
"""What the placeholders stand for: the program that writes it, and its last word."""


def merge_bench(
    size: int,
    workdir: Path,
    repeat: int,
    *,
    rows: tuple[Row, ...] = MERGE_ROWS,
    progress: Progress = lambda line: None,
) -> TransferBenchReport:
    """Measure ``rows`` on generated models of ``size`` bytes each.

    Works in a folder of its own below ``workdir`` and removes it in every case. Raises Unsupported
    where the disk will not hold it, or torch is missing.
    """
    require_torch()
    with bench_folder(workdir, int(size * 3 * 1.05)) as scratch:
        paths = output_paths(scratch)
        for mark, (task, last) in _WRITTEN.items():
            progress(f"writing {mark.strip('{}')}")
            name = mark.strip("{}") + (".safetensors" if task == "write-model" else "")
            paths[mark] = str(scratch / name)
            run_sample((*PROGRAM, task, paths[mark], str(size), str(last)))
        scene = Scene(paths, ("{source}", "{other}"))
        return TransferBenchReport(
            source="bf16 in one safetensors file",
            conditions="page cache warm unless a row says cold",
            nbytes=count_bytes(Path(paths["{source}"])),
            files=1,
            light_tensors=0,
            repeat=repeat,
            machine=describe_machine(DiskFolder(workdir)),
            versions=list_versions("torch", "safetensors", "numpy"),
            results=measure(rows, scene, repeat, {}, progress),
            skipped={},
        )
