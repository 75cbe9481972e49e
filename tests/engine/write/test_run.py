"""Moving bytes: any tile size and number of threads, failures midway, the target at the end."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import SUFFIX, TENSORS_OF, case, convert_to, read_back

from ckptool.api.commands import verify
from ckptool.commands.convert import prepare
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ConvertOptions, ReshardOptions, TransferOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.core.sharding.placement import parse_mesh, parse_rule
from ckptool.engine.progress import Progress
from ckptool.engine.write.output import OutputFiles
from ckptool.engine.write.run import _PlanWriter
from ckptool.errors import CkptoolError, Damaged, TransferError, Unsupported
from ckptool.storage.files import ReadPolicy
from ckptool.storage.local import LocalSource

NAMES = ["dcp_fsdp2_tp", "rank_experimental", "zip_zoo", "dcp_zstd"]


TILES = (1, 7, 64)


@pytest.mark.parametrize("target", TENSORS_OF)
@pytest.mark.parametrize("name", NAMES)
def test_tiles_of_any_size(
    name: str, target: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each size for each source and for each target, in turns."""
    tile = TILES[(NAMES.index(name) + [*TENSORS_OF].index(target)) % len(TILES)]
    monkeypatch.setattr(LocalSource, "policy", ReadPolicy(tile=tile))
    convert_to(target, case(name).path, out / f"m{SUFFIX[target]}")
    assert read_back(target, out / f"m{SUFFIX[target]}") == case(name).truth


@pytest.mark.parametrize("tile", [64])
def test_columns_in_tiles_of_any_size(
    tile: int, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part has several tiles, also those of small tensors; its checksum is that of all."""
    monkeypatch.setattr(LocalSource, "policy", ReadPolicy(tile=tile))
    reshard_columns(out / "m")
    assert read_back("dcp", out / "m") == case("dcp_fsdp2_tp").truth
    assert verify(out / "m")


def reshard_columns(target: Path, run: RunOptions | None = None) -> None:
    options = ReshardOptions(
        mesh=parse_mesh("1x2"),
        rules=(parse_rule("*=Replicate(),Shard(-1)"), parse_rule("*=Replicate(),Replicate()")),
        rank_state="keep",
        to="dcp",
        transfer=TransferOptions(run=run or RunOptions()),
    )
    prepare_reshard(case("dcp_fsdp2_tp").path, target, options).run()


def test_the_tiles_of_a_band_are_noted_once_all_are_written(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalSource, "policy", ReadPolicy(tile=64))
    log = ""

    def logged(letter: str, of: Any, name: str) -> None:
        known = getattr(of, name)

        def call(*args: Any) -> Any:
            nonlocal log
            log += letter
            return known(*args)

        monkeypatch.setattr(of, name, call)

    for name in ("_write_piece", "_write_small"):
        logged("w", _PlanWriter, name)
    logged("n", _PlanWriter, "_count")
    reshard_columns(out / "m", RunOptions(1, fsync=False))
    assert "wwnn" in log
    assert log.count("w") == log.count("n")


def test_what_comes_last_is_not_written_through_a_link(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = out / "other"
    other.write_bytes(b"mine")
    finish = _PlanWriter._finish

    def finish_behind_a_link(writer: _PlanWriter, number: int) -> None:
        file = writer._folder / writer._files[number].path
        file.unlink()
        file.symlink_to(other)
        finish(writer, number)

    monkeypatch.setattr(_PlanWriter, "_finish", finish_behind_a_link)
    with pytest.raises(CkptoolError):
        convert_to("safetensors", case("dcp_fsdp2_tp").path, out / "m.safetensors")
    assert other.read_bytes() == b"mine"


@pytest.mark.parametrize("workers", [1, 3, 16])
def test_any_number_of_workers_writes_the_same(workers: int, out: Path) -> None:
    source = case("dcp_fsdp2_tp").path
    convert_to("torch-save", source, out / "one.pt", run=RunOptions(1, fsync=False))
    (out / "other").mkdir()
    convert_to("torch-save", source, out / "other" / "one.pt", run=RunOptions(workers, fsync=False))
    assert (out / "one.pt").read_bytes() == (out / "other" / "one.pt").read_bytes()


def test_the_same_again_in_small_writes_is_the_same_bytes(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, at_once in (("1", 1 << 19), ("2", 37)):
        (out / number).mkdir()
        monkeypatch.setattr("ckptool.engine.write.output.WRITE", at_once)
        convert_to("dcp", case("rank_experimental").path, out / number / "m")
    files = sorted(path.name for path in (out / "1" / "m").iterdir())
    assert files == sorted(path.name for path in (out / "2" / "m").iterdir())
    for name in files:
        assert (out / "1/m" / name).read_bytes() == (out / "2/m" / name).read_bytes()


def test_progress_adds_up_to_what_is_written(out: Path) -> None:
    options = ConvertOptions("safetensors")
    prepared = prepare(case("hf_shards").path, out / "m", options)
    progress = Progress()
    prepared.run(progress)
    literals = sum(
        part.nbytes
        for file in prepared.report.files
        for part in file.parts
        if type(part).__name__ == "Literal"
    )
    assert progress.done in (prepared.nbytes, prepared.nbytes - literals)


# A budget too small


@pytest.mark.parametrize("name", ["dcp_fsdp2_tp", "dcp_zstd"])
def test_a_budget_too_small_is_refused(name: str, out: Path) -> None:
    with pytest.raises(Unsupported, match="budget") as caught:
        convert_to("dcp", case(name).path, out / "m", run=RunOptions(budget=1000))
    assert caught.value.exit_code == 4
    assert "--budget" in (caught.value.hint or "")
    assert not list(out.iterdir())


def test_the_hinted_budget_is_enough(out: Path) -> None:
    run = RunOptions(budget=1000)
    with pytest.raises(Unsupported) as caught:
        convert_to("dcp", case("dcp_zstd").path, out / "m", run=run)
    size = int((caught.value.hint or "").removeprefix("--budget ").removesuffix("MiB")) << 20
    run = RunOptions(workers=8, budget=size, fsync=False)
    convert_to("dcp", case("dcp_zstd").path, out / "m", run=run)
    assert read_back("dcp", out / "m") == case("dcp_zstd").truth


# Failures on the way


def visible(folder: Path) -> list[str]:
    """What a person sees; a partial output that ``--resume`` continues is hidden."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


class FullDisk:
    """``os.pwrite`` until ``room`` writes are done."""

    def __init__(self, room: int, number: int = errno.ENOSPC) -> None:
        self.room = room
        self.number = number
        self.real = os.pwrite

    def __call__(self, *args: Any) -> int:
        self.room -= 1
        if self.room < 0:
            raise OSError(self.number, os.strerror(self.number))
        return self.real(*args)


@pytest.mark.parametrize("room", [0, 1, 5])
@pytest.mark.parametrize("target", TENSORS_OF)
def test_a_full_disk(target: str, room: int, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", FullDisk(room))
    if room > 1:
        monkeypatch.setattr("ckptool.engine.write.output._RUN", 1)
    free = r"No space left on device at byte [0-9,]+: [0-9,]+ bytes are free, and room for"
    with pytest.raises(TransferError, match=free) as caught:
        convert_to(target, case("dcp_fsdp2_tp").path, out / f"m{SUFFIX[target]}")
    assert caught.value.exit_code == 5
    assert visible(out) == []


@pytest.mark.parametrize("target", ["safetensors", "torch-save", "dcp"])
def test_a_failure_leaves_the_old_target(
    target: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = out / f"m{SUFFIX[target]}"
    convert_to(target, case("dcp_base").path, path)
    with monkeypatch.context() as context:
        context.setattr(os, "pwrite", FullDisk(2, errno.EIO))
        context.setattr("ckptool.engine.write.output._RUN", 1)
        with pytest.raises(TransferError):
            convert_to(target, case("dcp_fsdp2_tp").path, path, overwrite=True)
    assert read_back(target, path) == case("dcp_base").truth
    assert set(visible(out)) <= {path.name, "m.extra.pt"}


def test_a_write_may_be_short(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda f, data, at: real(f, data[: -(-len(data) // 2)], at))
    convert_to("safetensors", case("dcp_base").path, out / "m")
    assert read_back("safetensors", out / "m") == case("dcp_base").truth


def test_a_read_may_be_short(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda f, buffers, at: real(f, [b[: -(-len(b) // 2)] for b in buffers], at)
    )
    convert_to("safetensors", case("dcp_base").path, out / "m")
    assert read_back("safetensors", out / "m") == case("dcp_base").truth


def test_damage_found_midway_leaves_nothing(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file shrinks between planning and reading."""
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda f, b, at: real(f, b, at) if at < 4000 else 0)
    with pytest.raises(Damaged):
        convert_to("safetensors", case("dcp_base").path, out / "m")
    assert not list(out.iterdir())


def test_an_interruption_passes_and_leaves_the_target_alone(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pwrite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert_to("safetensors", case("dcp_base").path, out / "m")
    assert visible(out) == []


# The target


@pytest.mark.parametrize("target", ["safetensors", "torch-save", "dcp"])
def test_nothing_is_replaced_unless_asked(target: str, out: Path) -> None:
    path = out / f"m{SUFFIX[target]}"
    convert_to(target, case("dcp_base").path, path)
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    with pytest.raises(Unsupported, match="already exists") as caught:
        convert_to(target, case("dcp_fsdp2_tp").path, path)
    assert "--overwrite" in (caught.value.hint or "")
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("target", ["safetensors", "torch-save", "dcp"])
def test_overwrite_replaces_all_of_it(target: str, out: Path) -> None:
    path = out / f"m{SUFFIX[target]}"
    convert_to(target, case("dcp_fsdp2_tp").path, path)
    convert_to(target, case("dcp_base").path, path, overwrite=True)
    assert read_back(target, path) == case("dcp_base").truth
    assert set(visible(out)) <= {path.name, "m.extra.pt"}
    assert not [p for p in out.iterdir() if p.name.startswith(".")]


def test_overwrite_keeps_the_old_until_the_new_is_whole(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, seen = out / "m.pt", os.pwrite, []
    convert_to("torch-save", case("dcp_base").path, path)
    before = path.read_bytes()

    def watching(*args: Any) -> int:
        seen.append(path.read_bytes() == before)
        return real(*args)

    monkeypatch.setattr(os, "pwrite", watching)
    convert_to("torch-save", case("dcp_fsdp2_tp").path, path, overwrite=True)
    assert seen
    assert all(seen)
    assert path.read_bytes() != before


def test_overwrite_of_a_link_replaces_the_link(out: Path) -> None:
    (out / "real.pt").write_bytes(b"precious")
    (out / "m.pt").symlink_to("real.pt")
    with pytest.raises(Unsupported):
        convert_to("torch-save", case("dcp_base").path, out / "m.pt")
    convert_to("torch-save", case("dcp_base").path, out / "m.pt", overwrite=True)
    assert (out / "real.pt").read_bytes() == b"precious"
    assert read_back("torch-save", out / "m.pt") == case("dcp_base").truth


def test_a_file_in_place_of_the_folder_to_write_into(out: Path) -> None:
    (out / "none").write_text("")
    with pytest.raises(Unsupported, match="none: not a folder to write into"):
        convert_to("dcp", case("dcp_base").path, out / "none" / "m")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_to(out: Path) -> None:
    out.chmod(0o500)
    try:
        with pytest.raises(Unsupported, match="cannot be written"):
            convert_to("dcp", case("dcp_base").path, out / "m")
    finally:
        out.chmod(0o700)


def test_too_little_free_space(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = (4096, 1, 100, 10, 10, 100, 100, 100, 0, 255)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(status))
    with pytest.raises(CkptoolError, match="10 are free"):
        convert_to("dcp", case("dcp_base").path, out / "m")
    assert not list(out.iterdir())


@pytest.mark.parametrize("target", TENSORS_OF)
def test_files_have_the_modes_of_any_new_file(target: str, out: Path) -> None:
    (out / "plain").touch()
    (out / "folder").mkdir()
    convert_to(target, case("dcp_base").path, out / f"m{SUFFIX[target]}")
    for path in out.rglob("*"):
        like = out / ("folder" if path.is_dir() else "plain")
        assert path.stat().st_mode == like.stat().st_mode, path


def test_no_descriptor_is_left_open(out: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for name in ("dcp_base", "rank_experimental"):
        convert_to("dcp", case(name).path, out / name)
    with pytest.raises(Unsupported):
        convert_to("dcp", case(name).path, out / name)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_thread_closes_what_it_wrote_and_nothing_else(out: Path) -> None:
    """After a second interrupt threads still write, while the caller is on its way out."""
    (out / "a").touch()
    files = OutputFiles(out)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(files.write, "a", 0, memoryview(b"abc")).result()
        files.close()
        with open(out / "b", "wb"):
            pool.submit(files.write, "a", 3, memoryview(b"def")).result()
        pool.submit(files.close).result()
    assert (out / "a").read_bytes() == b"abcdef"
    assert (out / "b").read_bytes() == b""
