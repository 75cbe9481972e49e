"""Whether adapter_config.json describes an adapter's tensors, as PEFT 0.21 makes and loads them.

A module's rank is that of the first pattern that its name ends with, else ``r``. ``lora_A`` has so
many rows, ``lora_B`` columns; for an ``nn.Parameter`` of a ``target_parameters``, such as the
experts of a mixture in one tensor, that number times the experts. Other methods than LoRA are only
named.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from reprlib import repr as shortened
from typing import Any

from msgspec import Struct

from ckptool.commands.model.records import Record
from ckptool.core.catalog import TensorEntry
from ckptool.core.text import plural
from ckptool.errors import Problem

ADAPTER_CONFIG = "adapter_config.json"
_LORA = "LORA"
_ADAPTIVE = "ADALORA"
"""The method that takes all of its rank from a module: matrices of no row or column are left."""
_DEFAULT_RANK = 8
_MATRIX = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)(?:\.base_layer)*"
    r"\.lora_(?P<kind>embedding_A|embedding_B|A|B)(?:\.weight)?"
)
_MAGNITUDE = ".lora_magnitude_vector"
_PLAIN = re.compile(r"[\w.\-]+")
_NOT_GATHERED = (
    "take the adapter from the trainer's own checkpoint: ckptool convert SRC DST --to hf"
    " --peft-adapter; or save it again with its parameters gathered"
    " (deepspeed.zero.GatheredParameters, FSDP's summon_full_params)"
)


class _Matrix(Struct, frozen=True):
    """One of the two matrices of a LoRA: its ``rank``, and that of ``module`` by name."""

    name: str
    module: str
    rank: int


def method_of(config: Record) -> str:
    """Return the method of an adapter: ``LORA`` without one; as JSON what is no name."""
    method = config.get("peft_type", _LORA)
    return method if isinstance(method, str) else json.dumps(method)


def is_of_lora(name: str) -> bool:
    """Return whether a tensor is one of a LoRA's two matrices, by its name."""
    return _MATRIX.fullmatch(name) is not None


def adapter_problems(
    config: Record, tensors: Mapping[str, TensorEntry], place: str = ADAPTER_CONFIG
) -> Iterator[Problem]:
    """Yield where an adapter's config, read from ``place``, contradicts the tensors."""
    if not isinstance(config.get("peft_type", _LORA), str):
        message = f"{place} says peft_type {method_of(config)}, which is no method's name"
        yield Problem(message, "config-mismatch", file=place)
    is_adaptive = method_of(config) == _ADAPTIVE
    empty = [name for name, entry in tensors.items() if not entry.elements]
    empty = [name for name in empty if not is_adaptive or len(tensors[name].shape) == 1]
    if empty:
        shape = list(tensors[empty[0]].shape)
        message = f"empty: {len(empty):,} of {plural(len(tensors), 'tensor')}, such as {empty[0]}"
        message += f" {shape}: parameters were not gathered before they were saved"
        problem = Problem(message, "config-mismatch", file=place, tensor=empty[0])
        yield problem.with_hint(_NOT_GATHERED)
    if method_of(config) == _LORA and not config.get("use_bdlora"):
        yield from _wrong_ranks(config, tensors, place)
        yield from _wrong_scales(config, place)
        yield from _wrong_kind(config, tensors, place)
        yield from _lost_halves(tensors) if "peft_type" in config else ()


def _wrong_ranks(
    config: Record, tensors: Mapping[str, TensorEntry], place: str
) -> Iterator[Problem]:
    """Yield one problem for all matrices of other ranks than the config's."""
    mismatches = []
    ranks = _Ranks(config)
    for where, value in ranks.unusable.items():
        message = f"{place} says {where} {value!r}, which is no rank: a number from 1 on"
        yield Problem(message, "config-mismatch", file=place)
    if ranks.unusable:
        return
    for matrix in _matrices(tensors):
        expected = ranks.of(matrix.module)
        is_parameter = ranks.is_parameter(matrix.module)
        fits = {rank for rank in expected if rank > 0 and matrix.rank % rank == 0}
        if matrix.rank not in expected and not (is_parameter and fits):
            mismatches.append((matrix, " or ".join(map(str, sorted(expected)))))
    if mismatches:
        matrix, expected_text = mismatches[0]
        total = f" ({plural(len(mismatches), 'tensor')} in all)" if len(mismatches) > 1 else ""
        message = f"{place} says r {expected_text}, but {matrix.name} has rank {matrix.rank}{total}"
        yield Problem(message, "config-mismatch", file=place, tensor=matrix.name)


def _wrong_scales(config: Record, place: str) -> Iterator[Problem]:
    """Yield where a config says that products are scaled by what is no finite number."""
    patterns = config.get("alpha_pattern")
    alphas: dict[str, Any] = {"lora_alpha": config.get("lora_alpha")}
    alphas |= patterns if isinstance(patterns, dict) else {}
    for where, value in alphas.items():
        is_number = type(value) in (int, float) and abs(value) <= sys.float_info.max
        if value is not None and not is_number:
            message = f"{place} says {where} {shortened(value)}, which is no alpha: a finite number"
            yield Problem(message, "config-mismatch", file=place)


def _matrices(tensors: Mapping[str, TensorEntry]) -> Iterator[_Matrix]:
    """Yield the matrices that show a rank: all but empty ones and the second of a convolution."""
    for name, entry in tensors.items():
        match = _MATRIX.fullmatch(name)
        is_first = match is not None and match["kind"].endswith("A")
        if match is None or not entry.elements or len(entry.shape) < 2:
            continue
        if is_first or len(entry.shape) == 2:
            yield _Matrix(name, match["module"], entry.shape[0 if is_first else 1])


def _wrong_kind(
    config: Record, tensors: Mapping[str, TensorEntry], place: str
) -> Iterator[Problem]:
    """Yield a problem if there are DoRA's magnitudes and PEFT's config has none, or the reverse."""
    magnitudes = [name for name in tensors if _MAGNITUDE in name]
    is_dora = bool(config.get("use_dora"))
    if magnitudes and not is_dora and "peft_type" in config:
        message = f"{place} does not say use_dora, but there is {magnitudes[0]}"
        yield Problem(message, "config-mismatch", file=place, tensor=magnitudes[0])
    if is_dora and not magnitudes and any(map(is_of_lora, tensors)):
        message = f"{place} says use_dora, but no tensor is a magnitude vector"
        yield Problem(message, "config-mismatch", file=place)


def _lost_halves(tensors: Mapping[str, TensorEntry]) -> Iterator[Problem]:
    """Yield one problem for all matrices of LoRAs whose other matrix is missing."""
    matches = {name: match for name in tensors if (match := _MATRIX.fullmatch(name))}
    missing = {
        name: other
        for name, match in matches.items()
        if (other := _other_half(name, match)) not in tensors
    }
    if missing:
        name, other = next(iter(missing.items()))
        total = f" ({plural(len(missing), 'tensor')} in all)" if len(missing) > 1 else ""
        yield Problem(f"there is {name}, but no {other}{total}", "data-missing", tensor=other)


def _other_half(name: str, match: re.Match[str]) -> str:
    """Return the name of the matrix that goes with one, by how their names differ."""
    at = match.end("kind") - 1
    return f"{name[:at]}{'B' if name[at] == 'A' else 'A'}{name[at + 1 :]}"


class _Ranks:
    """The ranks of modules by name. A pattern that is no plain name may match any module."""

    def __init__(self, config: Record) -> None:
        r: Any = config.get("r", _DEFAULT_RANK)
        patterns: Any = config.get("rank_pattern")
        patterns = patterns if isinstance(patterns, dict) else {}
        self._usual: tuple[int, Any] = (len(patterns), r)
        self._whole, self._ends = dict[str, tuple[int, Any]](), dict[str, tuple[int, Any]]()
        self._others: list[tuple[int, Any]] = []
        for key, numbered in zip(patterns, enumerate(patterns.values()), strict=True):
            plain = key.removeprefix("^").removesuffix("$")
            if _PLAIN.fullmatch(plain):
                (self._whole if key[:1] == "^" else self._ends).setdefault(plain, numbered)
            else:
                self._others.append(numbered)
        self._lengths = {*map(len, self._ends)}
        self.unusable = {
            where: rank
            for where, rank in {"r": r, **patterns}.items()
            if type(rank) is not int or rank < 1
        }
        parameters: Any = config.get("target_parameters")
        names = parameters if isinstance(parameters, list) else ()
        self._parameters = [str(name).rpartition(".") for name in names]

    def of(self, module: str) -> set[int]:
        """Return the ranks that a module may have: one, unless patterns cannot be told.

        PEFT looks for those of a parameter under its own name, ckptool under its module's too.
        """
        names = [module, *(f"{module}.{name}" for name in self._parameters_of(module))]
        return {rank for name in names for rank in self._ranks_of(name)}

    def is_parameter(self, module: str) -> bool:
        """Return whether a module has a parameter among the ``target_parameters``."""
        return bool(self._parameters_of(module))

    def _ranks_of(self, name: str) -> Iterator[int]:
        ends = (name[len(name) - length :] for length in self._lengths if length <= len(name))
        found = [self._ends.get(end, self._usual) for end in ends if f".{name}".endswith(f".{end}")]
        number, rank = min([*found, self._whole.get(name, self._usual)])
        yield from (other for at, other in self._others if at < number)
        yield rank

    def _parameters_of(self, module: str) -> list[str]:
        return [
            name
            for inside, _, name in self._parameters
            if not inside or module == inside or module.endswith(f".{inside}")
        ]
