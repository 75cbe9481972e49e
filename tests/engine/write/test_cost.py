"""The dry run's estimate of what is read equals what is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import case
from msgspec.structs import replace

from ckptool.commands.options.rewrite import RewriteOptions, Selection
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ReshardOptions, TransferOptions
from ckptool.commands.reshard.reshard import load_costs, prepare_reshard
from ckptool.commands.transfer import transfer
from ckptool.core.layout import Literal, written_entries
from ckptool.core.planning.plan import Plan
from ckptool.core.sharding.placement import parse_mesh, parse_rule
from ckptool.engine.checksum import RecordCheck
from ckptool.engine.read import byte_reader
from ckptool.engine.write.cost import bytes_to_read
from ckptool.formats import FORMATS
from ckptool.formats.base import Request
from ckptool.storage.local import LocalReader

COLUMNS = "*=Replicate(),Shard(-1)"


@pytest.mark.parametrize(
    ("name", "mesh", "rules"),
    [
        ("dcp_fsdp2_tp", "2x4", ()),
        ("dcp_fsdp2_tp", "1x3", (COLUMNS,)),
        ("dcp_hsdp", "2x2", (COLUMNS,)),
        ("rank_strided", "2x2", (COLUMNS,)),
        ("safetensors_file", "1x2", (COLUMNS,)),
    ],
)
def test_bytes_to_read(
    name: str, mesh: str, rules: tuple[str, ...], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    real = LocalReader.read_into

    def counted(self: LocalReader, file: str, offset: int, buffer: memoryview) -> None:
        read.append(len(buffer))
        real(self, file, offset, buffer)

    def not_again(self: RecordCheck, *source: Any) -> None:
        for record in self.unseen():
            self._pieces[record] = {record.offset: (record.nbytes, record.crc32)}

    options = ReshardOptions(
        mesh=parse_mesh(mesh),
        rules=(*map(parse_rule, rules), parse_rule("*=Replicate(),Replicate()")),
        rank_state="keep",
        to="dcp",
        transfer=TransferOptions(verify=False, run=RunOptions(1, fsync=False)),
    )
    prepared = prepare_reshard(case(name).path, out / "r", options)
    told = prepared.costs().read_bytes
    monkeypatch.setattr(LocalReader, "read_into", counted)
    monkeypatch.setattr(byte_reader, "_GAP", -1)
    monkeypatch.setattr(RecordCheck, "read_unseen", not_again)
    monkeypatch.setattr(transfer, "copied_files", lambda *_: ())
    prepared.run()
    assert sum(read) == told > 0


@pytest.mark.parametrize(
    ("name", "mesh", "rules"),
    [
        ("dcp_fsdp2_tp", "2x4", ()),
        ("dcp_base", "5", ("*=Replicate()",)),
        ("safetensors_file", "20", ()),
        ("dcp_hsdp", "2x2", (COLUMNS, "*=Replicate(),Replicate()")),
        ("dcp_lightning", "2", ()),
    ],
)
def test_tables_say_what_the_parts_of_files_say(
    name: str, mesh: str, rules: tuple[str, ...], out: Path
) -> None:
    """Where each box of a tensor is written, in all files or some, and what is read for them."""
    options = ReshardOptions(
        mesh=parse_mesh(mesh),
        rules=tuple(map(parse_rule, rules)),
        rank_state="drop",
        to="dcp",
    )
    prepared = prepare_reshard(case(name).path, out / "r", options)
    plan, source = prepared.plan, prepared.opened.source
    by_parts = replace(plan.layout, tables=None)
    assert (plan.layout.tables is None) == (name == "dcp_lightning")
    entries = {entry.name: entry for entry in plan.entries}
    for some in (slice(None), slice(0, None, 2), slice(1, 2)):
        both = (replace(one, files=one.files[some]) for one in (plan.layout, by_parts))
        told, read = (written_entries(layout, entries) for layout in both)
        assert {n: set(e.chunks) for n, e in told.items()} == {
            n: set(e.chunks) for n, e in read.items()
        }
    assert bytes_to_read(plan, source) == bytes_to_read(Plan(plan.catalog, by_parts), source)
    for file in plan.layout.files[:-1]:
        decisive, parts = (
            {part.data for part in some if isinstance(part, Literal)}
            for some in (file.decisive, file.parts)
        )
        assert decisive <= parts


@pytest.mark.parametrize("name", ["dcp_fsdp2_tp", "rank_strided", "zip_zoo", "dcp_zstd"])
def test_costs_are_those_of_each_tensor_by_itself(name: str, out: Path) -> None:
    """Those that are alike are counted at once, and are not mixed up with others."""
    drop = ("pair_with_tensor",) if name == "dcp_zstd" else ()  # it is written as a value
    rewrite = RewriteOptions(Selection(drop=drop))
    options = ReshardOptions(parse_mesh("2x2"), rank_state="keep", to="dcp", rewrite=rewrite)
    prepared = prepare_reshard(case(name).path, out / "r", options)
    whole = prepared.costs()
    catalog, placed = prepared.plan.catalog, prepared.placed
    source = prepared.opened.source
    nbytes, loaded = 0, [0] * 4
    for entry in catalog.tensors.values():
        alone = catalog.with_tensors({entry.name: entry})
        layout = FORMATS["dcp"].lay_out(alone, Request("r", placed=placed))
        nbytes += bytes_to_read(Plan(alone, layout), source)
        for rank, cost in enumerate(load_costs([entry], placed)):
            loaded[rank] += cost.nbytes
    assert nbytes == whole.read_bytes
    assert loaded == [cost.nbytes for cost in whole.from_source]
    assert sum(prepared.report.rank_bytes) == sum(cost.nbytes for cost in whole.from_target)
