"""Device meshes as torch's versions recorded them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from ckptool.serialization.archive.device_mesh import read_mesh
from ckptool.serialization.archive.read import read_torch_file
from ckptool.serialization.pickle.records import Call, Global
from ckptool.storage.local import LocalSource

LAYOUT = Call(Global("torch.distributed._mesh_layout", "_MeshLayout"), ())


@pytest.mark.parametrize("fields", [{}, {"_layout": LAYOUT}], ids=["before 2.10", "with a layout"])
@pytest.mark.parametrize("byteorder", ["little", "big"])
def test_ranks_in_a_tensor_are_read(
    fields: dict[str, Call], byteorder: str, tmp_path: Path
) -> None:
    """The tensor is all of the mesh, whatever layout a version between recorded beside it."""
    ranks = torch.tensor([[4, 6], [5, 700]], dtype=torch.int32)
    swapped = torch.from_numpy(ranks.numpy().byteswap())
    torch.save(ranks if byteorder == "little" else swapped, tmp_path / "mesh.pt")
    source = LocalSource.file(tmp_path / "mesh.pt")
    file = replace(read_torch_file(source, "mesh.pt"), byteorder=byteorder)
    mesh, rank = read_mesh(
        {**fields, "mesh": file.value, "_coordinate_on_dim": [1, 1]}, file, source
    )
    assert (mesh.shape, mesh.ranks, rank) == ((2, 2), (4, 6, 5, 700), 700)
