"""Failures on the way to a store are retried, and if that is in vain, named and resumed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks.loopback.messages import Request
from conftest import case
from fault_server import (
    DENIED,
    EXPIRED,
    INTERNAL,
    SLOW_DOWN,
    WRITES,
    call,
    cut,
    fewer,
    shifted,
    shifted_unsaid,
    whole,
)
from places import in_store
from store_server import S3, s3, server
from test_s3 import big, files_of, resharded

from ckptool.commands.convert import prepare
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ConvertOptions, ReshardOptions
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.commands.verify.verify import verify
from ckptool.core.sharding.placement import parse_mesh
from ckptool.engine.write.stage import RESUME_HINT
from ckptool.engine.write.store_notes import StoreNotes
from ckptool.errors import CkptoolError, NoAnswer, TransferError, Unsupported
from ckptool.storage.commit_note import UNFINISHED
from ckptool.storage.url import location

WRONG = [SLOW_DOWN, INTERNAL, cut, fewer, shifted, shifted_unsaid]


@pytest.mark.parametrize("fault", WRONG)
def test_reads_are_tried_again(fault: Any, s3: S3, out: Path) -> None:
    source = s3.put(case("dcp_fsdp2_tp").path, "source")
    resharded(case("dcp_fsdp2_tp").path, out / "one", "4")
    s3.fail(fault, "GetObject", times=3)
    resharded(source, out / "other", "4")
    assert files_of(out / "other") == files_of(out / "one")


@pytest.mark.parametrize("fault", [SLOW_DOWN, INTERNAL])
def test_writes_are_tried_again(fault: Any, s3: S3, out: Path) -> None:
    resharded(case("dcp_fsdp2_tp").path, out / "one", "4")
    s3.fail(fault, *WRITES, times=1)
    resharded(case("dcp_fsdp2_tp").path, s3.url("m"), "4")
    assert s3.get("m") == files_of(out / "one")


@pytest.mark.parametrize("fault", WRONG)
def test_reads_that_never_succeed_name_file_offset_and_attempts(
    fault: Any, s3: S3, out: Path
) -> None:
    source = s3.put(case("dcp_fsdp2_tp").path, "source")
    place = in_store(source)
    prepared = prepare(place, out / "m", ConvertOptions("dcp"))
    place.store.blocks.clear()
    s3.fail(fault, "GetObject")
    with pytest.raises(TransferError) as caught:
        prepared.run()
    assert f"{source}/__" in caught.value.message
    assert re.search(r": bytes [\d,]+ to [\d,]+: ", caught.value.message)
    assert "4 attempts" in caught.value.message
    assert not (out / "m").exists()


def test_a_proxy_that_gives_whole_objects_is_refused(s3: S3, out: Path) -> None:
    source = s3.put(big(out, 1), "source")
    s3.fail(whole, "GetObject", where=lambda one: not str(one.range).startswith("bytes=0-"))
    with pytest.raises(CkptoolError, match="does not answer requests for a part of a file"):
        resharded(source, out / "m", "4")
    assert not (out / "m").exists()


def test_a_store_that_does_not_answer_is_not_a_damaged_checkpoint(s3: S3) -> None:
    source = s3.put(case("dcp_fsdp2_tp").path, "source")
    s3.fail(INTERNAL, "GetObject", key="*.distcp")
    with pytest.raises(NoAnswer, match="4 attempts"):
        verify(location(source), VerifyOptions())


@pytest.mark.parametrize("operation", ["UploadPart", "CompleteMultipartUpload"])
def test_an_upload_that_fails_leaves_no_checkpoint_and_no_parts(
    operation: str, s3: S3, out: Path
) -> None:
    source = big(out, 3)

    s3.fail(DENIED, operation, where=lambda one: one.query.get("partNumber", "2") == "2")
    with pytest.raises(TransferError, match=r"s3://\S+/m/__\d_0.distcp: byte [\d,]+ cannot") as why:
        resharded(source, s3.url("m"), "2")
    assert "--resume" in (why.value.hint or "")
    s3.heal()
    assert ".metadata" not in s3.get("m")
    assert not s3.uploads


def test_parts_of_one_file_are_on_their_way_together_and_end_up_in_order(s3: S3, out: Path) -> None:
    source = big(out, 4)
    meeting = threading.Barrier(3)

    def together(request: Request) -> None:
        met.append(meeting.wait(timeout=30))
        time.sleep(0.05 * met[-1])

    met: list[int] = []
    s3.fail(call(together), "UploadPart", times=3, where=lambda one: one.received > 1 << 20)
    resharded(source, s3.url("m"), "1")
    s3.heal()
    resharded(source, out / "m", "1")
    assert sorted(met) == [0, 1, 2]
    assert s3.get("m") == files_of(out / "m")
    assert not s3.uploads


def test_no_part_arrives_after_an_upload_was_aborted(s3: S3, out: Path) -> None:
    source = big(out, 4)
    s3.fail(call(lambda request: time.sleep(0.3)), "UploadPart")
    s3.fail(DENIED, "UploadPart", where=lambda one: one.query["partNumber"] == "1")
    with pytest.raises(TransferError, match=r"access is denied \(403: AccessDenied \(part 1\)\)"):
        resharded(source, s3.url("m"), "1")
    s3.heal()
    of_upload = [one.operation for one in s3.requests if "uploadId" in one.query]
    assert of_upload[-1] == "AbortMultipartUpload"
    assert not s3.uploads


def begun(s3: S3, source: Path) -> None:
    """Reshard to ``m`` in the store, onto four ranks, up to the third."""
    s3.fail(DENIED, *WRITES, key="*__2_0.distcp")
    with pytest.raises(TransferError):
        resharded(source, s3.url("m"), "4", run=RunOptions(1))
    s3.heal()


def test_a_resumed_upload_writes_only_what_is_missing(s3: S3, out: Path) -> None:
    source = case("dcp_fsdp2_tp").path
    resharded(source, out / "m", "4")
    begun(s3, source)
    done = set(s3.get("m"))
    assert done == {UNFINISHED, "__0_0.distcp", "__1_0.distcp"}
    with pytest.raises(Unsupported, match="plan has changed"):
        resharded(source, s3.url("m"), "2", resume=True)
    s3.requests.clear()
    resharded(source, s3.url("m"), "4", resume=True)
    written = {one.name for one in s3.of("PutObject")}
    assert written == {UNFINISHED, "__2_0.distcp", "__3_0.distcp", ".metadata"}
    assert s3.get("m") == files_of(out / "m")


def test_a_resumed_upload_writes_a_file_of_another_size_again(s3: S3, out: Path) -> None:
    source = case("dcp_fsdp2_tp").path
    resharded(source, out / "m", "4")
    begun(s3, source)
    s3.write("m/__0_0.distcp", s3.get("m")["__0_0.distcp"][:-1])
    resharded(source, s3.url("m"), "4", resume=True)
    assert s3.get("m") == files_of(out / "m")


@pytest.mark.parametrize("more", [{}, {"overwrite": True}], ids=str)
def test_without_resume_what_was_left_is_written_anew(
    more: dict[str, Any], s3: S3, out: Path
) -> None:
    """Files of other names than this run's are removed if that is asked for."""
    source = case("dcp_fsdp2_tp").path
    s3.fail(DENIED, *WRITES, key="*.metadata")
    with pytest.raises(TransferError):
        resharded(source, s3.url("m"), "4")
    s3.heal()
    if not more:
        left = s3.get("m")
        with pytest.raises(Unsupported, match=r"already exists \(2 files, such as __2_0"):
            resharded(source, s3.url("m"), "2")
        assert s3.get("m") == left
        resharded(source, s3.url("m"), "4")
        return
    resharded(source, s3.url("m"), "2", **more)
    resharded(source, out / "m", "2")
    assert s3.get("m") == files_of(out / "m")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_process_that_is_ended_leaves_no_checkpoint_and_is_resumed(
    number: int, s3: S3, out: Path
) -> None:
    source = big(out, 3)

    s3.fail(call(lambda request: time.sleep(0.3)), "UploadPart")
    command = [sys.executable, "-m", "ckptool", "reshard", str(source), s3.url("m")]
    command += ["--mesh", "1", "--budget", "40MiB"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not s3.of("UploadPart"):
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    s3.heal()
    assert set(s3.get("m")) - {"__0_0.distcp"} == {UNFINISHED}
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number, told
        assert not s3.uploads
    resharded(source, s3.url("m"), "1", resume=True)
    resharded(source, out / "m", "1")
    assert s3.get("m") == files_of(out / "m")
    assert number == signal.SIGKILL or not s3.uploads


@pytest.mark.parametrize("removed", [True, False])
def test_interrupted_at_its_end_it_says_whether_all_is_there(
    removed: bool, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note is removed last: until then readers take the output for unfinished."""
    forget = StoreNotes.remove

    def interrupted(notes: StoreNotes) -> None:
        if removed:
            forget(notes)
        raise KeyboardInterrupt

    monkeypatch.setattr(StoreNotes, "remove", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        resharded(case("dcp_fsdp2_tp").path, s3.url("m"), "2")
    stands = f"{s3.url('m')} is complete and verified"
    assert caught.value.__notes__ == ([stands] if removed else [RESUME_HINT])
    assert (UNFINISHED in s3.get("m")) is not removed


def test_interrupted_at_its_end_it_does_not_fail_if_the_store_refuses(
    s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(notes: StoreNotes) -> None:
        s3.fail(DENIED, "GetObject")
        raise KeyboardInterrupt

    monkeypatch.setattr(StoreNotes, "remove", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        resharded(case("dcp_fsdp2_tp").path, s3.url("m"), "2")
    assert caught.value.__notes__ == [RESUME_HINT]


def test_credentials_that_expire_midway_keep_what_was_written(s3: S3) -> None:
    place = in_store(s3.put(case("dcp_fsdp2_tp").path, "source"))
    options = ReshardOptions(parse_mesh("4"), rank_state="drop")
    prepared = prepare_reshard(place, location(s3.url("m")), options)
    place.store.blocks.clear()
    s3.fail(EXPIRED, key="source/__3_0.distcp")
    with pytest.raises(TransferError, match="the credentials have expired") as caught:
        prepared.run()
    assert "--resume" in (caught.value.hint or "")
    s3.heal()
    resharded(s3.url("source"), s3.url("m"), "4", resume=True)
    assert ".metadata" in s3.get("m")
