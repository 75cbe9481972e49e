"""What an adapter of PEFT is: its settings, understood or refused, and the part each tensor plays.

As PEFT 0.21 saves and merges one; its older files have the same names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, lru_cache, partial
from typing import Generic, Literal, TypeVar

from msgspec import Struct, field

from ckptool.commands.merge.operands import Operand
from ckptool.commands.model.adapter_config import ADAPTER_CONFIG, adapter_problems, method_of
from ckptool.commands.model.records import Record, read_beside, read_file
from ckptool.core.catalog import TensorEntry
from ckptool.core.text import compile_stated, list_some
from ckptool.errors import Unsupported
from ckptool.storage.url import Location

_Value = TypeVar("_Value")
_PREFIX = "base_model.model."
_INNER = ".base_layer"
_PART = re.compile(
    rf"(?P<module>.+?)(?P<inner>(?:\{_INNER})*)\.(?P<kind>lora_A\.weight|lora_B\.weight"
    r"|lora_B\.bias|lora_embedding_A|lora_embedding_B|lora_magnitude_vector(?:\.weight)?)"
)
_OF_ATTENTION = f"{_INNER}.out_proj"
"""How the module ends that PEFT adapts together with all of an nn.MultiheadAttention."""
_TWICE = re.compile(r"\.(?:modules_to_save(?:\.default)?|original_module)(?=\..*\bbias$)")
"""What is in the names by which PEFT (0.21) saves biases of modules to save again, if it saves all
biases, and never reads them.
"""
_TOKENS = ".token_adapter.trainable_tokens_delta"
_KINDS = {
    "lora_A.weight": "right",
    "lora_B.weight": "left",
    "lora_B.bias": "bias",
    "lora_embedding_A": "right",
    "lora_embedding_B": "left",
    "lora_magnitude_vector": "magnitudes",
    "lora_magnitude_vector.weight": "magnitudes",
}
_UNSUPPORTED = (
    *("use_qalora", "use_bdlora", "alora_invocation_tokens", "velora_config", "monteclora_config"),
    *("arrow_config", "kasa_config", "layer_replication", "megatron_config"),
)
TAKES = (
    "--lora takes the folder that PEFT's save_pretrained writes; of a trainer's checkpoint,"
    " `ckptool convert CKPT ADAPTER --to hf --peft-adapter` makes one"
)
_FEW = 3
_LONGEST = 1.0
"""Seconds of the processor for one pattern and one name."""
_MOST_PATTERNS = 1 << 14
_NAME, _NO_DOT = re.compile(r"[\w.-]+"), re.compile(r"[^.]")
_AT_ONCE = re.compile(r"[^*+?{|]*")
"""A pattern without repetitions and alternatives, as most are: it is matched in no time."""
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to initialize that subtract what they put into the adapter from the base's weights."""
_CONVERTS = (
    "PEFT's save_pretrained(path_initial_model_for_weight_conversion=...) writes the adapter for"
    " the base as it was"
)
_PEFT_MERGES = "PEFT's merge_and_unload merges it, where that is possible"
_QUANTIZES = (
    "--onto takes the base that LoftQ left, saved after it, if adapter_config.json says"
    " init_lora_weights true"
)
_INITIALIZED = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
_NEVER_EMPTY = ("r", "lora_alpha", "bias")
"""Keys of which an empty value is a wrong one; of others it says as much as none."""
_KNOWN = frozenset(
    "peft_type task_type base_model_name_or_path revision inference_mode auto_mapping peft_version"
    " r target_modules exclude_modules lora_alpha lora_dropout fan_in_fan_out bias use_rslora"
    " modules_to_save init_lora_weights layers_to_transform layers_pattern rank_pattern"
    " alpha_pattern megatron_core trainable_token_indices loftq_config eva_config corda_config"
    " lora_ga_config use_dora qalora_group_size runtime_config lora_bias target_parameters"
    " ensure_weight_tying".split()
)


class Settings(Struct, frozen=True, dict=True):
    """What adapter_config.json says of a LoRA that decides what it is merged to."""

    place: str
    r: int = 8
    lora_alpha: float = 8
    rank_pattern: Mapping[str, int] = {}
    alpha_pattern: Mapping[str, float] = {}
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    ensure_weight_tying: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    target_parameters: tuple[str, ...] = ()
    target_modules: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    trainable_token_indices: Mapping[str, tuple[int, ...]] | tuple[int, ...] = ()
    base: str = field(name="base_model_name_or_path", default="")
    peft_version: str = ""

    def rank_of(self, key: str) -> int:
        """Return the rank of a module or parameter, as PEFT finds it by its name."""
        return self._ranks.find(key, self.r)

    def scale_of(self, key: str) -> float:
        """Return what the product of a module's matrices is multiplied by."""
        rank = self.rank_of(key)
        return self._alpha_of(key) / (math.sqrt(rank) if self.use_rslora else rank)

    def may_be_scaled_otherwise(self, key: str) -> bool:
        """Return whether PEFT before 0.14, which wrote no version, has another scale.

        It looked for rank and alpha under the first pattern of either that fits.
        """
        if self.peft_version:
            return False
        former = self.alpha_pattern.get(self._either.find(key, ""), self.lora_alpha)
        return former != self._alpha_of(key)

    def _alpha_of(self, key: str) -> float:
        return self._alphas.find(key, self.lora_alpha)

    @cached_property
    def _ranks(self) -> _Patterns[int]:
        return _Patterns(self.place, self.rank_pattern)

    @cached_property
    def _alphas(self) -> _Patterns[float]:
        return _Patterns(self.place, self.alpha_pattern)

    @cached_property
    def _either(self) -> _Patterns[str]:
        patterns = (*self.rank_pattern, *self.alpha_pattern)
        return _Patterns(self.place, {pattern: pattern for pattern in patterns})

    def tokens_of(self, module: str) -> tuple[int, ...]:
        """Return the rows of an embedding that were trained apart; none if nothing says so."""
        indices = self.trainable_token_indices
        if not isinstance(indices, Mapping):
            return indices
        return next((indices[key] for key in indices if f".{module}".endswith(f".{key}")), ())


class Matrices(Struct):
    """The tensors of one LoRA by the part that they play; ``module`` is what it was put on.

    ``depth`` counts the LoRAs on the same module that were put on it later.
    """

    module: str
    depth: int
    is_embedding: bool = False
    left: TensorEntry | None = None
    right: TensorEntry | None = None
    bias: TensorEntry | None = None
    magnitudes: TensorEntry | None = None

    @property
    def both(self) -> tuple[TensorEntry, TensorEntry]:
        """B and A; Unsupported if one is missing."""
        if self.left is None or self.right is None:
            entry = self.left or self.right or self.bias or self.magnitudes
            name = entry.name if entry is not None else self.module
            raise Unsupported(f"{name}: the other matrix of {self.module} is missing")
        return self.left, self.right


class Adapter(Struct, frozen=True):
    """An adapter: its settings, LoRAs, and the tensors that replace those of the base.

    ``whole`` are by their names in the base, ``tokens`` rows of an embedding by its module;
    ``unread`` is what PEFT does not read.
    """

    operand: Operand
    settings: Settings
    loras: list[Matrices]
    whole: dict[str, TensorEntry]
    tokens: dict[str, TensorEntry]
    unread: list[str]


def read_adapter(operand: Operand) -> Adapter:
    """Return an opened adapter, understood; Unsupported for what is no LoRA that can be merged."""
    place = operand.opened.path
    folder = place if place.is_dir() else place.parent
    record = read_beside(operand.opened.source, ADAPTER_CONFIG)
    record = record or read_file(folder / ADAPTER_CONFIG)
    where = f"{folder}: {ADAPTER_CONFIG}"
    if not record:
        message = f"{place}: no {ADAPTER_CONFIG}, which says by what the adapter is scaled"
        raise Unsupported(message, hint=TAKES)
    _require_understood(record, where)
    for problem in adapter_problems(record, operand.catalog.tensors, where):
        raise Unsupported(problem, hint=problem.hint)
    loras: dict[tuple[str, int], Matrices] = {}
    whole, tokens = dict[str, TensorEntry](), dict[str, TensorEntry]()
    names = dict[str, str]()
    for name, entry in operand.catalog.tensors.items():
        key = name.removeprefix(_PREFIX)
        if match := _PART.fullmatch(key):
            _require_no_attention(match["module"], name, place)
            depth, kind = match["inner"].count(_INNER), match["kind"]
            lora = loras.setdefault((match["module"], depth), Matrices(match["module"], depth))
            setattr(lora, _KINDS[kind], entry)
            lora.is_embedding |= "embedding" in kind
            key = f"{match['module']}{match['inner']} {_KINDS[kind]}"
        elif key.endswith(_TOKENS):
            tokens[key.removesuffix(_TOKENS)] = entry
        else:
            key = key.replace(f"{_INNER}.", ".")
            whole[key] = entry
        _require_once(names.setdefault(key, name), name, place)
    if not (loras or tokens):
        text = list_some([*whole], _FEW) or "no tensors"
        raise Unsupported(f"{place}: {text}, but no LoRA", hint=TAKES)
    saved_again = filter(_TWICE.search, whole) if record.get("bias") == "all" else ()
    unread = [name for name in saved_again if _TWICE.sub("", name) in whole]
    for name in unread:
        del whole[name]
    settings = _settings(record, where)
    return Adapter(operand, settings, list(loras.values()), whole, tokens, unread)


def _require_once(first: str, name: str, place: Location) -> None:
    """Raise Unsupported for two names of one part, of which one would be lost."""
    if first != name:
        raise Unsupported(
            f"{place}: {first} and {name} are the same part of one module",
            hint=f"`ckptool convert {place} COPY --drop '{name}'` leaves one out",
        )


def _require_no_attention(module: str, name: str, place: Location) -> None:
    """Raise Unsupported for a LoRA of torch's attention, of which PEFT (0.21) merges a part twice.

    As it does so in training, too, no sum is right for every version.
    """
    if module.endswith(_OF_ATTENTION):
        attention = module.removesuffix(_OF_ATTENTION)
        raise Unsupported(
            f"{place}: {name} is of {attention}, an nn.MultiheadAttention, whose out_proj PEFT adds"
            " twice: not supported",
            hint=_PEFT_MERGES,
        )


def _require_understood(record: Record, where: str) -> None:
    """Raise Unsupported for another method, and for what a LoRA may be that is not understood."""
    method = method_of(record)
    if method != "LORA":
        raise Unsupported(
            f"{where} says peft_type {method}: only LORA is merged",
            hint=_PEFT_MERGES,
        )
    for key in _UNSUPPORTED:
        if record.get(key):
            message = f"{where} says {key} {_short(record[key])}: not supported"
            raise Unsupported(message, hint=_PEFT_MERGES)
    initialized = record.get("init_lora_weights", True)
    if isinstance(initialized, str) and initialized.startswith(_CHANGE_THE_BASE):
        raise Unsupported(
            f"{where} says init_lora_weights {initialized!r}, which changes the base's weights",
            hint=_QUANTIZES if initialized == "loftq" else _CONVERTS,
        )
    if initialized not in _INITIALIZED:
        message = f"{where} says init_lora_weights {_short(initialized)}: not known"
        raise Unsupported(message, hint=_PEFT_MERGES)
    unknown = [key for key in record if key not in _KNOWN and record[key]]
    if unknown := [key for key in unknown if key not in _UNSUPPORTED]:
        text = list_some([f"{key} {_short(record[key])}" for key in unknown], _FEW)
        message = f"{where} says {text}, which is not known of PEFT 0.21"
        raise Unsupported(message, hint=_PEFT_MERGES)


def _settings(record: Record, where: str) -> Settings:
    """Return the settings of a LoRA; Unsupported for values of other types than PEFT's."""
    stated = {key: value for key, value in record.items() if value or key in _NEVER_EMPTY}
    chosen = any(record.get(key) is not None for key in ("exclude_modules", "layers_to_transform"))
    targets = record.get("target_modules")
    stated["target_modules"] = targets if isinstance(targets, list) and not chosen else ()
    from msgspec import ValidationError, convert

    try:
        return convert({**stated, "place": where}, Settings)
    except (ValidationError, UnicodeEncodeError) as error:  # a text with half a character
        raise Unsupported(f"{where}: {error}") from None


class _Patterns(Generic[_Value]):
    """The values of patterns, of which the first that a name ends with counts, as in PEFT.

    Most are names themselves, of which only a dot may also be another character. They are looked
    up, not tried one by one: an adapter may have thousands, one for each module.
    """

    def __init__(self, place: str, values: Mapping[str, _Value]) -> None:
        self._place = place
        self._values = list(values.items())
        self._names = {p: number for number, p in enumerate(values) if _NAME.fullmatch(p)}
        self._shapes = {_NO_DOT.sub(" ", name) for name in self._names}
        self._others = [number for number, p in enumerate(values) if p not in self._names]
        if len(self._others) > _MOST_PATTERNS:
            message = f"{place}: {len(self._others):,} patterns that are more than names; ckptool"
            raise Unsupported(f"{message} tries up to {_MOST_PATTERNS:,}", "limit-exceeded")

    def find(self, key: str, usual: _Value) -> _Value:
        """Return the value of the first pattern that a name ends with, the usual one without."""
        none = len(self._values)
        endings, numbers = self._endings(key), self._others
        if "\n" in key:  # the one character that a dot is not
            endings, numbers = iter(()), [*range(none)]
        first = min((self._names.get(ending, none) for ending in endings), default=none)
        tried = (number for number in numbers if number < first and self._fits(number, key))
        first = next(tried, first)
        return self._values[first][1] if first < none else usual

    def _endings(self, key: str) -> Iterator[str]:
        """Yield the endings of a name, with dots where the names of a shape have them."""
        for shape in self._shapes:
            start = len(key) - len(shape)
            if start == 0 or (start > 0 and key[start - 1] == "."):
                pairs = zip(shape, key[start:], strict=True)
                yield "".join("." if dot == "." else letter for dot, letter in pairs)

    def _fits(self, number: int, key: str) -> bool:
        """Try a pattern; Unsupported if it takes too long, as anybody may write such."""
        pattern, _ = self._values[number]
        try:
            return bool(_ending(pattern)(key))
        except Unsupported as error:
            raise error.within(self._place) from None
        except TimeoutError:
            message = f"{self._place}: pattern {_short(pattern)} takes more than"
            message += f" {_LONGEST:g} s to match {key}"
            raise Unsupported(message, "limit-exceeded", hint="simplify it there") from None


@lru_cache(maxsize=_MOST_PATTERNS)
def _ending(pattern: str) -> Callable[[str], object]:
    """Return what matches a name that ends with a pattern; Unsupported if it is none."""
    whole = rf"(.*\.)?({pattern})$"
    try:
        if _AT_ONCE.fullmatch(pattern):
            return re.compile(whole).match
        return partial(compile_stated(whole).match, timeout=_LONGEST)
    except (re.error, RecursionError) as error:
        message = f"pattern {_short(pattern)}: {getattr(error, 'msg', error)}"
        raise Unsupported(message) from None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def same_base(settings: Settings, base: Location) -> bool:
    """Return whether the base's place is, or ends like, the one that an adapter names."""
    last = settings.base.rstrip("/").rpartition("/")[2]
    return not last or last in str(base)
