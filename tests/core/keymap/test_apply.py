"""Rules of a key map: which are valid, their effect on arrays, and that they undo themselves."""

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
from ckptool.core.keymap.axes import Axes, axes_of, parse_axes, show_axes, solve
from ckptool.core.keymap.match import ModelFacts
from ckptool.core.keymap.model import KeyMap, abstract
from ckptool.core.keymap.parse import parse_map, parse_pattern
from ckptool.errors import Unsupported, UsageError

Array = np.ndarray[Any, Any]


# Named axes


@pytest.mark.parametrize(
    "text",
    ["", "hidden", "layer hidden", "(head pair two) hidden", "(gate + up) hidden",
     "layer (kv (q + k + v) dim) hidden", "(a (b + c))"],
)  # fmt: skip
def test_axes_are_shown_as_they_are_written(text: str) -> None:
    assert show_axes(parse_axes(text)) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("(head", "unclosed parenthesis"),
        ("head head", "repeats axis head"),
        ("head) x", "invalid axis name"),
        ("a + b", "invalid axis name"),
        ("(a + )", "invalid sum of axes"),
        ("(a + (b c))", "invalid sum of axes"),
        ("Head", "invalid axis name"),
        ("a, b", "invalid axis name"),
    ],
)
def test_axes_that_make_no_sense(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_axes(text)


@pytest.mark.parametrize(
    ("axes", "shape", "known", "found"),
    [
        ("(head dim) hidden", (12, 5), {"head": 4}, {"dim": 3, "hidden": 5}),
        ("(gate + up)", (12,), {}, {}),
        ("((gate + up) ffn)", (12,), {"gate": 1, "up": 1}, {"ffn": 6}),
        ("(gate + up)", (12,), {"gate": 4}, {"up": 8}),
        ("(kv (q + k + v) dim)", (48,), {"kv": 2, "dim": 6, "k": 1, "v": 1}, {"q": 2}),
        ("(kv (q + k + v) dim)", (48,), {"kv": 2, "q": 2, "k": 1, "v": 1}, {"dim": 6}),
        ("(head dim)", (12,), {}, {}),
        ("(head dim)", (12,), {"head": 5}, {}),
    ],
)
def test_sizes_are_told_from_shapes(
    axes: str, shape: tuple[int, ...], known: dict[str, int], found: dict[str, int]
) -> None:
    solved = solve([(parse_axes(axes), shape)], known)
    assert {name: solved.get(name) for name in found} == found
    assert solved.keys() == known.keys() | found.keys()


def test_padding_is_never_half_of_a_dim() -> None:
    tensors = [(parse_axes("(vocab + extra) hidden"), (12, 4))]
    assert solve(tensors, {}) == {"hidden": 4}
    assert solve(tensors, {"vocab": 9})["extra"] == 3


# Names


def test_a_pattern_finds_its_numbers_and_says_them_again() -> None:
    pattern = parse_pattern("mtp.{ mtp + layers }.w1.{expert}.weight0")
    found = abstract("mtp.63.w1.7.weight0")
    assert found is not None
    assert found[0] == pattern.key
    binding = pattern.match(found[1], {"layers": 61})
    assert binding == {"mtp": 2, "expert": 7}
    assert pattern.name(binding, {"layers": 61}) == "mtp.63.w1.7.weight0"


@pytest.mark.parametrize("name", ["mtp.60.w1.7.weight0", "mtp.63.w2.7.weight0"])
def test_other_numbers_do_not_match(name: str) -> None:
    pattern = parse_pattern("mtp.{mtp + layers}.w1.{expert}.weight0")
    assert pattern.match(abstract(name)[1], {"layers": 61}) is None


def test_a_name_with_leading_zeros_is_not_an_index() -> None:
    assert abstract("layers.01.w") == ("", ())


@pytest.mark.parametrize("text", ["a.{b", "a.{}", "a.{b c}", "w1{e}", "a b", "", "a [b] c"])
def test_patterns_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError):
        parse_pattern(text)


# Rules that work both ways, and those that do not


def key_map(*rules: dict[str, Any], **more: Any) -> KeyMap:
    return parse_map({"rule": list(rules), **more}, "m.toml", {}.__getitem__)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"from": "a"}, "requires both"),
        ({"from": "a.{l}", "to": "b"}, "axis l must be in both"),
        ({"from": "a.{l}", "to": "b.{m}"}, "must be in both"),
        ({"from": "a [x y]", "to": "b [x]"}, "axis y must be in both"),
        ({"from": "a [x]", "to": "b"}, "for all names or for none"),
        ({"from": "a [(x + y)]", "to": ["b [x]"]}, "no name contains y"),
        ({"from": "a [(x + y)]", "to": ["b [x]", "c [x]"]}, "two names contain x"),
        ({"from": "a [(x + y + z)]", "to": ["b [(x + y)]", "c [(y + z)]"]}, "two names contain y"),
        ({"from": "a [(x + y) h]", "to": ["b [x h]", "c [h]"]}, "must contain exactly one of x"),
        ({"from": ["a", "b", "c"], "to": ["d", "e"]}, "must pair up, in order"),
        ({"from": ["a [x]", "b [y]"], "to": ["c [x]", "d [z]"]}, "axis y must be in both"),
        ({"from": "a [(x | y) (z | w)]", "to": "b"}, "in one dim"),
        ({"from": "a [(x (y | z)]", "to": "b"}, "blocks are"),
        ({"from": "a [(x | y) h]", "to": "b [(x + z) h]"}, "exactly one of x"),
        ({"from": "a [(x | y)]", "to": "b [(x + y + z)]"}, "no name contains z"),
        ({"from": "a", "to": "b", "add": 0.5}, "must be a whole number"),
        ({"from": "a?", "to": "b"}, "optional names are allowed in ties only"),
        ({"from": "a", "to": "b?", "tie": True}, "a non-optional name on each side"),
        ({"from": ["a.{l}", "b"], "to": "c.{l}", "tie": True}, "same numbers"),
        ({"from": "a [(x + p)]", "to": "b [x]", "padding": "q"}, "no name contains p"),
        ({"from": "a [(p + x)]", "to": "b [x]", "padding": "p"}, "must be the last"),
        ({"from": "a.{x}", "to": "b [x]", "only": "ema"}, "must be model or optimizer"),
        ({"from": "a.{x} [x]", "to": "b [x]"}, "both in the name and in the dims"),
        ({"from": "a", "to": "b", "onyl": "model"}, "'onyl' is not one of"),
        ({"from": 3, "to": "b"}, "3 is not a name"),
        ({"from": "a [x", "to": "b"}, "is not NAME or NAME"),
        ({"from": "a<.{l}>.w", "to": "b.{l}.w"}, "needs axes in brackets"),
        ({"from": "a", "to": "b", "beside": "c"}, "is not a table"),
        ({"from": "a", "to": "b", "beside": {"too": "c"}}, "'too' is not one of"),
        ({"from": "a.{l}", "to": "b.{l}", "beside": {"to": "c.{m}"}}, "a number missing in"),
    ],
)  # fmt: skip
def test_rules_that_cannot_work_both_ways(rule: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        key_map(rule)
    assert caught.value.message.startswith("m.toml: rule 1: ")


@pytest.mark.parametrize(
    ("more", "words"),
    [({"dim": 3}, "'dim' is not one of"), ({"dims": 3}, "not a table"),
     ({"dims": {"a": 1.5}}, "must be a list"),
     ({"dims": {"a": ""}}, "a = '' is not KEY, A / B"),
     ({"dims": {"a": ["x", "x + y"]}}, r"a = 'x \+ y' is not KEY, A / B"),
     ({"dims": {"a": "x y"}}, "a = 'x y' is not KEY, A / B"),
     ({"drop": {"form": "x"}}, "'form' is not one of")],
)  # fmt: skip
def test_files_that_make_no_sense(more: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        key_map({"from": "a", "to": "b"}, **more)


def test_a_file_without_rules() -> None:
    with pytest.raises(UsageError, match=r"no \[\[rule\]\]"):
        parse_map({}, "m.toml", {}.__getitem__)


# Which rule takes a name


def makes(wanted: KeyMap, *names: str) -> set[str]:
    """The names that a map makes of tensors of two numbers."""
    tensors = {name: TensorEntry(name, (name,), BY_NAME["float32"], (2,), ()) for name in names}
    return set(apply_map(Catalog("dcp", tensors, {}, {}), wanted, ModelFacts()).catalog.tensors)


LAYERS = {"from": "layers<.{layer}>.w [x]", "to": "l{layer}.w [x]"}


def test_one_rule_for_tensors_that_may_be_stacked() -> None:
    wanted = key_map(LAYERS, dims={"x": 2})
    assert makes(wanted.inverse, "l0.w", "l1.w") == {"layers.w"}
    assert makes(wanted, "layers.0.w", "layers.1.w") == {"l0.w", "l1.w"}


def test_layers_that_differ_are_not_stacked() -> None:
    wanted = key_map(
        LAYERS,
        {"from": "layers.{layer}.odd", "to": "l{layer}.odd"},
        facts={"apart": ["l{layer}.w", "l{layer}.odd"]},
    )
    names = {"layers.0.w", "layers.1.w", "layers.1.odd"}
    assert makes(wanted.inverse, "l0.w", "l1.w", "l1.odd") == names
    assert makes(wanted.inverse, "wrapped.l0.w", "wrapped.l1.odd") == {
        "wrapped.layers.0.w",
        "wrapped.layers.1.odd",
    }


def test_a_rule_for_what_has_another_tensor_beside_it() -> None:
    rules = [
        {"from": "{l}.up.norm", "to": "{l}.norm", "beside": {"to": "{l}.up"}},
        {"from": "{l}.norm", "to": "{l}.norm"},
        {"from": "{l}.up", "to": "{l}.up"},
    ]
    there, back = key_map(*rules).inverse, key_map(*rules)
    assert makes(there, "0.norm", "1.norm", "1.up") == {"0.norm", "1.up.norm", "1.up"}
    assert makes(back, "0.norm", "1.up.norm", "1.up") == {"0.norm", "1.norm", "1.up"}


# What rules do, against numpy


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
    wanted_of = [(whole, {"group": grouped}), (pairs, {"group": grouped})]
    for rule, wanted in (*wanted_of, (apart, {"q": queries, "kv": others})):
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
