"""Keywords of the Python functions: the command line's options, typed, each with what it means.

``--tp-rule`` is ``tp_rule``; only ``--from`` and ``--all`` are called otherwise (``from_format``,
``every``), for the words are Python's own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

if TYPE_CHECKING:
    import torch

    AnyDType = str | torch.dtype
else:
    AnyDType = Any

AnyPath = str | os.PathLike[str]
"""A path or a URL."""

Strings = str | Sequence[str]
"""Several of an option, or the one by itself."""

Size = int | str
"""Bytes: a number, or as people write it (``"5GB"``, ``"512MiB"``)."""


class Rules(TypedDict, total=False):
    """How to read it, where its files alone leave that open."""

    from_format: Annotated[str | None, "read as this format instead of detecting it (--from)"]
    tp_rule: Annotated[Strings, "GLOB=RULE: how tensor-parallel ranks' parameters fit together"]
    flat_params: Annotated[AnyPath | None, "JSON file of names and shapes, for FSDP1's flat ones"]
    world_size: Annotated[int | None, "number of ranks whose files are read, of several saves"]


class Reading(Rules, total=False):
    """How to read it."""

    per_rank: Annotated[bool, "keep plain tensors that differ between ranks, as NAME@rankR"]


class Inspecting(Reading, total=False):
    """What ``inspect`` takes."""

    values: Annotated[bool, "also of a URL, read values that lie among the data"]


class Selecting(TypedDict, total=False):
    """What to take, and how to call it, in this order."""

    select: Annotated[Strings, "globs: keep only what matches"]
    drop: Annotated[Strings, "globs: leave out what matches"]
    model_only: Annotated[bool, "keep the model, under its own names"]
    strip_prefix: Annotated[str | None, "take off the names' beginning"]
    rename: Annotated[Strings, "REGEX=REPLACEMENT, in order"]


class KeyMapping(TypedDict, total=False):
    """The names and layout of another framework."""

    map: Annotated[str | None, "a built-in key map (list_maps), a TOML file, or auto"]
    dim: Annotated[Mapping[str, int], "sizes of the map's named dims"]
    inverse: Annotated[bool | None, "go from the map's to side to its from side"]
    hf_assets: Annotated[AnyPath | None, "a folder with config.json and tokenizer files"]


class Casting(TypedDict, total=False):
    """Other numbers than those that are stored, rounded as torch rounds."""

    dtype: Annotated[
        AnyDType | Sequence[AnyDType],
        "cast the model's weights: bf16, torch.bfloat16, ...; 'GLOB=bf16' casts what matches",
    ]
    dequantize: Annotated[bool, "make numbers of FP8, INT8 and MXFP4: bf16, or what dtype says"]


class Opening(Reading, Selecting, KeyMapping, Casting, total=False):
    """What ``open``, ``load`` and the DCP reader take."""

    unstack: Annotated[bool, "one tensor a layer and expert, of stacked ones"]


class Moving(TypedDict, total=False):
    """How to write."""

    overwrite: Annotated[bool, "replace the target once all is written"]
    resume: Annotated[bool, "continue what an interrupted run left"]
    workers: Annotated[int, "threads that move bytes"]
    budget: Annotated[Size, "memory for moving bytes"]
    fsync: Annotated[bool, "wait until the disk has it all"]
    dry_run: Annotated[bool, "report the plan and write nothing"]


class Converting(Opening, Moving, total=False):
    """What ``convert`` takes."""

    max_shard_size: Annotated[Size, "of a safetensors shard"]
    one_rank: Annotated[bool, "write whole tensors as rank 0, not the source's chunks"]


class Resharding(Rules, KeyMapping, Moving, total=False):
    """What ``reshard`` takes."""

    mesh: Annotated[str | None, "2x4, 8, or dp=2,tp=4"]
    shard: Annotated[Strings, "GLOB=PLACEMENTS, first wins: Shard(0),Replicate() or colwise"]
    plan: Annotated[AnyPath | None, "TOML file: a mesh and an ordered list of rules"]
    tp_plan: Annotated[AnyPath | None, "a config.json with a transformers tp_plan"]
    policy: Annotated[str | None, "fsdp, hsdp or replicate"]
    to: Annotated[str | None, "a format that reshard writes; default: the source's own kind"]
    unstack: Annotated[bool, "one tensor a layer and expert, of stacked ones"]
    rank_state: Annotated[str, "what differs between ranks: stop, keep, drop, or a rank's number"]
    verify: Annotated[bool, "read back and compare before it counts"]
    check: Annotated[bool, "load the result through torch on every rank, and compare"]


class Judging(Reading, total=False):
    """What counts as wrong."""

    strict: Annotated[bool, "warnings fail too"]
    ignore: Annotated[Strings, "codes of findings to leave out"]
    finite: Annotated[bool, "NaN and infinite values are errors"]
    workers: Annotated[int, "threads that read"]


class Checking(Judging, total=False):
    """What ``verify_run`` takes."""

    quick: Annotated[bool, "read metadata only, not the data"]
    sample: Annotated[float | str, "read a share of the data, such as 0.05"]
    seed: Annotated[int, "what sample chooses by"]


class Verifying(Checking, Opening, total=False):
    """What ``verify`` takes; what ``open`` takes beside reading goes with a manifest."""

    manifest: Annotated[AnyPath | None, "prove by this manifest, of whatever format"]
    write_manifest: Annotated[AnyPath | None, "write the SHA-256 of all, once all is sound"]
    overwrite: Annotated[bool, "replace the manifest"]


class Comparing(Judging, Opening, total=False):
    """What ``compare`` takes: what ``open`` makes of the first; without a tolerance bits count."""

    against_from: Annotated[str | None, "read the other one as this format"]
    rtol: Annotated[float | None, "allowed difference, times the other's number"]
    atol: Annotated[float | None, "allowed difference"]
    cast: Annotated[bool, "cast the model's weights to the other's types, then compare"]


class Salvaging(Reading, total=False):
    """What ``salvage`` takes."""

    overwrite: Annotated[bool, "replace the target once all is written"]
    workers: Annotated[int, "threads that move bytes"]


class Benching(TypedDict, total=False):
    """What ``bench`` takes."""

    like: Annotated[AnyPath | None, "save tensors shaped as this checkpoint's"]
    size: Annotated[Size, "of the state; 1GiB unless told"]
    strategies: Annotated[Strings, "names, families or globs, or MODULE:CLASS; default: all"]
    ranks: Annotated[int | None, "default: one an accelerator, or 2 on the CPU"]
    repeat: Annotated[int, "saves after the first"]
    out: Annotated[AnyPath, "where to save, a folder or a URL; all is removed at the end"]
    abort: Annotated[bool, "also kill each strategy in mid-save"]
