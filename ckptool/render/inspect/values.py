"""Short text of non-tensor values for the screen."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from datetime import date, time, timedelta
from itertools import chain, islice
from operator import itemgetter
from typing import Any

from ckptool.commands.inspect.records import content_of, parts_of, simple_value, unwrap
from ckptool.core.catalog import ObjectEntry
from ckptool.core.state_category import state_category
from ckptool.core.text import visible
from ckptool.serialization.pickle.records import Call, Global, Persistent
from ckptool.serialization.state_dict.values import type_name

_WANTED = {
    word: rank
    for rank, words in enumerate(
        (
            "step global_step global_steps iteration epoch tokens_seen consumed_train_samples",
            "lr learning_rate max_lr min_lr seed",
            "model_type hidden_size dim d_model n_embd"
            " num_layers num_hidden_layers n_layers n_layer",
            "num_attention_heads n_heads n_head num_key_value_heads num_query_groups n_kv_heads"
            " ffn_hidden_size intermediate_size vocab_size padded_vocab_size num_experts",
            "seq_len seq_length max_seq_len max_position_embeddings global_batch_size"
            " micro_batch_size train_batch_size batch_size",
        )
    )
    for word in words.split()
}
"""The last parts of the names of values that people look for, the first ones first."""
_ORDINARY = len(_WANTED)
_FEW = 4
_HYPERPARAMETERS = ("lr", "initial_lr", "betas", "momentum", "eps", "weight_decay")


def preview(value: Any, limit: int = 60) -> str:
    """Return a value in at most about ``limit`` characters, with no more work than that."""
    value = unwrap(value)
    if isinstance(value, list | tuple | set | frozenset):
        return _container(value, limit)
    if isinstance(value, dict):
        if limit < 4 and value:
            return f"{len(value):,} items"
        items = (f"{preview(k, 20)}: {preview(v, limit // 2)}" for k, v in value.items())
        return _enclose(items, "{}", len(value), limit)
    if isinstance(value, bytes | bytearray):
        return f"{len(value):,} bytes"
    if isinstance(value, Call) and (shown := _record(value, limit)) is not None:
        return shown
    if isinstance(value, str):
        cut = f"{value[:limit]}…" if len(value) > limit else value
        return "'" + visible(cut) + "'"
    return visible(_atom(value))


def _record(call: Call, limit: int) -> str | None:
    """Return the content of a record, None if only its name can be shown."""
    simple = simple_value(call)
    if simple is not None:
        is_time = isinstance(simple, date | time | timedelta)
        return str(simple) if is_time else preview(simple, limit)
    parts = content_of(call)
    if parts is None:
        return None
    arguments, fields = parts
    name, count = visible(call.name.rpartition(".")[2]), len(arguments) + len(fields)
    if limit < 4:
        return f"{name}(… {count:,} items)"
    shown = chain(
        (preview(value, limit // 2) for value in arguments),
        (f"{visible(key)}={preview(value, limit // 2)}" for key, value in fields.items()),
    )
    return name + _enclose(shown, "()", count, limit)


def _container(value: Any, limit: int) -> str:
    if limit < 4 and value:
        return f"{len(value):,} items"
    brackets = "[]" if isinstance(value, list) else "()" if isinstance(value, tuple) else "{}"
    if not value and isinstance(value, set | frozenset):
        return "set()"
    return _enclose((preview(item, limit // 2) for item in value), brackets, len(value), limit)


def _enclose(items: Iterable[str], brackets: str, count: int, limit: int) -> str:
    shown: list[str] = []
    room = limit
    for item in items:
        room -= len(item) + 2
        if room < 0:
            shown.append(f"… {count:,} items")
            break
        shown.append(item)
    return brackets[0] + ", ".join(shown) + brackets[1]


def _atom(value: Any) -> str:
    if isinstance(value, Global):
        return str(value)
    if isinstance(value, Call) and value.name in ("torch.Size", "torch.device"):
        return value.name + preview(value.args)
    if isinstance(value, Call | Persistent):
        return f"<{type_name(value)}>"
    if isinstance(value, int) and abs(value) > 1 << 256:
        return f"an int of {value.bit_length():,} bits"
    return repr(value)


def notable_values(entries: Iterable[ObjectEntry], most: int = 8) -> list[tuple[str, str]]:
    """Return the values that people look for first: short ones, then the optimizer's rates.

    Progress, rates, seeds and sizes come first; what an object keeps private is left out.
    Of an object with attributes, such as arguments, those are shown that are looked for.
    """
    items: list[tuple[int, int, str, Any]] = []
    optimizer: list[ObjectEntry] = []
    for entry in entries:
        if state_category(entry) == "optimizer":
            optimizer.append(entry)
        elif isinstance(entry.value, int | float | str):
            items.append((_rank(entry.name), len(entry.path), entry.name, entry.value))
        else:
            items += _attributes(entry)
    shown = sorted((item for item in items if item[0] <= _ORDINARY), key=itemgetter(0, 1))
    values = [(name, preview(value)) for _, _, name, value in shown[:most]]
    return values + _hyperparameters(optimizer)


def _attributes(entry: ObjectEntry) -> Iterator[tuple[int, int, str, Any]]:
    """Yield the attributes of an object that are looked for, as ``notable_values`` sorts them."""
    _, fields = parts_of(entry.value)
    for key, inner in fields.items():
        value = unwrap(inner)
        if isinstance(value, int | float | str) and (rank := _rank(str(key))) < _ORDINARY:
            yield rank, len(entry.path) + 1, f"{entry.name}.{key}", value


def _rank(name: str) -> int:
    """Return how early a value is shown, by the last part of its name."""
    last = name.rpartition(".")[2]
    if last.startswith("_"):
        return _ORDINARY + 1
    return _WANTED.get(last.lower(), _ORDINARY)


def _hyperparameters(entries: Iterable[ObjectEntry]) -> list[tuple[str, str]]:
    """Return each rate of the optimizer once, with all values in its groups."""
    rates: dict[str, dict[str, None]] = {}
    for entry in entries:
        last = str(entry.path[-1]).rpartition(".")[2]
        if last in _HYPERPARAMETERS:
            rates.setdefault(last, {})[preview(entry.value)] = None
    return [(f"optimizer {name}", _join(rates[name])) for name in _HYPERPARAMETERS if name in rates]


def _join(values: Collection[str]) -> str:
    """Return the first few of some values, and an ellipsis for others."""
    return " | ".join([*islice(values, _FEW), *(["…"] if len(values) > _FEW else [])])
