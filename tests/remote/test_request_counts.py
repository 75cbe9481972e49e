"""The cost of a transfer from or to a store: each byte is fetched once, in few requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import case
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from store_server import S3, s3, server
from typer.testing import CliRunner

from ckptool.cli.app import app
from ckptool.commands.convert import prepare
from ckptool.commands.inspect.stats import stats
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.question import Question
from ckptool.commands.options.rewrite import MapOptions, RewriteOptions
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ConvertOptions, ReshardOptions, TransferOptions
from ckptool.commands.options.verify import CompareOptions, VerifyOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.commands.verify.compare.against import against
from ckptool.commands.verify.verify import verify
from ckptool.core.sharding.placement import parse_mesh, parse_rule
from ckptool.storage.url import RemotePath, location

TO_SAVE = ConvertOptions("torch-save")


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


def test_small_tensors_among_large_ones_keep_nothing_that_is_fetched(
    tmp_path: Path, out: Path
) -> None:
    """Whoever reads the norms of all layers at once has all of the file in memory."""
    tensors = dict[str, torch.Tensor]()
    for layer in range(16):
        tensors |= {f"{layer}.norm": torch.ones(256), f"{layer}.weight": torch.ones(2048, 512)}
    (tmp_path / "source").mkdir()
    torch.save(tensors, tmp_path / "source" / "model.pt")
    place, size = uploaded(tmp_path / "source")
    transfer = TransferOptions(run=RunOptions(fsync=False, budget=128 << 20))
    prepare(place, out / "m", replace(TO_SAVE, to="safetensors", transfer=transfer)).run()
    assert place.store.traffic.requests <= size // (1 << 20)
    assert place.store.traffic.received <= 1.1 * size


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
        options = ReshardOptions(parse_mesh("1"), to="dcp", rewrite=rewriting, transfer=transfer)
        prepare_reshard(place, out / "two", options).run()
        same = against(out / "two", out / "one.safetensors", Question())
        assert same.verify.ok
    else:
        same = against(place, out / "one.safetensors", Question(rewrite=rewriting))
        assert same.verify.ok
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
        assert against(place, many / "m.safetensors", Question()).verify.ok
    assert place.store.traffic.received <= 1.02 * size
    assert place.store.traffic.requests <= few_requests(size)


def test_a_verify_fetches_each_byte_once(sharded: Path) -> None:
    place, size = uploaded(sharded)
    assert verify(place, VerifyOptions()).ok
    assert place.store.traffic.received <= 1.02 * size
    assert place.store.traffic.requests <= few_requests(size)


@pytest.mark.parametrize(
    ("to", "name", "most"),
    [("safetensors", "m.safetensors", 16), ("torch-save", "m.pt", 14), ("hf", "m", 16)],
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
    assert len([one for one in s3.of("HeadObject") if one.key == "a/m.extra.pt"]) <= 2
    assert len(s3.of("ListObjectsV2")) <= (5 if to == "hf" else 0)


def test_a_small_file_is_read_in_few_requests(s3: S3, out: Path) -> None:
    """It is found, and no side file beside it; then its header and its tensors are read."""
    save_file({"w": torch.ones(4)}, out / "m.safetensors")
    prepare(location(s3.put(out / "m.safetensors", "a/m.safetensors")), out / "m.pt", TO_SAVE).run()
    kinds = ["HeadObject", "HeadObject", "GetObject", "GetObject"]
    assert [one.operation for one in s3.requests] == kinds


def test_verbose_says_what_was_asked(s3: S3) -> None:
    url = s3.put(case("dcp_fsdp2_tp").path, "m")
    shown = CliRunner().invoke(app, ["inspect", url, "--verbose"])
    assert shown.exit_code == 0
    assert "2 requests, 10.6 KiB read" in shown.stderr
    assert "values in data files not read; --values reads them" in shown.stderr
    shown = CliRunner().invoke(app, ["inspect", url, "--verbose", "--values"])
    assert "not read" not in shown.output
