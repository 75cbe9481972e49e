"""Measure commands on a store against plain downloads and other readers, interleaved, as ratios.

The store is an S3 server on loopback, in this process, with the latency and the bandwidth of a
store that is some way off: clients then differ as they do there. It counts what it is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from msgspec.structs import replace

from benchmarks.loopback.server import S3Server
from benchmarks.page_cache import walk_files
from benchmarks.programs import RANKS
from benchmarks.report import TransferBenchReport
from benchmarks.rows import CONVERT, PROGRAM, Row
from benchmarks.samples import Sample, run_sample
from benchmarks.scene import (
    Progress,
    Scene,
    bench_folder,
    count_bytes,
    measure,
    without_packages,
)
from benchmarks.store_rows import STORE_ROWS
from benchmarks.transfer import output_paths, require_torch
from ckptool.commands.bench.machine import describe_machine, list_versions
from ckptool.commands.bench.save_folders import DiskFolder
from ckptool.errors import Unsupported

_LATENCY = 0.03
_BANDWIDTH = 200e6
_BUCKET = "bench"
_STORE, _WEIGHTS, _STORED = "source", "weights/model.safetensors", "outputs/target"
_CLIENTS = (
    *("s3fs", "obstore", "boto3", "s3torchconnector", "runai-model-streamer"),
    *("torch", "safetensors", "numpy"),
)


def store_bench(
    size: int,
    workdir: Path,
    repeat: int,
    *,
    rows: tuple[Row, ...] = STORE_ROWS,
    progress: Progress = lambda line: None,
) -> TransferBenchReport:
    """Measure ``rows`` on a generated checkpoint of ``size`` bytes, which is kept in memory too.

    Works in a folder of its own below ``workdir`` and removes it in every case. Raises Unsupported
    where the disk will not hold it, or s3fs or torch is missing.
    """
    require_torch()
    if find_spec("s3fs") is None:
        raise Unsupported("s3fs is not installed", hint="pip install 'ckptool[s3]'")
    with (
        bench_folder(workdir, int(size * 3 * 1.05)) as scratch,
        _serve() as server,
    ):
        scene = _prepare(server, size, scratch, progress)
        skipped = without_packages(rows)
        results = measure(rows, scene, repeat, skipped, progress)
        source = Path(scene.paths["{source}"])
        return TransferBenchReport(
            source=f"written by torch on {RANKS} gloo ranks",
            conditions=f"S3 on loopback, {_LATENCY * 1e3:.0f} ms and {_BANDWIDTH / 1e6:.0f} MB/s",
            nbytes=count_bytes(source),
            files=sum(1 for _ in walk_files(source)),
            light_tensors=0,
            repeat=repeat,
            machine=describe_machine(DiskFolder(workdir)),
            versions=list_versions(*_CLIENTS),
            results=results,
            skipped=skipped,
        )


@contextmanager
def _serve() -> Iterator[S3Server]:
    server = S3Server()
    server.latency, server.bandwidth = _LATENCY, _BANDWIDTH
    server.buckets[_BUCKET] = {}
    try:
        yield server
    finally:
        server.close()


def _prepare(server: S3Server, size: int, scratch: Path, progress: Progress) -> _StoreScene:
    """Write the checkpoint, and its weights as safetensors, and put both into the store."""
    source, weights = scratch / "source", scratch / "weights.safetensors"
    progress(f"writing a checkpoint of {size:,} bytes with torch on {RANKS} gloo ranks")
    run_sample((*PROGRAM, "write", str(source), str(size)))
    run_sample((*CONVERT, str(source), str(weights), "--to", "safetensors", "--no-fsync"))
    for file in walk_files(source):
        server.put(_BUCKET, f"{_STORE}/{file.relative_to(source)}", file.read_bytes())
    server.put(_BUCKET, _WEIGHTS, weights.read_bytes())
    weights.unlink()
    urls = {"{store}": _STORE, "{weights}": _WEIGHTS, "{stored}": _STORED}
    places = {mark: f"s3://{_BUCKET}/{key}" for mark, key in urls.items()}
    return _StoreScene(server, {"{source}": str(source), **output_paths(scratch), **places})


class _StoreScene(Scene):
    """Checkpoints in a store; what a command writes there is removed."""

    def __init__(self, server: S3Server, paths: Mapping[str, str]) -> None:
        super().__init__(paths)
        self._server = server
        self._objects = server.buckets[_BUCKET]
        self.environment = {
            **self.environment,
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def moved_bytes(self, row: Row) -> int:
        """Return the bytes of what a row reads in the store."""
        read = _STORE if "{store}" in row.command else _WEIGHTS
        return sum(len(one.data) for key, one in self._objects.items() if key.startswith(read))

    def take_sample(self, row: Row) -> Sample:
        """Take one sample of a row, with what the store was asked meanwhile."""
        self._server.log.clear()
        try:
            sample = super().take_sample(row)
        finally:
            for key in [key for key in self._objects if key.startswith(_STORED)]:
                del self._objects[key]
        asked = list(self._server.log)
        return replace(
            sample,
            requests=len(asked),
            read_bytes=sum(one.sent for one in asked),
            written_bytes=sum(one.received for one in asked),
        )
