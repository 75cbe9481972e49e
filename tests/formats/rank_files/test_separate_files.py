"""Files that differ in a number: ranks if a name or the content says it, else separate ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import case, convert_to, read_back
from typer.testing import CliRunner

from ckptool.cli.app import app
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.read import ReadOptions
from ckptool.errors import CkptoolError, Several

SEPARATE = [
    ("epoch={}.ckpt", (0, 1, 2)),  # Lightning 2.6, filename="{epoch}"
    ("epoch_{}.pth", (1, 2, 3)),  # mmengine 0.10
    ("iter_{}.pth", (1000, 2000)),
    ("checkpoint_{}.pth", (0, 1)),  # Ignite 0.5, and many a script
    ("checkpoint_{}.pt", (0, 1, 2)),
    ("checkpoint{}.pt", (1, 2)),  # fairseq 0.12
    ("best_model_{}_val_acc=0.{}.pt", (1, 2)),
    ("best-val_loss=0.{:03d}.ckpt", (261, 149, 2, 1, 0)),
    ("{:02d}-0.39.ckpt", (0, 1, 2)),
    ("fold{}.pt", (1, 2, 3, 4, 5)),
    ("fold_{}.pth", (0, 1, 2)),
    ("fold_{}/model.pt", (0, 1)),
    ("model_v{}.pt", (1, 2)),
    ("model-{}.bin", (0, 1)),
    ("ckpt_b128_e{}.pt", (0, 1)),
    ("seed{}.pt", (0, 1)),
    ("replica_{}.pt", (0, 1)),
    ("cp-{:04d}.ckpt", (0, 1)),
    ("model_ep{}.pt", (0, 1)),
    ("frank_{}.pt", (0, 1)),  # the end of a longer word
    ("ep{0}-ba{0}0-rank0.pt", (1, 2, 3)),  # Composer 0.32: rank 0 alone saves
    ("model_step_{}_rank_0.pt", (100, 200)),
]


def saved(folder: Path, pattern: str, numbers: tuple[int, ...]) -> list[Path]:
    """One training's saves: whole tensors of the same names and shapes."""
    files = [folder / pattern.format(number, 5 + number) for number in numbers]
    for number, file in zip(numbers, files, strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"w": torch.full((3, 2), float(number)), "n": number}, file)
    return files


def ran(*line: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(part) for part in line])
    return result.exit_code, result.output


@pytest.mark.parametrize(("pattern", "numbers"), SEPARATE)
def test_each_file_is_a_checkpoint_of_its_own(
    pattern: str, numbers: tuple[int, ...], tmp_path: Path, out: Path
) -> None:
    files = saved(tmp_path / "run", pattern, numbers)
    for number, file in zip(numbers, files, strict=True):
        catalog = open_checkpoint(file).catalog
        assert catalog.tensors.keys() == {"w"}
        assert catalog.objects["n"].value == number
    convert_to("safetensors", files[-1], out / "m")
    (bits,) = read_back("safetensors", out / "m").values()
    assert bits[2] == torch.full((3, 2), float(numbers[-1])).numpy().tobytes()
    with pytest.raises(Several, match=f"contains {len(files)} checkpoints"):
        open_checkpoint(tmp_path / "run")


@pytest.mark.parametrize("copies", [False, True])
def test_every_command_reads_the_named_file_alone(copies: bool, tmp_path: Path, out: Path) -> None:
    one, two, three = saved(tmp_path / "run", "epoch={}.ckpt", (0, 1, 2))
    if copies:  # the same content, as of a training that does not move
        shutil.copy(one, two)
    two.write_bytes(two.read_bytes()[:-40])
    for line in (
        ("inspect", three),
        ("verify", three),
        ("extract", three, "w"),
        ("convert", three, out / "m.safetensors"),
        ("reshard", three, out / "r", "--mesh", "2", "--to", "dcp"),
        ("diff", three, three),
        ("verify", three, "--against", three),
    ):
        code, output = ran(*line)
        assert code == 0, output
        assert "epoch=0" not in output
        assert "epoch=1" not in output
        assert "read together" not in output
    assert ran("diff", one, three, "--values")[0] == 1


SAID = [
    ("model_rank{}.pt", (0, 1)),
    ("model-Rank-{}.pt", (0, 1)),
    ("rank{}/model.pt", (0, 1)),
    ("model_shard_{}.pt", (0, 1)),
    ("shard{:02d}.bin", (0, 1)),
    ("model_part{}.pt", (0, 1)),
    ("tp{}.pt", (0, 1)),
    ("dp_rank_{:02d}_model.pt", (0, 1)),
    ("process{:03d}.state.pt", (0, 1)),
    ("model_world_size_2_rank_{}.pt", (0, 1)),
    ("rank_{}_of_2.pt", (0, 1)),
    ("rank_{}_of_2.pt", (1, 2)),
    ("model-shard-{:05d}-of-00002.bin", (0, 1)),
    ("model-shard-{:05d}-of-00002.bin", (1, 2)),
]


@pytest.mark.parametrize(("pattern", "numbers"), SAID)
def test_a_word_before_the_number_says_rank_or_shard(
    pattern: str, numbers: tuple[int, ...], tmp_path: Path
) -> None:
    for number in numbers:
        file = tmp_path / pattern.format(number)
        file.parent.mkdir(exist_ok=True)
        torch.save({"shared": torch.ones(2), f"own{number}": torch.ones(2)}, file)
    opened = open_checkpoint(tmp_path)
    assert opened.format.name == "rank-local"
    assert opened.catalog.world_size == 2
    assert set(opened.catalog.tensors) == {"shared", *(f"own{number}" for number in numbers)}


def test_of_shards_counted_from_one_the_last_is_missed(tmp_path: Path) -> None:
    saved(tmp_path, "rank_{}_of_3.pt", (1, 3))
    with pytest.raises(CkptoolError, match=r"rank 1 of 3 is missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model_rank0", "0_model", "epoch_3-rank0"])
def test_a_trainers_record_of_the_rank(name: str, tmp_path: Path) -> None:
    for rank in range(2):
        state = {"shared": torch.ones(2), "rank": rank, "world_size": 2}
        torch.save(state, tmp_path / f"{name.replace('0', str(rank))}.pt")
    assert open_checkpoint(tmp_path).catalog.world_size == 2


def test_values_beside_ranks_are_the_ranks(copy_of: Callable[[str], Path]) -> None:
    """torch_checkpointing and the like write each item's values into files of their own."""
    folder = copy_of("rank_experimental")
    for rank in range(4):
        torch.save({"step": 5}, folder / f"extra_{rank}.pt")
    catalog = open_checkpoint(folder).catalog
    assert catalog.objects["extra.step"].value == 5
    assert catalog.world_size == 4


def test_numbers_are_ranks_if_that_is_known(tmp_path: Path) -> None:
    """torch's ``_experimental`` writer names plain tensors as others name epochs."""
    saved(tmp_path, "checkpoint_{}.pt", (0, 1))
    options = ReadOptions("rank-local", per_rank=True)
    assert set(open_checkpoint(tmp_path, options).catalog.tensors) == {"w@rank0", "w@rank1"}


PARTS = {
    "rank_base": "checkpoint_1.pt",
    "rank_fsdp1": "optim_rank1.pt",
    "dcp_fsdp2": "__1_0.distcp",
    "bin_shards": "pytorch_model-00001-of-*.bin",
    "rank_verl": "model_world_size_2_rank_0.pt",
    "hf_shards": "model-00001-of-00004.safetensors",
    "hf_sharded": "shard-00001-model-00001-of-00001.safetensors",
    "llama_consolidated": "consolidated.00.pth",
    "vllm_sharded_state": "model-rank-1-part-0.safetensors",
    "deepspeed_zero_2": "mp_rank_00_model_states.pt",
    "deepspeed_zero_3": "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
}


@pytest.mark.parametrize("name", PARTS)
def test_a_named_part_opens_the_whole_and_it_is_said(name: str) -> None:
    file = next(case(name).path.rglob(PARTS[name]))
    catalog = open_checkpoint(file).catalog
    assert catalog.tensors.keys() == open_checkpoint(file.parent).catalog.tensors.keys()
    count = len(catalog.files)
    assert f"{file.name} is one of {count} files, which are read together" in catalog.notes


def test_every_command_says_that_it_reads_the_whole(out: Path) -> None:
    file = case("rank_base").path / "checkpoint_1.pt"
    for line in (
        ("inspect", file),
        ("verify", file),
        ("extract", file, "w"),
        ("convert", file, out / "m.safetensors"),
        ("reshard", file, out / "r", "--mesh", "2"),
        ("diff", file, file),
        ("verify", file, "--against", file),
    ):
        code, output = ran(*line)
        assert code == 0, output
        assert "checkpoint_1.pt is one of 4 files" in output
    code, output = ran("verify", file, "--json")
    findings = json.loads(output)["findings"]
    assert [f["file"] for f in findings if f["code"] == "part-named"] == ["checkpoint_1.pt"]


@pytest.mark.parametrize(
    ("fixture", "name"),
    [
        ("accelerate_whole", "model.safetensors"),
        ("accelerate_whole", "optimizer.bin"),
        ("accelerate_folders", "scheduler.bin"),
        ("megatron_torch_dist", "common.pt"),
    ],
)
def test_a_whole_file_beside_others_is_read_alone(fixture: str, name: str) -> None:
    file = next(case(fixture).path.rglob(name))
    assert set(open_checkpoint(file).catalog.files) == {name}


def test_flat_ranks_that_are_there_are_not_said_to_be_missing() -> None:
    with pytest.raises(CkptoolError, match="flat parameter") as error:
        open_checkpoint(case("rank_fsdp1_local").path / "local_rank0.pt")
    assert "missing" not in str(error.value)


def test_of_several_saves_the_one_of_the_named_file_is_read(
    copy_of: Callable[[str], Path],
) -> None:
    """As Composer 0.32 names the files of ranks, if each saves its own."""
    folder, whole = copy_of("rank_base"), open_checkpoint(case("rank_base").path).catalog
    for file in sorted(folder.iterdir()):
        rank = file.stem.rpartition("_")[2]
        shutil.copy(file, folder / f"ep1-ba10-rank{rank}.pt")
        file.rename(folder / f"ep2-ba20-rank{rank}.pt")
    (folder / "ep1-ba10-rank2.pt").unlink()
    catalog = open_checkpoint(folder / "ep2-ba20-rank1.pt").catalog
    assert catalog.tensors.keys() == whole.tensors.keys()
    assert set(catalog.files) == {f"ep2-ba20-rank{rank}.pt" for rank in range(4)}
    assert any("one of 4 files" in note for note in catalog.notes)
    with pytest.raises(CkptoolError, match="rank 2 of 4 is missing"):
        open_checkpoint(folder / "ep1-ba10-rank1.pt")
    with pytest.raises(CkptoolError, match="several saves"):
        open_checkpoint(folder)
