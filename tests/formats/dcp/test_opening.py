"""Items of a DCP folder in a store, which are opened when their elements are read."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckptool
from ckptool.commands.convert import prepare
from ckptool.commands.options.target import ConvertOptions, TransferOptions
from ckptool.commands.transfer.plan_digest import plan_digest
from ckptool.core.catalog import Container, Extent
from ckptool.errors import Damaged
from ckptool.formats.dcp.metadata import parse
from ckptool.storage.url import location

SIDE, COUNT = 96, 6
Change = Callable[[bytes], bytes]


def saved(folder: Path, *turned: int) -> dict[str, torch.Tensor]:
    """Save square tensors, those that are turned with other strides, in items of one size."""
    tensors = {f"w.{n}": torch.randn(SIDE, SIDE) for n in range(COUNT)}
    tensors |= {f"w.{n}": tensors[f"w.{n}"].t() for n in turned}
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    assert len({item.nbytes for item in items(folder).values()}) == 1
    return tensors


def items(folder: Path) -> dict[str, Container]:
    metadata = parse((folder / ".metadata").read_bytes(), ".metadata")
    return {name: item for (name, _), item in metadata.items.items()}


def change(folder: Path, name: str, how: Change) -> None:
    """Put another archive of the same size in the place of an item."""
    item = items(folder)[name]
    data = bytearray((folder / item.file).read_bytes())
    span = slice(item.offset, item.offset + item.nbytes)
    changed = how(bytes(data[span]))
    assert len(changed) == item.nbytes
    data[span] = changed
    (folder / item.file).write_bytes(data)


def version_first(archive: bytes) -> bytes:
    """Put the record behind a storage before it, so that the storage begins elsewhere."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        records, end = sorted(opened.infolist(), key=lambda r: r.header_offset), opened.start_dir
    starts = {r.filename: r.header_offset for r in records}
    ends = [r.header_offset for r in records[1:]] + [end]
    entries = {name: archive[a:b] for (name, a), b in zip(starts.items(), ends, strict=True)}
    names = sorted(entries, key=lambda name: name.endswith("/data/0"))
    moved, body = {}, b""
    for name in names:
        moved[starts[name]] = len(body)
        body += entries[name]
    directory, position = bytearray(archive[end:]), 0
    while directory[position : position + 4] == b"PK\x01\x02":
        lengths = struct.unpack_from("<3H", directory, position + 28)
        (old,) = struct.unpack_from("<L", directory, position + 42)
        struct.pack_into("<L", directory, position + 42, moved[old])
        position += 46 + sum(lengths)
    return body + bytes(directory)


def endless(archive: bytes) -> bytes:
    """Take the end of the directory away."""
    return archive[:-22] + bytes(22)


def flipped(archive: bytes) -> bytes:
    """Change a bit of an element."""
    return archive[:2000] + bytes([archive[2000] ^ 1]) + archive[2001:]


def uploaded(folder: Path) -> str:
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    for file in folder.iterdir():
        memory.pipe_file(f"/run/{file.name}", file.read_bytes())
    return "memory://run"


@pytest.mark.parametrize("turned", [(), (0,), (3,), (1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("moved", [(), (0,), (3,)], ids=str)
def test_items_of_one_size_that_differ(
    turned: tuple[int, ...], moved: tuple[int, ...], tmp_path: Path
) -> None:
    """Other strides, or a storage elsewhere: none is read as if it were like the others."""
    tensors = saved(tmp_path / "m", *turned)
    for n in moved:
        change(tmp_path / "m", f"w.{n}", version_first)
    url = uploaded(tmp_path / "m")
    ckptool.convert(url, tmp_path / "out.safetensors", to="safetensors")
    written = load_file(tmp_path / "out.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    checkpoint = ckptool.open(url)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name, (slice(5, 9), slice(2, 70))), tensor[5:9, 2:70])
        assert torch.equal(checkpoint.read(name), tensor)
    assert ckptool.verify(url).ok == ckptool.verify(tmp_path / "m").ok


@pytest.mark.parametrize(
    ("how", "words"), [(endless, "2 problems in the items"), (flipped, "2 problems in the source")]
)
def test_damaged_items_are_all_named_as_on_a_disk(how: Change, words: str, tmp_path: Path) -> None:
    saved(tmp_path / "m")
    for name in ("w.2", "w.4"):
        change(tmp_path / "m", name, how)
    errors = []
    for source in (tmp_path / "m", uploaded(tmp_path / "m")):
        with pytest.raises(Damaged, match=words) as caught:
            ckptool.convert(source, tmp_path / "out.safetensors", to="safetensors")
        errors.append((caught.value.message, caught.value.hint))
        assert not [file for file in tmp_path.iterdir() if file.name != "m"]
    assert errors[0] == errors[1]


def test_an_item_that_is_opened_first_is_named_with_all_others(tmp_path: Path) -> None:
    """One of a size of its own is opened before the others, and is damaged as one of these is."""
    tensors = {f"w.{n}": torch.randn(SIDE, SIDE) for n in range(COUNT)} | {"b": torch.ones(7)}
    dcp.save(tensors, checkpoint_id=tmp_path / "m", no_dist=True)
    for name in ("b", "w.4"):
        change(tmp_path / "m", name, endless)
    messages = set()
    for source in (tmp_path / "m", uploaded(tmp_path / "m")):
        with pytest.raises(Damaged, match="2 problems in the items") as caught:
            ckptool.convert(source, tmp_path / "out.safetensors", to="safetensors")
        messages.add(caught.value.message)
    assert len(messages) == 1


def test_what_would_be_overwritten_in_a_store_stays_where_an_item_is_damaged(
    tmp_path: Path,
) -> None:
    """It is removed before the new one is written: all items are opened before."""
    saved(tmp_path / "m")
    change(tmp_path / "m", "w.4", endless)
    url = uploaded(tmp_path / "m")
    saved(tmp_path / "old")
    memory = fsspec.filesystem("memory")
    for file in (tmp_path / "old").iterdir():
        memory.pipe_file(f"/old/{file.name}", file.read_bytes())
    before = {name: memory.cat_file(name) for name in memory.find("/old")}
    for write in (
        lambda: ckptool.convert(url, "memory://old", to="dcp", overwrite=True),
        lambda: ckptool.reshard(url, "memory://old", mesh="2", overwrite=True),
    ):
        with pytest.raises(Damaged, match="no zip directory"):
            write()
        assert {name: memory.cat_file(name) for name in memory.find("/old")} == before


def test_a_run_goes_on_whether_or_not_it_began_with_all_items_open(tmp_path: Path) -> None:
    """With --overwrite all are opened before, without it when they are read: one and the same."""
    saved(tmp_path / "m", 1)
    source, target = location(uploaded(tmp_path / "m")), location("memory://other")
    plans = [
        prepare(source, target, ConvertOptions("dcp", transfer=TransferOptions(overwrite=removes)))
        for removes in (True, False)
    ]
    kinds = [type(e.chunks[0].at) for plan in plans for e in plan.plan.entries[2:4]]
    assert kinds == [Extent, Extent, Container, Container]
    first, second = (plan_digest(p.plan, p.opened.source, p.decided) for p in plans)
    assert first == second
