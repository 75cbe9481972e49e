"""What torch's DCP can load of a catalog."""

from __future__ import annotations

from ckptool.core.catalog import Catalog, Index, ObjectEntry, Path, TensorEntry, flat_name
from ckptool.core.dtype import BY_NAME
from ckptool.serialization.state_dict.loadable import with_loadable_paths


def catalog(*paths: Path, value: Path) -> Catalog:
    """Tensors without chunks at these paths, and a value."""
    entries = [TensorEntry(flat_name(path), path, BY_NAME["float32"], (2,), ()) for path in paths]
    objects = {flat_name(value): ObjectEntry(flat_name(value), value, 1)}
    return Catalog("dcp", {entry.name: entry for entry in entries}, objects, {})


def test_a_list_with_holes_becomes_names() -> None:
    whole = (("a", Index(0)), ("a", Index(1)))
    holed = (("b", Index(1), "w"), ("b", Index(2), "w"))
    found = with_loadable_paths(catalog(*whole, *holed, value=("b", Index(3))))
    paths = [entry.path for entry in found.tensors.values()]
    paths += [entry.path for entry in found.objects.values()]
    assert paths == [*whole, ("b", "1", "w"), ("b", "2", "w"), ("b", "3")]
    assert list(found.tensors) == list(map(flat_name, (*whole, *holed)))
