"""A store that is gone from some request on: nothing incomplete reads as complete.

From the n-th request on each connection is reset, for every possible n: as if the process, the
network or the store had ended there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import case
from fault_server import reset
from store_server import S3, s3, server
from test_s3 import files_of

from ckptool.commands.convert import prepare
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ConvertOptions, ReshardOptions, TransferOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.core.sharding.placement import parse_mesh
from ckptool.errors import CkptoolError, NoAnswer
from ckptool.storage.clients.retry import RetryPolicy
from ckptool.storage.commit_note import UNFINISHED
from ckptool.storage.store import Store
from ckptool.storage.url import location

SOURCE = case("dcp_base").path
ONCE = RetryPolicy(attempts=1, pause=0.0)


def write(kind: str, target: Any, mesh: str = "2", **more: Any) -> None:
    transfer = TransferOptions(run=RunOptions(1, fsync=False), **more)
    if kind == "reshard":
        options = ReshardOptions(parse_mesh(mesh), rank_state="drop", transfer=transfer)
        prepare_reshard(SOURCE, target, options).run()
    else:
        prepare(SOURCE, target, ConvertOptions(kind, max_shard_size=1_000, transfer=transfer)).run()


def ends_at(number: int, s3: S3, kind: str, **more: Any) -> bool:
    """Write to a store that is gone from a request on; return whether it was asked that much."""
    rule = s3.fail(reset, start=number)
    failed = False
    try:
        write(kind, location(s3.url("m")), **more)
    except (CkptoolError, NoAnswer):
        failed = True
    s3.heal()
    assert failed == (rule.seen >= number)
    return failed


def as_it_reads(s3: S3) -> dict[str, bytes] | None:
    """The files of what reads as a checkpoint, None if nothing does."""
    try:
        open_checkpoint(location(s3.url("m")))
    except CkptoolError:
        return None
    return s3.get("m")


@pytest.mark.parametrize("kind", ["reshard", "safetensors"])
def test_a_new_output(kind: str, s3: S3, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "policy", ONCE)
    write(kind, out / "m")
    whole = files_of(out / "m")
    number = 1
    while ends_at(number, s3, kind):
        assert as_it_reads(s3) in (None, whole)
        write(kind, location(s3.url("m")), overwrite=True)
        assert s3.get("m") == whole
        s3.server.buckets[s3.bucket].clear()
        number += 1
    assert number > 10
    assert s3.get("m") == whole


def test_an_output_that_is_replaced(s3: S3, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old checkpoint or the new one, or neither: never files of both."""
    monkeypatch.setattr(Store, "policy", ONCE)
    write("reshard", out / "old", "4")
    write("reshard", out / "new", "2")
    old, new = files_of(out / "old"), files_of(out / "new")
    s3.put(out / "old", "m")
    number = 1
    while ends_at(number, s3, "reshard", overwrite=True):
        assert as_it_reads(s3) in (None, old, new)
        write("reshard", location(s3.url("m")), overwrite=True)
        assert s3.get("m") == new
        s3.server.buckets[s3.bucket].clear()
        s3.put(out / "old", "m")
        number += 1
    assert number > 10
    assert s3.get("m") == new


def test_an_output_of_the_same_sizes_that_is_replaced_and_resumed(
    s3: S3, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "policy", ONCE)
    write("safetensors", out / "m")
    new = files_of(out / "m")
    old = {n: d[:-1] + bytes([d[-1] ^ 1]) if n.endswith("rs") else d for n, d in new.items()}
    number, failed = 1, True
    while failed:
        s3.server.buckets[s3.bucket].clear()
        for name, data in old.items():
            s3.write(f"m/{name}", data)
        failed = ends_at(number, s3, "safetensors", overwrite=True)
        assert as_it_reads(s3) in (None, old, new)
        if UNFINISHED in s3.get("m"):
            write("safetensors", location(s3.url("m")), resume=True)
            assert s3.get("m") == new
        number += 1
    assert number > 10
    assert s3.get("m") == new
