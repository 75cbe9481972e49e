"""Parts written by independent processes: together they equal the output of one process."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import on_ranks
from fault_runs import Faults, run
from fsspec.implementations.memory import MemoryFileSystem
from msgspec.structs import replace

from ckptool.commands.convert import prepare
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.target import ConvertOptions, ReshardOptions, TransferOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.core.box import Box
from ckptool.core.sharding.placement import parse_mesh, parse_rule
from ckptool.core.sharding.table import ChunkTable, LateChunks
from ckptool.engine import checksum
from ckptool.engine.ranks import Ranks
from ckptool.engine.run_options import RunOptions
from ckptool.engine.share import Share, checked_chunks, parse_part
from ckptool.engine.write import stage as stage_module
from ckptool.engine.write.commit import FolderCommit
from ckptool.engine.write.journal import Journal
from ckptool.errors import (
    Changed,
    CkptoolError,
    Damaged,
    NotVerified,
    TransferError,
    Unrecognized,
    Unsupported,
    UsageError,
)
from ckptool.formats.dcp import items
from ckptool.formats.dcp.opening import locate_item
from ckptool.serialization.archive import cached
from ckptool.storage.file_status import FileStatus
from ckptool.storage.url import RemotePath, location

MANY = {"max_shard_size": 1_500}
Place = Path | RemotePath


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors that are cut by rows and by columns, replicated, small and empty, and values."""
    return save(tmp_path_factory.mktemp("source") / "ckpt", seed=5)


def save(path: Path, seed: int) -> Path:
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Any] = {
        f"layers.{n}.w": torch.randn(16, 24, generator=generator) for n in range(6)
    }
    state |= {"norm": torch.ones(7), "none": torch.empty(0, 3), "step": 3}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def asked(part: str | None = None, **more: Any) -> TransferOptions:
    share = None if part is None else parse_part(part, "--part")
    return TransferOptions(part=share, run=RunOptions(workers=1, fsync=False), **more)


def convert(to: str, **more: Any) -> Callable[..., Any]:
    def planned(source: Path, target: Place, transfer: TransferOptions) -> Any:
        return prepare(source, target, ConvertOptions(to, transfer=transfer, **more))

    return planned


def reshard(mesh: str, to: str | None = None) -> Callable[..., Any]:
    def planned(source: Path, target: Place, transfer: TransferOptions) -> Any:
        rules = (parse_rule("layers.0.w=Shard(1)"), parse_rule("layers.1.w=Replicate()"))
        options = ReshardOptions(parse_mesh(mesh), rules=rules, to=to, transfer=transfer)
        return prepare_reshard(source, target, options)

    return planned


KINDS: dict[str, tuple[str, Callable[..., Any]]] = {
    "folder of models": ("m", convert("hf", **MANY)),
    "dcp": ("m", convert("dcp")),
    "safetensors": ("m.safetensors", convert("safetensors")),
    "torch-save": ("m.pt", convert("torch-save")),
    "reshard": ("m", reshard("4")),
    "rank files": ("m", reshard("3", "rank-local")),
}


def content(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def alone(kind: str, source: Path, folder: Path) -> dict[str, bytes]:
    """What one process writes."""
    name, planned = KINDS[kind]
    folder.mkdir()
    planned(source, folder / name, asked()).run()
    return content(folder)


def write(planned: Callable[..., Any], source: Path, target: Place, *parts: str) -> None:
    for part in parts:
        report = planned(source, target, asked(part)).run()
        assert not report.written
        assert report.part.done


def finish(planned: Callable[..., Any], source: Path, target: Place, **more: Any) -> Any:
    return planned(source, target, asked(finish=True, **more)).run()


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_in_any_order_make_what_one_process_makes(
    kind: str, count: int, source: Path, tmp_path: Path
) -> None:
    name, planned = KINDS[kind]
    truth = alone(kind, source, tmp_path / "alone")
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / name
    order = random.Random(count).sample(range(1, count + 1), count)
    for number in order:
        write(planned, source, target, f"{number}/{count}")
        assert not target.exists()
    report = finish(planned, source, target)
    assert report.written
    assert content(tmp_path / "out") == truth


def test_each_file_is_one_part_s_and_parts_are_balanced(source: Path, tmp_path: Path) -> None:
    planned = convert("hf", **MANY)(source, tmp_path / "m", asked())
    layout = planned.plan.layout
    shares = [Share(at, 4).files(layout, None) for at in range(4)]
    assert sorted(number for share in shares for number in share) == [*range(len(layout.files))]
    loads = [sum(layout.files[number].nbytes for number in share) for share in shares]
    assert max(loads) - min(loads) <= max(file.nbytes for file in layout.files)


def test_64_parts_killed_at_random_end_equal(source: Path, tmp_path: Path) -> None:
    """One process after the other goes on until it is killed at some call that changes the disk."""
    name, planned = KINDS["folder of models"]
    truth = alone("folder of models", source, tmp_path / "alone")
    (tmp_path / "out").mkdir()
    target, chance = tmp_path / "out" / name, random.Random(7)
    order = chance.sample(range(1, 65), 64)
    log = tmp_path / "log"
    log.write_text("")

    def go_on() -> None:
        for number in order[len(log.read_text().split()) :]:
            write(planned, source, target, f"{number}/64")
            with open(log, "a") as done:
                done.write(f"{number}\n")
        finish(planned, source, target)

    kills = 0
    while killed(go_on, chance.randrange(1, 400) if log.read_text().count("\n") < 64 else kills):
        kills += 1
        done = log.read_text().count("\n")
        assert done == 64 or not target.exists()
    assert kills > 5
    assert content(tmp_path / "out") == truth


def killed(work: Callable[[], None], call: int) -> bool:
    """Do the work in a process of its own; return whether it was killed at this call."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            Faults("KILL", call).install()
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) or not os.WEXITSTATUS(status)
    return os.WIFSIGNALED(status)


# What does not fit together


def refused(work: Callable[[], object], match: str, kind: type[CkptoolError] = Unsupported) -> str:
    with pytest.raises(kind, match=match) as error:
        work()
    return f"{error.value.message} {error.value.hint}"


@pytest.fixture
def three(source: Path, tmp_path: Path) -> tuple[Callable[..., Any], Path]:
    """Two of three parts of a conversion."""
    planned, target = convert("hf", **MANY), tmp_path / "m"
    write(planned, source, target, "1/3", "3/3")
    return planned, target


def test_a_part_that_is_missing_is_named(three: Any, source: Path, tmp_path: Path) -> None:
    planned, target = three
    before = content(tmp_path)
    said = refused(lambda: finish(planned, source, target), "part 2 of 3 is not done")
    assert "--part 2/3" in said
    assert content(tmp_path) == before
    write(planned, source, target, "2/3")
    finish(planned, source, target)
    before = content(tmp_path)
    refused(lambda: finish(planned, source, target), "already exists")
    refused(lambda: write(planned, source, target, "1/3"), "already exists")
    assert content(tmp_path) == before


def test_without_parts_there_is_nothing_to_finish(source: Path, tmp_path: Path) -> None:
    refused(lambda: finish(convert("dcp"), source, tmp_path / "m"), "no parts found")
    assert not list(tmp_path.iterdir())


def test_parts_of_another_run_are_refused(three: Any, source: Path, tmp_path: Path) -> None:
    planned, target = three
    before = content(tmp_path)
    refused(lambda: write(planned, source, target, "2/4"), "the run began in 3 parts")
    refused(lambda: write(planned, source, target, "1/4"), "the run began in 3 parts")
    other = convert("hf", max_shard_size=2_000)
    for words in ("1/3", "2/3"):
        refused(lambda words=words: write(other, source, target, words), "the plan is another")
    refused(lambda: finish(other, source, target), "the plan is another")
    assert content(tmp_path) == before


def test_parts_with_other_values_or_assets_are_refused(tmp_path: Path) -> None:
    """Though names and sizes are the same: a mix of both would be committed."""
    source, target = tmp_path / "s.pt", tmp_path / "m"
    torch.save({"w": torch.ones(40), "step": 3}, source)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for file in ("config.json", "tokenizer.json"):
            (tmp_path / name / file).write_text(json.dumps({"model_type": name}))
    one, two = (
        ["convert", source, target, "--to", "hf", "--hf-assets", tmp_path / name]
        for name in ("one", "two")
    )
    log = tmp_path / "log"
    for part in ("1/2", "2/2"):
        assert run([*map(str, one), "--part", part], log).code == 0
    for way in (["--part", "2/2"], ["--finish"], ["--resume"]):
        ended = run([*map(str, two), *way], log)
        assert ended.code != 0
        assert "the plan" in ended.words
    assert run([*map(str, one), "--finish"], log).code == 0
    assert json.loads((target / "config.json").read_text()) == {"model_type": "one"}


def test_a_source_that_changed_between_is_refused(source: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(source, tmp_path / "ckpt")
    planned, target, mine = convert("hf", **MANY), tmp_path / "m", tmp_path / "ckpt"
    write(planned, mine, target, "1/2")
    file = next(mine.glob("*.distcp"))
    file.write_bytes(file.read_bytes())
    refused(lambda: write(planned, mine, target, "2/2"), "the source is another")
    refused(lambda: finish(planned, mine, target), "the source is another")


def test_files_of_a_part_that_are_gone_or_changed_are_written_again(
    source: Path, tmp_path: Path
) -> None:
    name, planned = KINDS["folder of models"]
    truth = alone("folder of models", source, tmp_path / "alone")
    target = tmp_path / name
    write(planned, source, target, "1/2", "2/2")
    staged = sorted((tmp_path / f".{name}.partial").glob("*.safetensors"))
    staged[0].unlink()
    before = staged[-1].stat()
    staged[-1].write_bytes(bytes(before.st_size))
    os.utime(staged[-1], ns=(before.st_atime_ns, before.st_mtime_ns))
    for _ in range(2):
        said = refused(lambda: finish(planned, source, target), "missing, or changed since")
        write(planned, source, target, said.split("--part ")[1].split()[0])
    finish(planned, source, target)
    assert content(target) == {key.removeprefix("m/"): data for key, data in truth.items()}


def test_parts_are_finished_where_files_have_other_inodes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another machine, of file systems in user space."""
    _, planned = KINDS["folder of models"]
    write(planned, source, tmp_path / "m", "1/2", "2/2")
    of = FileStatus.of
    monkeypatch.setattr(FileStatus, "of", lambda status: of(status)._replace(inode=7))
    finish(planned, source, tmp_path / "m")
    assert content(tmp_path / "m")


def test_one_process_writes_a_part_at_a_time(three: Any, source: Path, tmp_path: Path) -> None:
    """Nor is it committed, or begun afresh, while one does."""
    planned, target = three
    second = planned(source, target, asked("2/3"))
    real = type(second)._move

    def meanwhile(self: Any, *words: Any) -> None:
        refused(lambda: finish(planned, source, target), "part 2 of 3 is not done")
        for work in (
            lambda: write(planned, source, target, "2/3"),
            lambda: planned(source, target, asked(overwrite=True)).run(),
            lambda: planned(source, target, asked(resume=True)).run(),
        ):
            refused(work, "another ckptool is writing")
        real(self, *words)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(second), "_move", once(real, meanwhile))
        second.run()
    finish(planned, source, target)
    assert target.is_dir()


def once(real: Callable[..., None], first: Callable[..., None]) -> Callable[..., None]:
    called: list[int] = []

    def call(*words: Any) -> None:
        called.append(1)
        (first if len(called) == 1 else real)(*words)

    return call


def test_nothing_is_committed_while_a_part_that_was_done_goes_on(three: Any, source: Path) -> None:
    planned, target = three
    write(planned, source, target, "2/3")
    going_on = Journal.lock(target.with_name(".m.partial.journal.1"))
    refused(lambda: finish(planned, source, target), "another ckptool is writing")
    going_on.close()
    finish(planned, source, target)


def test_one_process_takes_over_what_parts_have_done(three: Any, source: Path) -> None:
    planned, target = three
    planned(source, target, asked(resume=True)).run()
    assert target.is_dir()
    assert sorted(path.name for path in target.parent.iterdir()) == ["m"]


def test_who_takes_over_notes_what_the_parts_have_done(tmp_path: Path) -> None:
    """It may be killed as well."""
    part = Journal.resume(tmp_path / "journal.0", "plan", "source", parts=2)
    part.done("a", 7)
    part.close()
    for _ in range(2):
        alone = Journal.resume(tmp_path / "journal.0", "plan", "source")
        assert alone.crc_of("a") == 7
        alone.close()


def test_no_run_that_begins_afresh_removes_parts_unasked(three: Any, source: Path) -> None:
    planned, target = three
    before = content(target.parent)
    again = planned(source, target, asked())
    refused(again.run, "holds the unfinished output of a run in 3 parts")
    assert "a run in 3 parts" in again.obstacle()
    assert content(target.parent) == before
    planned(source, target, asked(overwrite=True)).run()
    assert sorted(path.name for path in target.parent.iterdir()) == ["m"]


def test_a_part_that_ends_a_commit_cut_short_says_so(
    three: Any, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, target = three
    write(planned, source, target, "2/3")
    with monkeypatch.context() as patched:
        patched.setattr(FolderCommit, "clear", once(FolderCommit.clear, _interrupt))
        with pytest.raises(KeyboardInterrupt):
            finish(planned, source, target)
    report = planned(source, target, asked("1/3")).run()
    assert (report.written, report.part.done) == (True, True)
    assert "whose commit was interrupted" in report.notes[-1]
    assert sorted(path.name for path in target.parent.iterdir()) == ["m"]


def _interrupt(*words: Any) -> None:
    raise KeyboardInterrupt


def test_no_part_begins_once_one_process_has_taken_over(
    three: Any, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that failed would remove its files from what the other commits."""
    planned, target = three
    write(planned, source, target, "2/3")
    whole = planned(source, target, asked(resume=True))
    real = type(whole)._verify

    def meanwhile(self: Any, *words: Any) -> None:
        for part in ("1/3", "2/3"):
            refused(
                lambda part=part: write(planned, source, target, part),
                "the run began without --part|another ckptool",
            )
        monkeypatch.setattr(type(whole), "_verify", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(whole), "_verify", meanwhile)
    with pytest.raises(KeyboardInterrupt):
        whole.run()
    refused(lambda: finish(planned, source, target), "the run began without --part")
    planned(source, target, asked(resume=True)).run()
    assert sorted(path.name for path in target.parent.iterdir()) == ["m"]


def test_a_part_that_begins_while_others_are_removed_ends_the_new_run(
    three: Any, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, target = three
    real = stage_module.remove_staged
    opened: list[Any] = []

    def meanwhile(*words: Any) -> None:
        real(*words)
        part = planned(source, target, asked("2/3"))
        stage = part._open_stage(Ranks())
        stage.begin()
        opened.append(stage)

    monkeypatch.setattr(stage_module, "remove_staged", meanwhile)
    refused(
        lambda: planned(source, target, asked(overwrite=True)).run(), "another ckptool is writing"
    )
    opened[0].close()
    assert not target.exists()


def test_a_part_goes_on_without_verification_only_from_an_untouched_source(
    three: Any, source: Path, tmp_path: Path
) -> None:
    planned, target = three
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    planned(copy, target, asked("2/3", verify=False)).run()
    file = copy / "__0_0.distcp"
    before = file.stat()
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    again = planned(copy, target, asked("2/3", verify=False))
    refused(again.run, "the source was written to, or touched")
    planned(copy, target, asked("2/3")).run()


def test_files_that_go_before_a_part_is_done_end_it(
    three: Any, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, target = three
    last = planned(source, target, asked("2/3", verify=False))
    real = type(last)._move

    def losing(self: Any, stage: Any, *words: Any) -> None:
        real(self, stage, *words)
        (stage.folder / stage._names[0]).unlink()

    with monkeypatch.context() as patched:
        patched.setattr(type(last), "_move", losing)
        refused(last.run, "removed or cut short", TransferError)
    refused(lambda: finish(planned, source, target, verify=False), "part 2 of 3 is not done")
    write(planned, source, target, "2/3")
    finish(planned, source, target)


def test_files_that_go_before_the_commit_end_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, target = convert("hf", **MANY), tmp_path / "m"
    whole = planned(source, target, asked())
    real = type(whole)._verify

    def losing(self: Any, stage: Any, *words: Any) -> Any:
        found = real(self, stage, *words)
        next(stage.folder.glob("model-*.safetensors")).unlink()
        return found

    monkeypatch.setattr(type(whole), "_verify", losing)
    refused(whole.run, "removed or cut short", TransferError)
    assert not target.exists()


@pytest.mark.parametrize("end", [b"", b"\xff\xfe", b'{"part": {"verified": true, '])
def test_a_part_of_which_the_journal_is_cut_is_not_done(
    end: bytes, three: Any, source: Path
) -> None:
    planned, target = three
    write(planned, source, target, "2/3")
    journal = cut_short(target, end)
    refused(lambda: finish(planned, source, target), "part 2 of 3 is not done")
    write(planned, source, target, "2/3")
    assert b"\xff" not in journal.read_bytes()
    finish(planned, source, target)


@pytest.mark.parametrize("end", [b"\xff\xfe\n", b'{"part": {"verified": true}}\n'])
def test_a_part_of_which_the_journal_is_damaged_is_named(
    end: bytes, three: Any, source: Path
) -> None:
    planned, target = three
    write(planned, source, target, "2/3")
    journal = cut_short(target, end)
    for work in (finish, lambda *words: write(*words, "2/3")):
        refused(lambda work=work: work(planned, source, target), "journal.1: is not as ckptool wr")
    journal.unlink()
    write(planned, source, target, "2/3")
    finish(planned, source, target)


def cut_short(target: Path, end: bytes) -> Path:
    """Give the second part's journal another end."""
    journal = target.parent / ".m.partial.journal.1"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:-1], end]))
    return journal


def test_a_part_that_was_killed_as_it_began_is_named(three: Any, source: Path) -> None:
    planned, target = three
    (target.parent / ".m.partial.journal.1").touch()
    refused(lambda: finish(planned, source, target), "part 2 of 3 is not done")
    write(planned, source, target, "2/3")
    finish(planned, source, target)


def test_what_stands_is_replaced_at_the_end_alone(source: Path, tmp_path: Path) -> None:
    old, planned, target = convert("hf"), convert("hf", **MANY), tmp_path / "m"
    old(source, target, asked()).run()
    (target / "notes.txt").write_text("mine")
    before = content(target)
    refused(lambda: write(planned, source, target, "1/2"), "already exists")
    for part in ("1/2", "2/2"):
        planned(source, target, asked(part, overwrite=True)).run()
        assert content(target) == before
    refused(lambda: finish(planned, source, target), "already exists")
    finish(planned, source, target, overwrite=True)
    assert (target / "notes.txt").read_text() == "mine"
    assert len(content(target)) > len(before)


# The proof


def test_each_part_proves_what_it_wrote(
    three: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, target = three
    before, real = content(tmp_path), stage_module.run

    def damaging(work: Any, folder: Path, *words: Any) -> None:
        real(work, folder, *words)
        names = [work.plan.layout.files[number].path for number in work.numbers]
        path = next(folder / name for name in names if name.endswith(".safetensors"))
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)

    with monkeypatch.context() as patched:
        patched.setattr(stage_module, "run", damaging)
        refused(lambda: write(planned, source, target, "2/3"), "tensors? differ", NotVerified)
    assert content(tmp_path) == before, "the other parts stay"
    refused(lambda: finish(planned, source, target), "part 2 of 3 is not done")


def test_a_part_without_proof_is_committed_only_so(three: Any, source: Path) -> None:
    planned, target = three
    planned(source, target, asked("2/3", verify=False)).run()
    said = refused(lambda: finish(planned, source, target), "part 2 of 3 is not verified")
    assert "--no-verify" in said
    write(planned, source, target, "2/3")
    finish(planned, source, target)


def test_each_checksum_of_the_source_is_one_part_s(source: Path, tmp_path: Path) -> None:
    """Also of records that several parts need, and none reads whole."""
    mine, target = tmp_path / "ckpt", tmp_path / "m"
    shutil.copytree(source, mine)
    file = next(mine.glob("*.distcp"))
    data = file.read_bytes()
    at = open_checkpoint(mine).catalog.tensors["layers.0.w"].chunks[0].at
    changed = bytearray(data)
    changed[at.offset + at.nbytes // 2] ^= 1
    file.write_bytes(changed)
    found = 0
    for part in ("1/4", "2/4", "3/4", "4/4"):
        try:
            write(reshard("4"), mine, target, part)
        except Damaged as error:
            found += "CRC-32" in error.message
    assert found


def test_a_source_that_changes_meanwhile_ends_only_this_part(
    three: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptool.commands.transfer import transfer as module

    planned, target = three
    before = content(tmp_path)

    def changed(*words: Any) -> None:
        raise Changed("the source changed")

    monkeypatch.setattr(module, "require_unchanged", changed)
    refused(lambda: write(planned, source, target, "2/3"), "the source changed", Changed)
    assert content(tmp_path) == before


# The command line


@pytest.mark.parametrize("part", ["0/3", "4/3", "3", "a/3", "-1/3", "1/", "1/0", "1/2/3"])
def test_a_part_that_is_none_is_refused(part: str) -> None:
    refused(lambda: parse_part(part, "--part"), "invalid --part", UsageError)


def test_options_that_do_not_go_together(source: Path, tmp_path: Path) -> None:
    both = asked("1/2", finish=True)
    for transfer in (both, asked("1/2", resume=True), asked(finish=True, resume=True)):
        planned = convert("dcp")(source, tmp_path / "m", transfer)
        refused(planned.run, "--part|--finish", UsageError)
    checked = reshard("2")(source, tmp_path / "m", asked("1/2"))
    refused(replace(checked, check=True).run, "--finish", UsageError)


def test_what_is_reported_of_a_part(source: Path, tmp_path: Path) -> None:
    log, target = tmp_path / "log", tmp_path / "m"
    line = ["convert", str(source), str(target), "--to", "dcp", "--part", "1/1"]
    ended = run([*line, "--json"], log)
    report = json.loads(ended.words)
    assert (report["written"], report["part"]["done"]) == (False, True)
    assert (report["part"]["number"], report["part"]["of"]) == (1, 1)
    assert report["part"]["bytes"] == sum(file["bytes"] for file in report["files"])
    assert "wrote part 1 of 1 of" in run(line, log).words
    finished = run([*line[:-2], "--finish", "--json"], log)
    report = json.loads(finished.words)
    assert (report["written"], report["part"]) == (True, None)


def test_a_dry_run_says_what_a_part_would_write(source: Path, tmp_path: Path) -> None:
    for words in (["convert", "--to", "dcp"], ["reshard", "--mesh", "2"]):
        line = [words[0], str(source), str(tmp_path / "m"), *words[1:], "--dry-run"]
        part = json.loads(run([*line, "--part", "1/2", "--json"], tmp_path / "log").words)["part"]
        files = "1 file" if part["files"] == 1 else f"{part['files']} files"
        said = run([*line, "--part", "1/2"], tmp_path / "log").words
        assert f"of this, part 1 of 2 writes {files}, " in said
        assert not part["done"]
        assert "of this" not in run(line, tmp_path / "log").words


def test_torchrun_shares_a_conversion(source: Path, out: Path) -> None:
    truth = alone("folder of models", source, out / "alone")
    words = (source, out / "m", "--to", "hf", "--max-shard-size", "1500")
    ended = on_ranks(2, ("-m", "ckptool", "convert", *words))
    assert [one.code for one in ended] == [0, 0], ended[0].stderr
    assert [bool(one.stdout) for one in ended] == [True, False]
    assert content(out / "m") == {key.removeprefix("m/"): data for key, data in truth.items()}


# A store


def in_memory() -> RemotePath:
    found = location(f"memory://{uuid.uuid4().hex}/run/m")
    assert isinstance(found, RemotePath)
    return found


def stored(place: RemotePath) -> dict[str, bytes]:
    folder = MemoryFileSystem().store
    head = f"{place.parent.key}/"
    return {key.removeprefix(head): file.getvalue() for key, file in folder.items() if head in key}


@pytest.mark.parametrize("kind", KINDS)
def test_parts_make_the_same_in_a_store(kind: str, source: Path, tmp_path: Path) -> None:
    name, planned = KINDS[kind]
    truth = alone(kind, source, tmp_path / "alone")
    place = in_memory().with_name(name)
    for part in ("2/3", "3/3"):
        write(planned, source, place, part)
    again = location(place.url)
    with pytest.raises((Damaged, Unrecognized, CkptoolError)):
        open_checkpoint(again)
    refused(lambda: finish(planned, source, again), "part 1 of 3 is not done")
    refused(lambda: write(planned, source, again, "1/2"), "the run began in 3 parts")
    refused(lambda: planned(source, again, asked()).run(), "unfinished output of a run in 3 parts")
    write(planned, source, again, "1/3", "2/3")
    assert finish(planned, source, location(place.url)).written
    assert stored(place) == truth


@pytest.mark.parametrize("is_there", [False, True])
def test_in_a_store_files_that_are_gone_or_replaced_are_written_again(
    is_there: bool, source: Path
) -> None:
    planned, place = convert("hf", **MANY), in_memory()
    write(planned, source, place, "1/2", "2/2")
    whole = stored(place)
    lost = next(name for name in sorted(whole) if "/model-00001-of" in name)
    key = f"{place.parent.key}/{lost}"
    if is_there:
        place.store.put(key, bytes(len(whole[lost])), str(place))
    else:
        place.store.remove([key], str(place))
    said = refused(lambda: finish(planned, source, location(place.url)), "missing, or changed")
    write(planned, source, location(place.url), said.split("--part ")[1].split()[0])
    finish(planned, source, location(place.url))
    assert stored(place)[lost] == whole[lost]


def test_parts_replace_nothing_in_a_store(source: Path) -> None:
    planned, place = convert("hf", **MANY), in_memory()
    planned(source, place, asked()).run()
    before = stored(place)
    part = planned(source, location(place.url), asked("1/2", overwrite=True))
    refused(part.run, "already exists")
    assert stored(place) == before


def test_in_a_store_nothing_is_begun_afresh_while_a_part_is_written(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another process: its files would be mixed with those of the part."""
    planned, place = convert("hf", **MANY), in_memory()
    write(planned, source, place, "1/2")
    part = planned(source, location(place.url), asked("2/2"))
    real, mine = type(part)._move, os.getpid()

    def meanwhile(self: Any, *words: Any) -> None:
        for more in ({"overwrite": True}, {"overwrite": True, "resume": True}):
            monkeypatch.setattr(os, "getpid", lambda: 1)
            other = planned(source, location(place.url), asked(**more))
            refused(other.run, "another ckptool is writing a part of it")
            monkeypatch.setattr(os, "getpid", lambda: mine)
        real(self, *words)

    monkeypatch.setattr(type(part), "_move", once(real, meanwhile))
    part.run()
    finish(planned, source, location(place.url))


@pytest.mark.parametrize("kind", ["folder of models", "reshard"])
def test_parts_of_a_source_that_was_rewritten_with_its_time_set_back_are_not_put_together(
    kind: str, source: Path, tmp_path: Path
) -> None:
    """As a step that was unpacked over another: of the same sizes, times and plan."""
    name, planned = KINDS[kind]
    mine, target = tmp_path / "mine", tmp_path / "out" / name
    shutil.copytree(source, mine)
    target.parent.mkdir()
    data = next(mine.glob("*.distcp"))
    status = data.stat()
    write(planned, mine, target, "1/2")
    data.write_bytes((save(tmp_path / "other", seed=6) / data.name).read_bytes())
    os.utime(data, ns=(status.st_atime_ns, status.st_mtime_ns))
    write(planned, mine, target, "2/2")
    with pytest.raises(Unsupported, match="part 1 of 2 is of a source that was written to") as why:
        finish(planned, mine, target)
    assert "--part 1/2" in str(why.value.hint)
    assert not target.exists()
    with pytest.raises(NotVerified):  # what it had written is of what is gone
        write(planned, mine, target, "1/2")
    write(planned, mine, target, "1/2")
    finish(planned, mine, target)
    assert content(target.parent) == alone(kind, mine, tmp_path / "alone")


def test_parts_of_a_source_that_was_only_touched_are_compared_again(
    source: Path, tmp_path: Path
) -> None:
    name, planned = KINDS["folder of models"]
    mine, target = tmp_path / "mine", tmp_path / name
    shutil.copytree(source, mine)
    write(planned, mine, target, "1/2", "2/2")
    next(mine.glob("*.distcp")).chmod(0o600)
    with pytest.raises(Unsupported, match="2 parts of 2 are of a source"):
        finish(planned, mine, target)
    write(planned, mine, target, "1/2", "2/2")
    assert finish(planned, mine, target).written


def save_on_ranks(folder: Path, ranks: int) -> Path:
    """Eight tensors of which each rank has saved some of the rows."""
    rows = {f"layers.{n}.w": torch.randn(96, 2) for n in range(8)}
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
    real = items._open_chunk

    def noted(source: Any, entry: Any, known: Any, chunk: Any) -> Any:
        opened.append((entry.name, chunk.box))
        return real(source, entry, known, chunk)

    monkeypatch.setattr(items, "_open_chunk", noted)
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
        python = (sys.executable, "-c", program)
        return subprocess.check_output((*python, *words, "-q"), text=True).split()[-1] == "True"

    assert not imports_numpy("copied", "--part", "1/1", "--no-verify")
    assert not imports_numpy("compared", "--part", "1/1")
    assert not imports_numpy("compared", "--finish")
    assert imports_numpy("cast", "--dtype", "bf16")
    assert (tmp_path / "compared").is_dir()


def test_a_part_opens_what_is_alike_together(
    cut: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    single: list[Any] = []

    def noted(source: Any, item: Any) -> Any:
        single.append(item)
        return locate_item(source, item)

    monkeypatch.setattr(items, "locate_item", noted)
    monkeypatch.setattr(cached, "_CACHE", {})  # it may be full of other tests' archives
    write(LATE["folder of models"], cut, tmp_path / "m", "1/4")
    assert 0 < len({item.tensor for item in single}) <= 2  # models of the others: 192 items


def test_a_part_in_the_sources_own_chunks_is_planned_without_opening_them(
    late: Path, tmp_path: Path
) -> None:
    plan = prepare(late, tmp_path / "c", ConvertOptions("dcp", transfer=asked("2/3"))).plan
    assert all(type(entry.chunks) is LateChunks for entry in plan.entries)
    assert not any(entry.chunks.opened for entry in plan.entries)


def test_ranks_open_the_items_of_their_share_alone(cut: Path, tmp_path: Path) -> None:
    options = ReshardOptions(parse_mesh("8"), transfer=asked())
    plan = prepare_reshard(cut, tmp_path / "r", options, ranks=2).plan
    assert not any(entry.chunks.opened for entry in plan.entries)
    assert all(type(entry.chunks) is LateChunks for entry in plan.entries)
    words = ("reshard", cut, tmp_path / "r", "--mesh", "8", "--workers", "1", "--no-fsync")
    ended = on_ranks(2, ("-m", "ckptool", *words))
    assert [each.code for each in ended] == [0, 0], ended
    prepare_reshard(cut, tmp_path / "alone", options).run()
    assert content(tmp_path / "r") == content(tmp_path / "alone")


def test_a_record_is_checked_by_one_writer_whatever_that_writes_before(
    late: Path, tmp_path: Path
) -> None:
    plan = reshard("8")(late, tmp_path / "r", asked("1/2")).plan
    numbers = [plan.numbers[f"__{rank}_0.distcp"] for rank in (0, 1)]
    one, other = (
        sorted((entry.name, chunk.box.lo) for entry, chunk in checked_chunks(plan, each))
        for each in (numbers, numbers[::-1])
    )
    assert one == other
    every = [plan.numbers[f"__{rank}_0.distcp"] for rank in range(8)]
    shares = [
        [(entry.name, chunk.box.lo) for entry, chunk in checked_chunks(plan, [number])]
        for number in every
    ]
    assert sorted(shares[0] + shares[1]) == one
    checked = [place for share in shares for place in share]
    assert len(checked) == len({*checked}) == sum(len(entry.chunks) for entry in plan.entries)


def test_all_writers_check_as_many_records_of_tensors_that_each_has_a_part_of(
    tmp_path: Path,
) -> None:
    state = {f"layers.{n}.w": torch.full((16, 2), float(n)) for n in range(64)}
    dcp.save(state, checkpoint_id=tmp_path / "whole", no_dist=True)
    plan = reshard("8")(tmp_path / "whole", tmp_path / "r", asked("1/8")).plan
    numbers = [plan.numbers[f"__{rank}_0.distcp"] for rank in range(8)]
    counts = [sum(1 for _ in checked_chunks(plan, [number])) for number in numbers]
    assert sum(counts) == 64
    assert max(counts) < 20


def test_an_item_that_is_none_ends_the_parts_that_need_it(late: Path, tmp_path: Path) -> None:
    mine = tmp_path / "cut"
    shutil.copytree(late, mine)
    at = open_checkpoint(mine).catalog.tensors["layers.7.w"].chunks[-1].at
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
    planned, checked = convert("torch-save"), set[str]()
    for part in ("1/2", "2/2"):
        transfer = planned(source, tmp_path / "m.pt", asked(part))
        plan, numbers = transfer.plan, transfer.options.part.files(transfer.plan.layout, None)
        checked |= {chunk.at.record for _, chunk in checked_chunks(plan, numbers)}
        write(planned, source, tmp_path / "m.pt", part)
    finish(planned, source, tmp_path / "m.pt")
    assert len(checked) == 2


# Records of which several parts read some of the rows


@pytest.fixture(scope="module", params=[4, 64])
def rows(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Two tensors in which few or many ranks have saved rows; seven cut them elsewhere.

    Smaller ones are read whole by each part.
    """
    folder = tmp_path_factory.mktemp("rows")
    state = {f"blocks.{n}.w": torch.randn(384, 256) for n in range(2)}
    dcp.save(state, checkpoint_id=folder / "one", no_dist=True)
    options = ReshardOptions(parse_mesh(str(request.param)), transfer=asked())
    prepare_reshard(folder / "one", folder / "rows", options).run()
    return folder / "rows"


def by_rows(source: Path, target: Place, transfer: TransferOptions) -> Any:
    rules = (parse_rule("*=Shard(0)"),)
    options = ReshardOptions(parse_mesh("7"), rules=rules, transfer=transfer)
    return prepare_reshard(source, target, options)


SEVEN = tuple(f"{n}/7" for n in range(1, 8))


def count_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note how many bytes are read from now on for checksums alone."""
    read, real = list[int](), checksum.byte_job

    def noted(key: Any, file: str, offset: int, nbytes: int) -> Any:
        read.append(nbytes)
        return real(key, file, offset, nbytes)

    monkeypatch.setattr(checksum, "byte_job", noted)
    return read


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
    found = []
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
    chunks = open_checkpoint(mine).catalog.tensors["blocks.1.w"].chunks
    item = chunks[len(chunks) * 4 // 7].at  # of the fourth and the fifth part
    data = bytearray((mine / item.file).read_bytes())
    data[item.offset + item.nbytes * quarter // 4] ^= 1
    (mine / item.file).write_bytes(data)
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
