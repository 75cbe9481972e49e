"""What reshard wrote is proved, and loaded by torch where asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    read_back,
)
from reshard_runs import WRITERS, prepared, reshard, source

from ckptool.commands.reshard.load_check import check_loads, require_loadable
from ckptool.commands.reshard.reshard import ReshardReport
from ckptool.engine.ranks import Ranks
from ckptool.engine.write import disk_target
from ckptool.engine.write.run import run as run_engine
from ckptool.errors import TransferError, Unsupported


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def spot(report: ReshardReport, name: str, file_name: str) -> int:
    """Where the data of a tensor begins in a file."""
    file = next(file for file in report.files if file.path == file_name)
    offset = 0
    for part in file.parts:
        if getattr(part, "name", None) == name and part.nbytes:
            return offset
        offset += part.nbytes
    raise LookupError(name)


@pytest.fixture
def damaging(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Flip a bit of a staged file once it is written, before it is verified."""
    real = run_engine

    def arrange(file: str, at: int) -> None:
        def run(work: Any, folder: Path, *rest: Any) -> None:
            real(work, folder, *rest)
            flip(folder / file, at)

        monkeypatch.setattr(disk_target, "run", run)

    return arrange


COPIES = [
    ("dcp", "fsdp", "__1_0.distcp"),
    ("dcp-safetensors", "fsdp", "shard-00002-model-00001-of-00001.safetensors"),
    ("rank-local", "fsdp", "checkpoint_1.pt"),
    ("rank-local", "replicate", "checkpoint_0.pt"),
    ("rank-local", "replicate", "checkpoint_1.pt"),
]


@pytest.mark.parametrize(
    ("target", "policy", "file"), [row for row in COPIES if row[0] in WRITERS], ids=str
)
def test_what_is_not_what_it_should_be_never_counts(
    target: str, policy: str, file: str, source: Path, out: Path, damaging: Callable[..., None]
) -> None:
    ready = prepared(source, out / "r", "2", policy=policy, to=target)
    damaging(file, spot(ready.report, "model.w", file))
    with pytest.raises(TransferError, match=r"model\.w"):
        ready.run()
    assert not (out / "r").exists()


def test_once_it_was_wrong_it_can_be_written_anew(
    source: Path, out: Path, damaging: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hint of the error holds: ``--resume`` ends with the right bytes."""
    ready = prepared(source, out / "r", "2", policy="fsdp", to="dcp")
    damaging("__1_0.distcp", spot(ready.report, "model.w", "__1_0.distcp"))
    with pytest.raises(TransferError) as error:
        ready.run()
    monkeypatch.undo()
    resume = error.value.hint is not None and "--resume" in error.value.hint
    reshard(source, out / "r", "2", policy="fsdp", to="dcp", resume=resume)
    assert read_back("dcp", out / "r") == read_back("dcp", source)


def test_without_proof_it_is_taken_as_it_is(
    source: Path, out: Path, damaging: Callable[..., None]
) -> None:
    ready = prepared(source, out / "r", "2", to="dcp", verify=False)
    damaging("__1_0.distcp", spot(ready.report, "model.w", "__1_0.distcp"))
    ready.run()
    assert read_back("dcp", out / "r") != read_back("dcp", source)


CHECKED = ("dcp", "dcp-safetensors", "rank-local")


@pytest.mark.parametrize("target", CHECKED)
def test_the_check_finds_one_flipped_bit(target: str, source: Path, out: Path) -> None:
    ready = prepared(source, out / "r", "1", to=target)
    ready.run()
    check_loads(ready, Ranks())
    file = next(f.path for f in ready.report.files if f.rank == 0)
    flip(out / "r" / file, spot(ready.report, "model.w", file) + 4 * 8)
    with pytest.raises(TransferError, match=r"model\.w: rank 0 .* first at \[1, 1\]"):
        check_loads(ready, Ranks())


@pytest.mark.parametrize("target", CHECKED)
def test_the_check_finds_a_file_that_torch_cannot_load(
    target: str, source: Path, out: Path
) -> None:
    ready = prepared(source, out / "r", "1", to=target)
    ready.run()
    file = next(f.path for f in ready.report.files if f.rank == 0)
    (out / "r" / file).write_bytes(b"nothing of the kind")
    with pytest.raises(TransferError, match="torch cannot load it"):
        check_loads(ready, Ranks())


def test_the_check_needs_the_ranks_of_the_mesh(source: Path, out: Path) -> None:
    with pytest.raises(Unsupported, match="the mesh has 4 ranks, but 1 are running") as error:
        require_loadable(prepared(source, out / "r", "2x2"), Ranks())
    assert "--nproc-per-node 4" in (error.value.hint or "")


@pytest.mark.parametrize("target", [name for name in WRITERS if name not in CHECKED])
def test_the_check_names_what_it_cannot_load(target: str, source: Path, out: Path) -> None:
    with pytest.raises(Unsupported, match=target):
        require_loadable(prepared(source, out / "r", "1", to=target), Ranks())
