"""User-written maps: what they add to weights, what they include, what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import bits, convert_to, flat, load_dcp
from safetensors.torch import load_file, save_file

from ckptool.commands.keymap.library import load_map
from ckptool.commands.keymap.sizes import facts
from ckptool.commands.options.rewrite import MapOptions
from ckptool.errors import Unsupported, UsageError

CENTERED = """
[[rule]]
from = "norm.{layer}.weight"
to = "layers.{layer}.norm"
add = -1

[[rule]]
from = "w"
to = "weight"
"""


def saved(folder: Path, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    types = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    norms = {f"norm.{at}.weight": torch.randn(5).to(t) for at, t in enumerate(types)}
    state = {**norms, "w": torch.randn(3), **more}
    dcp.save(state, checkpoint_id=folder / "a", no_dist=True)
    (folder / "m.toml").write_text(CENTERED)
    return state


def test_what_a_rule_adds_is_what_torch_adds(tmp_path: Path) -> None:
    state = saved(tmp_path)
    options = MapOptions(str(tmp_path / "m.toml"))
    done = convert_to("safetensors", tmp_path / "a", tmp_path / "b", map=options)
    found = load_file(tmp_path / "b" / "model.safetensors")
    for layer in range(4):
        wanted = state[f"norm.{layer}.weight"] - 1
        assert bits(found[f"layers.{layer}.norm"]) == bits(wanted), wanted.dtype
    assert torch.equal(found["weight"], state["w"])
    assert any("computed, and rounded to their type" in note for note in done.map.notes)
    convert_to("dcp", tmp_path / "b", tmp_path / "c", map=options)
    back = flat(load_dcp(tmp_path / "c"))
    assert all(bits(back[n]) == bits(state[n] - 1 + 1) for n in state if n != "w")


def test_moments_are_those_of_the_weight_and_masters_are_not(tmp_path: Path) -> None:
    moment = torch.randn(5)
    saved(tmp_path, **{"optimizer.state.norm.0.weight.exp_avg": moment})
    options = MapOptions(str(tmp_path / "m.toml"))
    convert_to("dcp", tmp_path / "a", tmp_path / "b", map=options)
    found = flat(load_dcp(tmp_path / "b"))
    assert torch.equal(found["optimizer.state.layers.0.norm.exp_avg"], moment)
    saved(tmp_path, **{"optimizer.state.norm.0.weight.fp32_param": moment})
    with pytest.raises(Unsupported, match="fp32_param"):
        convert_to("dcp", tmp_path / "a", tmp_path / "c", map=options)


def test_what_has_no_sum_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, **{"norm.4.weight": torch.arange(3)})
    with pytest.raises(Unsupported, match="-1 cannot be added to int64"):
        convert_to("dcp", tmp_path / "a", tmp_path / "b", map=MapOptions(str(tmp_path / "m.toml")))


def written(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        (folder / f"{name}.toml").write_text(text)
    return folder / f"{next(iter(texts))}.toml"


def test_own_rules_go_before_those_that_are_included(tmp_path: Path) -> None:
    mine = """
    include = ["theirs.toml", "meta-llama"]
    without = ["norm.*"]
    [dims]
    head = 3
    [[rule]]
    from = "a"
    to = "mine"
    """
    theirs = '[dims]\nhead = 4\nkv = 2\n[[rule]]\nfrom = "a"\nto = "theirs"'
    key_map = load_map(str(written(tmp_path, mine=mine, theirs=theirs)))
    names = [rule.targets[0].text for rule in key_map.rules]
    assert names[:2] == ["mine", "theirs"]
    assert "model.norm.weight" not in names
    assert len(names) == 1 + len(load_map("meta-llama").rules)
    assert (key_map.sizes["head"], key_map.sizes["kv"]) == ((3,), (2,))
    assert key_map.model_types == ()


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ({"a": 'include = "b.toml"', "b": 'include = ["a.toml"]'}, "includes itself"),
        ({"a": 'include = ["meta-lama"]'}, "not a built-in map or a file beside it"),
        ({"a": 'include = ["b.toml"]', "b": "x = 1"}, "b.toml: 'x' is not one of"),
        ({"a": "include = [3]"}, "is not a name"),
        ({"a": 'include = ["meta-llama"]\nwithin.to."model." = "m.0."'}, "the beginning of a name"),
        ({"a": 'include = ["meta-llama"]\nwithout = ["nrom.*"]'}, "'nrom.*' matches no name"),
        ({"a": 'include = ["meta-llama"]\n[also]\nfrom = {}'}, r"\[\[also\]\] is not a list"),
        (
            {"a": 'include = ["meta-llama"]\n[[also]]\nfrom = {x = "y"}'},
            "matches the beginning of no rule",
        ),
        ({"a": 'include = ["meta-llama"]\n[[also]]\nfrom = {"" = "y["}'}, "beginning of a name"),
        (
            {
                "a": 'include = ["meta-llama"]\n'
                + 20 * "[[also]]\nfrom = {'' = ''}\nto = {'' = ''}\n"
            },
            "more than 10,000 rules",
        ),
        (
            {
                "a": f"keep = 'k.*'\n{CENTERED}"
                + 15 * "[[also]]\nfrom.'k.' = 'k.k.'\nto.'k.' = 'k.k.'\n"
            },
            "more than 10,000 rules",
        ),
    ],
)
def test_inclusions_that_cannot_be(texts: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        load_map(str(written(tmp_path, **texts)))


def test_a_file_that_is_included_twice_at_each_of_many_levels_is_read_once(tmp_path: Path) -> None:
    written(tmp_path, level0=CENTERED)
    for level in range(1, 26):
        text = f"include = ['level{level - 1}.toml', 'level{level - 1}.toml']\n"
        written(tmp_path, **{f"level{level}": text})
    assert len(load_map(str(tmp_path / "level25.toml")).rules) == 2


def test_rules_that_double_with_every_level_are_refused(tmp_path: Path) -> None:
    written(tmp_path, level0=CENTERED)
    for level in range(1, 16):
        below = f"include = ['level{level - 1}.toml']\n"
        start = "abcdefghijklmno"[level - 1]
        side = below + f"[within]\nfrom = {{ '' = '{start}.' }}\nto = {{ '' = '{start}.' }}\n"
        text = f"include = ['side{level}.toml', 'level{level - 1}.toml']\n"
        written(tmp_path, **{f"level{level}": text, f"side{level}": side})
    with pytest.raises(UsageError, match="more than 10,000 rules"):
        load_map(str(tmp_path / "level15.toml"))


def test_a_file_that_includes_itself_by_another_path_is_refused(tmp_path: Path) -> None:
    mine = written(tmp_path, mine=f"include = ['../{tmp_path.name}/mine.toml']\n")
    with pytest.raises(UsageError, match="includes itself"):
        load_map(str(mine))


def test_what_an_included_map_keeps_begins_otherwise_too(tmp_path: Path) -> None:
    written(tmp_path, base="keep = ['norm.*', '*.bias']\n" + CENTERED)
    inner = "include = ['base.toml']\n[within]\nfrom = { '' = 'llm.' }\nto = { '' = 'llm.' }\n"
    mine = written(tmp_path, mine=inner)
    assert [kept.source for kept in load_map(str(mine)).keep] == ["llm.norm.*", "llm.*.bias"]
    mine.write_text(inner.replace("to = { '' = 'llm.' }", "to = { '' = 'text.' }"))
    kept_as = load_map(str(mine)).kept_as
    names = ("llm.norm.3.x", "llm.0.bias", "text.0.bias")
    assert [*map(kept_as, names)] == ["text.norm.3.x", "text.0.bias", None]


def test_names_may_be_kept_but_for_their_beginning(tmp_path: Path) -> None:
    """Of several globs that match, the longest decides."""
    text = "keep = ['a.*', { from = 'a.*', to = 'a.deep.*' }, { from = 'b.*', to = 'c.*' }]\n"
    key_map = load_map(str(written(tmp_path, mine=text + CENTERED)))
    there, back = key_map.kept_as, key_map.inverse.kept_as
    assert [there(n) for n in ("a.x", "a.deep.x", "b.0.x", "d.x")] == [
        *("a.x", "a.deep.x", "c.0.x"),
        None,
    ]
    assert [back(n) for n in ("a.x", "a.deep.x", "c.0.x", "b.x")] == ["a.x", "a.x", "b.0.x", None]


@pytest.mark.parametrize(
    "keep",
    [
        *("3", "[3]", "{ from = 'a.*' }", "{ from = 'a.*', to = 'b' }"),
        *("[{ from = '*.a', to = '*.b' }]", "[{ from = 'a.*.b', to = '*.c' }]"),
    ],
)
def test_what_cannot_be_kept(keep: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        load_map(str(written(tmp_path, mine=f"keep = {keep}\n" + CENTERED)))


@pytest.mark.parametrize(
    ("size", "config", "wanted"),
    [
        ("n.length", {"n": ["a", "b"]}, 2),
        ("n.length", {"n": "*E*"}, 3),
        ("n.length", {"n": 4}, None),
        ("n.length - one", {"n": [7]}, 0),
        ("one - n.length", {"n": "ab"}, None),
    ],
)
def test_sizes_that_are_counted(
    size: str, config: dict[str, Any], wanted: int | None, tmp_path: Path
) -> None:
    text = f"[dims]\none = 1\nx = ['{size}']\n" + CENTERED
    known = facts(load_map(str(written(tmp_path, mine=text))), [config], {})
    assert known.sizes.get("x") == wanted


ALSO = """
[dims]
layers = []
[[also]]
from = { "l.{layer}." = "more.{extra}.inner." }
to = { "h.{layer}." = "h.{extra + layers}." }
[[rule]]
from = "l.{layer}.qk [(kv (two q | k) dim)]"
to = ["h.{layer}.q [(kv q two dim)]", "h.{layer}.k [(kv k dim)]"]
[[rule]]
beside.to = "h.{layer}.q"
from = "l.{layer}.norm"
to = "h.{layer}.norm"
[[rule]]
from = "l.{layer}.odd"
to = "odd.{layer}"
"""


def test_rules_hold_under_other_beginnings_too(tmp_path: Path) -> None:
    """Both ways: what counts from the number of layers on goes before what takes any number."""
    sizes = {"layers": 2, "kv": 2, "q": 3, "k": 1, "two": 2, "dim": 5}
    state = {f"{at}.qk": torch.randn(70) for at in ("l.0", "l.1", "more.0.inner")}
    state |= {f"{at}.norm": torch.randn(3) for at in ("l.0", "l.1", "more.0.inner")}
    save_file(state | {"l.1.odd": torch.ones(2)}, tmp_path / "a.safetensors")
    options = MapOptions(str(written(tmp_path, mine=ALSO)), sizes)
    convert_to("safetensors", tmp_path / "a.safetensors", tmp_path / "b.safetensors", map=options)
    there = load_file(tmp_path / "b.safetensors")
    layers = {f"h.{layer}.{part}" for layer in range(3) for part in ("q", "k", "norm")}
    assert there.keys() == {"odd.1", *layers}
    assert torch.equal(there["h.2.norm"], state["more.0.inner.norm"])
    assert torch.equal(there["h.2.k"], state["more.0.inner.qk"].view(2, 35)[:, 30:].flatten())
    convert_to("safetensors", tmp_path / "b.safetensors", tmp_path / "c.safetensors", map=options)
    back = load_file(tmp_path / "c.safetensors")
    assert back.keys() == {*state, "l.1.odd"}
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


TWO_SPELLINGS = """
keep = ["old.*.norm", { from = "top", to = "head" }]
[[also]]
from = { "old." = "old." }
to = { "old." = "new." }
[[rule]]
from = "old.{layer}.w [out in]"
to = "old.{layer}.w [in out]"
"""


@pytest.mark.parametrize("spelling", ["new", "old"])
def test_names_of_two_spellings_are_read_and_the_one_of_also_is_written(
    spelling: str, tmp_path: Path
) -> None:
    """Of what is kept, too."""
    state = {"old.3.w": torch.randn(2, 3), "old.3.norm": torch.randn(3), "top": torch.ones(1)}
    file = {"3.w": state["old.3.w"].T.contiguous(), "3.norm": state["old.3.norm"]}
    files = {f"{spelling}.{name}": tensor for name, tensor in file.items()}
    save_file(files | {"head": state["top"]}, tmp_path / "a.safetensors")
    options = MapOptions(str(written(tmp_path, mine=TWO_SPELLINGS)), inverse=True)
    convert_to("safetensors", tmp_path / "a.safetensors", tmp_path / "b.safetensors", map=options)
    there = load_file(tmp_path / "b.safetensors")
    assert {n: bits(t) for n, t in there.items()} == {n: bits(t) for n, t in state.items()}
    options = MapOptions(options.name, inverse=False)
    convert_to("safetensors", tmp_path / "b.safetensors", tmp_path / "c.safetensors", map=options)
    assert {*load_file(tmp_path / "c.safetensors")} == {"new.3.w", "new.3.norm", "head"}


def test_a_wrapper_is_what_all_names_have_though_some_fit_without_it(tmp_path: Path) -> None:
    """``old.3.w`` is a spelling of its own, and ``3.w`` within ``old.``."""
    text = """
keep = { from = "top", to = "head" }
[[also]]
from = { "x." = "x." }
to = { "old." = "" }
[[rule]]
from = "x.{layer}.w"
to = "old.{layer}.w"
"""
    state = {"old.3.w": torch.ones(2), "old.4.w": torch.ones(3), "old.head": torch.zeros(1)}
    save_file(state, tmp_path / "a.safetensors")
    options = MapOptions(str(written(tmp_path, mine=text)), inverse=True)
    convert_to("safetensors", tmp_path / "a.safetensors", tmp_path / "b.safetensors", map=options)
    wanted = {"old.x.3.w", "old.x.4.w", "old.top"}
    assert {*load_file(tmp_path / "b.safetensors")} == wanted


RULE = "[[rule]]\nfrom = 'w'\nto = 'v'\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rule = 3", r"\[\[rule\]\] is not a list of tables"),
        ("name = 3\n" + RULE, "name = 3 must be text"),
        ("model_types = 3\n" + RULE, "m.toml: 3 is not a name or a list"),
        ("unless = [3]\n" + RULE, "is not a name or a list"),
        (RULE + "tie = 'no'", "tie = 'no' must be true or false"),
        (RULE + "when = 3", "when = 3 must be text"),
        (RULE + "add = true", "add = True must be a whole number"),
        (RULE + f"add = {10**47}", "beyond 16,777,216"),
        ("[[rule]]\nfrom = 'w.{L}'\nto = 'v.{L}'", "word of small letters"),
        ("[[rule]]\nfrom = 'w'\nto = 'v\\u0000'".replace("'", '"'), "is not NAME"),
        ("[dims]\nx = -1\n" + RULE, "x = -1 is not a size"),
        (f"[dims]\nx = {10**30}\n" + RULE, "is not a size"),
        ("[dims]\nx = true\n" + RULE, "must be a list of keys or a number"),
        ("[dims]\n" + "".join(f"x{n} = 1\n" for n in range(201)) + RULE, "more than 200 sizes"),
        ("x = " + 3000 * "[" + 3000 * "]", "nested too deep"),
        ("#" + 5_000_000 * "x", "larger than 4,194,304 bytes"),
    ],
)
def test_what_is_not_a_map_is_refused_with_the_file_named(
    text: str, words: str, tmp_path: Path
) -> None:
    file = written(tmp_path, m=text)
    with pytest.raises(UsageError, match=words) as caught:
        load_map(str(file))
    assert "m.toml" in str(caught.value)


def test_sizes_that_double_at_every_step_are_none(tmp_path: Path) -> None:
    """Each is looked up once; a number past 64 bits is none."""
    text = "".join(f"x{n} = ['x{n + 1} * x{n + 1}']\n" for n in range(60))
    key_map = load_map(str(written(tmp_path, mine=f"[dims]\n{text}x60 = 2\n{RULE}")))
    sizes = facts(key_map, [], {}).sizes
    assert (sizes["x55"], sizes.get("x54"), sizes.get("x0")) == (1 << 32, None, None)


def test_a_number_that_counts_from_a_size_that_is_not_known(tmp_path: Path) -> None:
    saved(tmp_path)
    text = "keep = ['w']\n[[rule]]\nfrom = 'norm.{layer}.weight'\nto = 'n.{layer + first}'\n"
    options = MapOptions(str(written(tmp_path, mine=text)))
    with pytest.raises(UsageError, match="size of first not found"):
        convert_to("dcp", tmp_path / "a", tmp_path / "b", map=options)


def test_a_map_that_leaves_out_all_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    text = f"[drop]\nfrom = ['norm.{{layer}}.weight', 'w']\n{RULE.replace('w', 'none')}"
    with pytest.raises(UsageError, match="excludes every tensor"):
        convert_to(
            "dcp", tmp_path / "a", tmp_path / "b", map=MapOptions(str(written(tmp_path, m=text)))
        )


def test_names_that_are_kept_do_not_decide_the_direction(tmp_path: Path) -> None:
    state = saved(tmp_path)
    options = MapOptions(str(written(tmp_path, mine="keep = ['*']\n" + RULE)))
    done = convert_to("safetensors", tmp_path / "a", tmp_path / "b.safetensors", map=options)
    assert done.map.reason == "as asked"
    assert load_file(tmp_path / "b.safetensors").keys() == {*state, "v"} - {"w"}
    convert_to("dcp", tmp_path / "b.safetensors", tmp_path / "c", map=options)
    assert flat(load_dcp(tmp_path / "c")).keys() == state.keys()
