"""verify: good checkpoints have no errors, however deep it reads; what it leaves alone."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from beginning import AtTheBeginning
from conftest import CASES, GOOD, Case, by_name, case, run_verify
from recipes.damage import DAMAGE
from verify.verify_runs import checked, codes, saved

from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.verify import verify
from ckptool.core.dtype import BY_NAME
from ckptool.engine.check.content import all_finite


def not_finite(one: Case) -> bool:
    """Whether the truth itself holds NaN or infinity."""
    return any(
        not all_finite(memoryview(data), BY_NAME[dtype]) for dtype, _, data in one.truth.values()
    )


@pytest.mark.parametrize("one", [one for one in CASES if one.expect == "ok"], ids=by_name)
@pytest.mark.parametrize("depth", [{}, {"quick": True}, {"sample": 0.3, "seed": 5}])
def test_a_good_checkpoint_is_sound_without_a_warning(one: Case, depth: dict[str, Any]) -> None:
    report = checked(one.path, **depth)
    allowed = {"not-finite"} if not_finite(one) else set()
    assert report.ok
    assert codes(report) <= allowed
    if not depth:
        assert codes(report) == allowed


@pytest.mark.parametrize("one", [one for one in GOOD if one.expect == "part"], ids=by_name)
def test_what_is_not_read_is_a_warning(one: Case) -> None:
    report = checked(one.path)
    assert report.ok
    unread = {"tensor-unsupported"} if one.name != "torchao" else set()
    assert codes(report) - {"unknown-global"} == unread


def test_quick_reads_no_tensor(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("dcp_base")
    DAMAGE["data_flipped"].apply(folder)
    report = checked(folder, quick=True)
    assert report.ok
    assert report.nbytes == 0


def test_a_sample_is_seeded(copy_of: Callable[[str], Path]) -> None:
    one, again, other = (
        checked(case("dcp_fsdp2").path, sample=0.3, seed=seed) for seed in (1, 1, 2)
    )
    whole = checked(case("dcp_fsdp2").path)
    assert one.nbytes == again.nbytes != other.nbytes
    assert 0 < one.nbytes < whole.nbytes
    assert "sample of 0.3" in one.summary
    assert "seed 1" in one.summary


def test_json(flipped: Path) -> None:
    content = json.loads(run_verify(str(flipped), "--json").stdout)
    assert content["schema"] == "ckptool.verify/2"
    assert content["ok"] is False
    newer, finding = sorted(content["findings"], key=lambda one: one["severity"], reverse=True)
    assert newer["code"] == "data-newer"
    assert finding.keys() == {"code", "severity", "file", "tensor", "message", "affected", "hint"}
    assert (finding["code"], finding["severity"]) == ("crc-mismatch", "error")
    assert finding["file"] == "__1_0.distcp"


def test_verify_leaves_the_checkpoint_alone(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("dcp_fsdp2")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    for path in folder.iterdir():
        path.chmod(0o444)
    run_verify(str(folder))
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize("change", [Path.unlink, Path.touch])
def test_a_file_that_changes_meanwhile(
    change: Callable[[Path], None], copy_of: Callable[[str], Path]
) -> None:
    """What was read before and after is of no one save."""
    folder = copy_of("rank_base")

    def change_one() -> None:
        os.utime(folder / "checkpoint_2.pt", (1, 1))
        change(folder / "checkpoint_2.pt")

    report = verify(folder, VerifyOptions(workers=1), AtTheBeginning(change_one))
    first = report.findings[0]
    assert (first.code, first.file) == ("file-changed", "checkpoint_2.pt")
    assert not report.ok


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_cannot_be_read(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("dcp_base")
    (folder / "__1_0.distcp").chmod(0)
    assert "file-unreadable" in codes(checked(folder))


def test_large_records_are_read_in_tiles(tmp_path: Path) -> None:
    """A flip in the middle of a record of several MiB is found, whichever thread reads it."""
    torch = pytest.importorskip("torch")
    folder = saved(tmp_path / "c", state={"w": torch.zeros(3 << 20)})
    assert checked(folder).ok
    data = np.memmap(folder / "state.pt", "u1", "r+")
    data[7 << 20] ^= 4
    data.flush()
    assert codes(checked(folder)) == {"crc-mismatch"}


def test_links_and_loops(copy_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy_of("dcp_base")
    (folder / "again").symlink_to(folder)
    assert checked(folder).ok
    shutil.rmtree(folder)


def test_a_lost_random_state_is_seen_whatever_the_folder_is_read_as(
    copy_of: Callable[[str], Path],
) -> None:
    folder = copy_of("accelerate_whole")
    (folder / "random_states_0.pkl").unlink()
    report = verify(folder, VerifyOptions(ReadOptions(from_format="hf")))
    assert "rank-missing" in {finding.code for finding in report.findings}


def test_rows_that_were_exchanged_are_those_of_no_mesh(tmp_path: Path) -> None:
    """All bytes are whole, and of the right shape: only their writers are wrong."""
    folder = tmp_path / "ckpt"
    shutil.copytree(case("dcp_base").path, folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    items = metadata.storage_data
    first, second = [index for index in items if index.fqn == "big"][:2]
    items[first], items[second] = items[second], items[first]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    said = [finding.message for finding in checked(folder).findings]
    assert any(message.startswith("no device mesh of up to 3 dims") for message in said)
