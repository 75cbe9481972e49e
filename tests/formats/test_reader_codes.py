"""Errors of the framework formats' readers have a stable code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ckptool.formats

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
