"""What ``metadata.pkl`` of torch_checkpointing 0.1.1 says of tensors and files.

The folders are as the library writes them: ``DistributedMetadata.to_dict()``, pickled, beside the
files that its serializations make.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import bits
from safetensors.torch import save_file

import ckptool
from ckptool.errors import CkptoolError, Damaged, Unsupported

TORCH, SAFE = {"type": "TorchSerialization"}, {"type": "SafetensorsSerialization"}
WHOLE = torch.arange(32.0).reshape(8, 4)
MESH = {
    "device_type": "cpu",
    "mesh_shape": (4,),
    "mesh_data": (0, 1, 2, 3),
    "mesh_dim_names": ("dp",),
}


def sharded(**changes: Any) -> dict[str, Any]:
    """The record of a DTensor of eight rows on four ranks."""
    data = {
        "global_shape": [8, 4],
        "dtype": "torch.float32",
        "stride": [4, 1],
        "mesh_spec": MESH,
        "placements": [{"type": "Shard", "dim": 0}],
    }
    return {"type": "DTensorShardingMetadata", "data": data | changes}


def declared(rank: int, **changes: Any) -> dict[str, Any]:
    """The record of one rank's two rows."""
    data = {
        "global_shape": [8, 4],
        "global_offsets": [[2 * rank, 0]],
        "local_offsets": [[0, 0]],
        "local_sizes": [[2, 4]],
        "dtype": "torch.float32",
    }
    return {"type": "default_tensor_v1", "data": data | changes}


def groups(*records: dict[str, Any]) -> list[dict[str, Any]]:
    """One record for all ranks, or one for each."""
    ranks = [(0, 1, 2, 3)] if len(records) == 1 else [(rank,) for rank in range(len(records))]
    return [
        {"sharding_metadata": record, "ranks": of}
        for record, of in zip(records, ranks, strict=True)
    ]


OWN = groups(*map(declared, range(4)))


def write(folder: Path, items: dict[str, Any], layouts: dict[str, Any] | None = None) -> Path:
    """Write the metadata of four ranks: records by item and path, and each item's file names."""
    folder.mkdir(exist_ok=True)
    content = {
        item: {
            "nested_path_to_metadata": {json.dumps([*path]): of for path, of in records.items()},
            "rank_to_layout_info": {
                rank: layout and {**layout, "file_path": layout["file_path"].format(rank=rank)}
                for rank in range(4)
                for layout in [(layouts or {}).get(item)]
            },
        }
        for item, records in items.items()
    }
    metadata = {"metadata": content, "world_size": 4, "version": "2.0"}
    (folder / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    return folder


def save(folder: Path, name: str = "model_{rank}.safetensors") -> None:
    """Save each rank's two rows."""
    for rank, rows in enumerate(WHOLE.split(2)):
        path = folder / name.format(rank=rank)
        path.parent.mkdir(exist_ok=True)
        state = {"w": rows.clone()}
        save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("records", [OWN, groups(sharded())], ids=["own", "dtensor"])
def test_local_tensors_belong_where_their_record_says(
    records: Any, suffix: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "m", {"model": {("w",): records}})
    save(folder, f"model_{{rank}}.{suffix}")
    assert bits(ckptool.open(folder).read("model.w")) == bits(WHOLE)
    done = ckptool.convert(folder, tmp_path / "out.safetensors", model_only=True)
    assert (done.tensors, bits(ckptool.open(tmp_path / "out.safetensors").read("w"))) == (
        1,
        bits(WHOLE),
    )


def test_padding_is_no_element(tmp_path: Path) -> None:
    """``local_offsets`` may leave elements of a rank's tensor out."""
    records = [declared(rank, local_offsets=[[1, 0]]) for rank in range(4)]
    folder = write(tmp_path / "m", {"model": {("w",): groups(*records)}})
    for rank, rows in enumerate(WHOLE.split(2)):
        padded = torch.cat([torch.full((1, 4), -1.0), rows])
        save_file({"w": padded}, folder / f"model_{rank}.safetensors")
    assert bits(ckptool.open(folder).read("model.w")) == bits(WHOLE)


UNKNOWN = {
    "type": groups({"type": "default_tensor_v2", "data": declared(0)["data"]}),
    "field": groups(*(declared(rank, transposed=True) for rank in range(4))),
    "field of a DTensor": groups(sharded(padding=1)),
    "field of a mesh": groups(sharded(mesh_spec=MESH | {"order": "F"})),
    "field of a placement": groups(sharded(placements=[{"type": "Shard", "dim": 0, "pad": 1}])),
    "placement": groups(sharded(placements=[{"type": "BlockShard", "dim": 0}])),
    "rank": OWN[:3],
    "element type": groups(sharded(dtype="torch.float1")),
}
MALFORMED = {
    "size": groups(*(declared(rank, local_sizes=[[4, 4]]) for rank in range(4))),
    "outside": groups(*(declared(rank + 1) for rank in range(4))),
    "count": groups(*(declared(rank, local_offsets=[]) for rank in range(4))),
    "shape": groups(*(declared(rank, global_shape=None) for rank in range(4))),
    "other type": groups(sharded(dtype="torch.float64")),
    "mesh": groups(sharded(mesh_spec=MESH | {"mesh_data": (0, 1, 2)})),
    "ranks of a mesh": groups(sharded(mesh_spec=MESH | {"mesh_data": (0, 1, 2, 2)})),
    "dims": groups(sharded(placements=[])),
    "no data": groups({"type": "default_tensor_v1"}),
    "no type": groups({"type": ["default_tensor_v1"], "data": {}}),
}


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize(
    ("records", "error"),
    [(one, Unsupported) for one in UNKNOWN.values()]
    + [(one, Damaged) for one in MALFORMED.values()],
    ids=[*UNKNOWN, *MALFORMED],
)
def test_what_is_not_understood_stops_the_tensor(
    records: Any, error: type[CkptoolError], suffix: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "m", {"model": {("w",): records, ("b",): groups(sharded())}})
    for rank, rows in enumerate(WHOLE.split(2)):
        state = {"w": rows.clone(), "b": rows.clone()}
        path = folder / f"model_{rank}.{suffix}"
        save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
    with pytest.raises(error, match=r"^model\.w: metadata\.pkl"):
        ckptool.convert(folder, tmp_path / "out", to="dcp")
    assert not ckptool.compare(folder, folder).ok
    ckptool.convert(folder, tmp_path / "out", to="dcp", drop="model.w")
    assert bits(ckptool.open(tmp_path / "out").read("model.b")) == bits(WHOLE)


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("rank_{rank}/model.pt", TORCH),
        ("model_rank_{rank}.pt", TORCH),
        ("weights-{rank}.safetensors", SAFE),
        ("./w/r{rank}.safetensors", SAFE),
    ],
)
def test_files_are_where_the_layout_says(file: str, kind: dict[str, str], tmp_path: Path) -> None:
    layout = {"file_path": file, "serialization_format": kind}
    folder = write(tmp_path / "m", {"model": {("w",): OWN}}, {"model": layout})
    save(folder, file)
    assert bits(ckptool.open(folder).read("model.w")) == bits(WHOLE)
    (folder / file.format(rank=2)).unlink()
    with pytest.raises(Damaged, match="declares it, but its files are missing"):
        ckptool.open(folder)


def test_other_serializations(tmp_path: Path) -> None:
    def layout(file: str, kind: str) -> dict[str, Any]:
        return {"file_path": file, "serialization_format": {"type": kind}}

    layouts = {
        "raw": layout("raw_{rank}.bin", "RawSerialization"),
        "text": layout("text-{rank}", "JsonSerialization"),
        "other": layout("other_{rank}.x", "ArrowSerialization"),
    }
    folder = write(tmp_path / "m", {"model": {("w",): OWN}, **{n: {} for n in layouts}}, layouts)
    save(folder)
    for rank in range(4):
        (folder / f"raw_{rank}.bin").write_bytes(b"\x00raw")
        (folder / f"text-{rank}").write_text('{"a": [1, 2]}')
        (folder / f"other_{rank}.x").write_bytes(b"x")
    with pytest.raises(Unsupported, match=r"other: metadata.pkl says 'ArrowSerialization'"):
        ckptool.convert(folder, tmp_path / "out.pt")
    ckptool.convert(folder, tmp_path / "out.pt", drop="other")
    read = torch.load(tmp_path / "out.pt", weights_only=True)
    assert (read["raw"], read["text"]) == (b"\x00raw", {"a": [1, 2]})


@pytest.mark.parametrize("value", [7, 1.5, None, True, "text", [1, [2]], [], {}, {"a": {"b": 1}}])
def test_a_json_item_is_any_value(value: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", {"model": {("w",): OWN}})
    save(folder)
    for rank in range(4):
        (folder / f"step_{rank}.json").write_text(json.dumps(value))
    ckptool.convert(folder, tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt", weights_only=True)["step"] == value


def test_an_item_whose_files_are_gone_is_missing(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", {"model": {("w",): OWN}, "optimizer": {("m",): OWN}})
    save(folder)
    message = r"optimizer: metadata.pkl declares it, but its files are missing: optimizer_0.pt"
    with pytest.raises(Damaged, match=message):
        ckptool.open(folder)
    assert "rank-missing" in {one.code for one in ckptool.verify(folder).findings}


def test_a_tensor_that_no_file_holds_is_missing(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", {"model": {("w",): OWN, ("v",): OWN}})
    save(folder)
    with pytest.raises(Damaged, match=r"model\.v: metadata.pkl declares it, but no file holds it"):
        ckptool.open(folder)


def test_the_first_version_names_items_in_paths(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", {})
    metadata = {
        "metadata": {'["model","w"]': OWN},
        "rank_to_layout_info_mappings": {rank: {"model": None} for rank in range(4)},
        "world_size": 4,
        "version": "1.0",
    }
    (folder / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    save(folder)
    assert bits(ckptool.open(folder).read("model.w")) == bits(WHOLE)
    (folder / "metadata.pkl").write_bytes(pickle.dumps(metadata | {"version": "3.0"}))
    with pytest.raises(Unsupported, match=r"metadata.pkl: version '3.0' is not known"):
        ckptool.open(folder)


@pytest.mark.parametrize("name", ["../model_{rank}.pt", "/tmp/model_{rank}.pt", "a/../../m{rank}"])
def test_files_outside_are_not_read(name: str, tmp_path: Path) -> None:
    layout = {"file_path": name, "serialization_format": TORCH}
    folder = write(tmp_path / "m", {"model": {("w",): OWN}}, {"model": layout})
    save(folder, "model_{rank}.pt")
    save(tmp_path, "model_{rank}.pt")
    with pytest.raises(CkptoolError) as caught:
        ckptool.open(folder)
    assert caught.value.exit_code == 3
