"""Files that go to a store: their bytes and order, failures midway, and the budget of memory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import case
from engine.write.trees import content
from fault_server import DENIED
from hypothesis import given
from hypothesis import strategies as st
from places import in_store
from store_server import S3, s3, server

from ckptool.commands.convert import ConvertReport, prepare
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ConvertOptions, ReshardOptions, TransferOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.commands.transfer.transfer import Transfer
from ckptool.core.catalog import Catalog
from ckptool.core.layout import FileLayout, Layout, Verbatim
from ckptool.core.planning.plan import Plan
from ckptool.core.sharding.placement import parse_mesh, parse_rule
from ckptool.engine.checksum import RecordCheck, crc32
from ckptool.engine.progress import Progress
from ckptool.engine.write.parts import note_cut
from ckptool.engine.write.send import send, within_budget
from ckptool.engine.write.work import Work
from ckptool.errors import Changed, Damaged, TransferError, Unsupported
from ckptool.storage.files import SPAN, ReadPolicy
from ckptool.storage.multipart import memory_of_part
from ckptool.storage.virtual.memory import MemoryFiles

__all__ = ["s3", "server"]
RUN = RunOptions(workers=2, fsync=False)
Copy = Callable[[str], Path]


def planned(source: Path, target: Path, to: str = "dcp") -> Transfer[ConvertReport]:
    options = ConvertOptions(to, transfer=TransferOptions(run=RUN))
    return prepare(source, target, options)


def work_of(transfer: Transfer[ConvertReport], *names: str) -> Work:
    """The work on some files of a plan; on all if none is named."""
    plan = transfer.plan
    numbers = [plan.numbers[name] for name in names or plan.numbers]
    return Work(plan, transfer.opened.source, RUN, numbers)


@pytest.mark.parametrize("to", ["dcp", "hf", "torch-save"])
@pytest.mark.parametrize("name", ["dcp_fsdp2_tp", "dcp_zstd", "rank_experimental", "hf_shards"])
def test_a_store_gets_what_a_disk_gets(name: str, to: str, s3: S3, out: Path) -> None:
    (out / "run").mkdir()
    transfer = planned(case(name).path, out / "run" / ("m.pt" if to == "torch-save" else "m"), to)
    send(work_of(transfer), in_store(s3.url("m")), ())
    transfer.run()
    written = content(out / "run" / "m" if to != "torch-save" else out / "run")
    assert s3.get("m") == written


def test_the_last_file_appears_after_all_others(s3: S3, out: Path) -> None:
    transfer = planned(case("dcp_fsdp2_tp").path, out / "m")
    send(work_of(transfer), in_store(s3.url("m")), ())
    names = [file.path for file in transfer.plan.layout.files]
    sent = [one.name for one in s3.of("PutObject")]
    assert sorted(sent) == sorted(names)
    assert sent[-1] == names[-1] == ".metadata"


def test_finished_files_are_not_sent_and_count_as_progress(s3: S3, out: Path) -> None:
    transfer = planned(case("dcp_fsdp2_tp").path, out / "m")
    moved: list[int] = []
    progress = Progress(lambda done, total: moved.append(done))
    work = work_of(transfer)
    files = transfer.plan.layout.files
    work = Work(work.plan, work.source, RUN, work.numbers, progress=progress)
    send(work, in_store(s3.url("m")), [files[0].path, files[-1].path])
    assert s3.get("m").keys() == {file.path for file in files[1:-1]}
    assert moved[0] == files[0].nbytes + files[-1].nbytes
    assert moved[-1] == sum(file.nbytes for file in files)


def test_other_processes_files_are_theirs(s3: S3, out: Path) -> None:
    transfer = planned(case("dcp_fsdp2_tp").path, out / "m")
    send(work_of(transfer, "__1_0.distcp"), in_store(s3.url("m")), ())
    assert s3.get("m").keys() == {"__1_0.distcp"}


def test_what_it_reads_of_a_record_that_others_share_is_noted_for_the_end(
    s3: S3, out: Path
) -> None:
    torch.save({"w": torch.arange(600.0).reshape(100, 6)}, out / "s.pt")
    rows = ReshardOptions(parse_mesh("2"), rules=(parse_rule("*=Shard(0)"),), to="dcp")
    prepared = prepare_reshard(out / "s.pt", out / "m", rows)
    plan, records = prepared.plan, RecordCheck(shared=True)
    numbers = [plan.numbers["__0_0.distcp"]]
    work = Work(plan, prepared.opened.source, RUN, numbers, records)
    send(work, in_store(s3.url("m")), ())
    (noted,) = note_cut(records)
    ((start, nbytes, crc),) = noted.pieces
    assert (noted.nbytes, nbytes) == (2400, 1200)
    assert crc == crc32((out / "s.pt").read_bytes()[start : start + nbytes])


# Failures


@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata"])
def test_a_source_that_changed_keeps_the_last_file_back(
    name: str, copy_of: Copy, s3: S3, out: Path
) -> None:
    """Of a file that is read no more, it shows once all others are there."""
    source = copy_of("dcp_fsdp2_tp")
    transfer = planned(source, out / "m")
    os.utime(source / name, (1, 1))
    with pytest.raises(Changed, match=re.escape(name)):
        send(work_of(transfer), in_store(s3.url("m")), ())
    others = transfer.plan.numbers.keys() - {".metadata"}
    assert s3.get("m").keys() == others if name == ".metadata" else s3.get("m").keys() < others


def test_a_part_does_not_ask_whether_the_source_changed(copy_of: Copy, s3: S3, out: Path) -> None:
    """Whoever commits does."""
    source = copy_of("dcp_fsdp2_tp")
    transfer = planned(source, out / "m")
    os.utime(source / ".metadata", (1, 1))
    send(work_of(transfer, "__0_0.distcp"), in_store(s3.url("m")), ())
    assert s3.get("m").keys() == {"__0_0.distcp"}


def test_a_wrong_checksum_keeps_the_last_file_back(flipped: Path, s3: S3, out: Path) -> None:
    transfer = planned(flipped, out / "m")
    with pytest.raises(Damaged, match="CRC-32"):
        send(work_of(transfer), in_store(s3.url("m")), ())
    assert ".metadata" not in s3.get("m")


def test_a_file_that_is_refused_keeps_the_last_one_back(s3: S3, out: Path) -> None:
    s3.fail(DENIED, "PutObject", key="m/__2_0.distcp")
    transfer = planned(case("dcp_fsdp2_tp").path, out / "m")
    with pytest.raises(TransferError, match=r"__2_0\.distcp: byte [\d,]+ cannot be written"):
        send(work_of(transfer), in_store(s3.url("m")), ())
    assert ".metadata" not in s3.get("m")


@pytest.fixture
def large(out: Path) -> Path:
    """A checkpoint whose tensor goes to a store in parts."""
    state = {"w": torch.arange(3 << 20, dtype=torch.float32)}
    dcp.save(state, checkpoint_id=out / "large", no_dist=True)
    return out / "large"


def test_a_large_file_appears_once_all_its_parts_are_there(large: Path, s3: S3, out: Path) -> None:
    transfer = planned(large, out / "m.safetensors", "safetensors")
    send(work_of(transfer), in_store(s3.url("m")), ())
    transfer.run()
    assert len(s3.of("UploadPart")) == 2
    assert s3.get("m") == {"m.safetensors": (out / "m.safetensors").read_bytes()}


@pytest.mark.parametrize("operation", ["UploadPart", "CompleteMultipartUpload"])
def test_parts_of_a_file_that_fails_are_discarded(
    operation: str, large: Path, s3: S3, out: Path
) -> None:
    s3.fail(DENIED, operation)
    transfer = planned(large, out / "m.safetensors", "safetensors")
    with pytest.raises(TransferError, match="cannot be written"):
        send(work_of(transfer), in_store(s3.url("m")), ())
    assert not s3.get("m")
    assert not s3.uploads


def test_parts_of_a_file_of_which_the_source_is_cut_are_discarded(
    large: Path, s3: S3, out: Path
) -> None:
    transfer = planned(large, out / "m.safetensors", "safetensors")
    os.truncate(large / "__0_0.distcp", 10 << 20)
    with pytest.raises((Damaged, Changed)):
        send(work_of(transfer), in_store(s3.url("m")), ())
    assert not s3.get("m")
    assert not s3.uploads


def test_parts_of_a_last_file_that_is_kept_back_are_discarded(
    large: Path, s3: S3, out: Path
) -> None:
    transfer = planned(large, out / "m.safetensors", "safetensors")
    os.utime(large / ".metadata", (1, 1))
    with pytest.raises(Changed):
        send(work_of(transfer), in_store(s3.url("m")), ())
    assert s3.of("CreateMultipartUpload")
    assert not s3.get("m")
    assert not s3.uploads


# The budget of memory


class Requested(MemoryFiles):
    """A source of which each read is a request; it notes what it may keep."""

    policy = ReadPolicy(2 << 20, 1 << 20, 4, by_request=True)
    kept = 0

    def keep(self, nbytes: int) -> None:
        self.kept = nbytes


class Disk(Requested):
    """A source that fetches nothing ahead."""

    policy = ReadPolicy(workers=4)


def plan_of(sizes: list[int]) -> Plan:
    files = (FileLayout(f"{n}", (Verbatim("f", size),)) for n, size in enumerate(sizes))
    return Plan(Catalog("dcp", {}, {}, {}), Layout(tuple(files), folder=True))


MIB = 1 << 20
SIZES = st.lists(st.sampled_from([0, 1, 9 * MIB, 200 << 30]), max_size=40)


def require_hint(error: Unsupported, plan: Plan, source: Requested, options: RunOptions) -> None:
    """Require that the budget that an error asks for is more, and is enough."""
    needed = int(re.sub(r"\D", "", error.message.rpartition("needs")[2]))
    assert needed > options.budget
    budget = -(-needed // MIB)
    assert error.hint == f"--budget {budget}MiB"
    enough = RunOptions(workers=options.workers, budget=budget * MIB)
    assert within_budget(plan, source, enough, range(len(plan.layout.files))).files == 1


@given(
    sizes=SIZES,
    budget=st.integers(1, 4096),
    workers=st.sampled_from([None, 1, 3, 64]),
    kind=st.sampled_from([Requested, Disk]),
)
def test_what_is_sent_at_once_fits_into_the_budget(
    sizes: list[int], budget: int, workers: int | None, kind: type[Requested]
) -> None:
    plan, source = plan_of(sizes), kind({})
    options = RunOptions(workers=workers, budget=budget * MIB)
    part = memory_of_part(max(sizes, default=0))
    reader = 2 * source.policy.tile + 2 * SPAN
    try:
        files, readers, parts = within_budget(plan, source, options, range(len(sizes)))
    except Unsupported as error:
        require_hint(error, plan, source, options)
        return
    assert min(files, readers, parts) >= 1
    assert files * (readers * reader + parts * part) + source.kept <= options.budget
    assert files <= max(1, len(sizes))
    assert workers != 1 or (files, readers, parts) in ((1, 1, 1), (1, 1, 2))
    assert bool(source.kept) is source.policy.by_request


def test_files_are_sent_in_as_few_rounds_as_can_be_and_as_evenly() -> None:
    """Of nine files eight fit at once: five and four are as fast, with more memory for each."""
    options = RunOptions(workers=8, budget=1 << 30)
    assert within_budget(plan_of([1] * 9), Disk({}), options, range(9)).files == 5
    assert within_budget(plan_of([1] * 8), Disk({}), options, range(8)).files == 8
    assert within_budget(plan_of([1] * 9), Disk({}), options, [0, 1]).files == 2
