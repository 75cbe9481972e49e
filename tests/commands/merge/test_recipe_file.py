"""What a recipe's file says is checked as the same on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_merge import run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for at, label in enumerate("abc"):
        save_file({"a": torch.full((3,), float(at)), "a=b": torch.ones(2) * at}, tmp_path / label)
    return tmp_path


def refused(folder: Path, text: str) -> str:
    recipe = folder / "m.toml"
    recipe.write_text(text)
    code, said = run(str(folder / "out.safetensors"), "--recipe", str(recipe))
    assert code == 2, said
    assert not (folder / "out.safetensors").exists()
    assert said.startswith(f"--recipe {recipe}: ")
    return said


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("average = true\nweights = [nan, 1]", "weights nan: not a finite number"),
        ("average = true\nweights = ['1', 1]", "weights = ['1', 1]: not a list of numbers"),
        ("average = true\nweights = 1", "weights = 1: not a list of numbers"),
        ("average = 1", "average = 1: not true or false"),
        ("onto = 'a'\nadd = 'b'\nscale = inf", "scale inf: not a finite number"),
        ("onto = ''\nadd = 'b'", "onto = '': not a path"),
        ("onto = 'a'\nadd = '~nouser-of-this/x'", "add = '~nouser-of-this/x': no such user's home"),
        ("average = true\nlast = 1", "last 1: at least 2"),
        ("average = true\nlast = 2.5", "last = 2.5: not a whole number"),
        ("average = true\nlast = true", "last = True: not a whole number"),
        ("sources = ['a', '']\naverage = true", "sources = '': not a path"),
        ("sources = 'a'\naverage = true", "sources = 'a': not a list of texts"),
        ('sources = ["a\\u0000"]\naverage = true', "not a path"),
        ("sources = ['a']\ntake = ['a=b']", "take = ['a=b']: not a table of names and texts"),
        ("sources = ['a']\n[take]\na = ''", "take = '': not a path"),
        ("sources = ['a']\n[take]\n'' = 'b'", "invalid take '' FROM"),
        ("sources = ['a']\nfill = 'mean'\n[rows]\na = -4", "invalid rows 'a=-4'"),
        ("sources = ['a']\nfill = 'mean'\n[rows]\na = 1.5", "not a table of names and whole numb"),
        ("sources = ['a', 'b']\naverage = true\nweights = []", "weights []: not numbers"),
        ("with_optimizer = true", "unknown key 'with_optimizer'"),
        ("recipe = 'm.toml'", "unknown key 'recipe'"),
        ("average = yes", "not TOML"),
        (f"sources = {'[' * 3000}", "not TOML"),
    ],
)
def test_a_value_that_is_none_is_refused_by_its_key(folder: Path, text: str, wanted: str) -> None:
    assert wanted in refused(folder, text)


def test_any_text_may_be_a_name(folder: Path) -> None:
    recipe = folder / "m.toml"
    recipe.write_text("sources = ['b']\n[take]\n'a=b' = 'c'\n")
    out = folder / "out.safetensors"
    code, said = run(str(out), "--recipe", str(recipe))
    assert code == 0, said
    found = load_file(out)
    assert found["a"].tolist() == [1, 1, 1]
    assert found["a=b"].tolist() == [2, 2]


def test_a_folder_above_is_that_of_the_disk(folder: Path) -> None:
    """Beyond a link, ``..`` is the folder above what it leads to."""
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "link").symlink_to(folder / "deep" / "er")
    (folder / "a").rename(folder / "deep" / "a.safetensors")
    recipe = folder / "m.toml"
    recipe.write_text("sources = ['link/../a.safetensors', 'b']\nema = 0.5\n")
    code, said = run(str(folder / "out.safetensors"), "--recipe", str(recipe))
    assert code == 0, said
    assert load_file(folder / "out.safetensors")["a"].tolist() == [0.5] * 3


@pytest.mark.parametrize("words", [("--onto", ""), ("--onto", "{a}", "--add", "")])
def test_an_empty_path_is_refused_on_the_command_line(folder: Path, words: tuple[str, ...]) -> None:
    given = [word.format(a=folder / "a") for word in words]
    code, said = run(str(folder / "out"), *given, "--take", "a", "FROM", str(folder / "b"))
    assert code == 2
    assert f"{words[-2]}: empty path" in said
