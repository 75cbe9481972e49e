"""State that each rank has for itself: positions in the data, random states, of all ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, pairwise, takewhile
from math import gcd

from ckptool.commands.model.records import Record
from ckptool.commands.open import Survey
from ckptool.core.catalog import Catalog
from ckptool.core.text import list_some, plural
from ckptool.errors import CkptoolError, Problem
from ckptool.formats.companions import TRAINER_STATE, loader_ranks, size_in
from ckptool.serialization.archive.read import read_torch_file
from ckptool.serialization.pickle.records import Call
from ckptool.serialization.source import Source, are_of_a_node, find_missing_ranks

_RANDOM = re.compile(r"rng_state_(\d{1,6})\.pth")
"""The name of a rank's random states (transformers 4.20 to 5.24); of one process, no number."""
_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?/model_optim_rng\.pt")
"""The file of a tensor, pipeline and expert rank (Megatron-LM d98e8a6, training/checkpointing.py);
a second number is an expert rank's where there are no pipelines."""
_ARGUMENTS = "training_args.bin"
_PAIR = 2
_MOST = 1 << 16
"""More processes than any training has."""
_FEW = 4


def rank_problems(surveyed: Survey, catalog: Catalog) -> Iterator[Problem]:
    """Yield the state that only some ranks have; the others would begin anew, or fail.

    Each node of a cluster may have the random states of its own ranks, and each replica of torchft
    its ranks' positions, without a model.
    """
    loaders, degree = loader_ranks(catalog.objects)
    if loaders and catalog.tensors and (missing := find_missing_ranks(loaders, degree)):
        names = [f"dataloader.dp_rank_{rank}" for rank in missing]
        message = f"{list_some(names, _FEW)}: missing, of {plural(degree, 'data-parallel rank')}"
        yield Problem(message, "rank-missing", tensor=names[0])
    files = surveyed.source.files
    if without := _without_random(files, catalog):
        message = f"{list_some(without, _FEW)}: without rng_state, which files of other ranks have"
        yield Problem(message, "rank-missing", file=without[0])
    random = sorted(int(m[1]) for m in map(_RANDOM.fullmatch, files) if m)
    if TRAINER_STATE in files and random:
        yield from _random_problems(random, _processes(surveyed.source), catalog.world_size)


def _random_problems(random: Sequence[int], processes: int, world: int | None) -> Iterator[Problem]:
    """Yield a problem if random states are missing, of some of the Trainer's ``processes``.

    A node has those of its own ranks, as many as any other node. But beside a model that all ranks
    of the ``world`` saved, there are the random states of all.
    """
    rest = sorted({*range(processes)}.difference(random))
    if not are_of_a_node(random):
        distances = (high - low for low, high in pairwise(random))
        missing = sorted(set(range(random[0], random[-1], gcd(*distances))).difference(random))
        whose = f"ranks up to {random[-1]}"
    elif rest and (processes % len(random) or world == processes):
        missing, whose = rest, plural(processes, "rank")
    else:
        missing = []
    if missing:
        names = [f"rng_state_{rank}.pth" for rank in missing]
        message = f"{list_some(names, _FEW)}: missing, of {whose}"
        yield Problem(message, "rank-missing", file=names[0])
    elif rest:
        message = f"random states of {len(random)} of {processes} ranks, as one node has them"
        yield Problem(f"{message}: without rng_state_{rest[0]}.pth", "ranks-fewer")


def _processes(source: Source) -> int:
    """Return how many processes the Trainer had, as its arguments say; else 0.

    They hold accelerate's state (transformers 4.30 to 5.24).
    """
    if _ARGUMENTS in source.files:
        with suppress(CkptoolError):
            arguments = read_torch_file(source, _ARGUMENTS).inert
            state = _fields_of(_fields_of(arguments).get("distributed_state"))
            count = size_in(state, "num_processes") or 0
            return count if count < _MOST else 0
    return 0


def _fields_of(value: object) -> Record:
    fields = value.state if isinstance(value, Call) else None
    return fields if isinstance(fields, dict) else {}


def _without_random(files: Iterable[str], catalog: Catalog) -> list[str]:
    """Return the files of Megatron's ranks without random states, if those of others have them.

    The states are ``rng_state.PIPELINE.TENSOR``, with an expert rank if there are several.
    """
    tensors = (entry.path for entry in catalog.tensors.values())
    values = (entry.path for entry in catalog.objects.values())
    paths = (path[1:] for path in chain(tensors, values) if path[:1] == ("rng_state",))
    ranks = {tuple(takewhile(_is_number, path)) for path in paths}
    folders = [match for match in map(_FOLDER.fullmatch, files) if match and ranks]
    depth = max(map(len, ranks), default=0)
    return sorted(folder[0] for folder in folders if _rank_of(folder, depth) not in ranks)


def _is_number(step: object) -> bool:
    return isinstance(step, str) and step.isdigit()


def _rank_of(folder: re.Match[str], depth: int) -> tuple[str, ...]:
    """Return a folder's pipeline rank, tensor rank and, if ``depth`` is three, expert rank."""
    tensor, *rest = (str(int(number)) for number in folder.groups() if number)
    has_pipelines = depth == _PAIR or len(rest) == _PAIR
    pipeline = rest.pop(0) if rest and has_pipelines else "0"
    return (pipeline, tensor, *(rest or ["0"]))[:depth]
