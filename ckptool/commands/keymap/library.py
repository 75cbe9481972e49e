"""Key maps by name (the built-in ones), and by file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from ckptool.commands.options.files import table_of
from ckptool.core.keymap.model import KeyMap
from ckptool.core.keymap.parse import SEE_A_MAP, parse_map
from ckptool.core.text import did_you_mean
from ckptool.errors import UsageError

AUTO = "auto"
"""Requests the built-in map that matches a checkpoint's names."""
EXPERTS = ("packed", "separate")
"""How a mixture of experts is stored: one tensor for all of them, or one per expert."""
_NEAREST = 3
_DEEPEST = 50
"""The depth up to which map files may include one another."""
_LARGEST = 1 << 22
"""Bytes of a map file: 10,000 rules are 1 MB."""


@cache
def builtin_maps() -> dict[str, KeyMap]:
    """Return the maps that come with ckptool, by name."""
    return {name: _builtin_map(name) for name in sorted(_builtin_files())}


@cache
def _builtin_map(name: str) -> KeyMap:
    return parse_map(tomllib.loads(_builtin_files()[name]), f"{name}.toml", _builtin_map)


@cache
def _builtin_files() -> dict[str, str]:
    """Return the text of each map: that of ``maps/megatron/gpt.toml`` by ``megatron-gpt``.

    Also of files in subfolders of ``maps/megatron``.
    """
    return {
        f"{folder.name}-{file.name.removesuffix('.toml')}": file.read_text("utf-8")
        for folder in resources.files("ckptool").joinpath("maps").iterdir()
        for file in _files_below(folder)
    }


def _files_below(folder: Traversable) -> Iterator[Traversable]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files_below(entry)
        else:
            yield entry


def map_text(name: str) -> str:
    """Return the TOML of a built-in map; UsageError for an unknown name."""
    if name not in builtin_maps():
        raise UsageError(f"{name!r}: unknown map", hint=_maps_like(name))
    return _builtin_files()[name]


def _maps_like(name: str) -> str | None:
    """Return a hint at the map that was meant, or else at those with the most similar names."""
    from difflib import get_close_matches  # only errors need it

    names = [AUTO, *builtin_maps()]
    closest = ", ".join(get_close_matches(name, names, n=_NEAREST, cutoff=0))
    more = f"`ckptool maps` lists all {len(names) - 1}, and one of your own is a .toml file"
    return did_you_mean(name, names, f"the nearest are {closest}; {more}")


def load_map(name: str) -> KeyMap:
    """Return the built-in map of a name, or that of a TOML file; UsageError if it is neither."""
    path = Path(name)
    if name in builtin_maps():
        return builtin_maps()[name]
    if path.suffix != ".toml" and not path.is_file():
        message = f"--map {name!r}: not a built-in map or a file"
        raise UsageError(message, hint=_maps_like(name))
    return _map_in(path, name, (), {})


def _map_in(path: Path, shown: str, within: tuple[Path, ...], parsed: dict[Path, KeyMap]) -> KeyMap:
    """Parse a TOML file, and the maps that it includes: built-in ones, or files beside it.

    ``within`` are the files that include it, ``parsed`` those already read: each is read once.
    Raises UsageError.
    """
    file = path.resolve()
    if file in within:
        raise UsageError(f"--map {shown}: includes itself")
    if len(within) > _DEEPEST:
        raise UsageError(f"--map {shown}: included {len(within)} files deep")
    if file in parsed:
        return parsed[file]
    if path.is_file() and path.stat().st_size > _LARGEST:
        raise UsageError(f"--map {shown}: larger than {_LARGEST:,} bytes, not a key map")
    content = table_of(path, "--map", SEE_A_MAP)

    def include(other: str) -> KeyMap:
        if other in builtin_maps():
            return builtin_maps()[other]
        neighbour = path.parent / other
        if not neighbour.is_file():
            raise UsageError(
                f"--map {shown}: includes {other!r}, not a built-in map or a file beside it",
                hint=did_you_mean(other, list(builtin_maps()), "`ckptool maps` lists maps"),
            )
        return _map_in(neighbour, str(neighbour), (*within, file), parsed)

    parsed[file] = parse_map(content, shown, include)
    return parsed[file]
