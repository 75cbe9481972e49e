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


def test_the_docs_show_an_example_of_each_code_of_what_is_meant() -> None:
    """Those that a check of meaning, of training state or of likeness gives to problems."""
    checks = PACKAGE / "commands" / "verify"
    modules = [*(checks / "checks" / "meaning").glob("*.py"), checks / "checks" / "training.py"]
    modules += [checks / "checks" / "nonfinite.py", checks / "compare" / "like.py"]
    used = {code for module in modules for code in codes_in(ast.parse(module.read_text()))}
    used |= {code for code in CODES if code.startswith(("weight-", "like-"))} - {"weight-delta"}
    page = (PACKAGE / "docs" / "verify.md").read_text()
    table = page.partition("## What intact bytes can hide")[2].partition("\n## ")[0]
    assert len(used) > 20
    assert {code for code in used if f"`{code}`" not in table} == set()
