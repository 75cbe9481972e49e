"""verify --salvage of files that were cut or damaged inside, and what it leaves beside."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import bits, case, read_back
from typer.testing import CliRunner
from verify.salvage.salvaged import contents, damaged_copy, salvage

from ckptool.cli.app import app
from ckptool.errors import CkptoolError, Unsupported


def test_the_list_of_what_is_lost_lies_beside(copy_of: Callable[[str], Path], out: Path) -> None:
    source = damaged_copy("chunk_gap", copy_of)
    report = salvage(source, out / "m")
    listing = json.loads((out / "m.salvage.json").read_text())
    assert listing["schema"] == "ckptool.salvage/2"
    assert listing["lost"] == dict(report.lost)
    with pytest.raises(Unsupported, match="already exists"):
        salvage(source, out / "m")


def test_a_salvaged_checkpoint_is_sound(copy_of: Callable[[str], Path], out: Path) -> None:
    source = damaged_copy("chunk_gap", copy_of)
    runner = CliRunner()
    result = runner.invoke(app, ["verify", str(source), "--salvage", str(out / "m")])
    assert result.exit_code == 1
    assert "lost" in result.stdout
    assert runner.invoke(app, ["verify", str(out / "m")]).exit_code == 0


def test_mixed_saves_are_not_trusted(copy_of: Callable[[str], Path], out: Path) -> None:
    folder = copy_of("rank_verl")
    actor = folder / "global_step_5" / "actor"
    name = "model_world_size_2_rank_1.pt"
    (actor / name).rename(actor / name.replace("size_2", "size_4"))
    with pytest.raises(CkptoolError):
        salvage(folder, out / "m")


CUT = [
    ("rank_base", "checkpoint_1.pt", 0.9, 0),
    ("rank_base", "checkpoint_1.pt", 0.5, 3),
    ("rank_fsdp1", "*.pt", 0.9, 0),
    ("hf_sharded", "shard-00001-*.safetensors", 0.9, 4),
    ("hf_shards", "model-00001-*.safetensors", 0.9, 1),
    ("safetensors_file", "model.safetensors", 0.99, 2),
    ("safetensors_file", "model.safetensors", 0.9, 14),
    ("torch_checkpointing_safetensors", "model_1.safetensors", 0.9, 4),
    ("vllm_sharded_state", "model-rank-0-part-0.safetensors", 0.9, 1),
    ("bin_shards", "pytorch_model-00001-*.bin", 0.9, 0),
    ("bin_shards", "pytorch_model-00001-*.bin", 0.5, 1),
    ("llama_consolidated", "consolidated.00.pth", 0.9, 0),
    ("llama_consolidated", "consolidated.00.pth", 0.5, 10),
    ("megatron_torch", "model_optim_rng.pt", 0.9, 0),
    ("megatron_torch", "model_optim_rng.pt", 0.5, 17),
    ("deepspeed_zero_2", "*pp_rank_0*optim_states.pt", 0.9, 0),
    ("deepspeed_zero_2", "*pp_rank_0*optim_states.pt", 0.5, 13),
    ("zip_zoo", "zoo.pt", 0.9, 0),
    ("zip_without_crc", "*.pt", 0.6, 14),
    ("legacy_zoo", "zoo.pt", 0.99, 1),
    ("legacy_zoo", "zoo.pt", 0.9, 19),
    ("dcp_base", "__1_0.distcp", 0.9, 1),
    ("dcp_base", "__1_0.distcp", 0.5, 3),
    ("dcp_zstd", "__0_0.distcp", 0.9, 7),
    ("bytecheckpoint_ddp", "model/__0_0.distcp", 0.9, 1),
    ("bytecheckpoint_ddp", "model/__0_0.distcp", 0.5, 4),
]


@pytest.mark.parametrize(("name", "pattern", "share", "lost"), CUT)
def test_of_a_cut_file_only_what_lay_behind_the_cut_is_lost(
    name: str,
    pattern: str,
    share: float,
    lost: int,
    copy_of: Callable[[str], Path],
    out: Path,
) -> None:
    source = copy_of(name)
    file = sorted(source.rglob(pattern))[0]
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    before = contents(source)
    report = salvage(source, out / "m")
    truth, written = case(name).truth, read_back("dcp", out / "m")
    assert {n for n in written if n in truth and written[n] != truth[n]} == set()
    assert truth.keys() - written.keys() <= report.lost.keys()
    assert len(report.lost) == lost
    assert any(file.name in line for line in (*report.problems, *report.lost.values()))
    assert not report.complete
    assert contents(source) == before


@pytest.mark.parametrize("at", range(1, 20))
def test_a_broken_header_costs_one_record(
    at: int, copy_of: Callable[[str], Path], out: Path
) -> None:
    source = copy_of("zip_zoo")
    data = bytearray((source / "zoo.pt").read_bytes())
    header = [found.start() for found in re.finditer(b"PK\x03\x04", data)][at]
    data[header] ^= 1
    (source / "zoo.pt").write_bytes(data)
    report = salvage(source, out / "m")
    truth, written = case("zip_zoo").truth, read_back("dcp", out / "m")
    assert {n for n in written if n in truth and written[n] != truth[n]} == set()
    assert truth.keys() - written.keys() <= report.lost.keys()
    assert 0 <= len(report.lost) <= 7
    assert not report.complete


@pytest.mark.parametrize("size", [0, 1, 8, 100])
def test_an_archive_inside_a_storage_is_not_part_of_what_is_left(size: int, out: Path) -> None:
    inner = out / "inner.pt"
    torch.save({"x": torch.arange(64), "y": torch.ones(64)}, inner)
    held = torch.frombuffer(bytearray(inner.read_bytes()), dtype=torch.uint8)
    whole = out / "archive.pt"
    truth = {"x": torch.zeros(64), "held": held, "y": torch.arange(64)}
    torch.save(truth, whole)
    data = whole.read_bytes()
    at = data.index(b"archive/data/1")
    source = out / "source"
    source.mkdir()
    cut_at = data.index(b"PK\x05\x06", at) + size
    (source / "archive.pt").write_bytes(data[:at] + b"X" + data[at + 1 : cut_at])
    report = salvage(source / "archive.pt", out / "saved.pt")
    written = torch.load(out / "saved.pt")
    assert {n: bits(t) for n, t in written.items()} == {n: bits(truth[n]) for n in written}
    assert {"held", "y"} <= report.lost.keys()


@pytest.mark.parametrize("name", ["zip_deflated", "dcp_zstd"])
def test_what_unpacks_to_other_bytes_than_were_checksummed_is_lost(name: str, out: Path) -> None:
    truth = case(name).truth
    for seed in range(40):
        source = out.parent / f"source{seed}"
        shutil.copytree(case(name).path, source)
        file = max(source.rglob("*.[pd][ti]*"), key=lambda path: path.stat().st_size)
        data = bytearray(file.read_bytes())
        data[len(data) * (seed + 5) // 60] ^= 1 << seed % 8
        file.write_bytes(data)
        try:
            report = salvage(source, out / f"m{seed}")
        except CkptoolError:
            continue
        written = read_back("dcp", out / f"m{seed}")
        assert {n for n in written if n in truth and written[n] != truth[n]} == set()
        assert not report.unproved


def test_without_the_last_shard_no_shape_is_known(
    copy_of: Callable[[str], Path], out: Path
) -> None:
    source = copy_of("hf_sharded")
    file = source / "shard-00004-model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(Unsupported, match="nothing in it can be recovered"):
        salvage(source, out / "m")
