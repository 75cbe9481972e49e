"""Catalog to catalog: selecting, renaming, nesting, splitting."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.box import Box
from ckptool.core.catalog import (
    Catalog,
    Chunk,
    Extent,
    Index,
    ObjectEntry,
    Path,
    TensorEntry,
    flat_name,
)
from ckptool.core.dtype import BY_NAME
from ckptool.core.selection import (
    drop,
    rename,
    rename_by,
    renamed_path,
    select,
    split_stacked,
    strip_prefix,
    substitution,
    with_prefix,
)
from ckptool.core.sharding.coverage import coverage_problem
from ckptool.errors import UsageError

STEPS = st.one_of(
    st.sampled_from(["model", "layers", "0", "weight", "a.b", "w", "x y"]),
    st.integers(0, 3).map(Index),
    st.integers(0, 3),
)
PATHS = st.lists(STEPS, min_size=1, max_size=5).map(tuple)
NAMES = st.lists(st.sampled_from(["model", "net", "0", "w", "b"]), min_size=1, max_size=4).map(
    ".".join
)


def catalog(*paths: Path, values: tuple[Path, ...] = ()) -> Catalog:
    dtype = BY_NAME["float32"]
    tensors = {flat_name(p): TensorEntry(flat_name(p), p, dtype, (1,), ()) for p in paths}
    objects = {flat_name(p): ObjectEntry(flat_name(p), p, 1) for p in values}
    return Catalog("test", tensors, objects, {})


@given(PATHS, NAMES)
def test_a_renamed_path_spells_the_new_name(path: Path, new: str) -> None:
    assert flat_name(renamed_path(path, new)) == new


@given(PATHS)
def test_the_same_name_keeps_the_path(path: Path) -> None:
    assert renamed_path(path, flat_name(path)) == path


@given(PATHS, st.sampled_from(["ema", "net.body"]))
def test_taking_a_prefix_off_undoes_putting_it_on(path: Path, prefix: str) -> None:
    longer = renamed_path(path, f"{prefix}.{flat_name(path)}")
    assert renamed_path(longer, flat_name(path)) == path


@pytest.mark.parametrize(
    ("path", "new", "expected"),
    [
        (("model", "w"), "w", ("w",)),
        (("model", "a.b", "w"), "a.b.w", ("a.b", "w")),
        (("model", "w"), "net.w", ("net", "w")),
        (("opt", Index(0), "lr"), "optim.0.lr", ("optim", Index(0), "lr")),
        (("a", "b"), "c", ("c",)),
        (("model", "w"), "model.body.w", ("model", "body", "w")),
    ],
)
def test_steps_that_the_name_keeps_stay_steps(path: Path, new: str, expected: Path) -> None:
    assert renamed_path(path, new) == expected


@given(
    st.lists(NAMES, min_size=1, max_size=6, unique=True), st.sampled_from(["*w", "model.*", "?"])
)
def test_select_and_drop_share_the_names_between_them(names: list[str], glob: str) -> None:
    whole = catalog(*[(name,) for name in names])
    try:
        kept = select(whole, [glob]).tensors
    except UsageError:
        with pytest.raises(UsageError):
            drop(whole, [glob])
        return
    assert kept | drop(whole, [glob]).tensors == whole.tensors
    assert not kept.keys() & drop(whole, [glob]).tensors.keys()


def test_a_glob_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(UsageError, match="'x\\*' matches none of 1 name"):
        select(catalog(("w",)), ["w", "x*"])


def test_a_whole_name_means_only_that_one_whatever_characters_it_has() -> None:
    names = ("x[0]", "x0", "y*", "yes", 's.["step"]', "[!a]", "b")
    whole = catalog(*((name,) for name in names))
    for name in names:
        assert [*select(whole, [name]).tensors] == [name]
        assert [*drop(whole, [name]).tensors] == [other for other in names if other != name]
    assert [*select(whole, ["x[0]", "y?s"]).tensors] == ["x[0]", "yes"]
    assert [*drop(catalog(("x0",), ("x1",)), ["x[0]"]).tensors] == ["x1"]


def test_any_other_text_is_a_part_between_dots() -> None:
    known = ("a.layers.1.w", "layers.1", "a.layers.10.w", "b.w@rank0", "b.w@rank1", "a.x layers")
    whole = catalog(*((name,) for name in known))
    for part, meant in {"w": (0, 2, 3, 4), "layers": (0, 1, 2), "layers.1.w": (0,)}.items():
        assert [*select(whole, [part]).tensors] == [known[at] for at in meant]
    assert [*select(whole, ["layers.1"]).tensors] == ["layers.1"]
    for nothing in ("layer", "1.", ".w", "layers.", "10.w@rank0", ""):
        with pytest.raises(UsageError, match="matches none of 6 names"):
            select(whole, [nothing])


def test_a_name_that_was_not_selected_is_no_glob_to_drop() -> None:
    whole = catalog(("x[0]",), ("x0",))
    with pytest.raises(UsageError, match="none of 1 name"):
        drop(select(whole, ["x0"]), ["x[0]"], whole.tensors)


def test_values_and_conflicts_are_selected_too() -> None:
    whole = catalog(("a", "w"), values=(("a", "n"), ("b",)))
    assert set(select(whole, ["a.*"]).objects) == {"a.n"}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("^model\\.=", ["w", "b"]), ("w$=weight", ["model.weight", "model.b"]),
     ("(model)\\.(.)=\\2.\\1", ["w.model", "b.model"]), ("$=.x", ["model.w.x", "model.b.x"]),
     ("(.*)=pre.\\1", ["pre.model.w", "pre.model.b"])],
)  # fmt: skip
def test_rename(rule: str, expected: list[str]) -> None:
    renamed = rename(catalog(("model", "w"), ("model", "b")), substitution(rule))
    assert list(renamed.tensors) == expected
    assert [entry.name for entry in renamed.tensors.values()] == expected


@pytest.mark.parametrize(("rule", "words"), [("\\.[wb]$=.x", "same name"), (".*=", "empty name")])
def test_rename_that_loses_names_is_an_error(rule: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        rename(catalog(("model", "w"), ("model", "b")), substitution(rule))


def test_a_rule_that_matches_no_name_is_an_error() -> None:
    whole = catalog(("model", "w"), values=(("step",),))
    assert [*rename_by(whole, "step=n").objects] == ["n"]
    assert rename_by(whole, "^model=model") == whole
    with pytest.raises(UsageError, match=r"--rename '\^w=x' matches none of 2 names"):
        rename_by(whole, "^w=x")


@pytest.mark.parametrize("rule", ["no equals sign", "(=x", "a=\\1", "a=\\g<b>"])
def test_rules_that_are_none(rule: str) -> None:
    with pytest.raises(UsageError, match=re.escape(rule.split("=")[0])):
        substitution(rule)


def test_prefixes() -> None:
    whole = catalog(("model", "w"), ("other",))
    assert list(strip_prefix(whole, "model").tensors) == ["w", "other"]
    assert list(with_prefix(whole, "x").tensors) == ["x.model.w", "x.other"]
    with pytest.raises(UsageError, match="no name begins"):
        strip_prefix(whole, "mod")


def of_entries(*entries: TensorEntry) -> Catalog:
    return Catalog("megatron-torch_dist", {entry.name: entry for entry in entries}, {}, {})


def stacked(name: str, *shape: int, path: tuple[str, ...] | None = None) -> TensorEntry:
    """A tensor in chunks of one index of its first dim each."""
    inner = [4] * (len(shape) - 1)
    for dim in range(len(shape) - 2, 0, -1):
        inner[dim - 1] = inner[dim] * shape[dim + 1]
    chunks = tuple(
        Chunk(
            Box((at, *(0,) * (len(shape) - 1)), (at + 1, *shape[1:])),
            Extent(f"file{at}", 0, (0, *inner)),
            at,
        )
        for at in range(shape[0])
    )
    return TensorEntry(name, path or (name,), BY_NAME["float32"], shape, chunks)


def test_layers() -> None:
    found = split_stacked(
        of_entries(stacked("decoder.layers.mlp.linear_fc2.weight", 3, 4, 5))
    ).tensors
    assert list(found) == [f"decoder.layers.{n}.mlp.linear_fc2.weight" for n in range(3)]
    for number, entry in enumerate(found.values()):
        assert entry.shape == (4, 5)
        assert coverage_problem(entry) is None
        assert entry.chunks[0].at == Extent(f"file{number}", 0, (20, 4))


def test_experts_of_layers() -> None:
    key = "optimizer.state.exp_avg.decoder.layers.mlp.experts.experts.linear_fc1.weight"
    found = split_stacked(of_entries(stacked(key, 2, 3, 4, 5))).tensors
    name = "optimizer.state.exp_avg.decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"
    assert len(found) == 6
    assert found[name].shape == (4, 5)
    assert found[name].chunks[0].at == Extent("file1", 160, (20, 4))


def test_what_is_not_stacked_stays() -> None:
    kept = [stacked("embedding.weight", 2, 3), stacked("decoder.layers.0.norm.weight", 4)]
    found = split_stacked(of_entries(*kept, stacked("decoder.layers.norm2.weight", 2, 3)))
    assert {entry.name for entry in kept} <= found.tensors.keys()
    assert len(found.tensors) == 4


def test_nothing_to_unstack_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="no tensors with stacked"):
        split_stacked(of_entries(stacked("decoder.layers.0.norm.weight", 4)))


def test_a_slice_whose_name_is_taken() -> None:
    taken = stacked("layers.0.w", 1, 1)
    with pytest.raises(UsageError, match="already exists"):
        split_stacked(of_entries(taken, stacked("layers.w", 1, 2)))


def test_experts_that_have_keys_of_their_own_stay() -> None:
    own = stacked("decoder.layers.0.mlp.experts.experts.3.linear_fc1.weight", 4, 5)
    found = split_stacked(of_entries(own, stacked("decoder.layers.w", 2, 3))).tensors
    assert own.name in found
