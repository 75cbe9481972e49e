"""The layers, read from the imports. Imports point down only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptool.formats import CONVERTERS, FORMATS, WRITERS

PACKAGE = Path(__file__).parent.parent / "ckptool"
MODULES = sorted(PACKAGE.rglob("*.py"))

ALLOWED = {
    "cli": {"commands", "core", "engine", "formats", "render"},
    "render": {"commands", "core", "formats"},
    "dcp": {"api", "commands", "core", "engine"},
    "api": {"commands", "core", "engine", "formats"},
    "commands": {"core", "engine", "formats"},
    "engine": {"core"},
    "formats": {"core"},
    "core": set(),
    "errors": set(),
    "__main__": {"cli"},
    "__init__": {"api", "core", "dcp"},
}
"""What each layer may import beside itself and ``errors``."""

PROGRAMS = {"commands/bench_load.py": {"dcp"}}
"""Modules that are only run, each in a process of its own: what they use as any user would."""

HEAVY = {"torch", "transformers", "safetensors", "tensorflow", "jax"}
PLUGS = {"dcp": {"torch"}}
"""Modules that only their users import, for the framework that each is made for."""
SILENT = [m for m in MODULES if m.relative_to(PACKAGE).parts[0] not in ("render", "cli")]


def layer_of(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def by_path(module: Path) -> str:
    return str(module.relative_to(PACKAGE))


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layers"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layers_imported(module: Path) -> set[str]:
    names = imports(ast.parse(module.read_text()))
    parts = [name.split(".") for name in names if name.startswith("ckptool.")]
    return {found for _, found, *_ in parts if found != "__version__"}


def at_import_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Statements that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from at_import_time(node)


def test_every_layer_is_known() -> None:
    assert {layer_of(module) for module in MODULES} <= ALLOWED.keys()


@pytest.mark.parametrize("module", MODULES, ids=by_path)
def test_imports_point_down(module: Path) -> None:
    layer = layer_of(module)
    used = PROGRAMS.get(by_path(module), set())
    assert layers_imported(module) - {layer, "errors"} - used <= ALLOWED[layer]


@pytest.mark.parametrize("module", MODULES, ids=by_path)
def test_frameworks_are_imported_where_they_are_needed_and_never_before(module: Path) -> None:
    early: set[str] = set()
    for node in at_import_time(ast.parse(module.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            early |= {name.split(".")[0] for name in imports(node)}
    assert not early & (HEAVY - PLUGS.get(layer_of(module), set()))


@pytest.mark.parametrize("module", SILENT, ids=by_path)
def test_only_render_and_the_command_line_speak(module: Path) -> None:
    tree = ast.parse(module.read_text())
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not called & {"print", "typer.echo", "sys.stdout.write", "sys.stderr.write"}
    assert not {name.split(".")[0] for name in imports(tree)} & {"rich", "typer", "click"}


@pytest.mark.parametrize("module", MODULES, ids=by_path)
def test_no_assert_that_optimisation_would_remove(module: Path) -> None:
    assert not [n for n in ast.walk(ast.parse(module.read_text())) if isinstance(n, ast.Assert)]


@pytest.mark.parametrize(
    "module", [m for m in MODULES if layer_of(m) not in ("cli", "render")], ids=by_path
)
def test_nothing_but_the_command_line_ends_the_process(module: Path) -> None:
    tree = ast.parse(module.read_text())
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not called & {"sys.exit", "exit", "quit", "os._exit"} or module.name == "__main__.py"


@pytest.mark.parametrize("module", [m for m in MODULES if layer_of(m) == "core"], ids=by_path)
def test_core_touches_no_file(module: Path) -> None:
    tree = ast.parse(module.read_text())
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert "open" not in called
    assert not set(imports(tree)) & {"os", "io", "pathlib", "shutil", "mmap"}


def test_a_pickle_is_never_loaded() -> None:
    """Reading is done by an inert machine; torch loads what was written only as plain weights."""
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Call):
                called, options = ast.unparse(node.func), map(ast.unparse, node.keywords)
                assert called not in ("pickle.load", "pickle.loads", "pickle.Unpickler"), module
                assert called != "torch.load" or "weights_only=True" in options, module


def test_a_format_goes_by_the_name_it_is_listed_under() -> None:
    assert {name: item.name for name, item in FORMATS.items()} == {name: name for name in FORMATS}
    assert all(map(callable, (*CONVERTERS.values(), *WRITERS.values())))
