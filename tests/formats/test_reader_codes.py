"""Errors of the readers have a stable code, and are none of ckptool's own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ckptool
import ckptool.formats
from ckptool.errors import SourceError

FOLDER = Path(ckptool.formats.__file__).parent
HEADS = ("deepspeed", "megatron", "bytecheckpoint", "torchsnapshot", "nvrx")
READERS = [
    p for head in HEADS for p in (*FOLDER.glob(f"{head}.py"), *FOLDER.glob(f"{head}/**/*.py"))
]


@pytest.mark.parametrize("path", READERS, ids=lambda path: str(path.relative_to(FOLDER)))
def test_no_damage_is_raised_as_text_alone(path: Path) -> None:
    raised = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Damaged"
        and len(node.args) < 2
        and isinstance(node.args[0], ast.JoinedStr | ast.Constant)
    ]
    assert raised == []


@pytest.mark.parametrize("name", ckptool.formats.FORMATS)
def test_a_format_that_is_forced_on_other_files_finds_none(name: str, tmp_path: Path) -> None:
    for file in ("notes.txt", "settings.json"):
        (tmp_path / file).write_text("{}")
    with pytest.raises(SourceError) as error:
        ckptool.convert(tmp_path, tmp_path / "out", to="dcp", from_format=name)
    assert str(tmp_path) in str(error.value)
