"""Parts of a store's folder are sources of their own, and say what the store does not show."""

from __future__ import annotations

from places import in_store

from ckptool.errors import Denied, Problem
from ckptool.storage.clients.client import ObjectInfo
from ckptool.storage.remote import RemoteSource


def test_subfolders_are_what_narrowing_gives() -> None:
    info, hidden = ObjectInfo(1, "v", 0), Problem("access is denied", Denied.code)
    files = dict.fromkeys(["a", "b/c", "b/d/e", "g/h/i"], info)
    unlisted = dict.fromkeys(["b/d/f", "x/y"], hidden)
    source = RemoteSource(in_store("memory://run"), files, unlisted)
    found = source.subfolders()
    assert set(found) == {"b", "b/d", "g", "g/h", "x"}
    for folder, inner in found.items():
        same = source.narrowed(folder)
        assert (inner.root, inner.files, inner.unlisted) == (same.root, same.files, same.unlisted)
