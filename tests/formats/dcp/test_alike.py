"""Similar items of small tensors, opened many at a time, with the result of opening each alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.core.catalog import TensorEntry
from ckptool.errors import CkptoolError
from ckptool.formats import FORMATS
from ckptool.formats.base import ScanOptions
from ckptool.formats.dcp import alike, items
from ckptool.serialization.archive import cached
from ckptool.storage.local import LocalSource

DATA = "__0_0.distcp"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty small tensors of two shapes, one of another type, and one of another layout."""
    folder = tmp_path_factory.mktemp("saved")
    state = {f"a{n}": torch.full((3, 4), float(n)) for n in range(20)}
    state |= {f"b{n}": torch.arange(8.0) + n for n in range(20)}
    state |= {"half": torch.ones(3, 4, dtype=torch.float16), "turned": torch.ones(4, 3).t()}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def located(folder: Path) -> dict[str, TensorEntry] | list[str]:
    """Where all tensors lie, or what is wrong with their items."""
    cached._CACHE.clear()
    source = LocalSource.folder(folder)
    catalog = FORMATS["dcp"].scan(source, ScanOptions())
    try:
        return dict(items.locate(source, catalog).tensors)
    except CkptoolError as error:
        return [*map(str, error.problems)]


def located_one_by_one(folder: Path) -> dict[str, TensorEntry] | list[str]:
    """The same, each item opened by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(items, "locate_alike", lambda source, items: {})
        return located(folder)


def test_most_items_are_not_opened(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    locate_item = items.locate_item

    def noted(source: LocalSource, item: items.Item) -> object:
        opened.append(item.tensor)
        return locate_item(source, item)

    monkeypatch.setattr(items, "locate_item", noted)
    monkeypatch.setattr(alike, "locate_item", noted)
    assert isinstance(located(saved), dict)
    assert sorted(opened) == ["a0", "b0", "half", "turned"]


def test_places_are_those_of_items_that_are_opened(saved: Path) -> None:
    assert located(saved) == located_one_by_one(saved)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_changed_items(saved: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    folder = tmp_path_factory.mktemp("changed")
    (folder / ".metadata").symlink_to(saved / ".metadata")
    content = bytearray((saved / DATA).read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[at] = data.draw(st.integers(0, 255))
    (folder / DATA).write_bytes(content)
    assert located(folder) == located_one_by_one(folder)
