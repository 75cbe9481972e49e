"""Parts written by independent processes: together they equal the output of one process."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_runs import Faults, run
from parts.part_runs import KINDS, MANY, alone, asked, content, convert, finish, refused, write

from ckptool.engine.share import Share
from ckptool.storage.file_status import FileStatus


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
    shares = [Share(at, 4).files(layout) for at in range(4)]
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
    for part in ("1/3", "2/3"):
        refused(partial(write, other, source, target, part), "the plan is another")
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
