"""ByteCheckpoint's nested pickles: strides are honored, lies are refused, nothing is run."""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import bits, case, convert_to, read_back
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptool.commands.open import open_checkpoint
from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Chunk, Extent, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.errors import Damaged, Hostile
from ckptool.formats.base import ScanOptions
from ckptool.formats.bytecheckpoint import flat_members, unflatten_family

MODULE = "bytecheckpoint.checkpointer.meta_type"
WHOLE = torch.arange(6, dtype=torch.float32).reshape(2, 3)


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The two classes that ByteCheckpoint 0.0.2 pickles, by their names."""
    module = ModuleType(MODULE)
    fields = "state_dict_metadata planner_data storage_data all_tensor_metadata".split()
    for name, names in (
        ("Metadata", fields),
        ("_StorageInfo", ["relative_path", "offset", "length"]),
    ):
        made = make_dataclass(name, names)
        made.__module__ = MODULE
        setattr(module, name, made)
    for part in ("bytecheckpoint", "bytecheckpoint.checkpointer", MODULE):
        monkeypatch.setitem(sys.modules, part, module)
    return module


def skeleton(tensor: torch.Tensor) -> bytes:
    """As ByteCheckpoint pickles a tensor without its bytes."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, item: Any) -> Any:
            if isinstance(item, torch.storage.TypedStorage):
                count = item._untyped_storage.nbytes() // 4
                return ("storage", torch.FloatStorage, "0", "cpu", count)
            return None

    stream = io.BytesIO()
    Pickler(stream, protocol=2).dump(tensor)
    return stream.getvalue()


def folder_of(out: Path, writer: ModuleType, stored: torch.Tensor, pickled: bytes | None) -> Path:
    """A model of one tensor whose storage has the bytes of ``stored``."""
    index = MetadataIndex("w", torch.Size([0, 0]))
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), WHOLE.shape)
    entry = TensorStorageMetadata(TensorProperties(torch.float32), WHOLE.shape, [chunk])
    data = stored.contiguous().numpy().tobytes()
    info = writer._StorageInfo("__0_0.distcp", 0, len(data))
    metadata = writer.Metadata({"w": entry}, {"w": ("w",)}, {index: info}, {index: pickled})
    folder = out / "source" / "model"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "__0_0.distcp").write_bytes(data)
    return out / "source"


@pytest.mark.parametrize("strided", [WHOLE, WHOLE.t().contiguous().t()], ids=["rows", "columns"])
def test_strides_are_those_of_the_skeleton(
    strided: torch.Tensor, writer: ModuleType, out: Path
) -> None:
    order = strided if strided.is_contiguous() else strided.t()
    source = folder_of(out, writer, order, skeleton(strided))
    convert_to("safetensors", source, out / "m")
    assert read_back("safetensors", out / "m") == {"model.w": bits(WHOLE)}


class Evil:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch /nowhere",)


@pytest.mark.parametrize(
    ("pickled", "error", "words"),
    [
        (pickle.dumps(Evil()), Hostile, "can run code"),
        (None, Damaged, "does not record its strides"),
        (skeleton(WHOLE.reshape(3, 2)), Damaged, "not the float"),
        (skeleton(torch.zeros(3, 3)[:2]), Damaged, "expected "),
        (skeleton(WHOLE)[:-4], Damaged, "pickle"),
    ],
    ids=["evil", "none", "shape", "storage", "cut"],
)
def test_what_a_skeleton_must_not_say(
    pickled: bytes | None, error: type[Exception], words: str, writer: ModuleType, out: Path
) -> None:
    source = folder_of(out, writer, WHOLE, pickled)
    with pytest.raises(error, match=words):
        convert_to("safetensors", source, out / "m")


def test_a_familys_own_folder_is_read_too() -> None:
    found = open_checkpoint(case("bytecheckpoint_flat").path / "global_step_7" / "model").catalog
    assert found.format == "bytecheckpoint"
    assert "blks.0.a.weight" in found.tensors


def test_a_family_without_its_metadata_is_not_excluded(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("bytecheckpoint_flat")
    (folder / "global_step_7" / "optimizer" / ".metadata").unlink()
    with pytest.raises(Damaged, match=r"optimizer/\.metadata is missing") as error:
        open_checkpoint(folder)
    assert error.value.problems[0].code == "file-missing"


def test_a_familys_damaged_metadata_is_named_with_its_folder(
    copy_of: Callable[[str], Path],
) -> None:
    folder = copy_of("bytecheckpoint_flat")
    file = folder / "global_step_7" / "optimizer" / ".metadata"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(Damaged, match=r"^optimizer/\.metadata: the pickle ends") as error:
        open_checkpoint(folder)
    assert [p.file for p in error.value.problems] == ["optimizer/.metadata"]


def test_a_tensor_without_a_name_is_not_a_flat_parameter() -> None:
    """A save of a bare tensor beside what flat parameters are made of."""
    chunk = Chunk(Box((0,), (2,)), Extent("f", 0, (4,)))
    bare = TensorEntry("", (), BY_NAME["float32"], (2,), (chunk,))
    catalog = Catalog("dcp", {"": bare}, {}, {})
    assert unflatten_family(catalog, {"_flat_param": []}, ScanOptions()) == catalog


def test_shapes_that_are_fewer_than_names_are_damage() -> None:
    told = {
        "fsdp_flat_param_to_fqns": {"_flat_param": ["a", "b"]},
        "fsdp_shapes": {"_flat_param": [(2,)]},
        "fsdp_numels_with_padding": {"_flat_param": [2, 2]},
        "fsdp_is_padding_mask": {"_flat_param": [False, False]},
    }
    with pytest.raises(Damaged, match="cannot determine what the flat parameters contain"):
        flat_members({"model/.metadata": {"user_defined_dict": told}})
