"""The cost of looking at a checkpoint in a store: requests and bytes."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import GOOD, Case, by_name, case
from fsspec.implementations.memory import MemoryFileSystem
from msgspec.structs import replace
from places import in_store
from safetensors.torch import save_file
from store_server import S3, s3, server

from ckptool.commands.inspect.report import inspect
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ReshardOptions, TransferOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.core.sharding.placement import parse_mesh, parse_rule
from ckptool.storage.block_cache import BLOCK
from ckptool.storage.url import location

QUICK = ReadOptions(values=False)


def test_a_dcp_checkpoint_costs_its_listing_and_its_metadata(s3: S3) -> None:
    source = case("dcp_fsdp2_tp").path
    report = inspect(location(s3.put(source, "m")), QUICK)
    assert report.totals == inspect(source).totals
    listing, metadata = s3.requests
    assert listing.operation == "ListObjectsV2"
    assert metadata.key == "m/.metadata"
    assert metadata.sent == (source / ".metadata").stat().st_size


def shards(folder: Path, count: int, tensors: int) -> Path:
    """A Hugging Face folder of ``count`` files with ``tensors`` names each."""
    folder.mkdir()
    weight_map: dict[str, str] = {}
    for number in range(1, count + 1):
        file = f"model-{number:05d}-of-{count:05d}.safetensors"
        names = [f"model.layers.{number}.block.{n}.weight" for n in range(tensors)]
        save_file({name: torch.ones(2, 2) for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": 16 * len(weight_map)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_sharded_safetensors_folder_costs_a_listing_and_a_read_a_file(s3: S3, out: Path) -> None:
    url = s3.put(shards(out / "m", 40, 5), "m")
    report = inspect(location(url))
    assert report.totals.tensors == 200
    assert len(s3.of("ListObjectsV2")) == 1
    read = [one.name for one in s3.of("GetObject")]
    assert sorted(read) == sorted(file.name for file in (out / "m").iterdir())


def test_a_header_that_is_longer_than_a_block_costs_a_second_read(s3: S3, out: Path) -> None:
    url = s3.put(shards(out / "m", 1, 4000), "m")
    inspect(location(url))
    assert next(one.sent for one in s3.of("GetObject") if one.key.endswith(".safetensors")) == BLOCK
    assert sum(one.key.endswith(".safetensors") for one in s3.of("GetObject")) == 2


@pytest.mark.parametrize("one", GOOD, ids=by_name)
def test_no_file_is_read_more_often_than_its_blocks(one: Case) -> None:
    """Every format: nothing twice, and the same catalog as from a disk."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    root = one.path if one.path.is_dir() else one.path.parent
    for file in root.rglob("*"):
        if file.is_file():
            memory.pipe_file(f"/{one.name}/{file.relative_to(root)}", file.read_bytes())
    inside = "" if one.path.is_dir() else f"/{one.path.name}"
    place = in_store(f"memory://{one.name}{inside}")
    found, wanted = open_checkpoint(place), open_checkpoint(one.path)
    assert found.catalog.tensors == wanted.catalog.tensors
    blocks = sum(-(-file.stat().st_size // BLOCK) for file in root.rglob("*") if file.is_file())
    assert place.store.traffic.requests <= blocks + 3


class Zeros(MemoryFileSystem):  # type: ignore[misc]
    """Files of any size that hold zeros, but for those that were written."""

    protocol = "zeros"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    sizes: ClassVar[dict[str, int]] = {}
    asked: ClassVar[list[tuple[str, int]]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("zeros://", "memory://"))

    def find(self, path: str, **more: Any) -> Any:
        self.asked.append(("find", 0))
        found = super().find(path, detail=True)
        return found | {n: {"name": n, "size": s, "type": "file"} for n, s in self.sizes.items()}

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **m: Any
    ) -> Any:
        self.asked.append((path, (end or 0) - (start or 0)))
        if path in self.sizes:
            return bytes((end or 0) - (start or 0))
        return super().cat_file(path, start, end)


@pytest.fixture
def zeros() -> type[Zeros]:
    fsspec.register_implementation("zeros", Zeros, clobber=True)
    Zeros.store.clear()
    Zeros.sizes.clear()
    Zeros.asked.clear()
    return Zeros


def test_a_checkpoint_of_a_terabyte_on_256_ranks(zeros: type[Zeros]) -> None:
    from torch.distributed.checkpoint import metadata as m
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    ranks, layers, rows, columns = 256, 60, 256 * 128, 128_000
    row = rows // ranks
    names = [f"model.layers.{n}.weight" for n in range(layers)]
    item = 4 * row * columns + 1000
    box = [torch.Size([row, columns])]
    chunks = [m.ChunkStorageMetadata(torch.Size([r * row, 0]), *box) for r in range(ranks)]
    properties = m.TensorProperties(torch.float32)
    types: dict[str, Any] = {
        name: m.TensorStorageMetadata(properties, torch.Size([rows, columns]), chunks)
        for name in names
    }
    storage = {
        m.MetadataIndex(name, chunk.offsets): _StorageInfo(f"__{rank}_0.distcp", at * item, item)
        for at, name in enumerate(names)
        for rank, chunk in enumerate(chunks)
    }
    types["step"] = m.BytesStorageMetadata()
    storage[m.MetadataIndex("step")] = _StorageInfo("__0_0.distcp", layers * item, 1000)
    written = pickle.dumps(m.Metadata(types, storage_data=storage))
    fsspec.filesystem("zeros").pipe_file("/run/step-9/.metadata", written)
    for rank in range(ranks):
        size = layers * item + (1000 if rank == 0 else 0)
        zeros.sizes[f"/run/step-9/__{rank}_0.distcp"] = size
    assert sum(zeros.sizes.values()) > 10**12
    zeros.asked.clear()
    report = inspect(location("zeros://run/step-9"), QUICK)
    assert report.totals.nbytes == layers * rows * columns * 4
    assert report.step == 9
    assert len(zeros.asked) <= 4
    assert {path for path, _ in zeros.asked} == {"find", "/run/step-9/.metadata"}
    assert sum(nbytes for _, nbytes in zeros.asked) <= len(written) + BLOCK


@pytest.mark.parametrize("mesh", ["1", "3"])
@pytest.mark.parametrize("rule", ["*=Shard(0)", "*=Shard(1)"])
def test_a_dry_run_counts_the_bytes_that_will_be_read(mesh: str, rule: str, out: Path) -> None:
    wide = {f"wide.{n}": torch.ones(24, 80_000) for n in range(2)}  # a row is longer than a block
    small = {f"small.{n}": torch.ones(9, 9) for n in range(50)}
    save_file(wide | small | {"long": torch.ones(3000, 900)}, out / "m.safetensors")
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pipe_file("/run/m.safetensors", (out / "m.safetensors").read_bytes())
    place = in_store("memory://run/m.safetensors")
    transfer = TransferOptions(verify=False, run=RunOptions(1, fsync=False))
    options = ReshardOptions(parse_mesh(mesh), rules=(parse_rule(rule),), to="dcp")
    prepared = prepare_reshard(place, out / "m", replace(options, transfer=transfer))
    told = prepared.costs().read_bytes
    before = place.store.traffic.received
    place.store.blocks.clear()
    prepared.run()
    assert told == pytest.approx(place.store.traffic.received - before, rel=0.02)
