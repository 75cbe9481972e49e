"""Ranks whose files are lost though no file says how many there were."""

from __future__ import annotations

import json
import re

from ckptool.core.catalog import Catalog
from ckptool.errors import Damaged, Problem
from ckptool.formats.base import Source, first_missing, read_metadata

_RANDOM = re.compile(r"random_states_([0-9]{1,6})\.pkl")
_PARAMS = "params.json"
_QUERIES = "attention.wq.weight"


def lost_last_ranks(source: Source, catalog: Catalog) -> list[Problem]:
    """Files of the last ranks that are gone: Meta's ``consolidated.NN.pth``, random states."""
    return [*_lost_shards(source, catalog), *_lost_random_states(source, catalog)]


def _lost_random_states(source: Source, catalog: Catalog) -> list[Problem]:
    """accelerate writes ``random_states_N.pkl`` on every rank (1.15)."""
    ranks = {int(match[1]) for match in map(_RANDOM.fullmatch, source.files) if match}
    missing = first_missing(ranks, catalog.world_size or 0) if ranks else []
    if not missing:
        return []
    message = f"random_states_{missing[0]}.pkl is missing, of {catalog.world_size} ranks"
    return [Problem(message, "rank-missing", file=f"random_states_{missing[0]}.pkl")]


def _lost_shards(source: Source, catalog: Catalog) -> list[Problem]:
    """Meta's model-parallel files of which the last are gone: rows of queries are missing."""
    wanted = _query_rows(source) if catalog.format == "llama" else None
    for name, entry in catalog.tensors.items():
        if wanted and name.endswith(_QUERIES) and entry.shape and entry.shape[0] != wanted:
            message = f"{name}: {entry.shape[0]:,} rows, {_PARAMS} says {wanted:,}:"
            message += f" there were more ranks than the {catalog.world_size} whose files are here"
            return [Problem(message, "rank-missing", tensor=name)]
    return []


def _query_rows(source: Source) -> int | None:
    """Heads times their size, as Llama's and Mistral's ``params.json`` say."""
    try:
        params = json.loads(read_metadata(source, _PARAMS)) if _PARAMS in source.files else None
    except (ValueError, RecursionError, Damaged):
        return None
    sizes = params if isinstance(params, dict) else {}
    dim, heads, size = (sizes.get(key) for key in ("dim", "n_heads", "head_dim"))
    if type(heads) is not int or heads < 1:
        return None
    if type(size) is int:
        return heads * size
    return dim if type(dim) is int else None
