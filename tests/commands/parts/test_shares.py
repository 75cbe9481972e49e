"""Each part opens and checks the items of its own share, and none twice."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import on_ranks
from parts.part_runs import asked, content, convert, finish, reshard, write

from ckptool.commands.convert import prepare
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.target import ConvertOptions, ReshardOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, Container, Extent, Record, TensorEntry
from ckptool.core.chunks import ChunkTable, LateChunks
from ckptool.core.planning.plan import Plan
from ckptool.core.sharding.placement import parse_mesh, parse_rule
from ckptool.engine.share import checked_chunks
from ckptool.errors import (
    Damaged,
)
from ckptool.formats.dcp.opening import ItemOpening


def save_on_ranks(folder: Path, ranks: int) -> Path:
    """Tensors of which each rank has saved some of the rows; from 2,048 parts on, as tables."""
    rows = {f"layers.{n}.w": torch.randn(96, 2) for n in range(32)}
    dcp.save(rows, checkpoint_id=folder / "one", no_dist=True)
    reshard(str(ranks))(folder / "one", folder / "cut", asked()).run()
    tensors = open_checkpoint(folder / "cut").catalog.tensors.values()
    assert {isinstance(entry.chunks, ChunkTable) for entry in tensors} == {ranks > 16}
    return folder / "cut"


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors that 96 ranks have saved, of which metadata is read as tables."""
    return save_on_ranks(tmp_path_factory.mktemp("cut"), 96)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors that 4 ranks have saved, which have no tables."""
    return save_on_ranks(tmp_path_factory.mktemp("few"), 4)


@pytest.fixture(params=["cut", "few"])
def late(request: pytest.FixtureRequest) -> Path:
    """Tensors of many chunks, or of few."""
    folder: Path = request.getfixturevalue(request.param)
    return folder


LATE = {"reshard": reshard("8"), "folder of models": convert("hf", max_shard_size=1_000)}


@pytest.mark.parametrize("kind", LATE)
def test_a_part_opens_the_items_of_its_share_alone(
    kind: str, late: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, opened = LATE[kind], list[tuple[str, Box]]()
    real = ItemOpening._locate

    def noted(opening: Any) -> Any:
        opened.append((opening.item.tensor, opening.item.box))
        return real(opening)

    monkeypatch.setattr(ItemOpening, "_locate", noted)
    shares = []
    for part in ("2/4", "4/4", "1/4", "3/4"):
        write(planned, late, tmp_path / "r", part)
        assert len(opened) == len(set(opened))
        shares.append(set(opened))
        opened.clear()
    finish(planned, late, tmp_path / "r")
    assert not opened
    tensors = open_checkpoint(late).catalog.tensors.values()
    count = sum(len(entry.chunks) for entry in tensors)
    assert len(set.union(*shares)) == count
    assert max(map(len, shares)) <= count // 2
    planned(late, tmp_path / "alone", asked()).run()
    assert content(tmp_path / "r") == content(tmp_path / "alone")


def test_numpy_is_not_imported_to_copy_and_compare_rows(few: Path, tmp_path: Path) -> None:
    """Importing it takes a third of what a part of little costs."""
    run_it = "import sys; from ckptool.cli.app import app; app(sys.argv[1:], standalone_mode=False)"
    program = f"{run_it}; print('numpy' in sys.modules)"

    def imports_numpy(target: str, *how: str) -> bool:
        words = ("convert", few, tmp_path / target, "--to", "hf", "--drop", "layers.0.w", *how)
        line = [sys.executable, "-c", program, *map(str, words), "-q"]
        return subprocess.check_output(line, text=True).split()[-1] == "True"

    assert not imports_numpy("copied", "--part", "1/1", "--no-verify")
    assert not imports_numpy("compared", "--part", "1/1")
    assert not imports_numpy("compared", "--finish")
    assert imports_numpy("cast", "--dtype", "bf16")
    assert (tmp_path / "compared").is_dir()


def require_closed(plan: Plan) -> None:
    """Require that no chunk is opened yet."""
    places = [chunk.at for entry in plan.entries for chunk in entry.chunks]
    assert all(isinstance(at, Container) and at.opening is not None for at in places)
    assert all(at.opening.edges for at in places if isinstance(at, Container) and at.opening)


def test_a_part_in_the_sources_own_chunks_is_planned_without_opening_them(
    late: Path, tmp_path: Path
) -> None:
    plan = prepare(late, tmp_path / "c", ConvertOptions("dcp", transfer=asked("2/3"))).plan
    require_closed(plan)


def test_ranks_open_the_items_of_their_share_alone(cut: Path, tmp_path: Path) -> None:
    options = ReshardOptions(parse_mesh("8"), transfer=asked())
    plan = prepare_reshard(cut, tmp_path / "r", options, ranks=2).plan
    assert all(type(entry.chunks) is LateChunks for entry in plan.entries)
    require_closed(plan)
    words = ("reshard", cut, tmp_path / "r", "--mesh", "8", "--workers", "1", "--no-fsync")
    ended = on_ranks(2, ("-m", "ckptool", *words))
    assert [each.code for each in ended] == [0, 0], ended
    prepare_reshard(cut, tmp_path / "alone", options).run()
    assert content(tmp_path / "r") == content(tmp_path / "alone")


def names_of(chunks: Iterable[tuple[TensorEntry, Chunk]]) -> list[tuple[str, tuple[int, ...]]]:
    """Return what tells chunks apart."""
    return sorted((entry.name, chunk.box.lo) for entry, chunk in chunks)


def test_a_record_is_read_whole_by_one_writer_or_in_runs_by_all(late: Path, tmp_path: Path) -> None:
    plan = reshard("8")(late, tmp_path / "r", asked("1/2")).plan
    every = [plan.numbers[f"__{rank}_0.distcp"] for rank in range(8)]
    shares = [[names_of(each) for each in checked_chunks(plan, [number])] for number in every]
    wholes = [name for whole, _ in shares for name in whole]
    runs = {name for _, cut in shares for name in cut}
    assert len(wholes) == len({*wholes})
    assert runs.isdisjoint(wholes)
    assert len(wholes) + len(runs) == sum(len(entry.chunks) for entry in plan.entries)
    together, reversed_ = (
        [names_of(each) for each in checked_chunks(plan, numbers)]
        for numbers in (every[:2], every[1::-1])
    )
    assert together == reversed_
    assert together[0] == sorted(shares[0][0] + shares[1][0])
    assert together[1] == sorted({*shares[0][1], *shares[1][1]})


def test_all_writers_check_as_many_records_of_tensors_that_each_has_columns_of(
    tmp_path: Path,
) -> None:
    state = {f"layers.{n}.w": torch.full((2, 16), float(n)) for n in range(64)}
    dcp.save(state, checkpoint_id=tmp_path / "whole", no_dist=True)
    rules = (parse_rule("*=Shard(1)"),)
    options = ReshardOptions(parse_mesh("8"), rules=rules, to="rank-local")
    plan = prepare_reshard(tmp_path / "whole", tmp_path / "r", options).plan
    counts = [len(checked_chunks(plan, [number])[0]) for number in range(8)]
    assert sum(counts) == 64
    assert max(counts) < 20


def test_an_item_that_is_none_ends_the_parts_that_need_it(late: Path, tmp_path: Path) -> None:
    mine = tmp_path / "cut"
    shutil.copytree(late, mine)
    at = open_checkpoint(mine).catalog.tensors["layers.7.w"].chunks[-1].at
    assert isinstance(at, Container)
    with (mine / at.file).open("r+b") as file:
        file.seek(at.offset)
        file.write(bytes(at.nbytes))
    errors = []
    for part in ("1/4", "2/4", "3/4", "4/4"):
        try:
            write(reshard("8"), mine, tmp_path / "r", part)
        except Damaged as error:
            errors.append(error.problems[0])
    assert 1 <= len(errors) <= 2
    assert {error.tensor for error in errors} == {"layers.7.w"}


def test_one_process_takes_over_parts_that_opened_their_share(late: Path, tmp_path: Path) -> None:
    write(reshard("8"), late, tmp_path / "r", "2/3")
    reshard("8")(late, tmp_path / "r", asked(resume=True)).run()
    reshard("8")(late, tmp_path / "alone", asked()).run()
    assert content(tmp_path / "r") == content(tmp_path / "alone")


def test_a_record_of_a_tensor_that_is_written_and_one_that_is_not_is_checked(
    tmp_path: Path,
) -> None:
    """Tied tensors share what torch.save writes."""
    source, weight = tmp_path / "s.pt", torch.randn(64, 16)
    torch.save({"a.w": weight, "b.w": weight, "c.w": torch.randn(64, 16)}, source)
    planned, checked = convert("torch-save"), set[Record | None]()
    for part in ("1/2", "2/2"):
        transfer = planned(source, tmp_path / "m.pt", asked(part))
        plan, numbers = transfer.plan, transfer.options.part.files(transfer.plan.layout)
        places = [chunk.at for _, chunk in checked_chunks(plan, numbers)[0]]
        checked |= {at.record for at in places if isinstance(at, Extent)}
        write(planned, source, tmp_path / "m.pt", part)
    finish(planned, source, tmp_path / "m.pt")
    assert len(checked) == 2
