"""A trainer that writes to the source while a command reads it: one save, or an error."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from beginning import AtTheBeginning
from conftest import case, convert_to
from safetensors.numpy import save_file

import ckptool
from ckptool.commands.convert import prepare
from ckptool.commands.inspect.stats import stats
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.question import Question
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ConvertOptions, ReshardOptions, TransferOptions
from ckptool.commands.options.verify import SalvageOptions, VerifyOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.commands.verify.compare.against import against
from ckptool.commands.verify.manifest.build import build_manifest
from ckptool.commands.verify.salvage.salvage import plan_salvage
from ckptool.commands.verify.verify import verify
from ckptool.core.sharding.placement import parse_mesh
from ckptool.engine.progress import Progress
from ckptool.errors import Changed
from ckptool.storage.url import location

ONE_WORKER = TransferOptions(run=RunOptions(workers=1, fsync=False))


def save(path: Path, first: str, second: str, value: float) -> Path:
    """A file of two tensors; another order of the header is a file of the same size."""
    weights = {first: np.full((64, 64), value, "f4"), second: np.full((64, 64), -value, "f4")}
    save_file(weights, path)
    return path


def rewrite(path: Path) -> None:
    """Write the next save into the file that is there, and set its time back."""
    before = path.stat()
    newer = save(path.with_name("newer"), "bb", "aa", 2).read_bytes()
    path.with_name("newer").unlink()
    with open(path, "r+b") as stream:
        stream.write(newer)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path) -> None:
    """Put the next save in the place of the file, as old as that."""
    before = path.stat()
    newer = save(path.with_name("newer"), "bb", "aa", 2)
    os.utime(newer, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(newer, path)


CHANGES = pytest.mark.parametrize("change", [rewrite, replace, Path.unlink])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(tmp_path / "m.safetensors", "aa", "bb", 1)


def planned(kind: str, source: Path, target: Path) -> Any:
    if kind == "reshard":
        options = ReshardOptions(parse_mesh("2"), transfer=ONE_WORKER)
        return prepare_reshard(source, target, options)
    if kind == "salvage":
        return plan_salvage(source, target, SalvageOptions(transfer=ONE_WORKER))
    return prepare(source, target, ConvertOptions(kind, transfer=ONE_WORKER))


@CHANGES
@pytest.mark.parametrize("kind", ["dcp", "torch-save", "safetensors", "reshard", "salvage"])
def test_between_the_plan_and_the_run(
    kind: str, change: Callable[[Path], None], source: Path, out: Path
) -> None:
    ready = planned(kind, source, out / ("m.pt" if kind == "torch-save" else "m"))
    change(source)
    with pytest.raises(Changed, match=r"m\.safetensors: it was changed while it was read") as why:
        ready.run()
    assert why.value.exit_code == 5
    assert list(out.iterdir()) == []


@CHANGES
def test_after_the_last_read(change: Callable[[Path], None], source: Path, out: Path) -> None:
    ready = planned("dcp", source, out / "m")

    def written(done: int, total: int) -> None:
        if done == 2 * 64 * 64 * 4:
            change(source)

    with pytest.raises(Changed):
        ready.run(Progress(written))
    assert list(out.iterdir()) == []


def test_a_file_that_is_cut_meanwhile_is_changed_and_not_damaged(source: Path, out: Path) -> None:
    ready = planned("dcp", source, out / "m")
    with pytest.raises(Changed):
        ready.run(Progress(lambda done, total: os.truncate(source, 100)))


def test_what_was_staged_of_a_changed_source_is_not_resumed(source: Path, out: Path) -> None:
    shutil.copy2(source, source.with_name("kept"))
    ready = planned("dcp", source, out / "m")
    replace(source)
    with pytest.raises(Changed):
        ready.run()
    assert list(out.iterdir()) == []
    report = convert_to("dcp", source, out / "m")
    assert report.tensors == 2


@pytest.mark.parametrize(
    "change", [lambda path: path.chmod(0o640), lambda path: os.link(path, f"{path}.2")]
)
def test_rights_and_links_are_not_content(
    change: Callable[[Path], None], source: Path, out: Path
) -> None:
    ready = planned("dcp", source, out / "m")
    change(source)
    ready.run()
    assert (out / "m" / ".metadata").exists()


@CHANGES
def test_what_only_reads(change: Callable[[Path], None], source: Path, tmp_path: Path) -> None:
    opened, checkpoint = open_checkpoint(source), ckptool.open(source)
    change(source)
    with pytest.raises(Changed if change is not Path.unlink else ckptool.CkptoolError):
        stats(opened, ["*"])
    with pytest.raises(Changed if change is not Path.unlink else ckptool.CkptoolError):
        checkpoint.read("aa")


@pytest.mark.parametrize("change", [rewrite, replace])
def test_verify_says_so(change: Callable[[Path], None], source: Path, tmp_path: Path) -> None:
    progress = AtTheBeginning(lambda: change(source))
    found = verify(source, VerifyOptions(), progress)
    assert not found.ok
    assert "file-changed" in {one.code for one in found.findings}
    other = save(tmp_path / "other.safetensors", "aa", "bb", 1)
    found = against(other, source, Question(), progress).verify
    assert not found.ok
    assert "file-changed" in {one.code for one in found.findings}


def test_a_state_dict_that_was_filled_from_two_saves_is_an_error(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"aa": torch.zeros(64, 64), "bb": torch.zeros(64, 64)}
    checkpoint = ckptool.open(source)
    fill = checkpoint.fill

    def filled(*arguments: Any) -> None:
        fill(*arguments)
        rewrite(source)

    monkeypatch.setattr(checkpoint, "fill", filled)
    with pytest.raises(Changed):
        ckptool.load(checkpoint, state)


@pytest.mark.parametrize("at", ["plan", "run"])
def test_a_store_that_names_no_version(at: str, source: Path, out: Path) -> None:
    place = location("memory://changing/m.safetensors")
    place.write_bytes(source.read_bytes())
    newer = save(source, "bb", "aa", 2).read_bytes()
    ready = prepare(place, out / "m", ConvertOptions("dcp", transfer=ONE_WORKER))
    if at == "plan":
        place.write_bytes(newer)
    with pytest.raises(Changed):
        ready.run(Progress(lambda done, total: place.write_bytes(newer)))
    assert list(out.iterdir()) == []


def test_the_manifest_of_a_changing_source_is_not_written(source: Path, tmp_path: Path) -> None:
    progress = AtTheBeginning(lambda: rewrite(source))
    target = tmp_path / "m.json"
    report = build_manifest(source, target, Question(), progress)
    assert not report.ok
    assert not (tmp_path / "m.json").exists()


def test_a_folder_of_which_one_file_is_replaced(out: Path, tmp_path: Path) -> None:
    shutil.copytree(case("dcp_fsdp2_tp").path, tmp_path / "ckpt")
    ready = planned("dcp", tmp_path / "ckpt", out / "m")
    file = tmp_path / "ckpt" / "__1_0.distcp"
    shutil.copy(file, tmp_path / "copy")
    os.replace(tmp_path / "copy", file)
    with pytest.raises(Changed, match=r"__1_0\.distcp"):
        ready.run()
