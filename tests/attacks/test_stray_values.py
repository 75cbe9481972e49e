"""Unexpected values in a torch.save file: carried over, named or refused."""

from __future__ import annotations

import re
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import GOOD, Case, by_name

import ckptool
from ckptool.errors import Hostile

NAME = "hook_of_mine"


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


CALL = b"cposix\nsystem\n(" + _text("true") + b"tR"
CALLED_AND_POPPED = "a call whose result is thrown away"
HOSTILE = "a call that is kept under a name of its own"
PLAIN = "a number under a name of its own"


def changed(pickled: bytes, kind: str) -> bytes:
    """The pickle of a dict, with a value more."""
    if kind == CALLED_AND_POPPED:
        return pickled[:2] + CALL + b"0" + pickled[2:]
    value = CALL if kind == HOSTILE else b"K\x29"
    return pickled[:-1] + _text(NAME) + value + b"s."


def change(file: Path, kind: str) -> None:
    with zipfile.ZipFile(file) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, changed(data, kind) if name.endswith("/data.pkl") else data)


def is_dict(file: Path) -> bool:
    """Whether it is torch.save's file of a dict, with checksums."""
    if not file.is_file() or file.open("rb").read(4) != b"PK\x03\x04":
        return False
    with zipfile.ZipFile(file) as archive, suppress(zipfile.BadZipFile):
        pickled = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        return any(b"}" in archive.read(name)[:4] for name in pickled)
    return False


def files(folder: Path) -> list[str]:
    """One torch.save file of each kind, told apart by their names without numbers."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if is_dict(path))
    kinds = {re.sub(r"\d+|(?<=zero/)[^/]+", "#", name): name for name in reversed(names)}
    return list(kinds.values())


FOLDERS = [one for one in GOOD if one.path.is_dir() and files(one.path)]


@pytest.mark.parametrize("kind", [CALLED_AND_POPPED, HOSTILE])
@pytest.mark.parametrize("one", FOLDERS, ids=by_name)
def test_what_can_run_code_is_refused(
    one: Case, kind: str, tmp_path: Path, copy_of: Callable[[str], Path]
) -> None:
    source = copy_of(one.name)
    for file in files(source):
        before = (source / file).read_bytes()
        change(source / file, kind)
        with pytest.raises(Hostile):
            ckptool.convert(source, tmp_path / "a.pt", to="torch-save")
        (source / file).write_bytes(before)


@pytest.mark.parametrize("one", FOLDERS, ids=by_name)
def test_a_value_is_carried_or_named(
    one: Case, tmp_path: Path, copy_of: Callable[[str], Path]
) -> None:
    source = copy_of(one.name)
    for file in files(source):
        before = (source / file).read_bytes()
        change(source / file, PLAIN)
        done = ckptool.convert(
            source, tmp_path / "a.pt", to="torch-save", overwrite=True, drop=one.unread
        )
        carried = NAME.encode() in (tmp_path / "a.pt").read_bytes()
        assert carried or any(NAME in note for note in done.notes), file
        (source / file).write_bytes(before)
