"""Checkpoints of other versions of torch are read, and those versions load ckptool's output.

``make matrix`` names the versions and ``CKPTOOL_TORCH_AT``, a command that runs Python with one:
``$CKPTOOL_TORCH_AT 2.6.0 script.py``. Without it only the torch of the tests is used.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fork_server import forking_python

import ckptool
from ckptool.core.mesh import Mesh
from ckptool.serialization.archive.device_mesh import MeshRecord, record_mesh
from ckptool.serialization.archive.read import read_torch_file
from ckptool.serialization.pickle.records import Call
from ckptool.storage.local import LocalSource

LAUNCHER = os.environ.get("CKPTOOL_TORCH_AT")
VERSIONS = os.environ.get("CKPTOOL_TORCHES", "").split() if LAUNCHER else ["its own"]
SCRIPT = Path(__file__).with_name("torch_side.py")


def run(version: str, what: str, folder: Path) -> None:
    """Let a torch save or load; that of the tests in a fork of a process that has imported it."""
    command = [LAUNCHER, version] if LAUNCHER else [str(forking_python(folder))]
    done = subprocess.run(
        [*command, str(SCRIPT), what, str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_what_one_torch_writes_every_torch_loads(version: str, tmp_path: Path) -> None:
    run(version, "save", tmp_path)
    ckptool.convert(tmp_path / "dcp", tmp_path / "torch-save.pt", to="torch-save")
    ckptool.convert(tmp_path / "zip.pt", tmp_path / "from-zip", to="dcp")
    for source in ("zip.pt", "legacy.pt", "from-zip", "torch-save.pt"):
        report = ckptool.compare(tmp_path / "dcp", tmp_path / source)
        assert report.verify.ok, source
    run(version, "load", tmp_path)


@pytest.mark.parametrize("version", [one for one in VERSIONS if one != "2.4.1"])
def test_what_one_torch_reshards_every_torch_loads(version: str, tmp_path: Path) -> None:
    run(version, "save-rank", tmp_path)
    ckptool.reshard(tmp_path / "ranks", tmp_path / "rank-local", mesh="dp=1", to="rank-local")
    ckptool.reshard(tmp_path / "ranks", tmp_path / "items", mesh="dp=1", to="torch-checkpointing")
    run(version, "load-rank", tmp_path)


@pytest.mark.parametrize("version", [one for one in VERSIONS if one != "2.4.1"])
def test_device_meshes_are_recorded_as_each_torch_does(version: str, tmp_path: Path) -> None:
    run(version, "save-meshes", tmp_path)
    for saved in tmp_path.glob("mesh-*.pt"):
        content: Any = read_torch_file(LocalSource.file(saved), saved.name).inert
        theirs = content["w"].args[3][1]["_spec"].fields["mesh"].fields
        shape = tuple(map(int, saved.stem.partition("-")[2].split("x")))
        mesh = Mesh(shape, tuple("abc"[: len(shape)]), tuple(range(8)))
        ours = record_mesh(mesh, 5, MeshRecord.of(theirs)).fields
        for name in theirs.keys() - {"mesh", "_rank_map", "_hash"}:  # tensors, and of a process
            assert plain(ours[name]) == plain(theirs[name]), (saved.name, name)


def plain(value: Any) -> Any:
    """Return a record as its class and attributes, which compare by value."""
    if isinstance(value, Call):
        return value.name, plain(value.fields)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value
