"""Similar items, opened many at a time, with the result of opening each alone."""

from __future__ import annotations

import io
import pickle
import re
from operator import add
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptool.core.catalog import TensorEntry
from ckptool.errors import CkptoolError
from ckptool.formats import FORMATS
from ckptool.formats.base import ScanOptions
from ckptool.formats.dcp import alike, items
from ckptool.formats.dcp.opening import Item, locate_item
from ckptool.serialization.archive import read
from ckptool.serialization.archive.templates import ArchiveTemplate, Templates
from ckptool.serialization.zip import Region
from ckptool.storage.local import LocalSource

DATA = "__0_0.distcp"
LARGE = 2200
"""Floats of an item of which only both ends are read."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors of three shapes, the last ones large, one of another type, one of another layout."""
    folder = tmp_path_factory.mktemp("saved")
    state = {f"a{n}": torch.full((3, 4), float(n)) for n in range(20)}
    state |= {f"b{n}": torch.arange(8.0) + n for n in range(20)}
    state |= {f"large{n}": torch.full((LARGE,), float(n)) for n in range(17)}
    state |= {"half": torch.ones(3, 4, dtype=torch.float16), "turned": torch.ones(4, 3).t()}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def located(folder: Path) -> dict[str, TensorEntry] | list[str]:
    """Where all tensors lie, or what is wrong with their items."""
    read._TEMPLATES = Templates(reads=False)
    source = LocalSource.folder(folder)
    catalog = FORMATS["dcp"].scan(source, ScanOptions())
    try:
        return dict(items.locate(source, catalog).tensors)
    except CkptoolError as error:
        return [*map(str, error.problems)]


def located_one_by_one(folder: Path) -> dict[str, TensorEntry] | list[str]:
    """The same, each item opened by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alike, "_FEWEST", 1 << 30)
        return located(folder)


def test_most_items_are_not_opened(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def noted(source: LocalSource, item: Item) -> object:
        opened.append(item.tensor)
        return locate_item(source, item)

    monkeypatch.setattr(alike, "locate_item", noted)
    assert isinstance(located(saved), dict)
    assert sorted(opened) == ["a0", "b0", "half", "large0", "turned"]


def test_places_are_those_of_items_that_are_opened(saved: Path) -> None:
    assert located(saved) == located_one_by_one(saved)


def test_items_whose_pickles_are_not_compared_are_opened_each(tmp_path: Path) -> None:
    """A pickle of more than a KiB may say other strides than that of the item before."""
    tensors = {f"t{n:02}": torch.arange(16.0).reshape(4, 4) + n for n in range(20)}
    tensors["t07"] = tensors["t07"].t().contiguous().t()
    content, storage, shapes = b"", {}, dict[str, Any]()
    for name, tensor in tensors.items():
        tensor.note = "x" * 1500  # type: ignore[attr-defined]
        stream = io.BytesIO()
        torch.save(tensor, stream)
        index = MetadataIndex(name, torch.Size([0, 0]), 0)
        storage[index] = _StorageInfo(DATA, len(content), len(stream.getvalue()))
        chunk = ChunkStorageMetadata(torch.Size([0, 0]), tensor.shape)
        properties = TensorProperties(dtype=tensor.dtype)
        shapes[name] = TensorStorageMetadata(properties, tensor.shape, [chunk])
        content += stream.getvalue()
    (tmp_path / DATA).write_bytes(content)
    metadata = Metadata(shapes, {name: (name,) for name in shapes}, storage)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert located(tmp_path) == located_one_by_one(tmp_path)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_changed_items(saved: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    folder = tmp_path_factory.mktemp("changed")
    (folder / ".metadata").symlink_to(saved / ".metadata")
    content = bytearray((saved / DATA).read_bytes())
    ends = [found.end() for found in re.finditer(rb"PK\x05\x06.{18}", content, re.DOTALL)]
    near_an_end = st.builds(add, st.sampled_from(ends), st.integers(-900, 300))
    places = st.one_of(st.integers(0, len(content) - 1), near_an_end)
    for at in data.draw(st.lists(places, min_size=1, max_size=4)):
        content[at % len(content)] = data.draw(st.integers(0, 255))
    (folder / DATA).write_bytes(content)
    assert located(folder) == located_one_by_one(folder)


def test_items_like_one_that_was_read_beyond_their_ends_are_opened_each(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a compressed item, of which more is in memory, was read before."""

    def read_to_the_middle(region: Region) -> ArchiveTemplate | None:
        template = read.find_template(region)
        if template is None or region.nbytes < 4 * LARGE:
            return template
        (_, end), *rest = template.readings
        return replace(template, readings=((0, end + 5000), *rest))

    monkeypatch.setattr(alike, "find_template", read_to_the_middle)
    assert located(saved) == located_one_by_one(saved)
