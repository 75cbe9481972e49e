"""An interrupted commit, copied or added to: files that ckptool did not write stay."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import case, convert_to

from ckptool.commands.convert import prepare
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ConvertOptions, TransferOptions
from ckptool.errors import CkptoolError, Unsupported
from ckptool.storage import disk

CALLS = ("rename", "replace", "unlink", "rmdir", "mkdir")
NOTE = ".run.partial.journal.commit"


def write(place: Path, **more: Any) -> None:
    """Replace ``run``, which holds a script too."""
    options = ConvertOptions(
        "dcp", transfer=TransferOptions(run=RunOptions(workers=1, fsync=False), **more)
    )
    prepare(case("dcp_base").path, place / "run", options).run()


def begin(place: Path) -> None:
    place.mkdir()
    shutil.copytree(case("dcp_fsdp2_tp").path, place / "run")
    (place / "run" / "train.py").write_text("mine")
    (place / "run" / "src").mkdir()
    (place / "run" / "src" / "model.py").write_text("also mine")


def die_at(number: int, work: Callable[[], object], *, exchange: bool = True) -> bool:
    """Run ``work`` in a process that ends before its ``number``-th change; whether it did."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _let_die(number, exchange=exchange)
            work()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


def _let_die(number: int, *, exchange: bool) -> None:
    calls = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                os._exit(9)
            return real(*args, **more)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    real = disk._rename
    plain: Callable[..., bool] = (
        real
        if exchange
        else lambda one, other, flag: flag != disk._EXCHANGE and real(one, other, flag)
    )
    disk._rename = counted(plain)


def cut_short(folder: Path, *, exchange: bool = True) -> list[Path]:
    """A place for each state that a killed commit can leave."""
    found: dict[tuple[str, ...], Path] = {}
    for number in range(1, 60):
        place = folder / f"at-{number}"
        begin(place)
        if not die_at(number, partial(write, place, overwrite=True), exchange=exchange):
            break
        state = tuple(sorted(str(path.relative_to(place)) for path in place.rglob("*")))
        if (place / NOTE).exists():
            found.setdefault(state, place)
        if place not in found.values():
            shutil.rmtree(place)
    return [*found.values()]


@pytest.fixture(scope="module", autouse=True)
def _imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import what is killed: each process would else do so for itself."""
    write(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module", params=[True, False], ids=["exchange", "steps"])
def half_done(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    found = cut_short(tmp_path_factory.mktemp("half"), exchange=request.param)
    assert len(found) > 5
    return found


def mine(place: Path) -> dict[str, str]:
    """What is not ckptool's, wherever it lies, by the last part of its path."""
    names = ("train.py", "model.py", "thesis.txt")
    return {path.name: path.read_text() for path in place.rglob("*") if path.name in names}


SCRIPTS = {"train.py": "mine", "model.py": "also mine"}


def collide(place: Path, numbers: str) -> None:
    """Give the note the inode numbers that a file system gave the copies."""
    note = json.loads((place / NOTE).read_text())
    folders = (".run.partial", "run", ".run.replaced")
    staged, target, aside = (disk.identity(place / name) for name in folders)
    first = staged or aside or 0
    note["new"], note["old"] = (first, target) if numbers == "swapped" else (target or 0, first)
    (place / NOTE).write_text(json.dumps(note))


@pytest.mark.parametrize("numbers", ["other", "swapped", "same"])
def test_a_copy_of_a_half_done_commit_loses_nothing(
    numbers: str, half_done: list[Path], tmp_path: Path
) -> None:
    """Whatever the inode numbers are, and also once the note is removed as the hint says."""
    for place in half_done:
        copy = tmp_path / place.name
        shutil.copytree(place, copy)
        if numbers != "other":
            collide(copy, numbers)
        before = below(copy)
        error = said(partial(write, copy, overwrite=True))
        assert mine(copy) == SCRIPTS, place.name
        if "copied" in error:
            assert str(copy / NOTE) in error
            assert below(copy) == before
        (copy / NOTE).unlink(missing_ok=True)
        said(partial(write, copy, overwrite=True))
        assert mine(copy) == SCRIPTS, place.name


def below(place: Path) -> list[Path]:
    return sorted(path for path in place.rglob("*") if not path.name.endswith(".journal.0"))


def said(work: Callable[[], object]) -> str:
    """What a command says if it refuses."""
    try:
        work()
    except CkptoolError as error:
        return f"{error.message} hint: {error.hint}"
    return ""


def test_a_copy_is_refused_and_says_what_stands_where(
    half_done: list[Path], tmp_path: Path
) -> None:
    whole = [place for place in half_done if (place / ".run.partial" / "train.py").exists()]
    for place in whole[:1]:
        copy = tmp_path / "copy"
        shutil.copytree(place, copy)
        with pytest.raises(Unsupported, match="copied") as caught:
            write(copy, overwrite=True)
        assert f"{copy / 'run'} has the files of the new one" in caught.value.message
        assert ".run.partial has the files of the old one" in caught.value.message
        assert str(copy / NOTE) in str(caught.value.hint)


@pytest.mark.parametrize(("name", "exchange"), [("sub/thesis.txt", True), ("thesis.txt", False)])
def test_what_is_put_among_the_staged_files_survives(
    name: str, exchange: bool, tmp_path: Path
) -> None:
    """The places themselves, not copies: their inode numbers are those noted."""
    place = tmp_path / "place"
    for number in range(1, 60):
        begin(place)
        if not die_at(number, lambda: write(place, overwrite=True), exchange=exchange):
            break
        if (place / ".run.partial").is_dir():
            (place / ".run.partial" / name).parent.mkdir(exist_ok=True)
            (place / ".run.partial" / name).write_text("mine as well")
            for more in ({"resume": True}, {"overwrite": True}):
                error = said(partial(write, place, **more))
                assert not error or name.partition("/")[0] in error or "resume" in error
                assert mine(place) == SCRIPTS | {Path(name).name: "mine as well"}, number
        shutil.rmtree(place)
    else:
        raise AssertionError("never ended")


@pytest.mark.parametrize(("name", "to"), [("run", "dcp"), ("m.pt", "torch-save")])
def test_a_target_that_is_removed_after_a_kill_is_written_anew(
    name: str, to: str, tmp_path: Path
) -> None:
    options = ConvertOptions(to, transfer=TransferOptions(run=RunOptions(workers=1, fsync=False)))
    removed = 0
    for number in range(1, 60):
        place = tmp_path / f"at-{number}"
        place.mkdir()
        target = place / name
        if not die_at(number, prepare(case("dcp_base").path, target, options).run):
            break
        if target.exists():
            removed += (place / f".{name}.partial.journal.commit").exists()
            shutil.rmtree(target) if target.is_dir() else target.unlink()
        prepare(case("dcp_base").path, target, options).run()
        assert [path.name for path in place.iterdir()] == [name]
    assert removed


def test_a_file_of_a_planned_name_that_is_too_large_stays(tmp_path: Path) -> None:
    place = tmp_path / "place"
    begin(place)
    number = 1
    while not (place / ".run.partial").is_dir():
        shutil.rmtree(place)
        begin(place)
        assert die_at(number, lambda: write(place, overwrite=True))
        number += 1
    (place / ".run.partial" / ".metadata").write_bytes(b"x" * (1 << 20))
    with pytest.raises(Unsupported, match=r"holds \.metadata, which ckptool did not write"):
        write(place, overwrite=True)
    assert (place / ".run.partial" / ".metadata").stat().st_size == 1 << 20


def test_a_pair_of_files_that_was_copied_is_never_mixed(tmp_path: Path) -> None:
    """The main file of the new one, and the side file of the old one beside it."""
    torch.save({"w": torch.ones(2), "step": 3}, tmp_path / "old.pt")
    torch.save({"w": torch.zeros(2), "step": 4}, tmp_path / "new.pt")
    target = Path("m.safetensors")
    convert = partial(convert_to, "safetensors", tmp_path / "new.pt", overwrite=True)
    whole: list[dict[str, bytes]] = []
    read: list[dict[str, bytes]] = []

    def note(path: Path) -> None:
        read.append(pair(path))

    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        convert_to("safetensors", tmp_path / f"{name}.pt", tmp_path / name / target)
        whole.append(pair(tmp_path / name / target))
    for number in range(1, 40):
        place, copy = tmp_path / f"at-{number}", tmp_path / f"copy-{number}"
        shutil.copytree(tmp_path / "old", place)
        work = partial(convert, place / target)
        if not die_at(number, work):
            break
        assert pair(place / target) in whole
        shutil.copytree(place, copy)
        error = said(partial(note, copy / target))
        again = said(partial(convert, copy / target))
        assert not (error or again) or "copied" in error + again
        assert again or pair(copy / target) == whole[1]
        work()
        assert pair(place / target) == whole[1]
        assert sorted(os.listdir(place)) == ["m.extra.pt", "m.safetensors"]
    else:
        raise AssertionError("never ended")
    assert read
    assert all(one in whole for one in read)


@pytest.mark.parametrize("first", [{"overwrite": True}, {}], ids=["overwrite", "new"])
def test_a_side_file_that_came_since_stays_where_it_is(
    first: dict[str, Any], tmp_path: Path
) -> None:
    """Whatever is run next, and however often: it is named, or nothing is left to be written."""
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt")
    torch.save({"w": torch.zeros(2), "step": 4}, tmp_path / "new.pt")

    def convert(target: Path, **more: Any) -> None:
        transfer = TransferOptions(run=RunOptions(workers=1, fsync=False), **more)
        options = ConvertOptions("safetensors", transfer=transfer)
        prepare(tmp_path / "new.pt", target, options).run()

    named = 0
    for number in range(1, 40):
        place = tmp_path / f"at-{number}"
        place.mkdir()
        target, side = place / "m.safetensors", place / "m.extra.pt"
        if first:
            convert_to("safetensors", tmp_path / "old.pt", target)
        if not die_at(number, partial(convert, target, **first)):
            break
        is_done = side.exists()
        torch.save({"notes": [1, 2]}, side)
        before = side.read_bytes()
        for more in ({"resume": True}, {}, {"overwrite": True}, {"resume": True}):
            held = target.read_bytes() if target.exists() else None
            error = said(partial(convert, target, **more))
            assert side.read_bytes() == before, number
            assert (target.read_bytes() if target.exists() else None) == held
            assert is_done or str(side) in error
            named += str(side) in error
    else:
        raise AssertionError("never ended")
    assert named


def pair(path: Path) -> dict[str, bytes]:
    """The bytes of a safetensors file and of the side file that belongs to it."""
    source = open_checkpoint(path).source
    return {name: source.read(name, 0, size) for name, size in source.files.items()}
