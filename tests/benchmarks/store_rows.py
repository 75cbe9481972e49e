"""What the bench of stores measures: ckptool's commands, and other clients at the same work."""

from __future__ import annotations

import sys

from benchmarks.rows import (
    CKPTOOL,
    CONVERT,
    ON_2X4,
    RESHARD,
    TO_SAFETENSORS,
    Row,
)

_PROGRAM = (sys.executable, "-m", "benchmarks.store_programs")
_BOTO3, _BOTO3_TWICE, _S3FS = "boto3 download", "boto3 download, upload", "s3fs download"
_S3TORCH, _RUNAI = "dcp.load, s3torchconnector's reader", "weights, runai-model-streamer"


def _load(task: str, mark: str) -> tuple[str, ...]:
    return (*_PROGRAM, task, mark, "{result}")


STORE_ROWS = (
    Row(
        "convert s3 -> local, to safetensors",
        (*CONVERT, "{store}", *TO_SAFETENSORS, "--no-fsync"),
        peers=(_BOTO3, _S3FS),
    ),
    Row("verify s3", (*CKPTOOL, "verify", "--quiet", "{store}"), peers=(_BOTO3,)),
    Row(_BOTO3, (*_PROGRAM, "boto3-download", "{store}", "{target}"), needs=("boto3",)),
    Row(_S3FS, (*_PROGRAM, "s3fs-download", "{store}", "{target}"), needs=("s3fs",)),
    Row(
        "reshard s3 -> s3, --mesh 2x4",
        (*RESHARD, "{store}", "{stored}", *ON_2X4),
        peers=(_BOTO3_TWICE,),
    ),
    Row(
        _BOTO3_TWICE,
        (*_PROGRAM, "boto3-copy", "{store}", "{stored}", "{target}"),
        needs=("boto3",),
    ),
    Row(
        "dcp.load, ckptool's reader",
        (*_load("load-ckptool", "{store}"), "{source}"),
        peers=(_S3TORCH,),
        measure="load",
    ),
    Row(
        _S3TORCH,
        (*_load("load-s3torchconnector", "{store}"), "{source}"),
        measure="load",
        needs=("s3torchconnector",),
    ),
    Row("weights, ckptool.load", _load("weights-ckptool", "{weights}"), (_RUNAI,), "load"),
    Row(
        _RUNAI,
        _load("weights-runai", "{weights}"),
        measure="load",
        needs=("runai_model_streamer", "runai_model_streamer_s3"),
    ),
)
"""``{store}`` is a DCP checkpoint in the store, as ``{source}`` has it on disk, and ``{weights}`` a
contiguous safetensors file there; ``{stored}`` is where a command writes in the store."""
