"""What a dry run says will be read is what is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import case

from ckptool.commands.options.target import ReshardOptions, TransferOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.core.sharding.placement import parse_mesh, parse_rule
from ckptool.engine.checksum import RecordCheck
from ckptool.engine.run_options import RunOptions
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
            self.whole(record, record.crc32)

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
    monkeypatch.setattr(RecordCheck, "read_unseen", not_again)
    prepared.run()
    assert sum(read) == told > 0
