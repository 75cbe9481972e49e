"""An upload that was killed at any file is not a checkpoint until it is completed."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from conftest import case
from fsspec.implementations.memory import MemoryFileSystem
from places import in_store
from store_server import S3, s3, server
from test_s3 import big, files_of

from ckptool.commands.convert import prepare
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import (
    MAX_SHARD_SIZE,
    ConvertOptions,
    ReshardOptions,
    TransferOptions,
)
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.commands.runs.verify import verify_run
from ckptool.commands.verify.verify import verify
from ckptool.core.sharding.placement import parse_mesh
from ckptool.engine.read.tiles import read_tiles
from ckptool.engine.write import send
from ckptool.errors import Damaged, SourceError, Unsupported
from ckptool.storage import multipart
from ckptool.storage.commit_note import UNFINISHED
from ckptool.storage.url import RemotePath, location

SOURCE = case("dcp_fsdp2_tp").path


def planned(kind: str, target: Path | RemotePath, **more: Any) -> Any:
    transfer = TransferOptions(run=RunOptions(workers=1, fsync=False), **more)
    if kind in ("hf", "dcp"):
        to, size = (kind, MAX_SHARD_SIZE.default) if kind == "dcp" else ("safetensors", 1_000)
        options = ConvertOptions(to, max_shard_size=size, transfer=transfer)
        return prepare(SOURCE, target, options)
    asked = ReshardOptions(parse_mesh("2"), to=kind, rank_state="drop", transfer=transfer)
    return prepare_reshard(SOURCE, target, asked)


def place() -> RemotePath:
    found = location(f"memory://{uuid.uuid4().hex}/run/step-2")
    assert isinstance(found, RemotePath)
    return found


def killed_at(close: int, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    """Do the work until this file would appear."""
    closed: list[None] = []

    def killed() -> Iterator[bytes]:
        closed.append(None)
        if len(closed) > close:
            raise KeyboardInterrupt
        yield b""

    def counting(place: RemotePath, nbytes: int, contents: Iterable[bytes], capacity: int) -> None:
        multipart.upload(place, nbytes, chain(contents, killed()), capacity)

    with monkeypatch.context() as patched:
        patched.setattr(send, "upload", counting)
        with pytest.raises(KeyboardInterrupt):
            work()


def is_refused(target: RemotePath) -> bool:
    """Whether every way to read a folder sees that it is not finished."""
    with pytest.raises(Damaged, match="unfinished ckptool output"):
        open_checkpoint(location(target.url))
    try:
        report = verify(location(target.url), VerifyOptions())
    except SourceError:
        return True
    return not report.ok and "save-incomplete" in {one.code for one in report.findings}


@pytest.mark.parametrize("kind", ["hf", "dcp", "dcp-safetensors", "rank-local"])
def test_killed_before_any_file(kind: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(kind, out / "m").run()
    whole = files_of(out / "m")
    for close in range(len(whole)):
        target = place()
        killed_at(close, monkeypatch, planned(kind, target).run)
        assert is_refused(target)
        planned(kind, target, resume=True).run()
        found = {name: (target / name).read_bytes() for name in in_store(target.url).listing}
        assert found == whole


def test_killed_when_only_the_note_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptool.engine.write.store_notes import StoreNotes

    def stop(notes: StoreNotes) -> None:
        raise KeyboardInterrupt

    target = place()
    with monkeypatch.context() as patched:
        patched.setattr(StoreNotes, "remove", stop)
        with pytest.raises(KeyboardInterrupt):
            planned("hf", target).run()
    assert is_refused(target)
    planned("hf", target, resume=True).run()
    assert open_checkpoint(location(target.url)).catalog.tensors


def test_a_run_does_not_count_it_as_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    target = place()
    older = target.with_name("step-1")
    planned("hf", older).run()
    for close in (0, 1):
        killed_at(close, monkeypatch, planned("hf", target, overwrite=close > 0).run)
        report = verify_run(location(target.parent.url), VerifyOptions(), every=False)
        assert report.latest_good is not None
        assert report.latest_good.number == 1


def test_a_copy_of_it_on_a_disk_says_so_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = place()
    killed_at(1, monkeypatch, planned("hf", target).run)
    for name in location(target.url).listing:  # type: ignore[union-attr]
        (tmp_path / name).write_bytes((target / name).read_bytes())
    assert (tmp_path / UNFINISHED).exists()
    with pytest.raises(Damaged, match="unfinished ckptool output"):
        open_checkpoint(tmp_path)


def test_a_file_is_removed_before_what_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old file without the values beside it would be read as whole."""
    target = place().with_name("m.safetensors")
    prepare(SOURCE, target, ConvertOptions("safetensors")).run()
    removed: list[str] = []
    monkeypatch.setattr(MemoryFileSystem, "rm_file", lambda fs, key: removed.append(key))
    options = ConvertOptions("safetensors", transfer=TransferOptions(overwrite=True))
    prepare(SOURCE, location(target.url), options).run()
    names = [name.rpartition("/")[2] for name in removed]
    assert names[1:3] == ["m.safetensors", "m.extra.pt"]  # after a trial, of nothing


def stopped_at(removal: int, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> bool:
    """Do the work until this removal of a file; return whether there are so many."""
    client, seen = MemoryFileSystem, 0
    real = client.rm_file

    def counting(fs: MemoryFileSystem, key: str) -> None:
        nonlocal seen
        seen += 1
        if seen > removal:
            raise KeyboardInterrupt
        real(fs, key)

    with monkeypatch.context() as patched:
        patched.setattr(client, "rm_file", counting)
        with suppress(KeyboardInterrupt):
            work()
    return seen > removal


@pytest.mark.parametrize("again", [{"resume": True}, {}, {"overwrite": True}])
@pytest.mark.parametrize("kind", ["hf", "dcp-safetensors"])
def test_old_files_do_not_pass_for_new_ones(
    kind: str, again: dict[str, bool], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a removal left have the same names and sizes, and other values."""
    planned(kind, out / "m").run()
    new = files_of(out / "m")
    trial = 1
    for removal in range(trial + 1, trial + len(new)):
        target = place()
        for name, data in new.items():
            old = data[:-1] + bytes([data[-1] ^ 1]) if name.endswith(".safetensors") else data
            (target / name).write_bytes(old)
        assert stopped_at(removal, monkeypatch, planned(kind, target, overwrite=True).run)
        assert is_refused(target)
        assert stopped_at(trial, monkeypatch, planned(kind, target, **again).run)
        planned(kind, target, **again).run()
        assert {name: (target / name).read_bytes() for name in in_store(target.url).listing} == new


def test_a_run_that_was_to_overwrite_is_continued_once_the_old_one_is_gone(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then only --overwrite starts over: the note permits nothing by itself."""
    planned("hf", out / "m").run()
    new = files_of(out / "m")
    for removal in (1, 2, None):
        target = place()
        planned("dcp", target).run()
        work, again = planned("hf", target, overwrite=True).run, {"resume": True}
        if removal is None:
            killed_at(1, monkeypatch, work)
        else:
            assert stopped_at(removal, monkeypatch, work)
            with pytest.raises(Unsupported) as caught:
                planned("hf", target, resume=True).run()
            assert "--overwrite starts over" in (caught.value.hint or "")
            again = {"overwrite": True}
        planned("hf", target, **again).run()
        assert {name: (target / name).read_bytes() for name in in_store(target.url).listing} == new


def test_an_interrupt_once_the_last_file_was_sent_leaves_no_parts(
    s3: S3, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = read_tiles

    def stopping(source: Any, wanted: Any, *more: Any) -> None:
        jobs = list(wanted)
        real(source, jobs, *more)
        if jobs:
            raise KeyboardInterrupt

    monkeypatch.setattr(send, "read_tiles", stopping)
    prepared = prepare(
        big(out, 2), location(s3.url("m.safetensors")), ConvertOptions("safetensors")
    )
    with pytest.raises(KeyboardInterrupt):
        prepared.run()
    assert s3.of("CreateMultipartUpload")
    assert not s3.uploads
