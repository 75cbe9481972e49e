"""Everything written to a store is read back and compared before it counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_server import altered, call, reset
from store_server import S3, s3, server
from test_every_request import ONCE, as_it_reads

from ckptool.commands.convert import ConvertReport, prepare
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import MAX_SHARD_SIZE, ConvertOptions, TransferOptions
from ckptool.commands.transfer.transfer import Transfer
from ckptool.core.layout import Data, Literal
from ckptool.engine.share import Share
from ckptool.errors import CkptoolError, NoAnswer, NotVerified, TransferError
from ckptool.storage.commit_note import UNFINISHED
from ckptool.storage.store import Store
from ckptool.storage.url import location

TARGETS = {"safetensors": "m", "torch-save": "m.pt", "dcp": "m", "dcp-safetensors": "m"}


@pytest.fixture
def source(out: Path) -> Path:
    """Tensors, values and a config that is copied."""
    state = {n: torch.arange(240.0).reshape(12, 20) + at for at, n in enumerate("abc")}
    torch.save(state | {"lr": 0.1}, out / "m.pt")
    prepare(out / "m.pt", out / "in", ConvertOptions("safetensors", max_shard_size=1_000)).run()
    (out / "in" / "config.json").write_text('{"model_type": "llama"}')
    return out / "in"


def planned(source: Path, to: str, s3: S3, **more: Any) -> Transfer[ConvertReport]:
    transfer = TransferOptions(run=RunOptions(workers=2), **more)
    size = 1_000 if to == "safetensors" else MAX_SHARD_SIZE.default
    options = ConvertOptions(to, max_shard_size=size, transfer=transfer)
    return prepare(source, location(s3.url(f"run/{TARGETS[to]}")), options)


def spots(transfer: Transfer[ConvertReport]) -> list[tuple[str, int]]:
    """A byte of each run of bytes of each file, of both checksums of a tensor, and the last."""
    found = []
    for file in transfer.plan.layout.files:
        offset, first = 0, None
        for number, part in enumerate(file.parts):
            patches = part.patches if isinstance(part, Literal) else ()
            sums = {patch.at + n for patch in patches for n in range(4)}
            free = [n for n in range(min(part.nbytes, 99)) if n not in sums]
            found += [(file.path, offset + n) for n in free[:1]]
            first = number - patches[0].distance if patches and first is None else first
            of_first = (patch for patch in patches if number - patch.distance == first)
            found += [(file.path, offset + patch.at + 1) for patch in of_first]
            offset += part.nbytes
        found.append((file.path, offset - 1))
    return found


@pytest.mark.parametrize("to", TARGETS)
def test_no_flipped_bit_counts_wherever_it_is(to: str, source: Path, s3: S3) -> None:
    places = [one for one in spots(planned(source, to, s3)) if not one[0].startswith("model-00002")]
    assert len(places) > 5
    for file, at in places:
        s3.fail(altered(at), "PutObject", key=f"run/*{file}")
        with pytest.raises(NotVerified, match="verification failed: "):
            planned(source, to, s3).run()
        s3.heal()
        assert not s3.get("run")
    planned(source, to, s3).run()


def replaced(s3: S3, key: str) -> Callable[[object], None]:
    """Another object of the same size takes the place of one."""

    def replace(request: object) -> None:
        data = s3.get(key)[""]
        s3.write(key, bytes(len(data)))

    return replace


def data_file(transfer: Transfer[ConvertReport]) -> str:
    """The first file that holds a tensor."""
    return next(
        file.path
        for file in transfer.plan.layout.files
        if any(isinstance(part, Data) for part in file.parts)
    )


@pytest.mark.parametrize("verify", [True, False])
def test_a_file_that_is_replaced_before_the_commit(verify: bool, source: Path, s3: S3) -> None:
    """It is another's and stays; what would make a checkpoint of it does not."""
    transfer = planned(source, "dcp", s3, verify=verify)
    key = f"run/m/{data_file(transfer)}"
    other = bytes(10) if not verify else None

    def replace(request: object) -> None:
        s3.write(key, bytes(len(s3.get(key)[""])) if other is None else other)

    s3.fail(call(replace), "PutObject", key="*.metadata")
    with pytest.raises(TransferError, match=r"missing, or changed since written: __0_0\.distcp"):
        transfer.run()
    assert as_it_reads(s3) is None
    assert ".metadata" not in s3.get("run/m")
    assert not any(s3.get(key)[""])


def test_what_makes_a_checkpoint_is_replaced_before_the_commit(source: Path, s3: S3) -> None:
    transfer = planned(source, "dcp", s3)
    s3.requests.clear()
    transfer.run()
    last = len(s3.of("ListObjectsV2"))
    s3.server.buckets[s3.bucket].clear()
    key, again = "run/m/.metadata", planned(source, "dcp", s3)
    s3.fail(call(lambda request: s3.write(key, b"other")), "ListObjectsV2", start=last, times=1)
    with pytest.raises(TransferError, match=r"missing, or changed since written: \.metadata"):
        again.run()
    assert s3.get(key)[""] == b"other"


def test_a_file_that_is_replaced_while_it_is_read_back(source: Path, s3: S3) -> None:
    transfer = planned(source, "dcp", s3)
    key = f"run/m/{data_file(transfer)}"
    s3.fail(call(replaced(s3, key)), "GetObject", key=key, times=1)
    with pytest.raises(NotVerified, match=r"cannot be read back: .*changed"):
        transfer.run()
    assert list(s3.get("run")) == [f"m/{data_file(transfer)}"]  # nobody knows whose it is


@pytest.mark.parametrize("again", ["resume", "overwrite"])
@pytest.mark.parametrize("is_changed", [True, False])
def test_an_output_that_was_read_back_in_part(
    again: str, is_changed: bool, source: Path, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the first reads ends a run; what changed since is found by the next."""
    monkeypatch.setattr(Store, "policy", ONCE)
    planned(source, "dcp", s3).run()
    whole = s3.get("run")
    key = f"run/m/{data_file(planned(source, 'dcp', s3))}"
    s3.server.buckets[s3.bucket].clear()
    s3.fail(reset, "GetObject", key=key)
    with pytest.raises(TransferError, match="--resume continues"):
        planned(source, "dcp", s3).run()
    s3.heal()
    assert UNFINISHED in s3.get("run/m")
    if is_changed:
        flipped = bytearray(s3.get(key)[""])
        flipped[-30] ^= 1
        s3.write(key, bytes(flipped))
    if is_changed and again == "resume":
        with pytest.raises(NotVerified):
            planned(source, "dcp", s3, **{again: True}).run()
        assert not s3.get("run")
    else:
        planned(source, "dcp", s3, **{again: True}).run()
        assert s3.get("run") == whole


def test_a_file_of_a_part_that_is_gone_when_that_ends(source: Path, s3: S3) -> None:
    transfer = planned(source, "dcp", s3, part=Share(0, 1))
    s3.requests.clear()
    lost = f"run/m/{data_file(transfer)}"
    transfer.run()
    last = len(s3.of("ListObjectsV2"))
    s3.server.buckets[s3.bucket].clear()
    again = planned(source, "dcp", s3, part=Share(0, 1))
    s3.fail(call(lambda request: s3.remove(lost)), "ListObjectsV2", start=last, times=1)
    with pytest.raises(TransferError, match=r"missing, or changed since written: __0_0\.distcp"):
        again.run()


def test_parts_of_a_run_in_a_store_that_is_gone(
    source: Path, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From each request of a part, or of the end, on: what is begun again ends whole."""
    monkeypatch.setattr(Store, "policy", ONCE)
    planned(source, "dcp-safetensors", s3).run()
    whole = s3.get("run")
    steps: list[dict[str, Any]] = [{"part": Share(0, 2)}, {"part": Share(1, 2)}, {"finish": True}]
    for at, step in enumerate(steps[1:], start=1):
        number, failed = 1, True
        while failed:
            s3.server.buckets[s3.bucket].clear()
            for before in steps[:at]:
                planned(source, "dcp-safetensors", s3, **before).run()
            rule = s3.fail(reset, start=number)
            failed = False
            try:
                planned(source, "dcp-safetensors", s3, **step).run()
            except (CkptoolError, NoAnswer):
                failed = True
            s3.heal()
            assert failed == (rule.seen >= number)
            assert as_it_reads(s3) is None or s3.get("run") == whole
            for after in steps[at if failed else at + 1 :]:
                planned(source, "dcp-safetensors", s3, **after).run()
            assert s3.get("run") == whole
            number += 2 if "finish" in step else 6
        assert number > 10
