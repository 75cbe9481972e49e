"""The table of codes has every code that a module gives to problems."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import ckptool
from ckptool.commands.verify.codes import CODES

PACKAGE = Path(ckptool.__file__).parent


def codes_in(tree: ast.AST) -> Iterator[str]:
    """The codes that a module gives to problems."""
    place = {"Problem": 1, "coded": 0, "recoded": 0}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            at = place.get(ast.unparse(node.func).rpartition(".")[2])
            given = node.args[at] if at is not None and len(node.args) > at else None
            if isinstance(given, ast.Constant) and isinstance(given.value, str):
                yield given.value
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "code":
            yield from (n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)
                        and isinstance(n.value, str) and "-" in n.value)  # fmt: skip


def test_the_table_holds_every_code_that_is_used() -> None:
    used = {
        code for module in PACKAGE.rglob("*.py") for code in codes_in(ast.parse(module.read_text()))
    }
    assert used <= CODES.keys()
    assert len(used) > 40
