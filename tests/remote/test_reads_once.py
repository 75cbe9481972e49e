"""Each byte of the source is read once, although all that is written is proved."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import case
from parts.part_runs import content
from safetensors.torch import save_file
from store_server import S3, s3, server

import ckptool
from ckptool.commands.convert import prepare
from ckptool.commands.merge import prepare_merge
from ckptool.commands.options.merge import ExpressionOptions, MergeOptions
from ckptool.commands.options.rewrite import RewriteOptions
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ConvertOptions, ReshardOptions, TransferOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.commands.transfer.transfer import Transfer
from ckptool.core.casts import parse_casts
from ckptool.core.sharding.placement import parse_mesh, parse_rule
from ckptool.engine.share import Share
from ckptool.engine.write.output import OutputFiles
from ckptool.errors import NotVerified
from ckptool.formats.dcp import splits
from ckptool.storage.local import LocalReader
from ckptool.storage.url import Location, location

SMALL = {"safetensors": "m", "torch-save": "m.pt", "dcp": "m", "dcp-safetensors": "m"}
BESIDE = 1 << 20
"""Bytes of headers at most, for 129 items of a DCP file."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 MiB in a large tensor, and 2 MiB in small ones."""
    folder = tmp_path_factory.mktemp("source") / "dcp"
    numbers = torch.Generator().manual_seed(5)
    state = {f"small.{n}": torch.randn(64, 64, generator=numbers) for n in range(128)}
    state |= {"large": torch.randn(1024, 2048, generator=numbers)}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The bytes that were read below each folder."""
    found: dict[str, int] = {}
    some, runs = LocalReader.read_some, LocalReader.read_runs

    def read_some(self: LocalReader, file: str, offset: int, buffer: memoryview) -> int:
        count = some(self, file, offset, buffer)
        found[self._source.root] = found.get(self._source.root, 0) + count
        return count

    def read_runs(self: LocalReader, file: str, offset: int, step: int, wanted: Any) -> None:
        found[self._source.root] = found.get(self._source.root, 0) + sum(map(len, wanted))
        runs(self, file, offset, step, wanted)

    monkeypatch.setattr(LocalReader, "read_some", read_some)
    monkeypatch.setattr(LocalReader, "read_runs", read_runs)
    return found


def converted(source: Location, target: Location, to: str, **more: Any) -> Transfer[Any]:
    transfer = TransferOptions(run=RunOptions(workers=2, fsync=False))
    return prepare(source, target, ConvertOptions(to, transfer=transfer, **more))


def resharded(source: Location, target: Location, mesh: str, *rules: str) -> Transfer[Any]:
    transfer = TransferOptions(run=RunOptions(workers=2, fsync=False))
    placed = tuple(map(parse_rule, rules))
    return prepare_reshard(
        source, target, ReshardOptions(parse_mesh(mesh), rules=placed, transfer=transfer)
    )


@pytest.mark.parametrize("to", SMALL)
def test_a_convert_reads_once(to: str, source: Path, tmp_path: Path, reads: dict[str, int]) -> None:
    transfer = converted(source, tmp_path / SMALL[to], to)
    reads.clear()
    transfer.run()
    assert 0 <= reads[str(source)] - transfer.plan.read_bytes < BESIDE


@pytest.mark.parametrize(
    "words",
    [("2x4",), ("3",), ("2x2", "*=Shard(0),Shard(1)"), ("1x4", "*=Replicate(),Shard(1)")],
    ids=" ".join,
)
def test_a_reshard_reads_once(
    words: tuple[str, ...], source: Path, tmp_path: Path, reads: dict[str, int]
) -> None:
    transfer = resharded(source, tmp_path / "m", *words)
    reads.clear()
    transfer.run()
    assert 0 <= reads[str(source)] - transfer.plan.read_bytes < BESIDE


@pytest.mark.parametrize(
    ("mesh", "rule"),
    [("1x4", "*=Replicate(),Shard(1)"), ("2x2", "*=Shard(0),Shard(1)"), ("4", "*=Shard(0)")],
    ids=["columns", "rows and columns", "rows"],
)
def test_parts_together_read_once(
    mesh: str, rule: str, tmp_path: Path, reads: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many they are: files that are made of the same rows are one part's."""
    monkeypatch.setattr(splits, "_LEAST", 1 << 18)
    state = {f"w{n}": torch.randn(512, 512) for n in range(8)}
    dcp.save(state, checkpoint_id=tmp_path / "whole", no_dist=True)
    resharded(tmp_path / "whole", tmp_path / "rows", "2").run()

    def planned(target: str, **how: Any) -> Transfer[Any]:
        transfer = TransferOptions(run=RunOptions(workers=2, fsync=False), **how)
        options = ReshardOptions(parse_mesh(mesh), rules=(parse_rule(rule),), transfer=transfer)
        return prepare_reshard(tmp_path / "rows", tmp_path / target, options)

    files = planned("m").plan.layout.files
    assert len({file.unit for file in files if file.rank is not None}) == 4
    reads.clear()
    for number in range(4):
        planned("m", part=Share(number, 4)).run()
    planned("m", finish=True).run()
    assert 0 <= reads[str(tmp_path / "rows")] - planned("alone").plan.read_bytes < BESIDE
    planned("alone").run()
    assert content(tmp_path / "m") == content(tmp_path / "alone")
    read = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    dcp.load(read, checkpoint_id=tmp_path / "m", no_dist=True)
    assert all(torch.equal(state[name], read[name]) for name in state)


def test_columns_of_many_ranks_are_read_once(
    source: Path, tmp_path: Path, reads: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splits, "_LEAST", 1 << 14)
    transfer = resharded(source, tmp_path / "m", "1x32", "large=Replicate(),Shard(1)")
    reads.clear()
    transfer.run()
    assert 0 <= reads[str(source)] - transfer.plan.read_bytes < BESIDE


def test_the_source_is_read_in_its_own_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever files its rows go to: what a disk reads ahead is still there when it is wanted."""
    save_file({f"w{n}": torch.zeros(64, 4096) for n in range(4)}, tmp_path / "m.safetensors")
    real, offsets = LocalReader.read_some, list[int]()

    def read_some(self: LocalReader, file: str, offset: int, buffer: memoryview) -> int:
        if file == "m.safetensors":
            offsets.append(offset)
        return real(self, file, offset, buffer)

    monkeypatch.setattr(LocalReader, "read_some", read_some)
    run = RunOptions(workers=1, fsync=False)
    options = ReshardOptions(
        parse_mesh("4"),
        rules=(parse_rule("*=Shard(0)"),),
        to="dcp",
        transfer=TransferOptions(run=run, verify=False),
    )
    transfer = prepare_reshard(tmp_path / "m.safetensors", tmp_path / "m", options)
    offsets.clear()
    transfer.run()
    assert len(offsets) >= 16
    assert offsets == sorted(offsets)


@pytest.mark.parametrize("meshes", ["8 2", "8 3", "3 8", "32 2"])
def test_columns_of_the_output_are_read_once_too(
    meshes: str, tmp_path: Path, reads: dict[str, int]
) -> None:
    """Whatever columns the source has in a chunk of their own."""
    one, other = meshes.split()
    torch.save({"w": torch.arange(1 << 21).reshape(1024, 2048)}, tmp_path / "w.pt")
    resharded(tmp_path / "w.pt", tmp_path / "columns", one, "*=Shard(1)").run()
    transfer = resharded(tmp_path / "columns", tmp_path / "m", other, "*=Shard(1)")
    reads.clear()
    transfer.run()
    assert reads.pop(str(tmp_path / "columns")) < 1.1 * transfer.plan.read_bytes
    assert sum(reads.values()) < 1.1 * transfer.plan.read_bytes


@pytest.mark.parametrize("to", SMALL)
def test_what_is_cast_is_read_once(
    to: str, source: Path, tmp_path: Path, reads: dict[str, int]
) -> None:
    casts = RewriteOptions(casts=parse_casts(["bf16"]))
    transfer = converted(source, tmp_path / SMALL[to], to, rewrite=casts)
    assert transfer.report.reread_bytes == 0
    reads.clear()
    transfer.run()
    assert 0 <= reads[str(source)] - transfer.plan.read_bytes < BESIDE


def test_columns_that_are_cast_are_read_once(
    source: Path, tmp_path: Path, reads: dict[str, int]
) -> None:
    options = ReshardOptions(
        parse_mesh("1x4"),
        rules=(parse_rule("*=Replicate(),Shard(1)"),),
        rewrite=RewriteOptions(casts=parse_casts(["bf16"])),
        transfer=TransferOptions(run=RunOptions(workers=2, fsync=False)),
    )
    transfer = prepare_reshard(source, tmp_path / "m", options)
    reads.clear()
    transfer.run()
    assert 0 <= reads[str(source)] - transfer.plan.read_bytes < BESIDE


def test_what_is_merged_is_read_once(source: Path, tmp_path: Path, reads: dict[str, int]) -> None:
    other = tmp_path / "other"
    shutil.copytree(source, other)
    options = MergeOptions(
        expression=ExpressionOptions(average=True), convert=ConvertOptions("dcp")
    )
    transfer = prepare_merge([source, other], tmp_path / "m", options)
    reads.clear()
    transfer.run()
    assert transfer.plan.read_bytes == 2 * (10 << 20)
    for folder in (source, other):
        assert 0 <= reads[str(folder)] - transfer.plan.read_bytes // 2 < BESIDE


def nbytes(files: dict[str, bytes]) -> int:
    return sum(map(len, files.values()))


def test_from_a_store_each_byte_comes_once(source: Path, s3: S3, tmp_path: Path) -> None:
    url = s3.put(source, "in")
    transfer = converted(location(url), tmp_path / "m", "safetensors")
    begun = sum(one.sent for one in s3.of("GetObject"))
    transfer.run()
    sent = sum(one.sent for one in s3.of("GetObject")) - begun
    assert sent <= 1.02 * nbytes(s3.get("in"))


def test_a_lora_comes_once_from_a_store_whatever_the_tiles(s3: S3, tmp_path: Path) -> None:
    """Each tile of the base is computed of all of A."""
    base, adapter = tmp_path / "base.safetensors", tmp_path / "adapter"
    adapter.mkdir()
    save_file({"l.weight": torch.zeros(4096, 2048)}, base)
    halves = {"A": torch.ones(16, 2048), "B": torch.ones(4096, 16)}
    named = {f"base_model.model.l.lora_{half}.weight": t for half, t in halves.items()}
    save_file(named, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 16}')
    places = s3.put(base, "base.safetensors"), s3.put(adapter, "adapter")
    begun = sum(one.sent for one in s3.of("GetObject"))
    report = ckptool.merge(tmp_path / "m.safetensors", lora=places[1], onto=places[0])
    sent = sum(one.sent for one in s3.of("GetObject")) - begun
    assert report.read_bytes == 4 * (4096 * 2048 + 16 * 2048 + 4096 * 16)
    assert sent - report.read_bytes < BESIDE


def test_from_store_to_store_the_source_and_the_output_come_once_each(source: Path, s3: S3) -> None:
    url = s3.put(source, "in")
    transfer = resharded(location(url), location(s3.url("out")), "2x4")
    begun = sum(one.sent for one in s3.of("GetObject"))
    transfer.run()
    sent = sum(one.sent for one in s3.of("GetObject")) - begun
    assert sent <= 1.02 * (nbytes(s3.get("in")) + nbytes(s3.get("out")))


@pytest.fixture
def copying(tmp_path: Path) -> Transfer[Any]:
    """A convert that copies 4 MiB beside the tensors."""
    shutil.copytree(case("hf_full").path, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_bytes(bytes(4 << 20))
    return prepare(tmp_path / "model", tmp_path / "out", ConvertOptions("hf"))


def test_copied_files_are_read_once(
    copying: Transfer[Any], tmp_path: Path, reads: dict[str, int]
) -> None:
    reads.clear()
    copying.run()
    assert reads[str(tmp_path / "model")] - copying.plan.read_bytes - (4 << 20) < BESIDE


def test_a_copied_file_that_is_written_otherwise_is_found(
    copying: Transfer[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write = OutputFiles.write

    def write(files: OutputFiles, path: str, offset: int, data: memoryview) -> None:
        wrong = bytes(data[:-1]) + b"x" if path == "tokenizer.json" else data
        real_write(files, path, offset, memoryview(wrong))

    monkeypatch.setattr(OutputFiles, "write", write)
    with pytest.raises(NotVerified, match=r"tokenizer.json: bytes 0 to 4,194,304 differ"):
        copying.run()
