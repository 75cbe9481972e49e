"""Two writers at one place of a store, stale listings, and what stands at the target."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.loopback.messages import Request
from conftest import case, convert_to
from fault_server import DENIED, WRITES, call, cut
from msgspec.structs import replace
from places import in_store
from store_server import S3, s3, server
from test_s3 import big, files_of, resharded

from ckptool.commands.convert import prepare
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.target import ConvertOptions, TransferOptions
from ckptool.engine.progress import Progress
from ckptool.engine.ranks import Ranks
from ckptool.errors import Changed, Damaged, NotFound, TransferError, Unsupported
from ckptool.storage.commit_note import UNFINISHED
from ckptool.storage.url import location


def leave_unfinished(s3: S3) -> dict[str, Any]:
    """An upload that failed at its end; what its note says."""
    s3.fail(DENIED, *WRITES, key="*.metadata")
    with pytest.raises(TransferError):
        resharded(case("dcp_fsdp2_tp").path, s3.url("m"), "2")
    s3.heal()
    note: dict[str, Any] = json.loads(s3.get("m")[UNFINISHED])
    return note


def empty(s3: S3) -> None:
    for name in s3.get("m"):
        s3.remove(f"m/{name}")


def noted(s3: S3, note: dict[str, Any], **writer: object) -> None:
    """Put the note of another writer there."""
    note = note | {"writer": note["writer"] | writer}
    s3.write(f"m/{UNFINISHED}", json.dumps(note).encode())


@pytest.mark.parametrize("more", [{}, {"resume": True}, {"overwrite": True}])
def test_a_run_on_this_machine_that_has_not_ended_keeps_others_out(
    more: dict[str, Any], s3: S3
) -> None:
    started = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    noted(s3, leave_unfinished(s3), process=os.getppid(), started=started)
    with pytest.raises(
        Unsupported, match=rf"another ckptool is writing it: process {os.getppid()}"
    ):
        resharded(case("dcp_fsdp2_tp").path, s3.url("m"), "2", **more)


def test_what_another_machine_left_is_not_taken_for_ones_own(s3: S3) -> None:
    noted(s3, leave_unfinished(s3), host="elsewhere")
    with pytest.raises(
        Unsupported, match=r"unfinished output of process .* on elsewhere"
    ) as caught:
        resharded(case("dcp_fsdp2_tp").path, s3.url("m"), "2")
    assert "--resume continues it" in (caught.value.hint or "")
    resharded(case("dcp_fsdp2_tp").path, s3.url("m"), "2", resume=True)
    assert ".metadata" in s3.get("m")


def test_a_second_writer_is_noticed_before_the_checkpoint_appears(s3: S3) -> None:
    note = leave_unfinished(s3)

    def comes_between(request: Request) -> None:
        noted(s3, note, host="elsewhere", token="another")

    s3.fail(call(comes_between), *WRITES, key="*1_0.distcp", times=1)
    with pytest.raises(TransferError, match=r"another ckptool is writing it too: .* on elsewhere"):
        resharded(case("dcp_fsdp2_tp").path, s3.url("m"), "2")
    assert ".metadata" not in s3.get("m")


@pytest.mark.parametrize("name", ["m", "m.safetensors"])
def test_two_runs_that_begin_at_once_do_not_take_each_other_for_themselves(
    name: str, s3: S3, out: Path
) -> None:
    """Each finds the place free; the note of the second replaces that of the first."""
    torch.save({"w": torch.ones(2)}, out / "s.pt")
    note = f"{name}/{UNFINISHED}" if name == "m" else f".{name}.partial.journal"

    def comes_between(request: Request) -> None:
        if (written := s3.get(note)) and b'"elsewhere"' not in written[""]:
            known = json.loads(written[""])
            writer = known["writer"] | {"host": "elsewhere", "token": "another"}
            s3.write(note, json.dumps(known | {"writer": writer}).encode())

    s3.fail(call(comes_between), "GetObject", key=note)
    to = "hf" if name == "m" else "safetensors"
    with pytest.raises(TransferError, match=r"another ckptool is writing it too: .* on elsewhere"):
        convert_to(to, out / "s.pt", location(s3.url(name)))
    s3.heal()
    assert not [key for key in s3.get() if key.endswith(".safetensors")]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["m", "m.safetensors"])
def test_what_comes_while_a_run_begins_is_not_overwritten(
    name: str, overwrite: bool, s3: S3, out: Path
) -> None:
    """Another run listed as early, and is done, with no note left, before this one notes itself."""
    torch.save({"w": torch.ones(2)}, out / "s.pt")
    main = f"{name}/model.safetensors" if name == "m" else name
    note = f"{name}/{UNFINISHED}" if name == "m" else f".{name}.partial.journal"
    to = "hf" if name == "m" else "safetensors"
    if overwrite:
        convert_to(to, out / "s.pt", location(s3.url(name)))

    def comes_between(request: Request) -> None:
        s3.write(main, b"another's")

    s3.fail(call(comes_between), "PutObject", key=note)
    with pytest.raises(TransferError, match=r"another writes it too: .*safetensors"):
        convert_to(to, out / "s.pt", location(s3.url(name)), overwrite=overwrite)
    s3.heal()
    assert s3.get(main)[""] == b"another's"
    assert not s3.get(note)


@pytest.mark.parametrize("left", ["model-00001-of-00003.safetensors", "__0_0.distcp"])
def test_what_a_run_left_that_began_and_ended_meanwhile_is_not_taken_for_a_checkpoint(
    left: str, s3: S3, out: Path
) -> None:
    """Its note stays for as long as what it left, as if it had ended before this run."""
    torch.save({name: torch.ones(300) for name in "abc"}, out / "s.pt")
    note = leave_unfinished(s3) | {"files": [left]}
    empty(s3)
    options = ConvertOptions("hf", max_shard_size=1200)
    prepare(out / "s.pt", location(s3.url("m")), options).run()
    whole = s3.get("m")
    options = replace(options, transfer=TransferOptions(overwrite=True))
    prepared = prepare(out / "s.pt", location(s3.url("m")), options)

    stage = prepared.open_stage(Ranks())
    empty(s3)
    noted(s3, note, host="elsewhere")
    s3.write(f"m/{left}", bytes(9))
    if left in whole:
        prepared.run_on(stage, Progress(), Ranks())
        assert s3.get("m") == whole
        return
    with pytest.raises(Unsupported, match=f"speaks of {left}.* nothing was removed"):
        prepared.run_on(stage, Progress(), Ranks())
    assert s3.get("m").keys() == {UNFINISHED, left}


def test_a_file_that_is_listed_and_gone(s3: S3, out: Path) -> None:
    place = in_store(s3.put(case("dcp_fsdp2_tp").path, "source"))
    prepared = prepare(place, out / "m", ConvertOptions("dcp"))
    s3.remove("source/__0_0.distcp")
    place.store.blocks.clear()
    with pytest.raises(NotFound, match=r"__0_0.distcp: cannot be read: .*no such file"):
        prepared.run()
    assert not (out / "m").exists()


def test_a_file_that_metadata_names_and_no_listing(s3: S3, out: Path) -> None:
    source = s3.put(case("dcp_fsdp2_tp").path, "source")
    s3.remove("source/__0_0.distcp")
    with pytest.raises(Damaged, match=r"__0_0.distcp', referenced by .metadata, is missing"):
        open_checkpoint(location(source))


def test_an_object_that_is_replaced_is_not_read(s3: S3, out: Path) -> None:
    """Each read names the version that was listed: no second listing is needed."""
    place = in_store(s3.put(case("dcp_fsdp2_tp").path, "source"))
    prepared = prepare(place, out / "m", ConvertOptions("dcp"))
    data = s3.get("source")["__0_0.distcp"]
    s3.write("source/__0_0.distcp", data[:-1] + b"x")
    place.store.blocks.clear()
    s3.requests.clear()
    with pytest.raises(Changed, match=r"__0_0.distcp: it was changed while it was read"):
        prepared.run()
    assert not s3.of("ListObjectsV2")
    assert not (out / "m").exists()


def test_an_object_that_is_replaced_between_two_of_its_parts(s3: S3, out: Path) -> None:
    source = big(out, 3)
    s3.put(source, "source")

    def comes_between(request: Request) -> None:
        s3.write(request.key, bytes((source / request.name).stat().st_size))

    place = in_store(s3.url("source"))
    prepared = prepare(place, location(s3.url("m")), ConvertOptions("dcp"))
    s3.fail(call(comes_between), "GetObject", key="*0_0.distcp", times=1)
    with pytest.raises(Changed, match=r"__0_0.distcp: it was changed while it was read"):
        prepared.run()
    assert not s3.get("m")


def test_an_existing_target_is_refused_and_replaced_when_asked(s3: S3, out: Path) -> None:
    source = case("dcp_fsdp2_tp").path
    resharded(source, s3.url("m"), "8")
    with pytest.raises(Unsupported, match=r"s3://\S+/m already exists \(9 files"):
        resharded(source, s3.url("m"), "2")
    resharded(source, out / "m", "2")
    resharded(source, s3.url("m"), "2", overwrite=True)
    assert s3.get("m") == files_of(out / "m")


def test_the_old_checkpoint_is_no_longer_one_before_the_new_one_is_written(s3: S3) -> None:
    source = case("dcp_fsdp2_tp").path
    resharded(source, s3.url("m"), "4")
    s3.requests.clear()
    resharded(source, s3.url("m"), "4", overwrite=True)
    steps = [
        (one.operation.removesuffix("Object"), one.name)
        for one in s3.of("PutObject", "DeleteObject")
    ]
    steps = steps[1:]  # of nothing: a trial whether there may be removals
    assert steps[:2] == [("Put", UNFINISHED), ("Delete", ".metadata")]
    assert steps[-2:] == [("Put", ".metadata"), ("Delete", UNFINISHED)]


def test_a_folder_that_is_not_a_checkpoint_is_not_replaced(s3: S3) -> None:
    s3.write("m/letter.txt", b"dear")
    with pytest.raises(Unsupported, match="not a checkpoint, and is not replaced"):
        resharded(case("dcp_fsdp2_tp").path, s3.url("m"), "2", overwrite=True)
    assert s3.get("m") == {"letter.txt": b"dear"}


def test_one_file_stands_until_the_new_one_takes_its_place(s3: S3, out: Path) -> None:
    source = case("hf_shards").path
    s3.write("m.safetensors", b"old")
    options = ConvertOptions("safetensors", transfer=TransferOptions(overwrite=True))
    target = location(s3.url("m.safetensors"))
    with pytest.raises(Unsupported, match=r"m\.safetensors already exists") as caught:
        convert_to("safetensors", source, target)
    assert caught.value.hint == "--overwrite replaces it once all is written"
    s3.fail(DENIED, *WRITES, key="m.safetensors")
    with pytest.raises(TransferError):
        prepare(source, target, options).run()
    s3.heal()
    assert s3.get("m.safetensors") == {"": b"old"}
    prepare(source, target, options).run()
    convert_to("safetensors", source, out / "m.safetensors")
    assert s3.get("m.safetensors") == files_of(out / "m.safetensors")
