"""vLLM's sharded state: each tensor-parallel rank's own weights, ``model-rank-{r}-part-{p}``.

Written as ``ShardedStateLoader`` reads (vLLM at commit 01ed47b4): plain local tensors without
offsets or metadata, all keys of a rank spread over its parts. Empty tensors and all but the first
name of tied ones are left out, as the loader leaves them out of what it expects. Read: models of
which ``_vllm.py`` knows how they were cut; the files do not say it.
"""

from __future__ import annotations

import re
from functools import partial

from ckptool.core.catalog import Catalog
from ckptool.errors import Damaged
from ckptool.formats.base import Format, ScanOptions
from ckptool.formats.companions import companions, config_info, read_config
from ckptool.formats.safetensors import with_extra
from ckptool.formats.vllm.merge import Merger, sizes_of
from ckptool.formats.vllm.write import EXTRA, RULES, lay_out
from ckptool.serialization.safetensors import read_safetensors
from ckptool.serialization.source import Source, expect_heads, first_missing, require_rank
from ckptool.serialization.state_dict.tensor_parallel import LocalTensor, tp_mesh

_FILE = re.compile(r"model-rank-([0-9]{1,9})-part-([0-9]{1,9})\.safetensors")


def _probe(source: Source) -> bool:
    return any(_FILE.fullmatch(name) for name in source.files)


def _scan(source: Source, options: ScanOptions) -> Catalog:
    files = [match for name in source.files if (match := _FILE.fullmatch(name))]
    world = max(int(match[1]) for match in files) + 1
    _require_whole(source, files, world)
    locals_, problems = _locals(source, files, options)
    merger = Merger(sizes_of(read_config(source)), world, options.tp_rules)
    merger.merge(locals_)
    merger.add_tied()
    options.report([*problems, *merger.problems], subject=source.root)
    info = {"writer": "vLLM or SGLang (by its file names)", "parallelism": f"TP {world}"}
    catalog = Catalog(
        "sharded-state",
        merger.tensors,
        {},
        {match.string: source.files[match.string] for match in files},
        world_size=world,
        mesh=tp_mesh(world) if world > 1 else None,
        mesh_source="declared" if world > 1 else None,
        info=info | config_info(source),
        notes=tuple(merger.notes),
        conflicts=merger.unknown,
        companions=companions(source),
    )
    return with_extra(catalog, source, EXTRA)


def _require_whole(source: Source, files: list[re.Match[str]], world: int) -> None:
    """Raise Damaged where a rank, or a part before a rank's last, has no file."""
    require_rank(world, source.root)
    parts: dict[int, set[int]] = {}
    for match in files:
        parts.setdefault(int(match[1]), set()).add(int(match[2]))
    missing = [f"model-rank-{rank}-part-0" for rank in first_missing(parts, world)]
    for rank, numbers in parts.items():
        lost = first_missing(numbers, max(numbers) + 1)
        missing += [f"model-rank-{rank}-part-{part}" for part in lost]
    if missing:
        raise Damaged(f"{source.root}: {missing[0]}.safetensors is missing", "rank-missing")


def _locals(
    source: Source, files: list[re.Match[str]], options: ScanOptions
) -> tuple[dict[str, dict[int, LocalTensor]], list[str]]:
    """Return each rank's tensors, by name."""
    found: dict[str, dict[int, LocalTensor]] = {}
    problems = []
    expect_heads(source, (match.string for match in files))
    for match in sorted(files, key=lambda match: (int(match[1]), int(match[2]))):
        header = options.attempt(partial(read_safetensors, source, match.string))
        for name, item in (header.tensors if header else {}).items():
            held = found.setdefault(name, {})
            if int(match[1]) in held:
                problems.append(f"{name}: rank {match[1]} has it twice")
            held[int(match[1])] = LocalTensor(item.dtype, item.shape, item.at)
    return found, problems


FORMAT = Format(
    "sharded-state",
    "vLLM sharded state: model-rank-R-part-P.safetensors",
    _probe,
    _scan,
    reshard=lay_out,
    rules=lambda: RULES,
    takes_tp_rules=True,
    has_values=False,
    is_model_folder=True,
)
