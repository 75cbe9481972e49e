"""Measure loads of a model onto a device against other loaders, interleaved, as ratios.

Every load is the second of its process, from the page cache, into tensors that are there, but for
``load_file``, which makes its own on a device. All bits are compared after it.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.report import TransferBenchReport
from benchmarks.rows import PROGRAM, Row
from benchmarks.samples import run_sample
from benchmarks.scene import Progress, Scene, bench_folder, count_bytes, measure, without_packages
from benchmarks.transfer import output_paths, require_torch
from ckptool.commands.bench.machine import describe_machine, list_versions
from ckptool.commands.bench.save_folders import DiskFolder

_LIBRARIES = ("torch", "safetensors", "numpy", "fastsafetensors", "runai-model-streamer")
_PLACES = {"{safetensors}": "model.safetensors", "{pt}": "model.pt", "{dcp}": "dcp"}


def _load(name: str, way: str, mark: str, *peers: str, needs: tuple[str, ...] = ()) -> Row:
    command = (*PROGRAM, "load-onto", way, mark, "{device}", "{result}")
    return Row(name, command, peers, "load", ("torch", "safetensors", *needs))


LOAD_ROWS = (
    _load("ckptool.load, safetensors", "ckptool", "{safetensors}", "load_file", "fastsafetensors"),
    _load("fastsafetensors", "fastsafetensors", "{safetensors}", needs=("fastsafetensors",)),
    _load("runai-model-streamer", "runai", "{safetensors}", needs=("runai_model_streamer",)),
    _load("load_file", "safetensors", "{safetensors}"),
    _load("ckptool.load, torch.save", "ckptool", "{pt}", "torch.load, mmap, and a copy"),
    _load("torch.load, mmap, and a copy", "torch-save", "{pt}"),
    _load("ckptool.load, DCP", "ckptool", "{dcp}", "dcp.load"),
    _load("dcp.load, ckptool's reader", "dcp-by-ckptool", "{dcp}", "dcp.load"),
    _load("dcp.load", "dcp", "{dcp}"),
)


def load_bench(
    size: int,
    device: str,
    workdir: Path,
    repeat: int,
    *,
    rows: tuple[Row, ...] = LOAD_ROWS,
    progress: Progress = lambda line: None,
) -> TransferBenchReport:
    """Measure ``rows`` on a generated model of ``size`` bytes, loaded onto ``device``.

    Works in a folder of its own below ``workdir`` and removes it in every case. Raises Unsupported
    where the disk will not hold it, or torch is missing.
    """
    require_torch()
    with bench_folder(workdir, int(size * 3.1)) as scratch:
        folder = scratch / "model"
        progress(f"writing a model of {size:,} bytes, three times")
        run_sample((*PROGRAM, "write-loads", str(folder), str(size)))
        places = {mark: str(folder / name) for mark, name in _PLACES.items()}
        paths = {"{device}": device, **places, **output_paths(scratch)}
        skipped = without_packages(rows)
        return TransferBenchReport(
            source="bf16 in tensors alike",
            conditions=f"onto {device}, page cache warm",
            nbytes=count_bytes(folder / _PLACES["{safetensors}"]),
            files=1,
            light_tensors=0,
            repeat=repeat,
            machine=describe_machine(DiskFolder(workdir)),
            versions=list_versions(*_LIBRARIES),
            results=measure(rows, Scene(paths, tuple(_PLACES)), repeat, skipped, progress),
            skipped=skipped,
        )
