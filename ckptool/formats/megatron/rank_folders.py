"""The folders ``mp_rank_TT[_PPP][_EEE]`` of Megatron's own format, one per model-parallel rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

from msgspec import Struct

from ckptool.core.catalog import Index, Path, flat_name
from ckptool.errors import Damaged, Refusal, refused
from ckptool.formats.megatron import FOLDER
from ckptool.formats.megatron.model import Arguments, count_experts, count_layers, read_arguments
from ckptool.formats.megatron.tensor_parallel import Rank
from ckptool.serialization.archive.read import TorchFile, read_torch_file
from ckptool.serialization.source import Source, expect_archives, require_rank
from ckptool.serialization.state_dict.leaves import Leaf, PlainLeaf, read_leaves

STATE = "model_optim_rng.pt"
OPTIMIZER = "distrib_optim.pt"
_LAYER_WISE = re.compile(r"mp_rank_[0-9_]+/layer_wise_optimizer_[0-9]+\.pt")
_MODEL = re.compile(r"model([0-9]{0,4})")
_AXES = ("tensor", "pipeline", "expert")
_DEGREES = ("TP", "PP", "EP")


class RankFolder(Struct, frozen=True):
    """The content of one model-parallel rank's files, before names are those of the whole model.

    ``runs`` are the model's tensors by virtual pipeline stage, in the model's order; ``rest`` is
    all else, including the model's other values under ``model`` or ``modelN``.
    """

    rank: Rank
    number: int
    file: TorchFile
    runs: dict[int, dict[str, PlainLeaf]]
    rest: dict[str, Leaf]
    distributed: TorchFile | None

    @property
    def experts(self) -> int | None:
        """How many experts the rank numbers in its names; None if it numbers none."""
        return count_experts(name for run in self.runs.values() for name in run)

    @property
    def optimizer(self) -> Any:
        """The optimizer in the state dict, or None."""
        return self.file.inert.get("optimizer") if isinstance(self.file.inert, dict) else None


def read_folders(source: Source) -> tuple[list[RankFolder], Arguments]:
    """Return all folders in order of expert, pipeline and tensor rank, and the first's arguments.

    Raises Damaged if a rank is missing, or names do not distinguish pipeline from expert ranks.
    """
    names = sorted(name for name in source.files if FOLDER.fullmatch(name))
    expect_archives(source, names)
    files = {name: read_torch_file(source, name) for name in names}
    values = {name: f.inert if isinstance(f.inert, dict) else {} for name, f in files.items()}
    stated = {name: read_arguments(content.get("args")) for name, content in values.items()}
    args = stated[names[0]]
    ranks = {_parse_rank(name, args): name for name in names}
    _require_all(ranks, args)
    _require_own(ranks, {name: arguments.values.get("rank") for name, arguments in stated.items()})
    ordered = sorted(ranks, key=lambda rank: rank[::-1])
    _require_optimizers(source, [ranks[rank].replace(STATE, OPTIMIZER) for rank in ordered], args)
    return [
        _read_folder(source, rank, number, files[ranks[rank]], ranks[rank])
        for number, rank in enumerate(ordered)
    ], args


def _parse_rank(name: str, args: Arguments) -> Rank:
    match = FOLDER.fullmatch(name)
    numbers = [int(part) for part in match.groups() if part] if match else []
    require_rank(max(numbers), name)
    if len(numbers) == 3:
        return numbers[0], numbers[1], numbers[2]
    if len(numbers) == 1:
        return numbers[0], 0, 0
    pipeline, expert = args.degree("PP") > 1, args.degree("EP") > 1
    if pipeline == expert:
        raise Damaged(
            f"{name}: {numbers[1]} may be a pipeline or an expert rank, and the arguments saved"
            f" in it state PP {args.degree('PP')} and EP {args.degree('EP')}",
            "sharding-unknown",
        )
    return (numbers[0], numbers[1], 0) if pipeline else (numbers[0], 0, numbers[1])


def find_layer_wise_conflict(source: Source) -> dict[str, str]:
    """Return why the state of a layer-wise optimizer, which distributes parameters, is not read.

    ``LayerWiseDistributedOptimizer`` (megatron-core 0.16 to 0.20) saves a file per data rank; the
    parameters of each rank are not recorded.
    """
    files = sorted(name for name in source.files if _LAYER_WISE.fullmatch(name))
    if not files:
        return {}
    name = "optimizer.layer_wise"
    return {
        name: f"{name}: the state of a layer-wise optimizer lies in {files[0]} and"
        f" {len(files) - 1} more files, and nothing records which parameters belong to which"
    }


def find_virtual_stage(path: Path) -> int | None:
    """Return the virtual stage whose model contains a value: below ``model1`` it is 1."""
    match = _MODEL.fullmatch(str(path[0])) if len(path) > 1 else None
    return int(match[1] or 0) if match else None


def count_degrees(ranks: Mapping[Rank, object] | list[Rank]) -> Rank:
    """Return how many tensor-, pipeline- and expert-parallel ranks there are."""
    sizes = [max(rank[axis] for rank in ranks) + 1 for axis in range(3)]
    return sizes[0], sizes[1], sizes[2]


def _require_own(ranks: Mapping[Rank, str], writers: Mapping[str, Any]) -> None:
    """Raise Damaged if folders were swapped; ``writers`` are the global ranks stated in them.

    Those grow with each of the three, in whatever order they are counted. Tools that write all
    folders in one process save the same rank in each.
    """
    numbers = {rank: n for rank, name in ranks.items() if type(n := writers[name]) is int}
    if len(set(numbers.values())) < len(ranks):
        return
    for rank, next_rank in _pair_neighbors(numbers):
        if numbers[rank] > numbers[next_rank]:
            message = f"{ranks[rank]} was written by rank {numbers[rank]}, {ranks[next_rank]} by"
            message += f" rank {numbers[next_rank]}: folders were swapped"
            raise Damaged(message, "rank-copied", file=ranks[rank])


def _pair_neighbors(ranks: Iterable[Rank]) -> Iterator[tuple[Rank, Rank]]:
    """Yield each rank with the next one along each axis, with the other two equal."""
    for axis in range(3):
        lines: dict[tuple[int, ...], list[Rank]] = {}
        for rank in ranks:
            lines.setdefault(rank[:axis] + rank[axis + 1 :], []).append(rank)
        for line in lines.values():
            yield from pairwise(sorted(line))


def _require_all(ranks: Mapping[Rank, str], args: Arguments) -> None:
    degrees = [args.integer(f"{axis}_model_parallel_size") for axis in _AXES]
    for rank, name in ranks.items():
        if any(degree and n >= degree for n, degree in zip(rank, degrees, strict=True)):
            pairs = zip(_DEGREES, degrees, strict=True)
            listed = " x ".join(f"{short} {degree or 1}" for short, degree in pairs)
            raise Damaged(
                f"{name} belongs to no rank of {listed}, which the arguments in it state",
                "saves-mixed",
                file=name,
                hint="an earlier save with more ranks may have left it: move it away",
            )
    sizes = [
        max(size, degree or 1) for size, degree in zip(count_degrees(ranks), degrees, strict=True)
    ]
    lacking = prod(sizes) - len(ranks)
    expert_degree = args.integer("expert_tensor_parallel_size")
    if lacking and (expert_degree is None or expert_degree == sizes[0] or sizes[2] == 1):
        tensor, pipeline, expert = map(range, sizes)  # a product would contain every stated number
        grid = ((t, p, e) for t in tensor for p in pipeline for e in expert)
        missing = next(rank for rank in grid if rank not in ranks)
        what = ", ".join(f"{k} rank {n}" for k, n in zip(_DEGREES, missing, strict=True))
        total = " x ".join(map(str, sizes))
        message = f"the folder of {what} is missing ({lacking} of {total} model-parallel ranks)"
        raise Damaged(message, "rank-missing")


def _require_optimizers(source: Source, names: Sequence[str], args: Arguments) -> None:
    """Raise Damaged if only some ranks have an optimizer's file; experts' may be elsewhere."""
    missing = [name for name in names if name not in source.files]
    if missing and len(missing) < len(names) and args.degree("EP") == 1:
        message = f"{missing[0]!r} is missing, which {len(names) - len(missing)} of {len(names)}"
        message += " model-parallel ranks have"
        raise Damaged(message, "file-missing", file=missing[0])


def _read_folder(source: Source, rank: Rank, number: int, file: TorchFile, name: str) -> RankFolder:
    optimizer = name.replace(STATE, OPTIMIZER)
    distributed = read_torch_file(source, optimizer) if optimizer in source.files else None
    runs: dict[int, dict[str, PlainLeaf]] = {}
    rest: dict[str, Leaf] = {}
    for full, leaf in read_leaves(file, source).items():
        virtual = find_virtual_stage(leaf.path)
        if isinstance(leaf.value, Refusal):
            rest[full] = leaf
        elif virtual is not None and isinstance(leaf.value, PlainLeaf):
            runs.setdefault(virtual, {})[full.partition(".")[2]] = leaf.value
        elif not _is_state(leaf.path):
            rest[full] = leaf
    _require_numbers(runs, rest, name)
    if not runs:
        raise Damaged(f"{name}: no model in it", "data-missing")
    if distributed is not None:
        state = read_leaves(distributed, source, prefix=("optimizer", "state"))
        rest |= {full: leaf for full, leaf in state.items() if isinstance(leaf.value, Refusal)}
    return RankFolder(rank, number, file, runs, rest, distributed)


def _require_numbers(
    runs: Mapping[int, Mapping[str, object]], rest: Mapping[str, Leaf], file: str
) -> None:
    """Raise if a refused part of a model may be the only evidence of a layer or an expert.

    The numbers of those in later stages, and on other ranks, depend on how many there are.
    """
    for leaf in rest.values():
        virtual = find_virtual_stage(leaf.path)
        if virtual is None or not isinstance(leaf.value, Refusal):
            continue
        names = list(runs.get(virtual, ()))
        all_names = [*names, flat_name(leaf.path[1:])]
        if any(count(names) != count(all_names) for count in (count_layers, count_experts)):
            raise refused([leaf.value], subject=file)


def _is_state(path: tuple[Any, ...]) -> bool:
    """Return whether a path is in the optimizer's state by number, or in the list of numbers.

    The numbers of a group's parameters (``params``) are meaningless once the state has names.
    """
    steps = [step for step in path[:7] if not isinstance(step, Index)]
    inner = steps[2:] if steps[1:2] == ["optimizer"] else steps[1:]
    return steps[:1] == ["optimizer"] and (
        inner[:1] == ["state"]
        or inner[:2] == ["param_groups", "params"]
        or steps[1:2] == ["fp32_from_fp16_params"]
    )
