"""A store that refuses credentials, or gives no answer, says nothing about the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.loopback.messages import Answer, Request
from conftest import case
from fault_server import (
    DENIED,
    EXPIRED,
    INTERNAL,
    READS,
    REMOVALS,
    SKEWED,
    SLOW_DOWN,
    WRITES,
    Fault,
    altered,
    call,
    lost,
    refuse,
    reset,
    stall,
)
from msgspec.structs import replace
from places import in_store
from safetensors.torch import save_file
from store_server import QUICK, S3, s3, server
from test_s3 import big, files_of, resharded
from typer.testing import CliRunner

import ckptool
from ckptool.cli.app import app
from ckptool.cli.process import known_error
from ckptool.commands.convert import prepare
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ConvertOptions, ReshardOptions, TransferOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.core.sharding.placement import parse_mesh
from ckptool.errors import Denied, NoAnswer, NotVerified, TransferError, Unsupported
from ckptool.storage.clients import retry as retrying
from ckptool.storage.clients.retry import RetryPolicy
from ckptool.storage.commit_note import UNFINISHED
from ckptool.storage.store import Store
from ckptool.storage.url import location

REFUSALS = {
    "denied": (DENIED, "access is denied"),
    "expired": (EXPIRED, "the credentials have expired"),
    "skewed": (SKEWED, "this machine's clock is wrong"),
}
ON_THEIR_WAY = 40
"""Requests that may be on their way when one is refused: of all that read, and that fetch ahead."""
SOURCE = case("dcp_fsdp2_tp").path


class Clock:
    """Time that passes only while a policy waits, and some seconds for each look at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The policy that users get, and a clock that does not make them wait."""
    found = Clock()
    monkeypatch.setattr(retrying, "time", found)
    monkeypatch.setattr(Store, "policy", RetryPolicy())
    return found


def ended(*arguments: object) -> tuple[int, str]:
    """The exit code of a command, and all that it says."""
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    if result.exception is None or isinstance(result.exception, SystemExit):
        return result.exit_code, result.output
    error = known_error(result.exception)
    return error.exit_code, f"{result.output}{error.message}\nhint: {error.hint}"


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DCP checkpoint of 300 items on four ranks."""
    folder = tmp_path_factory.mktemp("many")
    tensors = {f"layer.{n}.weight": torch.full((64, 512), float(n)) for n in range(75)}
    save_file(tensors, folder / "m.safetensors")
    options = ReshardOptions(parse_mesh("4"), to="dcp", transfer=TransferOptions())
    prepare_reshard(folder / "m.safetensors", folder / "m", options).run()
    return folder / "m"


# Refusals


@pytest.mark.parametrize("kind", REFUSALS)
@pytest.mark.parametrize("start", [1, 4])
@pytest.mark.parametrize(
    "command",
    [
        ["convert", "SOURCE", "OUT", "--to", "safetensors"],
        ["reshard", "SOURCE", "OUT", "--mesh", "2", "--to", "dcp"],
        ["verify", "SOURCE"],
        ["verify", "SOURCE", "--against", "SOURCE"],
        ["inspect", "SOURCE", "--stats", "*"],
    ],
    ids=lambda words: "-".join(words[::3]),
)
def test_a_refusal_ends_all_work_and_is_not_damage(
    command: list[str], start: int, kind: str, many: Path, s3: S3, out: Path
) -> None:
    url, target = s3.put(many, "m"), out / "out"
    fault, words = REFUSALS[kind]
    rule = s3.fail(fault, "GetObject", key="*.distcp", start=start)
    code, told = ended(*({"SOURCE": url, "OUT": target}.get(one, one) for one in command))
    assert code == 5, told
    assert words in told
    assert "problems" not in told
    assert "lost" not in told
    assert "damaged" not in told
    assert rule.seen - start < ON_THEIR_WAY
    assert not target.exists()
    s3.heal()
    if "--resume" in told:
        words_again = [{"SOURCE": url, "OUT": target}.get(one, one) for one in command]
        assert ended(*words_again, "--resume")[0] == 0


def test_a_transfer_that_is_refused_midway_goes_on_later(many: Path, s3: S3, out: Path) -> None:
    place = in_store(s3.put(many, "m"))
    prepared = prepare(place, out / "m", ConvertOptions("dcp"))
    place.store.blocks.clear()
    s3.fail(EXPIRED, "GetObject", start=3)
    with pytest.raises(TransferError, match="the credentials have expired") as caught:
        prepared.run()
    assert "renew the credentials" in (caught.value.hint or "")
    assert "--resume" in (caught.value.hint or "")
    assert caught.value.message.code == "access-denied"
    s3.heal()
    again = ConvertOptions("dcp", transfer=TransferOptions(resume=True))
    prepare(location(s3.url("m")), out / "m", again).run()
    prepare(many, out / "other", ConvertOptions("dcp")).run()
    assert files_of(out / "m") == files_of(out / "other")


@pytest.mark.parametrize(
    ("fault", "code", "hint"),
    [
        (EXPIRED, "access-denied", "renew the credentials; "),
        (DENIED, "access-denied", "check the credentials: "),
        (INTERNAL, "no-answer", "the finished files are kept"),
    ],
)
@pytest.mark.parametrize("operation", ["PutObject", "UploadPart"])
def test_an_upload_that_is_refused_says_why_and_what_helps(
    operation: str, fault: Fault, code: str, hint: str, s3: S3, out: Path
) -> None:
    source = big(out, 3)
    s3.fail(fault, operation, key="*.metadata" if operation == "PutObject" else "*.distcp")
    with pytest.raises(TransferError, match=r"byte [\d,]+ cannot be written: ") as caught:
        resharded(source, s3.url("m"), "1")
    assert caught.value.message.code == code
    assert (caught.value.hint or "").startswith(hint)
    assert "--resume" in (caught.value.hint or "")


@pytest.mark.parametrize("kind", REFUSALS)
@pytest.mark.parametrize(
    "command", [["inspect", "M"], ["verify", "M"], ["verify", "M", "--latest-good"]]
)
def test_a_source_that_is_refused_at_once(command: list[str], kind: str, s3: S3) -> None:
    s3.put(SOURCE, "run/step-1")
    fault, words = REFUSALS[kind]
    rule = s3.fail(fault)
    code, told = ended(*(s3.url("run") if one == "M" else one for one in command))
    assert (code, words in told) == (5, True), told
    assert rule.seen <= 3


@pytest.mark.parametrize("operation", ["ListObjectsV2", "GetObject"])
def test_a_step_that_is_refused_is_not_a_bad_step(operation: str, s3: S3) -> None:
    """An older step must not be taken for the newest good one."""
    s3.put(SOURCE, "run/step-1")
    s3.put(SOURCE, "run/step-2")
    s3.fail(DENIED, operation, key="run/step-2/*" if operation == "GetObject" else "*")
    code, told = ended("verify", s3.url("run"), "--latest-good")
    assert (code, "access is denied" in told) == (5, True), told


def test_json_says_a_refusal_by_its_code(s3: S3) -> None:
    from ckptool.render.messages import error_json

    s3.put(SOURCE, "m")
    s3.fail(EXPIRED, "GetObject")
    with pytest.raises(Denied) as caught:
        open_checkpoint(location(s3.url("m")))
    said = error_json(known_error(caught.value))
    assert said["exit_code"] == 5
    assert [one["code"] for one in said["problems"]] == ["access-denied"]


# No answer


@pytest.mark.parametrize("retry_after", [None, 1, 30])
def test_a_listing_without_an_answer_ends_within_a_minute(
    retry_after: int | None, clock: Clock, s3: S3
) -> None:
    s3.put(SOURCE, "m")
    rule = s3.fail(refuse(503, "SlowDown", retry_after), "ListObjectsV2")
    with pytest.raises(NoAnswer, match="no answer after"):
        open_checkpoint(location(s3.url("m")))
    assert clock.now <= 60
    assert 2 <= rule.seen <= RetryPolicy().attempts


def test_a_read_without_an_answer_ends(clock: Clock, s3: S3) -> None:
    s3.put(SOURCE, "m")
    rule = s3.fail(SLOW_DOWN, "GetObject")
    with pytest.raises(NoAnswer, match=f"no answer after {RetryPolicy().attempts} attempts"):
        open_checkpoint(location(s3.url("m")))
    assert clock.now <= RetryPolicy().total
    assert rule.seen == RetryPolicy().attempts


def test_nobody_who_listens_is_found_out_within_ten_seconds(
    clock: Clock, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(NoAnswer, match="Could not connect"):
        open_checkpoint(location(s3.url("m")))
    assert 1 < clock.now <= 10


def test_a_stalled_read_is_sent_again(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    from threading import Event

    from msgspec.structs import replace

    monkeypatch.setattr(Store, "policy", replace(QUICK, timeout=0.5))
    s3.put(SOURCE, "m")
    release = Event()
    s3.fail(stall(release), "GetObject", times=1)
    assert open_checkpoint(location(s3.url("m"))).catalog.tensors
    release.set()


@pytest.mark.parametrize("fault", [SLOW_DOWN, refuse(503, "SlowDown", 0), reset, lost])
def test_every_fifth_request_fails(fault: Fault, many: Path, s3: S3, out: Path) -> None:
    url = s3.put(many, "m")
    s3.fail(fault, *READS, "PutObject", "UploadPart", "CompleteMultipartUpload", every=5)
    resharded(url, s3.url("out"), "2")
    s3.heal()
    resharded(many, out / "out", "2")
    assert s3.get("out") == files_of(out / "out")


# Who may read, and not list


def without_list(s3: S3) -> None:
    """Listing is denied, and so, as in S3, that a key is not there is not said."""
    s3.fail(DENIED, "ListObjectsV2")
    held = s3.server.buckets[s3.bucket]
    s3.fail(DENIED, "GetObject", "HeadObject", where=lambda one: one.key not in held)


@pytest.mark.parametrize(
    ("name", "file"),
    [("dcp_fsdp2_tp", ".metadata"), ("hf_shards", "model.safetensors.index.json")],
)
def test_a_metadata_file_that_is_named_needs_no_listing(
    name: str, file: str, s3: S3, out: Path
) -> None:
    url = s3.put(case(name).path, "run/m")
    without_list(s3)
    wanted = open_checkpoint(case(name).path)
    assert open_checkpoint(location(f"{url}/{file}")).catalog.tensors == wanted.catalog.tensors
    assert ended("convert", f"{url}/{file}", out / "m", "--to", "dcp")[0] == 0
    assert ended("verify", f"{url}/{file}")[0] == 0
    code, told = ended("inspect", url)
    assert code == 5
    assert f"{url}/.metadata" in told


def test_a_file_that_is_listed_and_denied_is_not_missing(s3: S3, out: Path) -> None:
    """Of one that is not listed the same answer says that one may list a part of a bucket only."""
    torch.save({"w": torch.ones(2), "step": 3}, out / "m.pt")
    ckptool.convert(out / "m.pt", out / "m.safetensors")
    for name in ("m.safetensors", "m.extra.pt"):
        s3.put(out / name, f"run/{name}")
    save_file({"w": torch.ones(2)}, out / "alone.safetensors")
    s3.put(out / "alone.safetensors", "run/alone.safetensors")
    s3.fail(DENIED, "HeadObject", "GetObject", key="*.extra.pt")
    with pytest.raises(Denied, match=r"m\.extra\.pt: nothing says whether it is there"):
        ckptool.convert(s3.url("run/m.safetensors"), out / "copy.pt")
    assert ckptool.convert(s3.url("run/alone.safetensors"), out / "copy.pt").notes == ()


# Answers that were lost


def test_a_lost_answer_to_the_last_request_is_settled(s3: S3, out: Path) -> None:
    source = big(out, 3)
    rule = s3.fail(lost, "CompleteMultipartUpload", times=1)
    resharded(source, s3.url("m"), "1")
    assert rule.seen == 2
    resharded(source, out / "m", "1")
    assert s3.get("m") == files_of(out / "m")
    assert not s3.uploads


def test_an_object_of_another_is_not_taken_for_ones_own(s3: S3, out: Path) -> None:
    source = big(out, 3)
    resharded(source, out / "m", "1")
    size = (out / "m" / "__0_0.distcp").stat().st_size

    def replaced(request: Request, carry_out: Callable[[Request], Any]) -> Any:
        s3.server.partial.clear()
        s3.write(request.key, bytes(size))
        return lost(request, carry_out)

    s3.fail(replaced, "CompleteMultipartUpload", times=1)
    with pytest.raises(TransferError, match="cannot be written"):
        resharded(source, s3.url("m"), "1")
    assert ".metadata" not in s3.get("m")


@pytest.mark.parametrize("operation", [*WRITES, *REMOVALS])
def test_any_lost_answer_changes_nothing(operation: str, s3: S3, out: Path) -> None:
    source = big(out, 2)
    resharded(source, s3.url("m"), "2")
    s3.fail(lost, operation, times=1)
    resharded(source, s3.url("m"), "1", overwrite=True)
    resharded(source, out / "m", "1")
    assert s3.get("m") == files_of(out / "m")


# What may not be removed


def test_parts_that_may_not_be_thrown_away_are_named(s3: S3, out: Path) -> None:
    source = big(out, 3)
    s3.fail(DENIED, "AbortMultipartUpload")
    s3.fail(DENIED, "UploadPart", start=3)
    with pytest.raises(TransferError, match="access is denied") as caught:
        resharded(source, s3.url("m"), "1")
    hint = caught.value.hint or ""
    nbytes = sum(len(part) for one in s3.uploads.values() for part in one.parts.values())
    said = re.search(rf"at most ([\d,]+) bytes of {s3.url('m/__0_0.distcp')}", hint)
    assert said is not None
    assert 0 < nbytes <= int(said[1].replace(",", ""))
    assert "charges for" in hint


@pytest.mark.parametrize("more", [{}, {"overwrite": True}])
def test_who_may_not_remove_changes_nothing(more: dict[str, Any], s3: S3) -> None:
    """The note of an unfinished output could not be removed at the end."""
    if more:
        resharded(SOURCE, s3.url("m"), "2")
    before = s3.get("m")
    s3.fail(DENIED, "DeleteObject", "DeleteObjects")
    with pytest.raises(TransferError, match=r"written to: .*test removal: access is denied"):
        resharded(SOURCE, s3.url("m"), "4", **more)
    assert s3.get("m") == before
    if more:
        assert open_checkpoint(location(s3.url("m"))).catalog.tensors


def test_removal_that_is_denied_later_names_what_remains(s3: S3, out: Path) -> None:
    """What is written is stored otherwise, so that it is thrown away."""
    source = big(out, 2)
    s3.fail(altered(1000), "UploadPart", key="m/__0_0.distcp", times=1)
    s3.fail(DENIED, "DeleteObject", start=2)
    with pytest.raises(NotVerified) as caught:
        resharded(source, s3.url("m"), "2", run=RunOptions(1))
    kept = {name: data for name, data in s3.get("m").items() if name != UNFINISHED}
    assert kept
    assert f"{sum(map(len, kept.values())):,} bytes of {s3.url(f'm/{min(kept)}')}" in str(
        caught.value.hint
    )


def test_a_listing_without_an_end(s3: S3) -> None:
    def repeat(request: Request, carry_out: Callable[[Request], Answer]) -> Answer:
        answer, more = carry_out(request), "<NextContinuationToken>m/</NextContinuationToken>"
        more = f"<IsTruncated>true</IsTruncated>{more}"
        body = bytes(answer.body).replace(b"<IsTruncated>false</IsTruncated>", more.encode())
        return replace(answer, body=body)

    store = in_store(s3.put(SOURCE, "m"))
    s3.fail(repeat, "ListObjectsV2")
    with pytest.raises(Unsupported, match="the store lists the same files again and again"):
        open_checkpoint(store)
