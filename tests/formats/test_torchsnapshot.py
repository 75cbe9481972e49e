"""Manifests of TorchSnapshot that contradict themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptool.commands.open import open_checkpoint
from ckptool.core.mesh import Shard
from ckptool.errors import Damaged

TENSOR = {
    "type": "Tensor",
    "location": "0/w",
    "serializer": "buffer_protocol",
    "dtype": "torch.float32",
    "shape": [2, 2],
    "replicated": False,
}
SHARD = {"offsets": [0, 0], "sizes": [2, 2], "tensor": TENSOR}


def snapshot(folder: Path, **entries: Any) -> Path:
    """A snapshot of one rank with these entries in a dict ``m``."""
    (folder / "0").mkdir()
    (folder / "0" / "w").write_bytes(bytes(16))
    manifest = {"0/m": {"type": "dict", "keys": [*entries]}}
    manifest |= {f"0/m/{key}": entry for key, entry in entries.items()}
    content = {"version": "0.1.0", "world_size": 1, "manifest": manifest}
    (folder / ".snapshot_metadata").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("mesh", "dim_map", "words"),
    [
        ([0], [[-1], [-1], [0]], "a dim_map of 3 dims"),
        ([0], [[5], [-1]], "a dim_map beyond a mesh of 1 dims"),
        ([[0], [1, 2]], [[0], [-1]], "2 positions for 3 ranks"),
        ([[]], [[0], [-1]], "not as TorchSnapshot writes it"),
        ([0], [[0], [-1]], None),
    ],
)
def test_a_mesh_fits_its_tensor(
    mesh: list[Any], dim_map: list[Any], words: str | None, tmp_path: Path
) -> None:
    entry = {"type": "DTensor", "shards": [SHARD], "mesh": mesh, "dim_map": dim_map}
    source = snapshot(tmp_path, w=entry)
    if words is None:
        assert open_checkpoint(source).catalog.tensors["m.w"].placements == (Shard(0),)
        return
    with pytest.raises(Damaged, match=words):
        open_checkpoint(source)


@pytest.mark.parametrize("kind", [["Tensor"], {"a": 1}, 3, None])
def test_a_type_that_is_no_text_is_named(kind: object, tmp_path: Path) -> None:
    with pytest.raises(Damaged, match=r"^m\.w: an entry of the unknown type"):
        open_checkpoint(snapshot(tmp_path, w={"type": kind}, v=TENSOR))


def test_an_entry_without_a_type_is_none(tmp_path: Path) -> None:
    with pytest.raises(Damaged, match=r"\.snapshot_metadata: not a manifest"):
        open_checkpoint(snapshot(tmp_path, w={"shape": [2]}))
