"""Folders of small files, as tests make and compare them."""

from __future__ import annotations

from pathlib import Path


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    """Write files below a folder, by their relative paths; return the folder."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder by their relative paths."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
