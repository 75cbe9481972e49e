"""Catalog to catalog: what is kept, what it is called, where it nests."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.catalog import Catalog, Index, ObjectEntry, Path, TensorEntry, flat_name
from ckptool.core.dtype import BY_NAME
from ckptool.core.rewrite import (
    drop,
    rename,
    renamed_path,
    select,
    strip_prefix,
    substitution,
    with_loadable_paths,
    with_prefix,
)
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
    with pytest.raises(UsageError, match="'x\\*' matches none of 1 names"):
        select(catalog(("w",)), ["w", "x*"])


def test_values_and_conflicts_are_selected_too() -> None:
    whole = catalog(("a", "w"), values=(("a", "n"), ("b",)))
    assert set(select(whole, ["a.*"]).objects) == {"a.n"}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("^model\\.=", ["w", "b"]), ("w$=weight", ["model.weight", "model.b"]),
     ("(model)\\.(.)=\\2.\\1", ["w.model", "b.model"])],
)  # fmt: skip
def test_rename(rule: str, expected: list[str]) -> None:
    renamed = rename(catalog(("model", "w"), ("model", "b")), substitution(rule))
    assert list(renamed.tensors) == expected
    assert [entry.name for entry in renamed.tensors.values()] == expected


@pytest.mark.parametrize(("rule", "words"), [("\\.[wb]$=.x", "same name"), (".*=", "empty name")])
def test_rename_that_loses_names_is_an_error(rule: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        rename(catalog(("model", "w"), ("model", "b")), substitution(rule))


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


def test_a_list_with_holes_becomes_names() -> None:
    whole = (("a", Index(0)), ("a", Index(1)))
    holed = (("b", Index(1), "w"), ("b", Index(2), "w"))
    found = with_loadable_paths(catalog(*whole, *holed, values=(("b", Index(3)),)))
    paths = [entry.path for entry in (*found.tensors.values(), *found.objects.values())]
    assert paths == [*whole, ("b", "1", "w"), ("b", "2", "w"), ("b", "3")]
    assert list(found.tensors) == list(map(flat_name, (*whole, *holed)))
