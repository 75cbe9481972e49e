"""What the rules of a key map do to arrays, against numpy."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import Catalog, Chunk, Extent, ObjectEntry, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.keymap.apply import apply_map
from ckptool.core.keymap.axes import Axes, axes_of, show_axes
from ckptool.core.keymap.match import ModelFacts
from ckptool.core.keymap.model import KeyMap
from ckptool.core.keymap.parse import parse_map
from ckptool.errors import Unsupported, UsageError


def key_map(*rules: dict[str, Any], **more: Any) -> KeyMap:
    return parse_map({"rule": list(rules), **more}, "m.toml", dict[str, KeyMap]().__getitem__)


Array = np.ndarray[Any, Any]


class Store:
    """One file of tensors, from arrays to entries and back."""

    def __init__(self) -> None:
        self.data = bytearray()

    def entry(self, name: str, values: Array, cuts: list[int]) -> TensorEntry:
        """The array, cut into chunks along its first dim at ``cuts``."""
        edges = [0, *sorted({c for c in cuts if 0 < c < values.shape[0]}), values.shape[0]]
        chunks = []
        for rank, (lo, hi) in enumerate(itertools.pairwise(edges)):
            part = np.ascontiguousarray(values[lo:hi], "i4")
            at = Extent("f", len(self.data), row_major_strides(part.shape, 4))
            box = Box((lo, *(0,) * (values.ndim - 1)), (hi, *values.shape[1:]))
            chunks.append(Chunk(box, at, rank))
            self.data += part.tobytes()
        return TensorEntry(name, (name,), BY_NAME["int32"], values.shape, tuple(chunks))

    def array(self, entry: TensorEntry) -> Array:
        whole = np.full(entry.shape, -1, "i4")
        for chunk in entry.chunks:
            at = chunk.at
            assert isinstance(at, Extent)
            view = np.ndarray(chunk.box.shape, "i4", bytes(self.data), at.offset, at.strides)
            whole[tuple(map(slice, chunk.box.lo, chunk.box.hi))] = view
        return whole


def catalog(entries: list[TensorEntry], **values: Any) -> Catalog:
    objects = {n: ObjectEntry(n, (n,), v) for n, v in values.items()}
    return Catalog("test", {entry.name: entry for entry in entries}, objects, {})


@st.composite
def arranged(draw: st.DrawFn, names: list[str]) -> Axes:
    """The axes in some order, in some dims."""
    order = draw(st.permutations(names))
    cuts = draw(st.sets(st.integers(1, len(names)))) | {len(names)}
    edges = itertools.pairwise([0, *sorted(cuts)])
    return tuple(tuple((n,) for n in order[lo:hi]) for lo, hi in edges)


def array_of(canonical: Array, order: list[str], axes: Axes) -> Array:
    """An array whose dims are ``order``, with its dims arranged as ``axes`` say."""
    names = [axis[0] for axis in axes_of(axes)]
    turned = canonical.transpose([order.index(name) for name in names])
    sizes = dict(zip(order, canonical.shape, strict=True))
    return turned.reshape([math.prod(sizes[axis[0]] for axis in dim) for dim in axes])


@given(st.data())
def test_any_arrangement_of_axes_into_any_other_and_back(data: st.DataObject) -> None:
    """Views, permutations, stacks and unstacks: one array under two namings of its axes."""
    inner = ["a", "b", "c"][: data.draw(st.integers(1, 3))]
    spelled = data.draw(st.sampled_from([None, "source", "target"]))
    order = [*inner, "n"] if spelled else inner
    sizes = {name: data.draw(st.integers(1, 4)) for name in order}
    canonical = np.arange(math.prod(sizes.values())).reshape([sizes[name] for name in order])
    sides = {
        side: data.draw(arranged(inner if spelled == side else order))
        for side in ("source", "target")
    }
    texts = {
        side: f"{side}{'.{n}' if spelled == side else ''} [{show_axes(axes)}]"
        for side, axes in sides.items()
    }
    arrays: dict[str, dict[str, Array]] = {
        side: {f"{side}.{i}": array_of(canonical[..., i], inner, axes) for i in range(sizes["n"])}
        if spelled == side
        else {side: array_of(canonical, order, axes)}
        for side, axes in sides.items()
    }
    store = Store()
    cuts = data.draw(st.lists(st.integers(0, 9), max_size=3))
    before = catalog([store.entry(n, a, cuts) for n, a in arrays["source"].items()])
    rules = key_map({"from": texts["source"], "to": texts["target"]})
    there = apply_map(before, rules, ModelFacts(sizes)).catalog
    assert there.tensors.keys() == arrays["target"].keys()
    for name, wanted in arrays["target"].items():
        np.testing.assert_array_equal(store.array(there.tensors[name]), wanted)
    back = apply_map(there, rules.inverse, ModelFacts(sizes)).catalog
    for name, wanted in arrays["source"].items():
        np.testing.assert_array_equal(store.array(back.tensors[name]), wanted)


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(0, 9)
)
def test_queries_keys_and_values_by_group(kv: int, q: int, dim: int, wide: int, cut: int) -> None:
    """A fused projection whose rows are grouped, as numpy takes it apart; and back."""
    fused = np.arange(kv * (q + 2) * dim * wide).reshape(kv * (q + 2) * dim, wide)
    groups = fused.reshape(kv, q + 2, dim, wide)
    wanted = {
        "q": groups[:, :q].reshape(-1, wide),
        "k": groups[:, q].reshape(-1, wide),
        "v": groups[:, q + 1].reshape(-1, wide),
    }
    rules = key_map(
        {
            "from": "qkv [(kv (q + k + v) dim) wide]",
            "to": [f"{n} [(kv {n} dim) wide]" for n in "qkv"],
        }
    )
    facts = ModelFacts({"kv": kv, "k": 1, "v": 1, "dim": dim})
    store = Store()
    there = apply_map(catalog([store.entry("qkv", fused, [cut])]), rules, facts).catalog
    assert there.tensors.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(store.array(there.tensors[name]), array)
    back = apply_map(there, rules.inverse, facts).catalog
    np.testing.assert_array_equal(store.array(back.tensors["qkv"]), fused)


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(0, 9)
)
def test_blocks_one_after_the_other(kv: int, q: int, dim: int, wide: int, cut: int) -> None:
    """All queries, all keys, all values: into groups, and apart; and back."""
    heads = {"q": kv * q, "k": kv, "v": kv}
    parts = {n: np.arange(h * dim * wide).reshape(h * dim, wide) for n, h in heads.items()}
    fused = np.concatenate([parts[n] + 1000 * at for at, n in enumerate("qkv")])
    grouped = np.concatenate(
        [part.reshape(kv, -1, dim, wide) for part in np.split(fused, [kv * q * dim, -kv * dim])], 1
    ).reshape(-1, wide)
    blocks = "qkv [(kv q dim | kv k dim | kv v dim) wide]"
    whole = {"from": blocks, "to": "group [(kv (q + k + v) dim) wide]"}
    apart = {
        "from": blocks,
        "to": ["q [wide (q kv dim)]", "kv [(kv (k | v) dim) wide]"],
    }
    pairs = {"from": blocks, "to": "group [(kv (q | k | v) dim) wide]"}
    queries, others = np.split(fused, [kv * q * dim])
    queries = queries.reshape(kv, q, dim, wide).transpose(3, 1, 0, 2).reshape(wide, -1)
    others = others.reshape(2, kv, dim, wide).transpose(1, 0, 2, 3).reshape(-1, wide)
    facts = ModelFacts({"kv": kv, "q": q, "k": 1, "v": 1, "dim": dim})
    store = Store()
    source = catalog([store.entry("qkv", fused, [cut])])
    cases: list[tuple[dict[str, Any], dict[str, Array]]] = [
        (whole, {"group": grouped}),
        (pairs, {"group": grouped}),
        (apart, {"q": queries, "kv": others}),
    ]
    for rule, wanted in cases:
        rules = key_map(rule)
        there = apply_map(source, rules, facts).catalog
        assert there.tensors.keys() == wanted.keys()
        for name, array in wanted.items():
            np.testing.assert_array_equal(store.array(there.tensors[name]), array)
        back = apply_map(there, rules.inverse, facts).catalog
        np.testing.assert_array_equal(store.array(back.tensors["qkv"]), fused)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"kv": 2, "k": 1, "v": 1, "dim": 3}, "unknown size of q"),
        ({"kv": 2, "q": 2, "k": 1, "v": 1, "dim": 4}, r"shape \[24, 5\] does not match"),
    ],
)
def test_blocks_of_unknown_or_wrong_length_are_not_guessed(
    sizes: dict[str, int], words: str
) -> None:
    rule = {
        "from": "qkv [(kv q dim | kv k dim | kv v dim) wide]",
        "to": "group [(kv (q + k + v) dim) wide]",
    }
    source = catalog([Store().entry("qkv", np.zeros((24, 5), int), [])])
    with pytest.raises((UsageError, Unsupported), match=words):
        apply_map(source, key_map(rule), ModelFacts(sizes))


def test_padding_is_taken_off_and_put_on_again_by_repeating_the_last_row() -> None:
    rules = key_map({"from": "e [(vocab + extra) w]", "to": "h [vocab w]", "padding": "extra"})
    full, store = np.arange(12).reshape(6, 2), Store()
    done = apply_map(catalog([store.entry("e", full, [3])]), rules, ModelFacts({"vocab": 5}))
    assert [move.operation for move in done.moves] == ["unpad 6 to 5"]
    np.testing.assert_array_equal(store.array(done.catalog.tensors["h"]), full[:5])
    back = apply_map(done.catalog, rules.inverse, ModelFacts({"extra": 2}))
    assert [move.operation for move in back.moves] == ["pad 5 to 7"]
    wanted = np.concatenate([full[:5], full[4:5], full[4:5]])
    np.testing.assert_array_equal(store.array(back.catalog.tensors["e"]), wanted)
    plain = apply_map(done.catalog, rules.inverse, ModelFacts())
    np.testing.assert_array_equal(store.array(plain.catalog.tensors["e"]), full[:5])
