"""Python processes that import nothing of the current folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import ckptool

_BEGIN = """
import json, sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
package, path, module, words = json.loads(sys.argv[1])
sys.path[:] = [*path, *(own for own in sys.path if own not in path)]
spec = spec_from_file_location("ckptool", package)
sys.modules["ckptool"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["ckptool"])
import_module(module).main(*words)
"""
"""ckptool is taken from its file: it may have been found in a folder that is not searched here."""


def isolated(module: str, *words: str) -> list[str]:
    """Return the command that runs a module's function ``main`` in a Python of its own.

    The Python searches what this one does but for the current folder (``-I`` obeys neither it nor
    the environment), and what it starts by ``multiprocessing`` does likewise.
    """
    start = [ckptool.__file__, search_path(), module, words]
    quiet = ["-B"] if sys.dont_write_bytecode else []
    return [sys.executable, "-I", *quiet, "-c", _BEGIN, json.dumps(start)]


def search_path() -> list[str]:
    """Return where this process finds modules, without the current folder.

    The current folder stays where ``PYTHONPATH`` names it; an empty entry there names nothing.
    """
    entries = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    folders = {os.path.abspath(entry) for entry in entries}
    return [entry for entry in sys.path if entry in folders or not _is_current(entry)]


def _is_current(entry: str) -> bool:
    try:
        return not entry or Path(entry).samefile(".")
    except OSError:
        return False
