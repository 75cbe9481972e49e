"""torch.save files that were unpacked, and packed again in every way that zip tools do it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import convert_to, read_back

import ckptool
from ckptool.errors import Unrecognized

STATE = {"w": torch.arange(64.0).reshape(8, 8), "b": torch.ones(3).bfloat16()}
HINT = "pack the folder again: "


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    torch.save(STATE, tmp_path / "model v1.pth")
    zipfile.ZipFile(tmp_path / "model v1.pth").extractall(tmp_path / "it is")
    return tmp_path / "it is" / "model v1"


def pack(folder: Path, head: str, *, method: int = zipfile.ZIP_STORED) -> Callable[[Path], None]:
    def write(target: Path) -> None:
        with zipfile.ZipFile(target, "w", method) as made:
            for path in sorted(folder.rglob("*")):
                made.write(path, f"{head}{path.relative_to(folder)}")

    return write


def packed_on_a_mac(folder: Path, target: Path) -> None:
    pack(folder, "model v1/")(target)
    with zipfile.ZipFile(target, "a") as made:
        made.writestr("__MACOSX/model v1/._data.pkl", b"fork")
        made.writestr("model v1/.DS_Store", b"view")


REPACKED: dict[str, Callable[[Path, Path], None]] = {
    "flat": lambda folder, target: pack(folder, "")(target),
    "flat, compressed": lambda f, target: pack(f, "", method=zipfile.ZIP_DEFLATED)(target),
    "of another name": lambda folder, target: pack(folder, "other/")(target),
    "in two folders": lambda folder, target: pack(folder, "outer/model v1/")(target),
    "compressed": lambda f, target: pack(f, "model v1/", method=zipfile.ZIP_DEFLATED)(target),
    "on a Mac": packed_on_a_mac,
}


def is_read_by_torch(file: Path) -> bool:
    try:
        return bool(torch.load(file))
    except RuntimeError:
        return False


@pytest.mark.parametrize("how", REPACKED)
def test_a_file_that_was_packed_again_is_read(how: str, unpacked: Path, tmp_path: Path) -> None:
    file = tmp_path / "again.pt"
    REPACKED[how](unpacked, file)
    report = ckptool.verify(file)
    assert report.ok
    assert [f.code for f in report.findings] == ["archive-flat"] * (not is_read_by_torch(file))
    convert_to("safetensors", file, tmp_path / "out")
    found = read_back("safetensors", tmp_path / "out")
    for name, tensor in STATE.items():
        assert found[name][2] == bytes(tensor.view(torch.uint8).flatten().tolist())


@pytest.mark.parametrize("inside", [".", "..", "data.pkl", "version", "data/0"])
def test_an_unpacked_file_is_called_that_and_the_hint_packs_it(
    inside: str, unpacked: Path, tmp_path: Path
) -> None:
    with pytest.raises(Unrecognized, match="that was unpacked") as caught:
        ckptool.open(unpacked / inside)
    assert caught.value.hint is not None
    command = caught.value.hint.removeprefix(HINT).replace("python", sys.executable, 1)
    subprocess.run(["sh", "-c", command], check=True)
    file = unpacked.parent / "model v1.pt"
    assert ckptool.verify(file).findings == ()
    assert torch.equal(torch.load(file)["w"], STATE["w"])


def test_the_folder_itself_may_be_where_one_is(
    unpacked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(unpacked)
    with pytest.raises(Unrecognized, match="that was unpacked") as caught:
        ckptool.open(".")
    assert f"cd '{unpacked.parent}'" in str(caught.value.hint)


def test_other_pickles_are_still_only_pickles(unpacked: Path) -> None:
    (unpacked / "version").unlink()
    shutil.rmtree(unpacked / "data")
    with pytest.raises(Unrecognized, match="plain pickle"):
        ckptool.open(unpacked)


def test_an_unpacked_program_is_called_that(unpacked: Path) -> None:
    (unpacked / "constants.pkl").write_bytes(b"")
    with pytest.raises(Unrecognized, match="a TorchScript file that was unpacked"):
        ckptool.open(unpacked)


def test_two_files_in_one_archive_are_not_one(unpacked: Path, tmp_path: Path) -> None:
    file = tmp_path / "two.pt"
    pack(unpacked, "a/")(file)
    with zipfile.ZipFile(file, "a") as made:
        made.write(unpacked / "data.pkl", "data.pkl")
    with pytest.raises(Unrecognized, match=r"not one that torch\.save wrote"):
        ckptool.open(file)
