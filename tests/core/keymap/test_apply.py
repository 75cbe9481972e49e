"""Rules of a key map: which are valid, and which takes a name."""

from __future__ import annotations

from typing import Any

import pytest

from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.keymap.apply import apply_map
from ckptool.core.keymap.axes import parse_axes, show_axes, solve
from ckptool.core.keymap.match import ModelFacts, may_match
from ckptool.core.keymap.model import KeyMap, abstract
from ckptool.core.keymap.parse import parse_map, parse_pattern
from ckptool.errors import UsageError


def key_map(*rules: dict[str, Any], **more: Any) -> KeyMap:
    return parse_map({"rule": list(rules), **more}, "m.toml", dict[str, KeyMap]().__getitem__)


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
        parse_map({}, "m.toml", dict[str, KeyMap]().__getitem__)


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
    rules: list[dict[str, Any]] = [
        {"from": "{l}.up.norm", "to": "{l}.norm", "beside": {"to": "{l}.up"}},
        {"from": "{l}.norm", "to": "{l}.norm"},
        {"from": "{l}.up", "to": "{l}.up"},
    ]
    there, back = key_map(*rules).inverse, key_map(*rules)
    assert makes(there, "0.norm", "1.norm", "1.up") == {"0.norm", "1.up.norm", "1.up"}
    assert makes(back, "0.norm", "1.up.norm", "1.up") == {"0.norm", "1.norm", "1.up"}


def test_what_is_kept_has_no_thousands_of_steps() -> None:
    """Such a name is hostile: it costs all maps what its bytes cost, but for this."""
    kept = key_map({"from": "norm", "to": "norm"}, keep=["layers.*"])
    for steps, may in ((3, True), (3_000, False)):
        name = "layers." * steps + "w"
        assert may_match([name], kept) is may
        assert (kept.kept_as(name) is not None) is may
