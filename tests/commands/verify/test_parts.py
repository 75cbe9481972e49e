"""Parts of a verification, and ranks: together they find what one process finds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import GOOD, Case, by_name, on_ranks
from safetensors.torch import save_file

import ckptool
from ckptool.cli import _run
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.checks.archives import ArchiveCheck
from ckptool.commands.verify.findings import VerifyReport
from ckptool.commands.verify.verify import verify
from ckptool.core.catalog import Container
from ckptool.engine.ranks import Ranks
from ckptool.engine.share import Share
from ckptool.errors import UsageError
from ckptool.formats.dcp import alike
from ckptool.formats.dcp.opening import locate_item
from ckptool.serialization.archive import read
from ckptool.serialization.archive.templates import Templates
from ckptool.storage.files import ReadSpan
from ckptool.storage.local import LocalSource

COUNT = 3


def in_parts(path: Path) -> list[VerifyReport]:
    return [verify(path, VerifyOptions(part=Share(at, COUNT))) for at in range(COUNT)]


def seen(*reports: VerifyReport) -> set[tuple[str, str]]:
    """What was found in data; what metadata shows, and what it cannot judge, each part says."""
    said = ("no-checksum", "parts-not-judged")
    found = (f for report in reports for f in report.findings if f.code not in said)
    return {(f.code, each.message) for f in found for each in f.affected or [f]}


@pytest.mark.parametrize("one", [c for c in GOOD if c.path.is_dir()][::4], ids=by_name)
def test_all_parts_read_what_one_process_reads(one: Case) -> None:
    whole, parts = verify(one.path, VerifyOptions()), in_parts(one.path)
    assert seen(*parts) == seen(whole)
    assert all(part.ok for part in parts) == whole.ok
    assert sum(part.nbytes for part in parts) == whole.nbytes
    assert parts[0].depth == "part"


@pytest.fixture
def folder(out: Path) -> Path:
    """A DCP folder of many items, with NaN in one of them."""
    generator = torch.Generator().manual_seed(3)
    state: dict[str, Any] = {f"w.{n}": torch.randn(8, 9, generator=generator) for n in range(12)}
    state["w.5"][2, 3] = float("nan")
    dcp.save(state, checkpoint_id=out / "ckpt", no_dist=True)
    return out / "ckpt"


def test_a_disk_is_asked_for_all_that_is_read_once_items_are_open(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def plan_reads(self: LocalSource, runs: Iterable[ReadSpan]) -> Callable[[], None]:
        asked.append(list(runs))
        return lambda: asked.append("end")

    def expect(self: LocalSource, spans: Iterable[ReadSpan]) -> None:
        asked.append("opened")

    monkeypatch.setattr(LocalSource, "plan_reads", plan_reads)
    monkeypatch.setattr(LocalSource, "expect", expect)
    verify(folder, VerifyOptions())
    assert asked[0] == asked[-3] == "opened"
    runs = cast(list[ReadSpan], asked[-2])
    assert runs == sorted(runs)
    assert [(file, nbytes) for file, _, nbytes in runs] == [("__0_0.distcp", 8 * 9 * 4)] * 12
    assert asked[-1] == "end"


def turn_byte(folder: Path, name: str) -> None:
    at = open_checkpoint(folder).catalog.tensors[name].chunks[0].at
    assert isinstance(at, Container)
    path = folder / at.file
    data = bytearray(path.read_bytes())
    data[at.offset + at.nbytes // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["w.0", "w.7", "w.11"])
def test_damage_is_found_by_the_part_that_has_it(name: str, folder: Path) -> None:
    before = seen(verify(folder, VerifyOptions()))
    turn_byte(folder, name)
    whole, parts = verify(folder, VerifyOptions()), in_parts(folder)
    assert seen(*parts) == seen(whole) != before
    assert [part.ok for part in parts].count(False) == 1


def zeros(folder: Path) -> None:
    """A safetensors file whose last half was never written."""
    path = next(folder.glob("*2.safetensors"))
    data = bytearray(path.read_bytes())
    half = len(data) // 2 // 4096 * 4096
    data[half:] = bytes(len(data) - half)
    path.write_bytes(data)


def infinity(folder: Path) -> None:
    path = folder / "model-3.safetensors"
    save_file({"w.3": torch.full((100, 99), float("inf"))}, path)


@pytest.mark.parametrize("damage", [zeros, infinity])
def test_damage_without_checksums_is_found(damage: Callable[[Path], None], out: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    names = {f"w.{n}": f"model-{n}.safetensors" for n in range(5)}
    for name, file in names.items():
        save_file({name: torch.randn(100, 99, generator=generator)}, out / file)
    (out / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": names})
    )
    before = seen(verify(out, VerifyOptions()))
    damage(out)
    whole, parts = verify(out, VerifyOptions()), in_parts(out)
    assert seen(*parts) == seen(whole) != before


class Two(Ranks):
    """One of two ranks, once it is known what the other one says."""

    size = 2

    def __init__(self, rank: int, said: list[Any]) -> None:
        self.rank, self._said = rank, said

    def gather(self, value: Any) -> list[Any]:
        self._said.append(value)
        return [*self._said]


def test_ranks_report_as_one_process(folder: Path) -> None:
    turn_byte(folder, "w.7")
    (folder / "notes.txt").write_text("mine")
    said: list[Any] = []
    first = verify(folder, VerifyOptions(), ranks=Two(0, said))
    both = verify(folder, VerifyOptions(), ranks=Two(1, said))
    alone = verify(folder, VerifyOptions())
    assert first.nbytes < both.nbytes == alone.nbytes
    assert seen(both) == seen(alone)
    assert (both.summary, both.depth, both.ok) == (alone.summary, "full", False)


def test_parts_judge_what_is_theirs_and_say_that_other_parts_share_some(tmp_path: Path) -> None:
    master = torch.randn(40, 30, generator=torch.Generator().manual_seed(3))
    state = {"fp32_param": master, "exp_avg": master, "exp_avg_sq": master.square()}
    state["exp_avg_sq"][3, 4] = -1
    named = {f"optimizer.state.{kind}.w": each for kind, each in state.items()}
    dcp.save({"w": master.bfloat16()} | named, checkpoint_id=tmp_path / "c", no_dist=True)
    codes = [[finding.code for finding in report.findings] for report in in_parts(tmp_path / "c")]
    assert all("parts-not-judged" in found for found in codes)
    assert sum("moments-negative" in found for found in codes) == 1
    assert not any("weights-differ-from-masters" in found for found in codes)


def test_a_rank_opens_its_share_alone_and_what_is_alike_together(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp.save({f"w.{n}": torch.full((8, 9), n) for n in range(48)}, checkpoint_id=out, no_dist=True)
    looked_at, located = list[Any](), list[Any]()

    def noted(into: list[Any], real: Callable[..., Any]) -> Callable[..., Any]:
        def call(before: Any, item: Any) -> Any:
            into.append(item)
            return real(before, item)

        return call

    monkeypatch.setattr(ArchiveCheck, "look_at", noted(looked_at, ArchiveCheck.look_at))
    monkeypatch.setattr(alike, "locate_item", noted(located, locate_item))
    monkeypatch.setattr(
        read, "_TEMPLATES", Templates(reads=False)
    )  # it may be full of other tests' archives
    said: list[Any] = []
    for rank in range(2):
        assert verify(out, VerifyOptions(), ranks=Two(rank, said)).ok
        assert 0 < len(looked_at) <= 28 + 20 * rank  # bytes are shared, those of .metadata too
    assert len(looked_at) == len({*looked_at}) == 48
    assert len(located) == 2  # each rank's first, with which its others are compared


def test_under_torchrun_one_rank_speaks_and_all_answer(folder: Path, out: Path) -> None:
    shutil.copytree(folder, out / "good")
    turn_byte(folder, "w.7")
    ended = on_ranks(2, ("-m", "ckptool", "verify", folder, "--json"))
    assert [one.code for one in ended] == [1, 1], ended[0].stderr
    assert json.loads(ended[0].stdout)["ok"] is False
    assert not ended[1].stdout


def test_parts_are_of_the_whole_data_alone(folder: Path, capsys: pytest.CaptureFixture[str],
                                           monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    for options in (VerifyOptions(part=Share(0, 2), quick=True),
                    VerifyOptions(part=Share(0, 2), sample=0.5)):  # fmt: skip
        with pytest.raises(UsageError, match="--part"):
            verify(folder, options)
    with pytest.raises(UsageError, match="part"):
        ckptool.verify(folder, part="1/2", write_manifest=folder.with_name("m.json"))
    line = ["ckptool", "verify", str(folder), "--part", "1/2"]
    for more in (["--against", str(folder)], ["--manifest", "m.json"], ["--all"]):
        monkeypatch.setattr("sys.argv", [*line, *more])
        assert _run() == 2
        assert "--part" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", line)
    assert _run() == 0
    assert "part 1 of 2 of the data read and checked" in capsys.readouterr().out
