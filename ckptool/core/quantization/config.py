"""What a model's ``quantization_config`` says of the weights of its modules."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import translate
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from ckptool.core.text import compile_stated
from ckptool.errors import Unsupported

if TYPE_CHECKING:
    from regex import Pattern

_IGNORED = ("ignore", "modules_to_not_convert", "exclude_modules")
"""Keys for modules without such weights: compressed-tensors' and ModelOpt's, transformers'.

By name, by ``re:`` and a pattern, or by a glob, as in ModelOpt (0.47).
"""
_SKIPPED = (*_IGNORED, "llm_int8_skip_modules")
_CHOOSING = ("dynamic", "modules_in_block_to_quantize", "quantized_layers")
"""Keys that choose the modules with such weights: GPTQ's, and ModelOpt's for layers by name."""
_GLOB = re.compile(r"[*?\[]")
_LONGEST = 5.0
"""Seconds that all patterns may take for all modules: a hostile one never ends, many take long."""
_SIMPLIFY = "simplify it in a copy of config.json, and pass that folder as --hf-assets"
_MOST_SHOWN = 80
_OFTEN = 16
"""Patterns between looks at the clock: each has a timeout, but of thousands none may reach it."""
_ANY = ("mixed-precision", "MIXED_PRECISION")
"""What compressed-tensors and ModelOpt call several formats in one model."""
_IN_BYTES = ("int-quantized", "naive-quantized")
"""Formats that store integers of fewer bits in a byte each."""
_STRATEGIES: Mapping[str, str] = {
    "FP8_PER_CHANNEL_PER_TOKEN": "channel",
    "W8A8_SQ_PER_CHANNEL": "channel",
}
"""The strategies that ModelOpt's names of algorithms state."""


class Group(Struct, frozen=True):
    """A group of modules in a config: its name there, the settings of their weights, the format."""

    name: str = ""
    weights: Mapping[str, Any] = field(default_factory=dict)
    format: str | None = None

    def __str__(self) -> str:
        return f"{self.name} of quantization_config" if self.name else "quantization_config"

    @property
    def bits_in_bytes(self) -> int:
        """The bits of integers that are stored in bytes."""
        bits = self.weights.get("num_bits")
        return bits if self.format in _IN_BYTES and type(bits) is int and 0 < bits < 8 else 8

    @property
    def block(self) -> tuple[int, int] | None:
        """The size of a block, None if none is stated; a group of part of a row is one row's.

        Raises Unsupported if it is stated in a way that is not understood.
        """
        size = _block("block_structure", self.weights)
        return size or _pair([1, self.weights.get("group_size")])

    def allows(self, shape: tuple[int, ...], block: tuple[int, ...]) -> bool:
        """Return whether ``strategy`` has a scale per ``block`` of a weight of ``shape``.

        Each matrix of a weight of several has scales of its own. A missing strategy allows every
        block, and so does a weight without elements.
        """
        if 0 in shape:
            return True
        matrix = _matrix(shape)
        grid = _counts(matrix, _matrix(block))
        block_grid = _counts(matrix, self.block) if self.block else grid
        counts: dict[str, tuple[int, int]] = {
            "tensor": (1, 1),
            "channel": (matrix[0], 1),
            "group": (matrix[0], block_grid[1]),
            "tensor_group": (matrix[0], block_grid[1]),
            "block": block_grid,
        }
        return counts.get(str(self.weights.get("strategy")), grid) == grid


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the last two dims of a shape; a vector is one row, a scalar one row of one column."""
    rows, columns = (1, 1, *shape)[-2:]
    return rows, columns


def _counts(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Return how many blocks a matrix has in each dim."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


NO_GROUP = Group()


class QuantizationConfig:
    """The recorded quantization of a model: ``quantization_config`` of config.json.

    ``fields`` are as transformers reads them; empty if there are none. It ``is_of_all`` linear
    layers but those that it leaves out, unless it chooses some by name.
    """

    def __init__(self, fields: Mapping[str, Any] | None = None) -> None:
        self.fields = fields = fields or {}
        method = fields.get("quant_method")
        self.method = None if method is None else str(method)
        lists = [fields[key] for key in _IGNORED if isinstance(fields.get(key), list)]
        ignored = {str(name) for names in lists for name in names}
        groups = dict(_target_groups(fields))
        self._seconds = _LONGEST
        targets = ((self._compile(target), groups[target]) for target in sorted(groups))
        classes = {id(group): group for name, group in groups.items() if _is_class(name)}
        rest = Group(format=_format(fields)) if fields else NO_GROUP
        skipped = map(self._compile, _with_globs(ignored))
        self._ignored = [(pattern, NO_GROUP) for pattern in skipped if pattern is not None]
        self._named = groups | dict(_layer_groups(fields))
        self._patterns = [(pattern, group) for pattern, group in targets if pattern is not None]
        self._of_class = next(iter(classes.values())) if len(classes) == 1 else rest
        self._group_cache = dict.fromkeys(ignored, NO_GROUP)
        self.is_of_all = all(map(_is_class, groups)) and not any(map(fields.get, _CHOOSING))

    def block_of(self, module: str) -> tuple[int, int] | None:
        """Return the block size of a module's weight, None if none is stated.

        Raises Unsupported if it is stated in a way that is not understood.
        """
        return self.group_of(module).block or _block("weight_block_size", self.fields)

    def group_of(self, module: str) -> Group:
        """Return the group of a module, in the order of compressed-tensors 0.20.

        A target is the name of a module, ``re:`` and a pattern of the beginning of names, or a
        class: in that order, and patterns by their text. ModelOpt's ``quantized_layers`` are names.
        NO_GROUP if ``ignore`` matches the module; the group of all modules if no target matches.
        """
        if module not in self._group_cache:
            group = self._match(self._ignored, module) or self._named.get(module)
            group = group or self._match(self._patterns, module)
            self._group_cache[module] = group or self._of_class
        return self._group_cache[module]

    def leaves_out(self, module: str) -> bool:
        """Return whether the config leaves the weight of a module unquantized.

        It lists a beginning of the module's name, or a part of it between dots, as transformers
        (5.24) and vLLM compare them.
        """
        lists = [self.fields[key] for key in _SKIPPED if isinstance(self.fields.get(key), list)]
        names = [str(item) for items in lists for item in items]
        if any(module.startswith(name) or f".{name}." in f".{module}." for name in names):
            return True
        return self.group_of(module) is NO_GROUP

    def _compile(self, target: str) -> Pattern[str] | None:
        """Return the pattern of a target, None if it is none; Unsupported if it is too much."""
        started = time.thread_time()
        pattern = _pattern(target)
        self._seconds -= time.thread_time() - started
        if self._seconds <= 0:
            raise _too_long(target, "compile")
        return pattern

    def _match(self, patterns: Iterable[tuple[Pattern[str], Group]], module: str) -> Group | None:
        """Return the group of the first pattern that a module's name begins as, None for none.

        Raises Unsupported if the matches of all modules so far take too long.
        """
        started, result = time.thread_time(), None
        for at, (pattern, group) in enumerate(patterns):
            try:
                if pattern.match(module, timeout=self._seconds) is not None:
                    result = group
                    break
            except TimeoutError:
                raise _too_long(pattern.pattern, f"match {module}") from None
            if not at % _OFTEN and time.thread_time() - started > self._seconds:
                raise _too_long(pattern.pattern, f"match {module}")
        self._seconds -= time.thread_time() - started
        if self._seconds <= 0:
            raise _too_long(pattern.pattern, f"match {module}")
        return result


def _with_globs(names: Collection[str]) -> Iterator[str]:
    """Yield names, after the pattern of all globs among them."""
    globs = [translate(n) for n in names if not n.startswith("re:") and _GLOB.search(n)]
    if globs:
        yield f"re:{'|'.join(globs)}"
    yield from names


def _pattern(target: str) -> Pattern[str] | None:
    """Return the pattern of a target, None if it is none; Unsupported if it cannot be matched."""
    if not target.startswith("re:"):
        return None
    try:
        return compile_stated(target.removeprefix("re:"))
    except re.error as error:
        message = f"quantization_config: {_shown(target)}: {error}"
        raise Unsupported(message, hint=_SIMPLIFY) from None


def _too_long(pattern: str, purpose: str) -> Unsupported:
    message = f"quantization_config: {_shown(pattern)} takes too long to {purpose}"
    message += f": {_LONGEST:g} s are for all patterns and modules"
    return Unsupported(message, "limit-exceeded", hint=_SIMPLIFY)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...")


def _is_class(target: str) -> bool:
    return not target.startswith("re:") and "." not in target and target[:1].isupper()


def _format(fields: Mapping[str, Any]) -> str | None:
    """Return the format of all weights or of a group; None if it is none, or several."""
    name = fields.get("format") or fields.get("quant_algo")
    return None if name is None or name in _ANY else str(name)


def _target_groups(fields: Mapping[str, Any]) -> Iterator[tuple[str, Group]]:
    """Yield the targets of ``config_groups``, each with its group."""
    groups = fields.get("config_groups")
    for name, table in groups.items() if isinstance(groups, dict) else ():
        if isinstance(table, dict) and isinstance(table.get("targets"), list):
            weights = table.get("weights")
            settings = weights if isinstance(weights, dict) else {}
            group = Group(str(name), settings, _format(table) or _format(fields))
            yield from ((str(target), group) for target in table["targets"])


def _layer_groups(fields: Mapping[str, Any]) -> Iterator[tuple[str, Group]]:
    """Yield the modules of ModelOpt's ``quantized_layers``, each with its group."""
    layers = fields.get("quantized_layers")
    for name, settings in layers.items() if isinstance(layers, dict) else ():
        if isinstance(settings, dict):
            algorithm = _format(settings)
            weights = {"strategy": _STRATEGIES.get(algorithm or ""), **settings}
            yield str(name), Group("quantized_layers", weights, algorithm)


def _block(key: str, fields: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the size of a block; None if it is not stated."""
    pair = fields.get(key)
    size = _pair(pair)
    if size is None and pair is not None:
        raise Unsupported(
            f"quantization_config: {key} {str(pair)[:_MOST_SHOWN]} is not the two sizes of a block",
            hint="correct it in a copy of config.json, and pass that folder as --hf-assets",
        )
    return size


def _pair(value: Any) -> tuple[int, int] | None:
    if not isinstance(value, list) or len(value) != 2 or any(type(n) is not int for n in value):
        return None
    return (value[0], value[1]) if min(value) > 0 else None
