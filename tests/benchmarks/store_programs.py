"""Programs that the rows of the bench of stores run, each in a process of its own.

``python -m benchmarks.store_programs TASK ...``. A load tells, as JSON in the
file ``result``, the seconds and the processor's seconds of the load alone: its modules are there,
and what it loads into where that is the caller's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

_PART = 8 << 20
_AT_ONCE = 16
_FILES_AT_ONCE = 4


def boto3_download(source: str, target: str) -> None:
    """Download a folder as boto3 does it: several files at a time, each in parallel parts."""
    bucket, prefix = _place(source)
    client = _boto3_client()
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
    keys = [one["Key"] for page in pages for one in page.get("Contents", [])]
    os.makedirs(target)

    def download(key: str) -> None:
        file = os.path.join(target, key.removeprefix(f"{prefix}/"))
        client.download_file(bucket, key, file, Config=_transfer_config())

    _for_each(download, keys)


def boto3_copy(source: str, target: str, folder: str) -> None:
    """Download a folder and upload it, as who reshards on a disk has to."""
    boto3_download(source, folder)
    bucket, prefix = _place(target)
    client = _boto3_client()

    def upload(name: str) -> None:
        file = os.path.join(folder, name)
        client.upload_file(file, bucket, f"{prefix}/{name}", Config=_transfer_config())

    _for_each(upload, os.listdir(folder))


def _place(url: str) -> tuple[str, str]:
    """Return the bucket and the key of a URL."""
    parts = urlsplit(url)
    return parts.netloc, parts.path.strip("/")


def _for_each(work: Callable[[str], None], names: list[str]) -> None:
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        list(pool.map(work, names))


def _boto3_client() -> Any:
    import boto3
    from botocore.config import Config

    return boto3.client("s3", config=Config(max_pool_connections=_AT_ONCE))


def _transfer_config() -> Any:
    from boto3.s3.transfer import TransferConfig

    at_once = _AT_ONCE // _FILES_AT_ONCE
    return TransferConfig(
        multipart_threshold=_PART, multipart_chunksize=_PART, max_concurrency=at_once
    )


def s3fs_download(source: str, target: str) -> None:
    """Download a folder as s3fs does it."""
    import s3fs

    s3fs.S3FileSystem().get(source, target, recursive=True)


def load_by_ckptool(source: str, result: str, local: str) -> None:
    """Load every tensor of a DCP checkpoint by ckptool's storage reader."""
    from ckptool.dcp import CheckpointReader

    _load_by(lambda: CheckpointReader(source), result, local)


def load_by_s3torchconnector(source: str, result: str, local: str) -> None:
    """Load every tensor of a DCP checkpoint by the reader of s3torchconnector."""
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageReader

    region = os.environ["AWS_DEFAULT_REGION"]
    config = S3ClientConfig(force_path_style=True)
    _load_by(lambda: S3StorageReader(region, source, s3client_config=config), result, local)


def _load_by(make_reader: Callable[[], Any], result: str, local: str) -> None:
    """Load by ``torch.distributed.checkpoint.load``, in one process; ``local`` is the same on disk.

    Each reader has read the metadata once before: what it imports as it goes is there.
    """
    import torch
    from torch.distributed.checkpoint.state_dict_loader import load

    from benchmarks.programs import read_tensors

    # zeros, not empty: the memory is touched before the clock starts
    state = {name: torch.zeros(size, dtype=dtype) for name, size, dtype in read_tensors(local)}
    make_reader().read_metadata()
    with _Clock(result):
        load(state, storage_reader=make_reader(), no_dist=True)


def weights_by_ckptool(source: str, result: str) -> None:
    """Load every tensor of a safetensors file into memory by ``ckptool.load``."""
    import torch

    from ckptool.api.checkpoint import open
    from ckptool.api.load import load

    open(source)
    with _Clock(result):
        checkpoint = open(source)
        state = {
            name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype.name))
            for name, entry in checkpoint.tensors.items()
        }
        load(checkpoint, state)


def weights_by_runai(source: str, result: str) -> None:
    """Load every tensor of a safetensors file into memory by runai-model-streamer."""
    from runai_model_streamer import SafetensorsStreamer

    os.environ["RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING"] = "0"
    with _Clock(result), SafetensorsStreamer() as streamer:
        streamer.stream_file(source)
        dict(streamer.get_tensors())


class _Clock:
    """Measures what is done under it, for the file ``result``."""

    def __init__(self, result: str) -> None:
        self._result = result

    def __enter__(self) -> None:
        self._begin = time.perf_counter(), time.process_time()

    def __exit__(self, error: object, *words: object) -> None:
        wall, cpu = time.perf_counter() - self._begin[0], time.process_time() - self._begin[1]
        if error is None:
            with open(self._result, "w", encoding="utf-8") as stream:
                json.dump({"load": wall, "cpu": cpu}, stream)


_TASKS: dict[str, Callable[..., object]] = {
    "boto3-download": boto3_download,
    "boto3-copy": boto3_copy,
    "s3fs-download": s3fs_download,
    "load-ckptool": load_by_ckptool,
    "load-s3torchconnector": load_by_s3torchconnector,
    "weights-ckptool": weights_by_ckptool,
    "weights-runai": weights_by_runai,
}

if __name__ == "__main__":
    _task, *_words = sys.argv[1:]
    _TASKS[_task](*_words)
