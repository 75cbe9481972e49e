"""Processes that import nothing of the current folder, however the environment names it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptool.commands.bench.isolated import isolated, search_path

HOSTILE = ("ckptool", "json", "torch", "sitecustomize", "usercustomize", "importlib", "msgspec")
SHOW = """
import json, multiprocessing, sys
import ckptool, msgspec

def main(*words):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(json.dumps, [None])
    print(json.dumps([ckptool.__file__, sys.path, words]))
"""


@pytest.mark.parametrize("named", [None, "", ":", ":{other}", "{other}:", "."])
def test_nothing_of_the_current_folder_runs(
    named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But a module that ``PYTHONPATH`` leads this process to."""
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir()
    other.mkdir()
    for name in HOSTILE:
        (model / f"{name}.py").write_text(f"open({str(tmp_path / name)!r}, 'w')")
    (other / "shown.py").write_text(SHOW)
    monkeypatch.chdir(model)
    monkeypatch.setattr(sys, "path", ["", str(model), *sys.path, str(other)])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    command = isolated("shown", "one", "two")
    environment = dict(os.environ)
    if named is not None:
        environment["PYTHONPATH"] = named.format(other=other)
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    package, path, words = json.loads(ran.stdout)
    assert Path(package).parts[-2:] == ("ckptool", "__init__.py")
    assert str(other) in path
    assert not {"", str(model)} & {*path}
    assert words == ["one", "two"]
    assert {entry.name for entry in tmp_path.iterdir()} == {"model", "other"}


@pytest.mark.parametrize(
    ("named", "kept"), [(None, False), ("", False), (":/x", False), ("{here}:/x", True)]
)
def test_the_current_folder_is_searched_only_where_the_environment_names_it(
    named: str | None, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "", "/x"])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if named is not None:
        monkeypatch.setenv("PYTHONPATH", named.format(here=tmp_path))
    assert search_path() == [str(tmp_path), "/x"] if kept else ["/x"]
