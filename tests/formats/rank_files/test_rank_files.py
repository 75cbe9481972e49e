"""Which files of a folder are one per rank of one checkpoint, and which belong to another save."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import case, convert_to, read_back
from typer.testing import CliRunner

import ckptool
from ckptool.cli.app import app
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.verify import verify
from ckptool.errors import CkptoolError, Unsupported, UsageError

VERL = "global_step_5"


@pytest.fixture
def relaunched(copy_of: Callable[[str], Path]) -> Path:
    """verl's folder, and in it what a run with other numbers of ranks left."""
    (folder,) = (p for p in copy_of("rank_verl").rglob("*") if list(p.glob("model_world_size_*")))
    for file in list(folder.glob("model_world_size_2_*")):
        shutil.copy(file, folder / file.name.replace("size_2", "size_4"))
    return folder


def codes_of(folder: Path, **options: object) -> dict[str, str]:
    report = verify(folder, VerifyOptions(ReadOptions(**options), workers=1))  # type: ignore[arg-type]
    return {finding.code: finding.message for finding in report.findings}


def test_of_two_world_sizes_none_is_taken(relaunched: Path) -> None:
    with pytest.raises(CkptoolError, match=r"several world sizes: 2 \(6 files.* 4 \(2 files") as e:
        open_checkpoint(relaunched)
    assert "--world-size 2" in str(e.value.hint)
    assert "saves-mixed" in codes_of(relaunched)
    result = CliRunner().invoke(app, ["verify", str(relaunched), "--quick"])
    assert result.exit_code == 1


def test_one_stray_file_of_another_world_size(copy_of: Callable[[str], Path]) -> None:
    (file,) = copy_of("rank_verl").rglob("optim_world_size_2_rank_0.pt")
    shutil.copy(file, file.with_name("optim_world_size_3_rank_0.pt"))
    with pytest.raises(CkptoolError, match=r"2 \(6 files.* 3 \(1 file, such as optim_world_size_3"):
        open_checkpoint(file.parent)


def test_the_world_size_that_is_asked_for_is_read(relaunched: Path, out: Path) -> None:
    convert_to("safetensors", relaunched, out / "m", world_size=2)
    found, truth = read_back("safetensors", out / "m"), case("rank_verl").truth
    assert {name: found[name] for name in truth} == truth
    assert ckptool.open(relaunched, world_size=2).tensors.keys() == found.keys()
    with pytest.raises(CkptoolError, match="rank 2, 3 of 4 is missing"):
        open_checkpoint(relaunched, ReadOptions(world_size=4))
    for command in ("inspect", "verify"):
        line = [command, str(relaunched), "--world-size", "2", "--json"]
        result = CliRunner().invoke(app, line)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)


def test_of_two_steps_none_is_taken(copy_of: Callable[[str], Path]) -> None:
    """Steps in the names of rank files: two of them are no families of one checkpoint."""
    folder = copy_of("rank_experimental")
    for file in list(folder.iterdir()):
        rank = file.stem.rpartition("_")[2]
        file.rename(folder / f"model_step_200_rank_{rank}.pt")
    assert open_checkpoint(folder).catalog.world_size == 4
    shutil.copy(folder / "model_step_200_rank_3.pt", folder / "model_step_100_rank_3.pt")
    with pytest.raises(
        CkptoolError, match=r"several saves: step_100 \(1 file, .* step_200 \(4 files"
    ):
        open_checkpoint(folder)


def test_a_world_size_that_no_name_states(copy_of: Callable[[str], Path]) -> None:
    """Where the last ranks' files are lost without a trace, a person knows how many there were."""
    folder = copy_of("rank_experimental")
    assert open_checkpoint(folder, ReadOptions(world_size=4)).catalog.world_size == 4
    with pytest.raises(CkptoolError, match="rank 4 of 5 is missing"):
        open_checkpoint(folder, ReadOptions(world_size=5))
    with pytest.raises(CkptoolError, match=r"has 4 ranks; the file of rank 3 is missing"):
        open_checkpoint(folder, ReadOptions(world_size=3))
    (folder / "checkpoint_3.pt").rename(folder / "checkpoint_world_size_2_rank_3.pt")
    with pytest.raises(CkptoolError, match="a file of rank 3, but there are 2 ranks"):
        open_checkpoint(folder)
    with pytest.raises(CkptoolError, match="iteration 100 lacks the file of rank 2, 3"):
        open_checkpoint(case("megatron_local").path, ReadOptions(world_size=4))
    with pytest.raises(CkptoolError, match="iteration 100 has a file of rank 1"):
        open_checkpoint(case("megatron_local").path, ReadOptions(world_size=1))
    with pytest.raises(UsageError, match="--world-size: not applicable, dcp does without"):
        open_checkpoint(case("dcp_base").path, ReadOptions(world_size=2))


def test_a_relaunch_over_names_without_a_world_size(
    copy_of: Callable[[str], Path], out: Path
) -> None:
    """Two ranks wrote over the files of four, of which the last two are left."""
    folder, other = copy_of("rank_fsdp1"), case("rank_experimental").path
    for rank in (2, 3):
        for kind in ("model", "optim"):
            shutil.copy(other / f"checkpoint_{rank}.pt", folder / f"{kind}_rank{rank}.pt")
    with pytest.raises(CkptoolError):
        convert_to("safetensors", folder, out / "mixed")
    convert_to("safetensors", folder, out / "m", world_size=2)
    assert read_back("safetensors", out / "m") == case("rank_fsdp1").truth
    notes = open_checkpoint(folder, ReadOptions(world_size=2)).catalog.notes
    assert any("not read: model_rank2.pt and 1 more" in note for note in notes)


NAMES: dict[str, Callable[[int], str]] = {
    "shards": lambda rank: f"shard-{rank:05d}-of-00004.pt",
    "folders": lambda rank: f"rank{rank}/model.pt",
    "bare folders": lambda rank: f"{rank}/model.pt",
    "from one": lambda rank: f"model_{rank + 1}_of_4.bin",
    "data-parallel": lambda rank: f"dp_rank_{rank:02d}_model.pt",
    "two numbers": lambda rank: f"weights-{rank // 2}-{rank % 2}.pth",
    "in front": lambda rank: f"{rank}_model.pt",
    "processes": lambda rank: f"process{rank:03d}.state.pt",
}


def renamed(folder: Path, name: Callable[[int], str]) -> Path:
    """The rank files of a fixture under other names."""
    for file in list(folder.iterdir()):
        path = folder / name(int(file.stem.rpartition("_")[2]))
        path.parent.mkdir(exist_ok=True)
        file.rename(path)
    return folder


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("fixture", ["rank_experimental", "torch_2_1_rank_files"])
def test_names_that_differ_in_numbers(
    kind: str, fixture: str, copy_of: Callable[[str], Path], out: Path
) -> None:
    folder = renamed(copy_of(fixture), NAMES[kind])
    convert_to("safetensors", folder, out / "m")
    found, truth = read_back("safetensors", out / "m"), case(fixture).truth
    assert {name: found[name] for name in truth} == truth
    assert verify(folder, VerifyOptions(workers=1)).ok


@pytest.mark.parametrize("kind", NAMES)
def test_a_numbered_rank_file_that_is_lost_or_a_copy(
    kind: str, copy_of: Callable[[str], Path]
) -> None:
    folder = renamed(copy_of("rank_experimental"), NAMES[kind])
    kept = (folder / NAMES[kind](3)).read_bytes()
    (folder / NAMES[kind](3)).unlink()
    assert "rank-missing" in codes_of(folder)
    (folder / NAMES[kind](3)).write_bytes(kept)
    shutil.copy(folder / NAMES[kind](0), folder / NAMES[kind](2))
    assert "rank-copied" in codes_of(folder)


@pytest.mark.parametrize(
    "names",
    [
        ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"),
        ("run0/model.pt", "run1/model.pt"),
        ("step_1/model.pt", "step_2/model.pt"),
    ],
)
def test_numbers_that_are_not_ranks(names: tuple[str, ...], tmp_path: Path) -> None:
    """Shards of a whole model, runs and steps: each is a checkpoint, and both are named."""
    for at, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        torch.save({f"w{at}": torch.ones(2)}, tmp_path / name)
    with pytest.raises(CkptoolError, match="2 checkpoints:"):
        open_checkpoint(tmp_path)


def ranked(folder: Path, rows: dict[int, int], name: str = "lora_rank{}.pt") -> Path:
    """Files of whole tensors, by the number in the name and how many rows those have."""
    for number, count in rows.items():
        path = folder / name.format(number)
        path.parent.mkdir(exist_ok=True)
        torch.save({"a.weight": torch.ones(count, 4)}, path)
    return folder


@pytest.mark.parametrize("name", ["lora_rank{}.pt", "rank{}/lora.pt"])
@pytest.mark.parametrize("rows", [{8: 8, 16: 16}, {1: 1, 2: 2}, {2: 2, 4: 4, 8: 8}, {4: 4, 8: 4}])
def test_ranks_of_adapters_are_not_ranks_of_processes(
    rows: dict[int, int], name: str, tmp_path: Path
) -> None:
    folder = ranked(tmp_path, rows, name)
    with pytest.raises(CkptoolError, match=f"{len(rows)} checkpoints:"):
        open_checkpoint(folder)
    last = max(rows)
    if last > 2:
        opened = open_checkpoint(folder / name.format(last))
        assert opened.catalog.tensors["a.weight"].shape == (rows[last], 4)
        assert any("read by itself" in note for note in opened.catalog.notes) is ("/" not in name)


@pytest.mark.parametrize("numbers", [(0, 1, 3), (1, 2, 3), (0, 2), (1,)])
def test_a_lost_rank_of_whole_tensors_stays_an_error(
    numbers: tuple[int, ...], tmp_path: Path
) -> None:
    folder = ranked(tmp_path, dict.fromkeys(numbers, 2), "model_rank{}.pt")
    with pytest.raises(CkptoolError, match="is missing"):
        open_checkpoint(folder)


@pytest.mark.parametrize("kept", [(2, 3), (3,)])
def test_records_say_that_a_rank_is_lost(
    kept: tuple[int, ...], copy_of: Callable[[str], Path]
) -> None:
    folder = renamed(copy_of("rank_experimental"), "model_rank{}.pt".format)
    for rank in set(range(4)) - set(kept):
        (folder / f"model_rank{rank}.pt").unlink()
    with pytest.raises(CkptoolError, match="is missing"):
        open_checkpoint(folder)


def test_two_steps_of_one_rank_are_not_two_ranks(copy_of: Callable[[str], Path]) -> None:
    """Only rank 0 of each save was kept."""
    folder = copy_of("rank_experimental")
    for number in range(2):
        (folder / f"run{number}").mkdir()
        shutil.copy(folder / "checkpoint_0.pt", folder / f"run{number}" / "model.pt")
    for rank in range(4):
        (folder / f"checkpoint_{rank}.pt").unlink()
    with pytest.raises(CkptoolError, match="2 checkpoints:"):
        open_checkpoint(folder)


def test_two_files_of_one_rank(copy_of: Callable[[str], Path]) -> None:
    folder = renamed(copy_of("rank_experimental"), NAMES["data-parallel"])
    shutil.copy(folder / "dp_rank_00_model.pt", folder / "tp_rank_00_model.pt")
    shutil.copy(folder / "dp_rank_01_model.pt", folder / "tp_rank_01_model.pt")
    with pytest.raises(CkptoolError, match="are both the model of rank 0"):
        open_checkpoint(folder)


def test_a_placement_that_is_not_known_stops_its_tensors(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("torch_checkpointing_safetensors")
    file = folder / "metadata.pkl"
    content = pickle.loads(file.read_bytes())
    for records in content["metadata"]["model"]["nested_path_to_metadata"].values():
        for record in records:
            for placement in record["sharding_metadata"].get("data", {}).get("placements", ()):
                placement["type"] = "Another"
    file.write_bytes(pickle.dumps(content))
    with pytest.raises(
        Unsupported, match=r"model\.steps: metadata\.pkl says unknown placement Another"
    ):
        convert_to("dcp", folder, folder.with_name("out"))


def test_a_tensor_that_cannot_be_read_is_named_with_its_ranks_file(tmp_path: Path) -> None:
    for rank in range(2):
        tensor = torch.ones(2)
        vars(tensor).update((f"a{n}", n) for n in range(300 * rank))
        torch.save({"w": tensor}, tmp_path / f"model_rank{rank}.pt")
    assert codes_of(tmp_path) == {
        "tensor-record": "w: model_rank1.pt: a tensor with 300 attributes"
    }
