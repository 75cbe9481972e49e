"""The recipes work, and their output is that of the fixtures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import CASES, FIXTURES, GOOD, Case, bits, convert_to, read_back
from recipes import RECIPES
from recipes.common import run_single
from recipes.damage import DAMAGE

SINGLE = [name for name, made in RECIPES.items() if not made.world]
README = (FIXTURES / "README.md").read_text()


@pytest.mark.parametrize("name", SINGLE)
def test_a_recipe_makes_its_fixture(name: str, tmp_path: Path, out: Path) -> None:
    """The same truth, in the same files; the bytes differ by the writers' own random numbers."""
    needs = RECIPES[name].needs
    if needs is not None:
        pytest.importorskip(needs)
    run_single(name, RECIPES[name], tmp_path / "made")
    made = tmp_path / "made" / name
    for file in ("truth.json", "truth.safetensors"):
        assert (made / file).read_bytes() == (FIXTURES / name / file).read_bytes()
    assert files(made / "ckpt") == files(Case(name).path)
    if Case(name) in GOOD:
        convert_to("torch-save", made / "ckpt", out / "m.pt", drop=Case(name).unread)
        assert read_back("torch-save", out / "m.pt") == Case(name).truth


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_every_recipe_has_its_fixture() -> None:
    """Those whose truth is what the writer saves beside them are in folders of the writer."""
    assert {name for name in RECIPES if "/" not in name} <= {one.name for one in CASES}
    assert all((FIXTURES / name / "ckpt").is_dir() for name in RECIPES)


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_a_fixture_says_where_it_comes_from(one: Case) -> None:
    assert f"`{one.name}`" in README or (one.name not in RECIPES and one.facts["writer"])
    assert (one.facts["recipe"] is None) == (one.name not in RECIPES)


def test_every_damage_is_made_from_a_good_checkpoint() -> None:
    assert {damage.source for damage in DAMAGE.values()} <= {one.name for one in GOOD}


def test_the_fixtures_are_small_and_speak_only_of_themselves() -> None:
    paths = [
        path for path in FIXTURES.rglob("*") if path.is_file() and "__pycache__" not in str(path)
    ]
    assert sum(path.stat().st_size for path in paths) < 3_700_000
    for path in paths:
        assert not path.stat().st_mode & 0o111, path
    home = os.fsencode(Path.home())
    for path in [path for path in paths if path.suffix != ".py"]:
        assert home not in path.read_bytes() or len(home) < 3, path


def test_the_values_of_recipes_depend_on_names_alone() -> None:
    from recipes.common import seeded

    assert bits(seeded("a", 3)) == bits(seeded("a", 3)) != bits(seeded("b", 3))
