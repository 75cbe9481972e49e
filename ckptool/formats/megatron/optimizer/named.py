"""Take the distributed optimizer's state of a ``torch_dist`` checkpoint apart into parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.state_category import state_category
from ckptool.errors import Undetermined
from ckptool.formats.dcp import SavePlan
from ckptool.formats.megatron.arguments import arguments_among
from ckptool.formats.megatron.optimizer.buckets import Group, bucket_state, buckets_among, is_bucket
from ckptool.formats.megatron.optimizer.gathered import (
    Buffer,
    gathered_state,
    matched_buffers,
    param_dtype,
)
from ckptool.formats.megatron.optimizer.stages import Stages
from ckptool.formats.megatron.parameters import Fragments, StorageRun, merge_fragments
from ckptool.serialization.source import Source

_GATHERED = re.compile(
    r"(?:chained_([0-9]{1,3})\.)?optimizer\.distributed\.dp_group_idx_([0-9]{1,7})\.param_state"
)
_BY_BUCKET = "the optimizer's state is kept by bucket, for its parameters are not known"


def with_named_state(source: Source, catalog: Catalog, plans: list[SavePlan]) -> Catalog:
    """Return the catalog with ``fp32.<name>``, ``exp_avg.<name>``, ... in the place of buckets.

    Where the parameters in them are not known for certain, the buckets stay, and a note says why.
    """
    tensors = catalog.tensors.values()
    state = {e.name: e for e in tensors if is_bucket(e.name) or _group_of(e)}
    if not state:
        return catalog
    rest = {name: entry for name, entry in catalog.tensors.items() if name not in state}
    model = {name: entry for name, entry in rest.items() if state_category(entry) == "model"}
    writers = _writers(state.values())
    args = arguments_among(catalog.objects.values())
    stages = Stages(model, plans, args, writers, {})
    try:
        found = _found(source, state.values(), stages)
    except Undetermined as error:
        return replace(catalog, notes=(*catalog.notes, f"{_BY_BUCKET}: {error}"))
    whole = merge_fragments(stages.fit, found)
    objects = {n: e for n, e in catalog.objects.items() if not _GATHERED.match(n)}
    return replace(
        catalog,
        tensors=rest | whole.tensors,
        objects=objects,
        conflicts=catalog.conflicts | whole.conflicts,
    )


def _found(source: Source, state: Iterable[TensorEntry], stages: Stages) -> Fragments:
    found: Fragments = {}
    entries = list(state)
    for group, buffers in buckets_among(entries).items():
        _add(found, bucket_state(buffers, stages.expected(group)))
    for group, saved in _gathered(entries).items():
        tied = not stages.args.values.get("untie_embeddings_and_output_weights", True)
        _add(
            found, gathered_state(source, matched_buffers([saved], [stages.expected(group)]), tied)
        )
    return found


def _add(found: Fragments, more: Fragments) -> None:
    for path, parts in more.items():
        found.setdefault(path, []).extend(parts)


def _group_of(entry: TensorEntry) -> Group | None:
    """Return the group whose gathered state (``dp_zero_gather_scatter``) the tensor belongs to."""
    match = _GATHERED.fullmatch(str(entry.path[0]))
    return (int(match[1] or 0), int(match[2])) if match and len(entry.path) == 4 else None


def _gathered(entries: Iterable[TensorEntry]) -> dict[Group, list[Buffer]]:
    """The gathered buffers of each group: paths are key, buffer, element types, kind of state."""
    found: dict[Group, dict[str, Buffer]] = {}
    for entry in entries:
        group = _group_of(entry)
        if group is None or len(entry.shape) != 1:
            continue
        _, number, dtypes, kind = entry.path
        buffers = found.setdefault(group, {})
        buffer = buffers.setdefault(str(number), Buffer(param_dtype(dtypes), {}))
        buffer.runs[str(kind)] = [
            StorageRun(chunk.box.shape, entry.dtype, chunk.at, chunk.box.lo[0], chunk.rank)
            for chunk in entry.chunks
        ]
    return {group: [b[key] for key in sorted(b, key=_number)] for group, b in found.items()}


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else -1


def _writers(state: Iterable[TensorEntry]) -> dict[Group, frozenset[int]]:
    """Return the ranks that wrote each group's state."""
    found: dict[Group, set[int]] = {}
    for entry in state:
        bucket = next(iter(buckets_among([entry])), None)
        group = bucket or _group_of(entry)
        if group is not None:
            found.setdefault(group, set()).update(
                chunk.rank for chunk in entry.chunks if chunk.rank is not None
            )
    return {group: frozenset(ranks) for group, ranks in found.items()}
