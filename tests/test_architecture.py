"""The layers, read from the imports. Imports point down only."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

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


@cache
def tree_of(module: Path) -> ast.Module:
    return ast.parse(module.read_text())


def called_in(module: Path) -> set[str]:
    """What a module calls, as it writes it."""
    nodes = ast.walk(tree_of(module))
    return {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}


def breaking(
    modules: Iterable[Path], found: Callable[[Path], Iterable[str]]
) -> dict[str, list[str]]:
    """What is found in modules that must have none of it, by module."""
    told = {by_path(module): sorted(found(module)) for module in modules}
    return {path: what for path, what in told.items() if what}


def layers_imported(module: Path) -> set[str]:
    parts = [name.split(".") for name in imports(tree_of(module)) if name.startswith("ckptool.")]
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


def test_imports_point_down() -> None:
    def upward(module: Path) -> set[str]:
        layer = layer_of(module)
        used = PROGRAMS.get(by_path(module), set())
        return layers_imported(module) - {layer, "errors"} - used - ALLOWED[layer]

    assert not breaking(MODULES, upward)


def test_frameworks_are_imported_where_they_are_needed_and_never_before() -> None:
    def early(module: Path) -> set[str]:
        nodes = at_import_time(tree_of(module))
        imported = (n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom))
        first = {name.split(".")[0] for node in imported for name in imports(node)}
        return first & (HEAVY - PLUGS.get(layer_of(module), set()))

    assert not breaking(MODULES, early)


def test_only_render_and_the_command_line_speak() -> None:
    def speaking(module: Path) -> set[str]:
        first = {name.split(".")[0] for name in imports(tree_of(module))}
        called = called_in(module) & {"print", "typer.echo", "sys.stdout.write", "sys.stderr.write"}
        return called | first & {"rich", "typer", "click"}

    assert not breaking(SILENT, speaking)


def test_no_assert_that_optimisation_would_remove() -> None:
    def asserts(module: Path) -> list[str]:
        nodes = ast.walk(tree_of(module))
        return [f"line {node.lineno}" for node in nodes if isinstance(node, ast.Assert)]

    assert not breaking(MODULES, asserts)


def test_nothing_but_the_command_line_ends_the_process() -> None:
    def ending(module: Path) -> set[str]:
        return called_in(module) & {"sys.exit", "exit", "quit", "os._exit"}

    below = [m for m in MODULES if layer_of(m) not in ("cli", "render")]
    assert not breaking((m for m in below if m.name != "__main__.py"), ending)


def test_core_touches_no_file() -> None:
    def touching(module: Path) -> set[str]:
        imported = set(imports(tree_of(module))) & {"os", "io", "pathlib", "shutil", "mmap"}
        return imported | called_in(module) & {"open"}

    assert not breaking((m for m in MODULES if layer_of(m) == "core"), touching)


def test_a_pickle_is_never_loaded() -> None:
    """Reading is done by an inert machine; torch loads what was written only as plain weights."""
    for module in MODULES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.Call):
                called, options = ast.unparse(node.func), map(ast.unparse, node.keywords)
                assert called not in ("pickle.load", "pickle.loads", "pickle.Unpickler"), module
                assert called != "torch.load" or "weights_only=True" in options, module


def test_a_format_goes_by_the_name_it_is_listed_under() -> None:
    assert {name: item.name for name, item in FORMATS.items()} == {name: name for name in FORMATS}
    assert all(map(callable, (*CONVERTERS.values(), *WRITERS.values())))
