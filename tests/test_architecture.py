"""The layers, from the imports, which point down only."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from math import inf
from pathlib import Path

import pytest

from ckptool.formats import FORMATS, LATEST, SINGLE_FILES
from ckptool.formats.base import Deferred

PACKAGE = Path(__file__).parent.parent / "ckptool"
MODULES = sorted(PACKAGE.rglob("*.py"))

ALLOWED = {
    "cli": {"commands", "core", "engine", "formats", "render", "storage"},
    "render": {"commands", "core", "engine", "formats", "serialization"},
    "dcp": {"api", "commands", "core", "engine", "storage"},
    "api": {"commands", "core", "engine", "formats", "serialization", "storage"},
    "commands": {"core", "engine", "formats", "serialization", "storage"},
    "engine": {"core", "storage"},
    "formats": {"core", "serialization"},
    "serialization": {"core"},
    "storage": {"core"},
    "core": set(),
    "errors": set(),
    "version": set(),
    "__main__": {"cli"},
    "conformance": {"commands", "core", "formats"},
    "__init__": {"api", "core", "dcp"},
}
"""What each layer may import beside itself and the modules of ``ANYWHERE``."""
ANYWHERE = {"errors", "version"}

HEAVY = {"torch", "transformers", "safetensors", "tensorflow", "jax"}
PLUGS = {"dcp": {"torch"}}
"""Modules that only their users import, for the framework that each is made for."""
SILENT = [m for m in MODULES if m.relative_to(PACKAGE).parts[0] not in ("render", "cli")]


def layer_of(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def by_path(module: Path) -> str:
    return str(module.relative_to(PACKAGE))


def imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Every module that import statements name."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layers"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def tree_of(module: Path) -> ast.Module:
    return ast.parse(module.read_text())


@cache
def nodes_of(module: Path) -> tuple[ast.AST, ...]:
    """Import statements, calls, asserts, comparisons and classes, wherever in the file."""
    kinds = (ast.Import, ast.ImportFrom, ast.Call, ast.Assert, ast.ClassDef, ast.Compare)
    return tuple(node for node in ast.walk(tree_of(module)) if isinstance(node, kinds))


def called_in(module: Path) -> set[str]:
    """What a module calls, as it writes it."""
    return {name_called(node) for node in nodes_of(module) if isinstance(node, ast.Call)}


def name_called(call: ast.Call) -> str:
    """The dotted name that is called; empty for what is called without one."""
    names, function = [], call.func
    while isinstance(function, ast.Attribute):
        names.append(function.attr)
        function = function.value
    return ".".join([function.id, *names[::-1]]) if isinstance(function, ast.Name) else ""


def breaking(
    modules: Iterable[Path], found: Callable[[Path], Iterable[str]]
) -> dict[str, list[str]]:
    """The modules with something that none of them may have."""
    told = {by_path(module): sorted(found(module)) for module in modules}
    return {path: what for path, what in told.items() if what}


def layers_imported(module: Path) -> set[str]:
    parts = [name.split(".") for name in imports(nodes_of(module)) if name.startswith("ckptool.")]
    return {found for _, found, *_ in parts}


def statements(tree: ast.AST, *, skipped: tuple[type[ast.AST], ...] = ()) -> Iterator[ast.AST]:
    """All that a module runs, without what only type checkers read."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, skipped):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node = ast.Module(node.orelse, [])
        yield node
        yield from statements(node, skipped=skipped)


def at_import_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Statements that run when the module is imported."""
    return statements(tree, skipped=(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))


def test_every_layer_is_known() -> None:
    assert {layer_of(module) for module in MODULES} <= ALLOWED.keys()


def test_imports_point_down() -> None:
    def upward(module: Path) -> set[str]:
        layer = layer_of(module)
        return layers_imported(module) - {layer, *ANYWHERE} - ALLOWED[layer]

    assert not breaking(MODULES, upward)


def names_of(module: Path) -> str:
    parts = ("ckptool", *module.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_imported(module: Path, nodes: Iterable[ast.AST]) -> set[str]:
    """The package's own modules that import statements name."""
    return set(imports(nodes)) & NAMES.keys() - {names_of(module)}


NAMES = {names_of(module): module for module in MODULES}


def targets_of(module: Path, nodes: Iterable[ast.AST]) -> set[str]:
    """The modules whose content is imported: ``from a import b`` means ``a.b`` if that is one."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= full if full <= NAMES.keys() else {*full, node.module or ""}
    return found & NAMES.keys() - {names_of(module)}


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules each of which leads to each other one of its group."""
    found: list[set[str]] = []
    depths: dict[str, float] = {}
    path: list[str] = []

    def lowest_from(name: str) -> float:
        """Return the least depth that is reachable; a group ends where it is the module's own."""
        if name in depths:
            return depths[name]
        own = len(path)
        lowest: float = own
        depths[name] = own
        path.append(name)
        lowest = min([lowest, *map(lowest_from, graph[name])])
        if lowest == own:
            group = path[own:]
            del path[own:]
            depths.update(dict.fromkeys(group, inf))  # left: nothing that comes later is of it
            if len(group) > 1:
                found.append(set(group))
        return lowest if lowest < own else inf

    for name in graph:
        lowest_from(name)
    return found


def test_no_modules_import_each_other() -> None:
    """Not even by imports inside functions."""
    graph = {name: targets_of(m, statements(tree_of(m))) for name, m in NAMES.items()}
    assert not circles(graph)


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e", "f"}, "e": {"d"}, "f": set()}
    assert sorted(map(sorted, circles(graph))) == [["a", "b", "c"], ["d", "e"]]


MOST_LINES, MOST_ENTRIES = 400, 17


def test_files_and_folders_stay_small() -> None:
    long = {by_path(m): n for m in MODULES if (n := len(m.read_text().splitlines())) > MOST_LINES}
    assert not long
    folders: dict[Path, set[Path]] = {}
    for path in PACKAGE.rglob("*"):
        if path.name not in ("__init__.py", "__pycache__") and path.parent.name != "__pycache__":
            folders.setdefault(path.parent, set()).add(path)
    assert not {by_path(f): len(e) for f, e in folders.items() if len(e) > MOST_ENTRIES}


def test_a_family_of_formats_is_one_package_to_others() -> None:
    families = {names_of(m.parent / "__init__.py") for m in MODULES if m.match("formats/*/*.py")}

    def deeper(module: Path) -> set[str]:
        own = names_of(module) + "."
        named = modules_imported(module, nodes_of(module))
        return {
            name.removeprefix("ckptool.formats.")
            for name in named
            for family in families
            if name.startswith(family + ".") and not own.startswith(family + ".")
        }

    assert not breaking(MODULES, deeper)


def test_frameworks_are_imported_where_they_are_needed_and_never_before() -> None:
    def early(module: Path) -> set[str]:
        first = {name.split(".")[0] for name in imports(at_import_time(tree_of(module)))}
        return first & (HEAVY - PLUGS.get(layer_of(module), set()))

    assert not breaking(MODULES, early)


def asks_for_kind(node: ast.AST) -> bool:
    """Whether this is ``isinstance`` of a place's classes."""
    if not (isinstance(node, ast.Call) and name_called(node) == "isinstance"):
        return False
    return bool({"Path", "RemotePath"} & {*re.findall(r"\w+", ast.unparse(node.args[1]))})


def asks_for_block(node: ast.AST) -> bool:
    """Whether this compares a source's block with a number."""
    if not (isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute)):
        return False
    return node.left.attr == "block" and ast.unparse(node.comparators[0]).isdigit()


@pytest.mark.parametrize("asks", [asks_for_kind, asks_for_block])
def test_only_storage_asks_what_a_place_is(asks: Callable[[ast.AST], bool]) -> None:
    outside = [module for module in MODULES if layer_of(module) != "storage"]
    found = breaking(outside, lambda m: [ast.unparse(node) for node in nodes_of(m) if asks(node)])
    assert not found


def test_only_render_and_the_command_line_speak() -> None:
    def speaking(module: Path) -> set[str]:
        first = {name.split(".")[0] for name in imports(nodes_of(module))}
        called = called_in(module) & {"print", "typer.echo", "sys.stdout.write", "sys.stderr.write"}
        return called | first & {"rich", "typer", "click"}

    assert not breaking(SILENT, speaking)


def test_no_assert_that_optimization_would_remove() -> None:
    def asserts(module: Path) -> list[str]:
        return [f"line {node.lineno}" for node in nodes_of(module) if isinstance(node, ast.Assert)]

    assert not breaking(MODULES, asserts)


def test_classes_of_fields_are_structs() -> None:
    """All but options, whose fields have metadata: ``dataclass`` compiles for half a ms a class."""

    def compiling(module: Path) -> list[str]:
        classes = (node for node in nodes_of(module) if isinstance(node, ast.ClassDef))
        decorators = {
            c.name: {ast.unparse(d).split("(")[0] for d in c.decorator_list} for c in classes
        }
        return [name for name, found in decorators.items() if "dataclass" in found]

    assert not breaking(MODULES, compiling)


def test_nothing_but_the_command_line_ends_the_process() -> None:
    def ending(module: Path) -> set[str]:
        return called_in(module) & {"sys.exit", "exit", "quit", "os._exit"}

    below = [m for m in MODULES if layer_of(m) not in ("cli", "render")]
    assert not breaking((m for m in below if m.name != "__main__.py"), ending)


def test_core_touches_no_file() -> None:
    def touching(module: Path) -> set[str]:
        imported = set(imports(nodes_of(module))) & {"os", "io", "pathlib", "shutil", "mmap"}
        return imported | called_in(module) & {"open"}

    assert not breaking((m for m in MODULES if layer_of(m) == "core"), touching)


def test_a_pickle_is_never_loaded() -> None:
    """Reading is done by an inert machine; torch loads what was written only as plain weights."""
    for module in MODULES:
        for node in nodes_of(module):
            if isinstance(node, ast.Call):
                called, options = name_called(node), map(ast.unparse, node.keywords)
                assert called not in ("pickle.load", "pickle.loads", "pickle.Unpickler"), module
                assert called != "torch.load" or "weights_only=True" in options, module


def test_a_format_goes_by_the_name_it_is_listed_under() -> None:
    assert {name: item.name for name, item in FORMATS.items()} == {name: name for name in FORMATS}
    assert tuple(name for name, row in FORMATS.items() if row.detection.suffixes) == SINGLE_FILES
    latest = (row.detection.latest for row in FORMATS.values())
    markers = {marker.file for marker in latest if marker is not None}
    assert markers == {*LATEST}


def test_what_a_format_loads_later_is_there() -> None:
    groups = [g for row in FORMATS.values() for g in (row.detection, row.reading, row.writing)]
    fields = [getattr(group, name) for group in groups for name in group.__struct_fields__]
    deferred = [field for field in fields if isinstance(field, Deferred)]
    assert deferred
    assert all(callable(field.load()) for field in deferred)
