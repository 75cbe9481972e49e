"""Check whether a model's config.json describes its tensors, which have transformers' names."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptool.commands.model.records import (
    DTYPE_KEYS,
    HIDDEN_SIZES,
    LAYER_COUNTS,
    Record,
    is_causal,
)
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.dtype import BY_NAME, DType
from ckptool.core.quantization.names import kinds, packed_names
from ckptool.errors import Problem

_MODEL = (
    r"(?:(?:model|transformer|gpt_neox|language_model"
    r"|model\.language_model|language_model\.model)\.)?"
)
_EMBEDDING = re.compile(rf"{_MODEL}(?:embed_tokens|wte|embed_in)\.weight")
_HEAD = re.compile(r"(?:language_model\.)?lm_head\.weight")
_NORM = re.compile(rf"{_MODEL}(?:norm|ln_f|final_layer_norm)\.weight")
_NUMBER = "([0-9]{1,9})"
"""Python refuses to parse thousands of digits, which a stranger may put into a name."""
_LAYER = re.compile(rf"({_MODEL})(?:layers|h)\.{_NUMBER}\..+")
_PREDICTING = re.compile(rf"{_MODEL}layers\.{_NUMBER}\.eh_proj\.weight")
_PROJECTION = re.compile(rf"{_MODEL}layers\.\d+\.self_attn\.([qk])_proj\.weight")
_GATE = re.compile(rf"{_MODEL}layers\.\d+\.mlp\.gate_proj\.weight")
"""Only the language model's: vision and audio parts have their own heads and widths."""
_EXPERT = re.compile(rf"({_MODEL}(?:layers|h)\.\d+\..*\bexperts)\.{_NUMBER}\.(.+)")
_EXPERTS = re.compile(rf"({_MODEL}(?:layers|h)\.\d+\..*\bexperts)\.(gate_up_proj|down_proj)")

_VOCABULARY = ("vocab_size", "padded_vocab_size", "draft_vocab_size")
"""The last is the head of a draft model (EAGLE-3)."""
_MORE_EMBEDDINGS = {"mllama": 8, "mllama_text_model": 8, "moshi": 1}
"""Embeddings beyond the vocabulary, for images and the like (transformers 5.23)."""
_MORE_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_layers")
_EXPERT_COUNTS = (
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_moe_experts",  # Megatron-core's configuration
)
_NO_EXPERTS = ("zero_expert_num",)
"""Experts that return their input (LongCat-Flash): transformers 5.23 has tensors of them."""
_NARROW = ("embedding_size", "word_embed_proj_dim", "embedding_dim")
_PLAIN = frozenset(
    "llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 olmo olmo2 olmoe starcoder2"
    " cohere granite".split()
)
"""Model types whose projections have as many rows as the heads of one size have."""
_HEAD_SIZE_OF_ITS_OWN = frozenset(["qwen3", "qwen3_moe", "gemma", "gemma2"])


def config_problems(config: Record, catalog: Catalog) -> list[Problem]:
    """Find where a config.json contradicts the tensors, each with the code config-mismatch.

    Not compared: names other than transformers', quantized tensors, and keys that a config lacks.
    """
    inner = config.get("text_config")
    merged = {**config, **inner} if isinstance(inner, dict) else dict(config)
    differences = [
        *_compare_sizes(merged, _numbers_in(catalog)),
        *_compare_ties(merged, catalog),
        *_compare_counts(merged, catalog),
    ]
    if not kinds(catalog) and "quantization_config" not in merged:
        differences += _compare_dtypes([merged, config], catalog)
    return [
        Problem(f"config.json says {text}", "config-mismatch", file="config.json", tensor=name)
        for text, name in differences
    ]


Difference = tuple[str, str | None]
"""The config's statement, the actual fact, and the tensor that shows it."""


def count_problems(recorded: Record, catalog: Catalog) -> list[str]:
    """Find where what is recorded contradicts the number of layers, experts and heads of a model.

    The tensors have transformers' names; ``recorded`` may be of another configuration.
    """
    return [f"recorded is {text}" for text, _ in _compare_counts(recorded, catalog)]


def uncounted_experts(recorded: Record, catalog: Catalog) -> set[int]:
    """Return the number of experts per layer by names alone, as no configuration states it."""
    if _numbers(recorded, _EXPERT_COUNTS):
        return set()
    return {len(numbers) for numbers in _experts(catalog).values()}


def lacking_experts(recorded: Record, catalog: Catalog) -> list[str]:
    """Find tensors that experts of some layers have and others lack, whatever is recorded.

    If no configuration states the number of experts, the rows of a layer's router do.
    """
    parts: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    counts: dict[str, int] = {}
    for name, entry in catalog.tensors.items():
        if match := _EXPERT.fullmatch(name):
            parts[match[1]][int(match[2])].add(match[3].partition(".")[0])
        elif (match := _EXPERTS.fullmatch(name)) and entry.shape:
            parts[match[1]][_ALL].add(match[2])
            counts[match[1]] = entry.shape[0]
    counts |= {prefix: len(experts) for prefix, experts in parts.items() if _ALL not in experts}
    every = {part for experts in parts.values() for names in experts.values() for part in names}
    every |= {_DOWN[part] for part in every if part in _DOWN}
    lacking = [
        f"{prefix}.{part if number == _ALL else f'{number}.{part}'} not found"
        for prefix, experts in parts.items()
        for number, names in experts.items()
        for part in sorted(every - names)
    ]
    is_counted = bool(_numbers(recorded, _EXPERT_COUNTS))
    return [*lacking, *([] if is_counted else _compare_routers(counts, catalog))]


_ALL = -1
_DOWN = {"gate_up_proj": "down_proj", "gate_proj": "down_proj", "up_proj": "down_proj", "w1": "w2"}
"""The tensor that an expert with the other one has, too."""


def _compare_routers(counts: Mapping[str, int], catalog: Catalog) -> Iterator[str]:
    """Yield the layers whose routers do not have a row per expert.

    ERNIE 4.5 VL has two routers a layer, with their inputs first.
    """
    for prefix, count in counts.items():
        head = prefix.removesuffix("experts")
        for name in (f"{head}gate.weight", f"{head}router.weight"):
            router = catalog.tensors.get(name)
            if router is None or f"{name}_1" in catalog.tensors or len(router.shape) != 2:
                continue
            if router.shape[0] != count:
                yield f"{name} is for {router.shape[0]:,} experts, but found {count:,} in {prefix}"


def _compare_counts(config: Record, catalog: Catalog) -> Iterator[Difference]:
    yield from _compare_layers(config, catalog)
    yield from _compare_experts(config, catalog)
    yield from _compare_attention(config, _numbers_in(catalog))


def _numbers_in(catalog: Catalog) -> dict[str, TensorEntry]:
    """Return the tensors that are not scalars and hold unquantized weights."""
    packed = packed_names(catalog)
    return {
        name: entry
        for name, entry in catalog.tensors.items()
        if entry.dtype.kind == "float" and entry.dtype.itemsize > 1 and entry.shape
        if name not in packed
    }


def _numbers(config: Record, keys: tuple[str, ...]) -> dict[str, int]:
    return {key: config[key] for key in keys if type(config.get(key)) is int}


def _compare_sizes(config: Record, tensors: Mapping[str, TensorEntry]) -> Iterator[Difference]:
    """Compare vocabulary and hidden size with the embeddings, the head and the last norm."""
    vocabulary = _numbers(config, _VOCABULARY)
    hidden = {} if _numbers(config, _NARROW) else _numbers(config, HIDDEN_SIZES)
    more = _MORE_EMBEDDINGS.get(str(config.get("model_type")), 0)
    for name, entry in tensors.items():
        shape = entry.shape
        if len(shape) == 2 and (_EMBEDDING.fullmatch(name) or _HEAD.fullmatch(name)):
            if more and shape[0] - more in vocabulary.values():
                shape = (shape[0] - more, shape[1])
            yield from _difference(vocabulary, shape[0], f"{name} has {shape[0]:,} rows", name)
            yield from _difference(hidden, shape[1], f"{name} has {shape[1]:,} columns", name)
        elif len(shape) == 1 and _NORM.fullmatch(name):
            yield from _difference(hidden, shape[0], f"{name} has {shape[0]:,} elements", name)


def _difference(
    config: Mapping[str, int], size: int, measured: str, name: str | None
) -> Iterator[Difference]:
    """Yield the difference of a size from all those that the config states, if there is one."""
    if config and size not in config.values():
        yield f"{_join(config)}, but {measured}", name


def _join(config: Record) -> str:
    return " and ".join(f"{key} {value}" for key, value in config.items())


def shared_names(catalog: Catalog) -> set[str]:
    """Return the names that headers have beside those of tensors.

    safetensors' ``save_model`` notes there what it left out, as it shares another one's memory.
    """
    return {name for texts in catalog.metadata.values() for name in texts}


def _compare_layers(config: Record, catalog: Catalog) -> Iterator[Difference]:
    """Count the layers, with or without those that predict further tokens.

    Those that predict join the last hidden state with an embedding by ``eh_proj`` (DeepSeek V3, GLM
    4.5); transformers skips them, and its config need not count them. With ``block_configs``
    (Nemotron-NAS) a layer may do nothing, and then has no tensor.
    """
    counts = {} if "block_configs" in config else _numbers(config, LAYER_COUNTS)
    names = {*catalog.tensors, *shared_names(catalog)}
    matches = [match for match in map(_LAYER.fullmatch, names) if match]
    numbers = {int(match[2]) for match in matches}
    if not counts or len({match[1] for match in matches}) != 1:
        return
    predicting = {int(m[1]) for name in catalog.tensors if (m := _PREDICTING.fullmatch(name))}
    more = {0, len(predicting), *_numbers(config, _MORE_LAYERS).values()}
    if not any(len(numbers) - n in more for n in counts.values()):
        yield f"{_join(counts)}, but found tensors of {len(numbers):,} layers", None


def _experts(catalog: Catalog) -> dict[str, set[int]]:
    """Return the numbers of the experts of each layer with a tensor per expert."""
    experts: dict[str, set[int]] = defaultdict(set)
    for match in filter(None, map(_EXPERT.fullmatch, catalog.tensors)):
        experts[match[1]].add(int(match[2]))
    return experts


def _compare_experts(config: Record, catalog: Catalog) -> Iterator[Difference]:
    """Count the experts of each layer: tensors by their names, or the first dim of packed ones."""
    counts = _numbers(config, _EXPERT_COUNTS)
    for key, more in _numbers(config, _NO_EXPERTS).items() if counts else ():
        counts |= {f"{name} with {key}": n + more for name, n in counts.items()}
    is_ernie = str(config.get("model_type")).startswith("ernie4_5_vl_moe")
    sizes = {name: (2 if is_ernie else 1) * n for name, n in counts.items()}  # for text, for images
    for prefix, numbers in _experts(catalog).items() if counts else ():
        yield from _difference(sizes, len(numbers), f"found {len(numbers):,} in {prefix}", None)
    for name, entry in catalog.tensors.items() if counts else ():
        if _EXPERTS.fullmatch(name) and entry.shape:
            experts = entry.shape[0]
            yield from _difference(counts, experts, f"{name} has {experts:,}", name)


def _compare_attention(config: Record, tensors: Mapping[str, TensorEntry]) -> Iterator[Difference]:
    """Compare heads times head size, and the width of a plain MLP, with projections' rows."""
    model_type = str(config.get("model_type"))
    if model_type not in _PLAIN:
        return
    width = _numbers(config, ("intermediate_size",))
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    size = config.get("head_dim")
    if type(size) is not int and type(heads) is int and type(hidden) is int and heads:
        size = None if model_type in _HEAD_SIZE_OF_ITS_OWN else hidden // heads
    counts = {"q": heads, "k": config.get("num_key_value_heads") or heads}
    names = {"q": "num_attention_heads", "k": "num_key_value_heads"}
    for name, entry in tensors.items():
        match, rows = _PROJECTION.fullmatch(name), entry.shape[0]
        count = counts[match[1]] if match else None
        if match and type(size) is int and type(count) is int and rows != count * size:
            yield f"{names[match[1]]} {count} of size {size}, but {name} has {rows:,} rows", name
        if _GATE.fullmatch(name) and model_type not in ("qwen2_moe", "qwen3_moe"):
            yield from _difference(width, rows, f"{name} has {rows:,} rows", name)


def _compare_ties(config: Record, catalog: Catalog) -> Iterator[Difference]:
    """Yield a difference if the config has the head as a separate tensor, and it is missing."""
    if config.get("tie_word_embeddings") is not False or not is_causal(config):
        return
    is_model = (
        str(config.get("model_type")) in _PLAIN and "model.embed_tokens.weight" in catalog.tensors
    )
    if is_model and not any(map(_HEAD.fullmatch, catalog.tensors)):
        yield "tie_word_embeddings false, but lm_head.weight not found", None


def _compare_dtypes(configs: Sequence[Record], catalog: Catalog) -> Iterator[Difference]:
    """Compare the type of most elements with those of a config and its text_config.

    One that a type of the config holds exactly loses nothing when the model is loaded: torchtune
    copies the config of its base, whatever it trains in.
    """
    pairs = [
        (key, str(config[key]).removeprefix("torch."))
        for config in configs
        for key in DTYPE_KEYS
        if config.get(key)
    ]
    types, main = [name for _, name in pairs], main_dtype(catalog)
    if not pairs or main is None or not all(name in BY_NAME for name in types):
        return
    if not any(_holds(BY_NAME[name], BY_NAME[main]) for name in types):
        yield f"{_join(dict(pairs))}, but most elements are {main}", None


def _holds(dtype: DType, other: DType) -> bool:
    """Return whether a type has all numbers of another, which is not quantized."""
    is_wider = dtype.exponent >= other.exponent and dtype.mantissa >= other.mantissa
    return dtype is other or (dtype.kind == "float" and is_wider and not other.is_float8)


def main_dtype(catalog: Catalog) -> str | None:
    """Return the dtype of most floating elements: norms and biases may have another."""
    elements: Counter[str] = Counter()
    packed = packed_names(catalog)
    for name, entry in catalog.tensors.items():
        if entry.dtype.kind == "float" and name not in packed:
            elements[entry.dtype.name] += entry.elements
    return elements.most_common(1)[0][0] if elements else None


def with_dtype(config: Record, dtype: str | None) -> dict[str, Any]:
    """Return a config with another element type wherever it states one; unchanged for None."""
    if dtype is None:
        return dict(config)
    keys = [key for key in DTYPE_KEYS if key in config] or ["torch_dtype"]
    inner = config.get("text_config")
    changed = {**config, **dict.fromkeys(keys, dtype)}
    if isinstance(inner, dict) and any(key in inner for key in DTYPE_KEYS):
        changed["text_config"] = with_dtype(inner, dtype)
    return changed
