"""The cost of looking at a checkpoint in a store: requests and bytes."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import CASES, GOOD, Case, by_name, case
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file, save_file
from store_server import S3, s3, server
from typer.testing import CliRunner

from ckptool.cli.app import app
from ckptool.commands.convert import prepare
from ckptool.commands.inspect import inspect
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.rewrite import MapOptions, RewriteOptions
from ckptool.commands.options.target import ConvertOptions, ReshardOptions, TransferOptions
from ckptool.commands.options.verify import CompareOptions, VerifyOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.commands.stats import stats
from ckptool.commands.verify.compare.against import against
from ckptool.commands.verify.verify import verify
from ckptool.core.sharding.placement import parse_mesh, parse_rule
from ckptool.engine.run_options import RunOptions
from ckptool.storage.block_cache import BLOCK
from ckptool.storage.url import RemotePath, location

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
    weight_map = {}
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
    place = location(f"memory://{one.name}{inside}")
    found, wanted = open_checkpoint(place), open_checkpoint(one.path)
    assert found.catalog.tensors == wanted.catalog.tensors
    blocks = sum(-(-file.stat().st_size // BLOCK) for file in root.rglob("*") if file.is_file())
    assert place.store.traffic.requests <= blocks + 3


class Zeros(MemoryFileSystem):
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
    place = location("memory://run/m.safetensors")
    transfer = TransferOptions(verify=False, run=RunOptions(1, fsync=False))
    options = ReshardOptions(parse_mesh(mesh), rules=(parse_rule(rule),), to="dcp")
    prepared = prepare_reshard(place, out / "m", replace(options, transfer=transfer))
    told = prepared.costs().read_bytes
    before = place.store.traffic.received
    place.store.blocks.clear()
    prepared.run()
    assert told == pytest.approx(place.store.traffic.received - before, rel=0.02)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight rows-sharded tensors of 3 MiB on four ranks, as DCP has them: 24 MiB."""
    folder = tmp_path_factory.mktemp("sharded")
    tensors = {f"w.{n}": torch.randn(1024, 768) for n in range(8)}
    save_file(tensors, folder / "m.safetensors")
    options = ReshardOptions(parse_mesh("4"), rules=(parse_rule("*=Shard(0)"),), to="dcp")
    prepare_reshard(folder / "m.safetensors", folder / "dcp", options).run()
    return folder / "dcp"


def uploaded(folder: Path) -> tuple[Any, int]:
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    for file in folder.iterdir():
        memory.pipe_file(f"/run/{file.name}", file.read_bytes())
    return location("memory://run"), sum(file.stat().st_size for file in folder.iterdir())


def few_requests(size: int) -> int:
    """How many are enough to list a checkpoint of so many bytes and to read each of them once."""
    return 40 + size // (8 << 20)


PLACEMENTS = ["*=Shard(0),Replicate()", "*=Shard(1),Shard(0)", "*=Replicate(),Shard(1)"]


@pytest.mark.parametrize("rule", PLACEMENTS)
@pytest.mark.parametrize("target", ["local", "store"])
def test_a_reshard_fetches_each_byte_once(target: str, rule: str, sharded: Path, out: Path) -> None:
    place, size = uploaded(sharded)
    transfer = TransferOptions(verify=False, run=RunOptions(fsync=False))
    options = ReshardOptions(parse_mesh("2x2"), rules=(parse_rule(rule),), transfer=transfer)
    to = location(str(out / "m") if target == "local" else "memory://out")
    prepare_reshard(place, to, replace(options, to="dcp")).run()
    traffic = place.store.traffic
    assert traffic.received <= 1.02 * size
    assert traffic.requests <= few_requests(size)


def test_all_of_an_output_is_read_back_in_few_requests(many: Path) -> None:
    place, _ = uploaded(many / "dcp")
    target = location("memory://out/m")
    options = ReshardOptions(parse_mesh("2x2"), rules=(parse_rule(PLACEMENTS[0]),), to="dcp")
    prepare_reshard(place, target, options).run()
    assert isinstance(target, RemotePath)
    size = sum(info.nbytes for info in target.store.find(target.key, "it").values())
    assert target.store.traffic.received <= 1.02 * size
    assert target.store.traffic.requests <= few_requests(size)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 MiB of matrices, and many small tensors that are not written by all ranks."""
    file = tmp_path_factory.mktemp("uneven") / "m.safetensors"
    tensors = {f"{n}.norm.weight": torch.randn(2048) for n in range(60)}
    tensors |= {f"{n}.w.weight": torch.randn(1024, 2048) for n in range(3)}
    save_file(tensors, file)
    return file


@pytest.mark.parametrize(("budget", "times"), [(40, 4), (160, 1), (1024, 1)])
def test_a_reshard_fetches_each_byte_once_a_pass(
    budget: int, times: int, s3: S3, uneven: Path
) -> None:
    """With room for one file at a time the rows of four are read four times, and no more often."""
    source, size = location(s3.put(uneven, "m.safetensors")), uneven.stat().st_size
    rules = parse_rule("*norm*=Replicate()"), parse_rule("*=Shard(1)")
    transfer = TransferOptions(verify=False, run=RunOptions(budget=budget << 20, workers=8))
    options = ReshardOptions(parse_mesh("4"), rules=rules, to="dcp", transfer=transfer)
    prepare_reshard(source, location(s3.url("out")), options).run()
    read = [one for one in s3.of("GetObject") if one.name == "m.safetensors"]
    assert sum(one.sent for one in read) <= times * size * 1.02
    largest = min(8 << 20, (budget << 20) // 4 * 3 // 4 // 8)
    assert len(read) <= 3 + times * -(-size // largest)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DCP checkpoint of 1,200 items on four ranks, a step counter for each tensor among them."""
    folder = tmp_path_factory.mktemp("many")
    tensors = {f"state.w.{n}.exp_avg": torch.randn(24, 64 + n % 3) for n in range(240)}
    tensors |= {f"state.w.{n}.step": torch.tensor(3.0) for n in range(240)}
    save_file(tensors, folder / "m.safetensors")
    options = ReshardOptions(parse_mesh("4"), rules=(parse_rule("*=Shard(0)"),), to="dcp")
    prepare_reshard(folder / "m.safetensors", folder / "dcp", options).run()
    return folder


def test_a_verify_of_many_items_fetches_what_it_would_of_one(many: Path) -> None:
    place, size = uploaded(many / "dcp")
    assert verify(place, VerifyOptions()).ok
    assert place.store.traffic.received <= 1.02 * size
    assert place.store.traffic.requests <= few_requests(size)


def test_a_convert_of_many_items_fetches_what_it_would_of_one(many: Path, out: Path) -> None:
    place, size = uploaded(many / "dcp")
    transfer = TransferOptions(verify=False)
    prepare(place, out / "out.safetensors", ConvertOptions("safetensors", transfer=transfer)).run()
    assert place.store.traffic.received <= 1.02 * size
    assert place.store.traffic.requests <= few_requests(size)
    written, tensors = load_file(out / "out.safetensors"), load_file(many / "m.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())


def llama(names: tuple[str, ...], transposed: int) -> dict[str, torch.Tensor]:
    """Layers as torchtitan names them; elements of some tensors lie in columns."""
    return {
        f"layers.{layer}.attention.{name}.weight": weight.t() if layer < transposed else weight
        for layer in range(60)
        for name in names
        for weight in [torch.randn(32, 32)]
    }


MAP = MapOptions("torchtitan-llama3", {"head": 4, "kv": 4})


@pytest.mark.parametrize(
    ("command", "names", "transposed", "times"),
    [
        ("convert", ("wv", "wo"), 0, 1.0),
        ("reshard", ("wv", "wo"), 0, 1.0),
        ("against", ("wv", "wo"), 0, 1.0),
        ("convert", ("wq", "wk"), 0, 2.0),
        ("convert", ("wq", "wk", "wv", "wo"), 4, 3.0),
    ],
)
def test_a_map_opens_items_from_what_is_read(
    command: str, names: tuple[str, ...], transposed: int, times: float, s3: S3, out: Path
) -> None:
    """Even where the elements of some lie in another order than those of the first.

    Of permuted rows the checksums are read once more.
    """
    dcp.save(llama(names, transposed), checkpoint_id=out / "dcp", no_dist=True)
    place, size = location(s3.put(out / "dcp", "m")), (out / "dcp/__0_0.distcp").stat().st_size
    rewriting = RewriteOptions(map=MAP)
    one = ConvertOptions("safetensors", rewrite=rewriting)
    prepare(out / "dcp", out / "one.safetensors", one).run()
    s3.requests.clear()
    if command == "convert":
        unproved = replace(one, transfer=TransferOptions(verify=False))
        prepare(place, out / "two.safetensors", unproved).run()
        assert (out / "two.safetensors").read_bytes() == (out / "one.safetensors").read_bytes()
    elif command == "reshard":
        transfer = TransferOptions(verify=False)
        options = ReshardOptions(parse_mesh("1"), to="dcp", map=MAP, transfer=transfer)
        prepare_reshard(place, out / "two", options).run()
        options = VerifyOptions(), RewriteOptions(), CompareOptions()
        assert against(out / "two", out / "one.safetensors", *options).verify.ok
    else:
        options = VerifyOptions(), rewriting, CompareOptions()
        assert against(place, out / "one.safetensors", *options).verify.ok
    read = [each for each in s3.of("GetObject") if each.name == "__0_0.distcp"]
    assert sum(each.sent for each in read) <= times * 1.02 * size
    assert {each.bucket for each in s3.requests} == {s3.bucket}


def test_a_proof_of_small_items_reads_the_source_in_few_requests(s3: S3, many: Path) -> None:
    """Once to write, and once more to compare: the archives between elements are read over."""
    source = location(s3.put(many / "dcp", "m"))
    options = ReshardOptions(parse_mesh("2x2"), rules=(parse_rule(PLACEMENTS[0]),), to="dcp")
    prepare_reshard(source, location(s3.url("out")), options).run()
    read = [one for one in s3.of("GetObject") if one.key.startswith("m/__")]
    size = sum(file.stat().st_size for file in (many / "dcp").glob("__*"))
    assert sum(one.sent for one in read) <= 2.02 * size
    assert len(read) <= 1 + 4 + 4 * 4


@pytest.mark.parametrize("command", ["stats", "against"])
def test_whoever_reads_items_opens_them_from_what_is_read(command: str, many: Path) -> None:
    place, size = uploaded(many / "dcp")
    if command == "stats":
        assert len(stats(open_checkpoint(place), ["*"]).stats) == 480
    else:
        options = VerifyOptions(), RewriteOptions(), CompareOptions()
        assert against(place, many / "m.safetensors", *options).verify.ok
    assert place.store.traffic.received <= 1.02 * size
    assert place.store.traffic.requests <= few_requests(size)


def test_a_verify_fetches_each_byte_once(sharded: Path) -> None:
    place, size = uploaded(sharded)
    assert verify(place, VerifyOptions()).ok
    assert place.store.traffic.received <= 1.02 * size
    assert place.store.traffic.requests <= few_requests(size)


@pytest.mark.parametrize(
    ("to", "name", "most"),
    [("safetensors", "m.safetensors", 27), ("torch-save", "m.pt", 21), ("hf", "m", 20)],
)
def test_a_small_file_is_written_in_few_requests(
    to: str, name: str, most: int, s3: S3, out: Path
) -> None:
    """With the proof; a side file is looked for only where an old one may be."""
    torch.save({"w": torch.ones(4)}, out / "s.pt")
    prepare(out / "s.pt", location(s3.url(f"a/{name}")), ConvertOptions(to)).run()
    assert len(s3.requests) <= most
    keys = [one.key for one in s3.requests if one.operation in ("PutObject", "DeleteObject")]
    assert keys[-1] == keys[1], "the note, which is removed last"
    assert len([one for one in s3.of("HeadObject") if one.key == "a/m.extra.pt"]) <= 3


def test_verbose_says_what_was_asked(s3: S3) -> None:
    url = s3.put(case("dcp_fsdp2_tp").path, "m")
    shown = CliRunner().invoke(app, ["inspect", url, "--verbose"])
    assert shown.exit_code == 0
    assert "2 requests, 10.6 KiB read" in shown.stderr
    assert "values in data files not read; --values reads them" in shown.stderr
    shown = CliRunner().invoke(app, ["inspect", url, "--verbose", "--values"])
    assert "not read" not in shown.output
