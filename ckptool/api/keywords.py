"""Keywords of the Python functions, for type checkers.

Generated: ``python -m ckptool.api.arguments``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from ckptool.api.arguments import AnyDType, AnyPath, Size, Strings


class ReadKeywords(TypedDict, total=False):
    """Keywords of ``ReadOptions``."""

    from_format: str | None
    per_rank: bool
    flat_params: AnyPath | None
    tp_rule: Strings
    storage_option: Mapping[str, object]
    world_size: int | None


class OpenKeywords(ReadKeywords, total=False):
    """Keywords of ``ReadOptions``, ``RewriteOptions``."""

    split_stacked: bool
    select: Strings
    drop: Strings
    model_only: bool
    no_optimizer: bool
    peft_adapter: bool
    strip_prefix: str | None
    rename: Strings
    map: str | None
    dim: Mapping[str, int]
    hf_assets: AnyPath | None
    inverse: bool | None
    experts: str | None
    dtype: AnyDType | Sequence[AnyDType] | None
    dequantize: bool
    metadata: Mapping[str, str]
    drop_metadata: Strings


class DiffKeywords(OpenKeywords, total=False):
    """Keywords of ``DiffOptions``."""

    values: bool
    rtol: float | None
    atol: float | None
    cast: bool
    other_format: str | None
    workers: int | None


class ExtractKeywords(ReadKeywords, total=False):
    """Keywords of ``ExtractOptions``."""

    experts: str | None
    dtype: AnyDType | Sequence[AnyDType] | None
    dequantize: bool
    resume: bool
    workers: int | None
    budget: Size


class ConvertKeywords(OpenKeywords, total=False):
    """Keywords of ``ConvertOptions``."""

    max_shard_size: Size
    single_rank: bool
    overwrite: bool
    resume: bool
    verify: bool
    workers: int | None
    budget: Size
    fsync: bool
    part: str | None
    finish: bool
    dry_run: bool


class SaveKeywords(TypedDict, total=False):
    """Keywords of ``SaveOptions``."""

    max_shard_size: Size
    overwrite: bool
    verify: bool
    workers: int | None
    budget: Size
    fsync: bool


class ReshardKeywords(TypedDict, total=False):
    """Keywords of ``ReshardOptions``."""

    mesh: str | None
    shard: Strings
    policy: str | None
    plan: AnyPath | None
    tp_plan: AnyPath | None
    to: str | None
    from_format: str | None
    flat_params: AnyPath | None
    tp_rule: Strings
    split_stacked: bool
    storage_option: Mapping[str, object]
    world_size: int | None
    rank_state: str
    select: Strings
    drop: Strings
    model_only: bool
    no_optimizer: bool
    map: str | None
    dim: Mapping[str, int]
    hf_assets: AnyPath | None
    inverse: bool | None
    experts: str | None
    dtype: AnyDType | Sequence[AnyDType] | None
    overwrite: bool
    resume: bool
    verify: bool
    workers: int | None
    budget: Size
    fsync: bool
    part: str | None
    finish: bool
    dry_run: bool
    check: bool


class MergeKeywords(ExtractKeywords, total=False):
    """Keywords of ``MergeOptions``."""

    average: bool
    sum: bool
    weights: str | Sequence[float]
    ema: float | None
    onto: AnyPath | None
    lora: AnyPath | None
    add: AnyPath | None
    minus: AnyPath | None
    scale: float
    apply_delta: bool
    take: Mapping[str, AnyPath]
    last: int | None
    rows: Mapping[str, int] | Strings
    fill: str | None
    with_optimizer: bool
    recipe: AnyPath | None
    mesh: str | None
    to: str | None
    split_stacked: bool
    select: Strings
    drop: Strings
    model_only: bool
    no_optimizer: bool
    strip_prefix: str | None
    rename: Strings
    map: str | None
    dim: Mapping[str, int]
    hf_assets: AnyPath | None
    inverse: bool | None
    metadata: Mapping[str, str]
    drop_metadata: Strings
    max_shard_size: Size
    single_rank: bool
    overwrite: bool
    verify: bool
    fsync: bool
    part: str | None
    finish: bool
    dry_run: bool


class VerifyRunKeywords(ReadKeywords, total=False):
    """Keywords of ``VerifyOptions``."""

    quick: bool
    sample: float | str
    seed: int
    fail_nonfinite: bool
    allow_nonfinite: bool
    strict: bool
    ignore: Strings
    workers: int | None


class VerifyKeywords(OpenKeywords, total=False):
    """Keywords of ``VerifyOptions``, ``RewriteOptions``, ``LikeOptions``, ``ManifestOptions``."""

    quick: bool
    sample: float | str
    seed: int
    part: str | None
    fail_nonfinite: bool
    strict: bool
    ignore: Strings
    workers: int | None
    like: AnyPath | None
    expect_changed: Strings
    expect_equal: Strings
    write_manifest: AnyPath | None
    manifest: AnyPath | None
    overwrite: bool


class CompareKeywords(OpenKeywords, total=False):
    """Keywords of ``VerifyOptions``, ``RewriteOptions``, ``CompareOptions``."""

    fail_nonfinite: bool
    strict: bool
    ignore: Strings
    workers: int | None
    rtol: float | None
    atol: float | None
    cast: bool
    other_format: str | None


class SalvageKeywords(ReadKeywords, total=False):
    """Keywords of ``SalvageOptions``."""

    overwrite: bool
    workers: int | None


class PruneKeywords(TypedDict, total=False):
    """Keywords of ``PruneOptions``."""

    keep_every: int | None
    no_optimizer: bool
    yes: bool
    from_format: str | None
    per_rank: bool
    storage_option: Mapping[str, object]
    world_size: int | None
    quick: bool
    allow_nonfinite: bool
    strict: bool
    ignore: Strings
    workers: int | None


class BenchKeywords(TypedDict, total=False):
    """Keywords of ``BenchOptions``."""

    size: Size | None
    like: AnyPath | None
    out: AnyPath
    strategies: Strings
    ranks: int | None
    repeat: int
    step_time: float | str | None
    interval: float | str | None
    mtbf: float | str | None
    abort: bool
