"""Whatever happens to an output between its writing and its commit, no wrong one is committed.

A mutation befalls the staged files once they are written: tiles are exchanged, rows are shifted,
pages keep what was there before, a write is cut short, numbers in the metadata change.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from trials import trials

from ckptool.commands.convert import prepare
from ckptool.commands.options.rewrite import RewriteOptions
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ConvertOptions, ReshardOptions, TransferOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.commands.transfer.transfer import Transfer
from ckptool.core.casts import parse_casts
from ckptool.core.sharding.placement import parse_mesh, parse_rule
from ckptool.engine.share import Share
from ckptool.engine.write import disk_target
from ckptool.engine.write.run import run as write_plan
from ckptool.errors import NotVerified
from ckptool.formats.dcp import splits

pytestmark = pytest.mark.trials
COUNT = trials(80)
"""Mutations in all."""
PAGE = 512

Planned = Callable[[Path, Path], Transfer[Any]]


def convert(to: str, target: str, **more: Any) -> Planned:
    def plan(source: Path, folder: Path) -> Transfer[Any]:
        transfer = TransferOptions(run=RunOptions(workers=1, fsync=False))
        return prepare(source, folder / target, ConvertOptions(to, transfer=transfer, **more))

    return plan


def reshard(mesh: str, to: str, part: Share | None = None, **more: Any) -> Planned:
    def plan(source: Path, folder: Path) -> Transfer[Any]:
        transfer = TransferOptions(run=RunOptions(workers=1, fsync=False), part=part)
        options = ReshardOptions(parse_mesh(mesh), to=to, transfer=transfer, **more)
        return prepare_reshard(source, folder / "out", options)

    return plan


COLUMNS = [parse_rule(f"{name}=Shard(0),Shard(1)") for name in ("wide", "tall", "small.*")]
TRANSFERS = {
    "safetensors": convert("safetensors", "out.safetensors"),
    "shards of safetensors": convert("safetensors", "out", max_shard_size=9_000),
    "torch.save": convert("torch-save", "out.pt"),
    "dcp": convert("dcp", "out"),
    "cast": convert("dcp", "out", rewrite=RewriteOptions(casts=parse_casts(["bf16"]))),
    "rows of ranks": reshard("3", "dcp", policy="fsdp"),
    "ranks' files": reshard("2x2", "rank-local", policy="fsdp"),
    "replicas": reshard("2", "rank-local", policy="replicate"),
    "columns": reshard("2x2", "dcp", rules=COLUMNS),
    "part of rows": reshard("3", "dcp", Share(0, 2), policy="fsdp"),
    "part of columns": reshard("2x2", "dcp", Share(1, 2), rules=COLUMNS),
    "part of ranks' files": reshard("2x2", "rank-local", Share(1, 2), policy="fsdp"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors small and large, of rows and of one dim, and values."""
    folder = tmp_path_factory.mktemp("source") / "dcp"
    numbers = torch.Generator().manual_seed(11)
    shapes = {"wide": (12, 400), "tall": (700, 3), "flat": (1000,), "deep": (4, 6, 50)}
    state: dict[str, Any] = {n: torch.randn(s, generator=numbers) for n, s in shapes.items()}
    state |= {f"small.{n}": torch.randn(16, 8, generator=numbers) for n in range(6)}
    dcp.save({**state, "step": 12}, checkpoint_id=folder, no_dist=True)
    return folder


def exchange_tiles(data: bytearray, random: Random) -> None:
    size = random.choice((4, 64, 1600, PAGE))
    one, other = (random.randrange(0, max(1, len(data) - size)) for _ in range(2))
    first, second = data[one : one + size], data[other : other + size]
    data[one : one + size], data[other : other + size] = second, first


def shift_rows(data: bytearray, random: Random) -> None:
    start, size = random.randrange(len(data)), random.choice((40, 1600, 4000))
    by = random.choice((1, 4, 16, 40))
    rows = data[start : start + size]
    data[start : start + size] = rows[by:] + rows[:by]


def keep_pages(data: bytearray, random: Random) -> None:
    """Zeros as of a new file, or the page before as of a stale cache."""
    at = random.randrange(len(data)) // PAGE * PAGE
    end = min(len(data), at + PAGE)
    before = data[max(0, at - PAGE) : at].ljust(PAGE, b"\0")
    data[at:end] = random.choice((bytes(PAGE), before))[: end - at]


def cut_short(data: bytearray, random: Random) -> None:
    """The size is there, as it was allocated, but not the end of one write."""
    at = random.randrange(len(data))
    size = random.choice((1, 100, PAGE, len(data)))
    data[at : at + size] = bytes(len(data[at : at + size]))


def change_numbers(data: bytearray, random: Random) -> None:
    """Those of the metadata: digits of a header, bytes of a pickle."""
    places = [at for at, byte in enumerate(data) if 48 <= byte <= 57]
    at = random.choice(places or [0])
    data[at] = 48 + (data[at] - 47) % 10


def truncate(data: bytearray, random: Random) -> None:
    del data[random.randrange(len(data)) :]


MUTATIONS = (exchange_tiles, shift_rows, keep_pages, cut_short, change_numbers, truncate)


@pytest.mark.parametrize("kind", TRANSFERS)
def test_no_mutation_of_what_was_written_is_committed(
    kind: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, random, changed = write_plan, Random(kind), list[str]()
    monkeypatch.setattr(splits, "_LEAST", 1 << 10)

    def run(work: Any, folder: Path, *rest: Any) -> None:
        real(work, folder, *rest)
        file = folder / work.plan.layout.files[random.choice(work.numbers)].path
        before, mutate = file.read_bytes(), random.choice(MUTATIONS)
        data = bytearray(before)
        mutate(data, random)
        if data != before:
            changed.append(f"{mutate.__name__} of {file.name}")
            file.write_bytes(data)

    monkeypatch.setattr(disk_target, "run", run)
    for number in range(-(-COUNT // len(TRANSFERS))):
        folder = tmp_path / str(number)
        folder.mkdir()
        changed.clear()
        transfer = TRANSFERS[kind](source, folder)
        if _is_refused(transfer):
            assert not list(folder.iterdir()), changed
        else:
            assert not changed, changed


def _is_refused(transfer: Transfer[Any]) -> bool:
    try:
        transfer.run()
    except NotVerified:
        return True
    return False
