"""Parts that are written to a store, and sources that change between two of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from parts.part_runs import (
    KINDS,
    MANY,
    alone,
    asked,
    content,
    convert,
    finish,
    in_memory,
    once,
    refused,
    save,
    stored,
    write,
)

from ckptool.commands.open import open_checkpoint
from ckptool.errors import (
    CkptoolError,
    Damaged,
    NotVerified,
    Unrecognized,
    Unsupported,
)
from ckptool.storage.url import location


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
    monkeypatch.setattr("ckptool.storage.store._require_own_process", lambda: None)

    def meanwhile(self: Any, *words: Any) -> None:
        whys = {True: "another ckptool is writing a part of it", False: "of a run in 2 parts"}
        for overwrite, why in whys.items():
            monkeypatch.setattr(os, "getpid", lambda: 1)
            how = asked(overwrite=overwrite, resume=not overwrite)
            refused(planned(source, location(place.url), how).run, why)
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
