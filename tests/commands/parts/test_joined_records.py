"""Records of which several parts or ranks read some rows: their checksums are joined at the end."""

from __future__ import annotations

import json
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from parts.part_runs import Place, asked, content, finish, in_memory, refused, stored, write

from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.target import ReshardOptions, TransferOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.core.catalog import Container
from ckptool.core.sharding.placement import parse_mesh, parse_rule
from ckptool.engine import checksum
from ckptool.engine.ranks import TorchRanks
from ckptool.engine.read.byte_reader import byte_job
from ckptool.errors import (
    CkptoolError,
    Damaged,
    Problem,
    Unsupported,
)


def by_rows(source: Path, target: Place, transfer: TransferOptions) -> Any:
    rules = (parse_rule("*=Shard(0)"),)
    options = ReshardOptions(parse_mesh("7"), rules=rules, transfer=transfer)
    return prepare_reshard(source, target, options)


SEVEN = tuple(f"{n}/7" for n in range(1, 8))


def count_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note how many bytes are read from now on for checksums alone."""
    read, real = list[int](), byte_job

    def noted(key: Any, file: str, offset: int, nbytes: int) -> Any:
        read.append(nbytes)
        return real(key, file, offset, nbytes)

    monkeypatch.setattr(checksum, "byte_job", noted)
    return read


def change_a_record(source: Path, quarter: int) -> None:
    """Change a bit in a quarter of the item that the fourth and the fifth of seven files need."""
    chunks = open_checkpoint(source).catalog.tensors["blocks.1.w"].chunks
    item = chunks[len(chunks) * 4 // 7].at
    assert isinstance(item, Container)
    data = bytearray((source / item.file).read_bytes())
    data[item.offset + item.nbytes * quarter // 4] ^= 1
    (source / item.file).write_bytes(data)


@pytest.mark.parametrize("is_remote", [False, True])
def test_records_cut_by_rows_are_joined_from_what_parts_read(
    is_remote: bool, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target: Place = in_memory() / "m" if is_remote else tmp_path / "m"
    read = count_bytes(monkeypatch)
    write(by_rows, rows, target, *SEVEN)
    assert finish(by_rows, rows, target).written
    assert not sum(read)
    by_rows(rows, tmp_path / "alone", asked()).run()
    made = content(target) if isinstance(target, Path) else stored(target)
    alone = content(tmp_path / "alone")
    assert {name.removeprefix("m/"): data for name, data in made.items()} == alone


class ThreadRanks(TorchRanks):
    """Ranks that are threads of one process."""

    def __init__(self, rank: int, values: list[Any], barrier: Barrier) -> None:
        self.rank = self.local_rank = rank
        self.size, self._values, self._barrier = len(values), values, barrier

    def gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(60)
        values = [*self._values]
        self._barrier.wait(60)
        return values


def write_on_threads(source: Path, target: Path, count: int) -> list[Exception | None]:
    """Write by rows on as many ranks; return how each ended."""
    values, barrier = [None] * count, Barrier(count)

    def run(rank: int) -> Exception | None:
        try:
            by_rows(source, target, asked()).run(ranks=ThreadRanks(rank, values, barrier))
        except CkptoolError as error:
            return error
        return None

    with ThreadPoolExecutor(count) as pool:
        return [*pool.map(run, range(count))]


def test_records_cut_by_rows_are_joined_from_what_ranks_read(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = count_bytes(monkeypatch)
    assert write_on_threads(rows, tmp_path / "m", 3) == [None] * 3
    assert not sum(read)
    by_rows(rows, tmp_path / "alone", asked()).run()
    assert content(tmp_path / "m") == content(tmp_path / "alone")


def test_a_changed_record_that_several_ranks_read_is_found_before_the_commit(
    rows: Path, tmp_path: Path
) -> None:
    mine, target = tmp_path / "rows", tmp_path / "m"
    shutil.copytree(rows, mine)
    change_a_record(mine, 3)
    for error in write_on_threads(mine, target, 7):
        assert isinstance(error, Damaged)
        assert "(blocks.1.w) have CRC-32" in error.message
    assert not [*tmp_path.glob("*m*")]


def make_columns(folder: Path) -> Path:
    """Two tensors of which four ranks have saved columns."""
    state = {f"blocks.{n}.w": torch.randn(384, 256) for n in range(2)}
    dcp.save(state, checkpoint_id=folder / "one", no_dist=True)
    rules = (parse_rule("*=Shard(1)"),)
    options = ReshardOptions(parse_mesh("4"), rules=rules, transfer=asked())
    prepare_reshard(folder / "one", folder / "columns", options).run()
    return folder / "columns"


def make_column_major(folder: Path) -> Path:
    """Two tensors that are stored column by column."""
    state = {f"blocks.{n}.w": torch.randn(256, 384).t() for n in range(2)}
    dcp.save(state, checkpoint_id=folder / "columns", no_dist=True)
    return folder / "columns"


def make_swapped(folder: Path) -> Path:
    """Two tensors of another byte order."""
    state = {f"blocks.{n}.w": torch.randn(384, 256) for n in range(2)}
    file = folder / "swapped.pt"
    torch.save(state, file)
    with zipfile.ZipFile(file) as read, zipfile.ZipFile(folder / "big.pt", "w") as written:
        for name in read.namelist():
            data = read.read(name)
            if "/data/" in name:
                data = np.frombuffer(data, "<u4").byteswap().tobytes()
            written.writestr(name, b"big" if name.endswith("byteorder") else data)
    return folder / "big.pt"


NO_RUNS = {"columns": make_columns, "column-major": make_column_major, "swapped": make_swapped}


@pytest.mark.parametrize("stored", NO_RUNS)
def test_records_that_no_part_reads_in_runs_are_checked_by_the_parts(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = NO_RUNS[stored](tmp_path), tmp_path / "m"
    read = count_bytes(monkeypatch)
    write(by_rows, source, target, *SEVEN)
    assert sum(read) <= 2 * 384 * 256 * 4
    read.clear()
    finish(by_rows, source, target)
    assert not sum(read)
    by_rows(source, tmp_path / "alone", asked()).run()
    assert content(target) == content(tmp_path / "alone")


@pytest.mark.parametrize("stored", NO_RUNS)
def test_a_changed_record_that_no_part_reads_in_runs_is_found_by_one(
    stored: str, tmp_path: Path
) -> None:
    source = NO_RUNS[stored](tmp_path)
    file = source if source.is_file() else sorted(source.glob("*.distcp"))[-1]
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)
    found = list[Problem]()
    for part in SEVEN:
        try:
            write(by_rows, source, tmp_path / "m", part)
        except Damaged as error:
            found += error.problems
    assert "crc-mismatch" in {problem.code for problem in found}


@pytest.mark.parametrize("quarter", [1, 3])
def test_a_changed_record_that_several_parts_read_is_found_at_the_end(
    quarter: int, rows: Path, tmp_path: Path
) -> None:
    mine, target = tmp_path / "rows", tmp_path / "m"
    shutil.copytree(rows, mine)
    change_a_record(mine, quarter)
    write(by_rows, mine, target, *SEVEN)
    with pytest.raises(Damaged, match="CRC-32") as error:
        finish(by_rows, mine, target)
    assert {each.tensor for each in error.value.problems} == {"blocks.1.w"}
    assert not target.exists()


def test_what_no_part_has_noted_is_read_at_the_end(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as of files that a killed run of a part had finished."""
    target = tmp_path / "m"
    write(by_rows, rows, target, *SEVEN, "3/7", "5/7")
    read = count_bytes(monkeypatch)
    assert finish(by_rows, rows, target).written
    assert 0 < sum(read) <= 2 * 2 * -(-384 // 7) * 256 * 4  # of two tensors, two parts' rows


@pytest.mark.parametrize("damage", ["another sum", "no sums"])
def test_parts_that_read_different_bytes_are_not_committed(
    damage: str, rows: Path, tmp_path: Path
) -> None:
    target = tmp_path / "m"
    write(by_rows, rows, target, *SEVEN)
    journals = sorted(tmp_path.glob(".*journal.*"))
    noted = 0
    for journal in journals:
        *before, last = journal.read_text().splitlines()
        note = json.loads(last)
        joined = note["part"]["joined"]
        noted += len(joined)
        if joined and noted == len(joined):
            joined[0][-1] = [[n, m, crc ^ 1] for n, m, crc in joined[0][-1]]
            joined[0][-1] = joined[0][-1] if damage == "another sum" else "none"
        journal.write_text("\n".join([*before, json.dumps(note), ""]))
    assert noted
    kind = Damaged if damage == "another sum" else Unsupported
    match = "CRC-32" if damage == "another sum" else "journal.0: is not as ckptool writes it"
    refused(lambda: finish(by_rows, rows, target), match, kind)
    assert not target.exists()
