"""accelerate's folders as other versions and transformers' Trainer leave them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import Bits, case, convert_to, load_dcp, load_torch, read_back
from safetensors.torch import save_file

import ckptool
from ckptool.commands.open import open_checkpoint
from ckptool.errors import Damaged, Unsupported

FOLDERS = case("accelerate_folders").path


def test_what_transformers_trainer_saves_beside(copy_of: Callable[[str], Path], out: Path) -> None:
    """Each rank's random state is its own; scheduler and model are one."""
    folder = copy_of("accelerate_folders")
    for name in ("scheduler.bin", "random_states_0.pkl", "random_states_1.pkl"):
        (folder / name).unlink()
    torch.save({"last_epoch": 5}, folder / "scheduler.pt")
    for rank in range(2):
        torch.save({"cpu": torch.arange(4) + rank}, folder / f"rng_state_{rank}.pth")
    catalog = open_checkpoint(folder).catalog
    assert {"rng_state.cpu@rank0", "rng_state.cpu@rank1"} <= catalog.tensors.keys()
    assert catalog.objects["scheduler.last_epoch"].value == 5
    convert_to("safetensors", folder, out / "m")
    found = read_back("safetensors", out / "m")
    whole = case("accelerate_folders").truth
    assert {name: found[name] for name in whole} == whole


def test_the_folder_names_of_old_versions(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("accelerate_folders")
    (folder / "pytorch_model_fsdp_0").rename(folder / "pytorch_model_0")
    found = open_checkpoint(folder).catalog
    assert found.format == "accelerate"
    assert case("accelerate_folders").truth.keys() <= found.tensors.keys()


def test_two_models_of_one_name_are_not_mixed(copy_of: Callable[[str], Path]) -> None:
    """A newer version saved into the same folder, or with other settings."""
    folder = copy_of("accelerate_folders")
    shutil.copytree(folder / "pytorch_model_fsdp_0", folder / "pytorch_model_0")
    with pytest.raises(Damaged, match=r"both in pytorch_model_fsdp_0/\S+ and in") as error:
        open_checkpoint(folder)
    assert [p.code for p in error.value.problems] == ["saves-mixed"]
    shutil.rmtree(folder / "pytorch_model_0")
    torch.save({"last_epoch": 5}, folder / "pytorch_model.bin")
    found = open_checkpoint(folder).catalog
    assert found.objects["model.last_epoch"].value == 5, "of names of its own"
    torch.save({"x": 5}, folder / "custom_checkpoint_0.pkl")
    torch.save({name: torch.ones(2) for name in truth_names()}, folder / "pytorch_model.bin")
    with pytest.raises(Damaged, match=r"and in pytorch_model\.bin: of two saves"):
        open_checkpoint(folder)


def truth_names() -> list[str]:
    return [n.removeprefix("model.") for n in case("accelerate_folders").truth if n[0] == "m"]


def test_shards_are_read_rather_than_what_was_made_of_them(
    copy_of: Callable[[str], Path],
) -> None:
    folder = copy_of("accelerate_folders")
    save_file({name: torch.ones(2) for name in truth_names()}, folder / "model.safetensors")
    opened = open_checkpoint(folder)
    assert "not read: model.safetensors: looks like part of a checkpoint" in opened.catalog.notes
    assert "model.safetensors" not in opened.catalog.files


def test_damaged_metadata_is_named_with_its_folder(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("accelerate_folders")
    file = folder / "optimizer_0" / ".metadata"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(Damaged, match=r"^optimizer_0/\.metadata: the pickle ends") as error:
        open_checkpoint(folder)
    assert [p.file for p in error.value.problems] == ["optimizer_0/.metadata"]


def test_a_model_exported_into_deepspeeds_folder_does_not_hide_it(
    copy_of: Callable[[str], Path],
) -> None:
    folder, other = copy_of("deepspeed_zero_2"), case("accelerate_whole").path
    for name in ("model.safetensors", "random_states_0.pkl", "random_states_1.pkl"):
        shutil.copy(other / name, folder)
    found = open_checkpoint(folder).catalog
    assert found.format == "deepspeed"
    assert any("not read: model.safetensors: looks" in note for note in found.notes)


def tensor_of(value: Bits) -> torch.Tensor:
    dtype, shape, data = value
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape)


def test_a_file_that_is_named_stands_for_the_whole() -> None:
    folder = case("accelerate_whole").path
    whole, part = (ckptool.open(path) for path in (folder, folder / "random_states_1.pkl"))
    assert part.catalog.tensors.keys() == whole.catalog.tensors.keys()
    (note,) = {*part.catalog.notes} - {*whole.catalog.notes}
    assert note == "random_states_1.pkl is one of 4 files, which are read together"


def test_a_whole_model_saved_with_torch(copy_of: Callable[[str], Path], out: Path) -> None:
    """``safe_serialization=False``: the same under the same names, and nothing is left behind."""
    folder = copy_of("accelerate_whole")
    (folder / "model.safetensors").unlink()
    whole = case("accelerate_whole").truth
    model = {n.removeprefix("model."): n for n in whole if n.startswith("model.")}
    state = {short: tensor_of(whole[name]) for short, name in model.items()}
    torch.save(state, folder / "pytorch_model.bin")
    convert_to("safetensors", folder, out / "m")
    found = read_back("safetensors", out / "m")
    assert {name: found[name] for name in whole} == whole


@pytest.mark.parametrize("safe", [False, True])
def test_a_second_model_and_its_optimizer(copy_of: Callable[[str], Path], *, safe: bool) -> None:
    folder = copy_of("accelerate_whole")
    (folder / "model.safetensors").unlink()
    for number in ("", "_1"):
        if safe:
            save_file({"w": torch.ones(2)}, folder / f"model{number}.safetensors")
        else:
            torch.save({"w": torch.ones(2)}, folder / f"pytorch_model{number}.bin")
        torch.save({"state": {0: {"m": torch.ones(2)}}}, folder / f"optimizer{number}.bin")
    found = open_checkpoint(folder).catalog
    wanted = {"model.w", "model_1.w", "optimizer.state.0.m", "optimizer_1.state.0.m"}
    assert wanted <= found.tensors.keys()
    assert not found.notes


def test_what_an_older_trainer_saved(copy_of: Callable[[str], Path]) -> None:
    """Two ranks' random states beside one model: the model is what counts."""
    folder = copy_of("accelerate_whole")
    for file in folder.iterdir():
        file.unlink()
    torch.save({"w": torch.ones(2)}, folder / "pytorch_model.bin")
    torch.save({"state": {0: {"m": torch.ones(2)}}}, folder / "optimizer.pt")
    for rank in range(2):
        torch.save({"cpu": torch.arange(4) + rank}, folder / f"rng_state_{rank}.pth")
    found = open_checkpoint(folder).catalog.tensors
    assert {"model.w", "optimizer.state.0.m"} <= found.keys()


def test_a_trainers_folder_is_its_model(copy_of: Callable[[str], Path], out: Path) -> None:
    """One process: the optimizer lies beside the model, and is named."""
    folder = copy_of("accelerate_whole")
    for file in folder.iterdir():
        file.unlink()
    torch.save({"w": torch.ones(2)}, folder / "pytorch_model.bin")
    torch.save({"state": {}}, folder / "optimizer.pt")
    (folder / "config.json").write_text("{}")
    catalog = open_checkpoint(folder).catalog
    assert (catalog.format, list(catalog.tensors)) == ("torch-save", ["w"])
    assert any("not read: optimizer.pt: looks" in note for note in catalog.notes)
    convert_to("safetensors", folder, out / "m")
    assert (out / "m/config.json").exists()


def test_an_adapter_stays_one(copy_of: Callable[[str], Path], out: Path) -> None:
    folder = copy_of("accelerate_whole")
    for file in folder.iterdir():
        if file.name == "model.safetensors":
            file.rename(folder / "adapter_model.safetensors")
        else:
            file.unlink()
    (folder / "adapter_config.json").write_text("{}")
    assert open_checkpoint(folder).catalog.format == "hf"
    convert_to("dcp", folder, out / "m")
    assert (out / "m/adapter_config.json").exists()
    convert_to("safetensors", folder, out / "again")
    assert (out / "again/adapter_model.safetensors").exists()


# Written


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("saved", [FOLDERS, case("accelerate_rank_files").path])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_is_written_as_accelerate_opens_it(saved: Path, size: int, out: Path) -> None:
    """Whichever way accelerate saved it."""
    report = ckptool.reshard(saved, out / "r", mesh=str(size), fsync=False)
    assert report.target_format == "accelerate"
    inner = {".metadata", *(f"__{rank}_0.distcp" for rank in range(size))}
    folders = {f"{at}/{file}" for at in ("pytorch_model_fsdp_0", "optimizer_0") for file in inner}
    states = {f"random_states_{rank}.pkl" for rank in range(size)}
    assert files_of(out / "r") == {"scheduler.bin", *folders, *states}
    assert load_torch(out / "r" / "scheduler.bin") == {"last_epoch": 3}
    for rank in range(size):
        found = load_torch(out / "r" / f"random_states_{rank}.pkl")
        if size != 2:
            assert found == {"step": 3}, "as many ranks find their own states again"
            continue
        wanted = load_torch(saved / f"random_states_{rank}.pkl")
        assert found.keys() == wanted.keys()
        assert torch.equal(found["torch_manual_seed"], wanted["torch_manual_seed"])
        assert found["random_state"] == wanted["random_state"]


def test_the_trainers_files_keep_its_names(out: Path) -> None:
    run = out / "checkpoint-7"
    shutil.copytree(FOLDERS, run)
    (run / "scheduler.bin").rename(run / "scheduler.pt")
    for rank in range(2):
        (run / f"random_states_{rank}.pkl").rename(run / f"rng_state_{rank}.pth")
    (run / "trainer_state.json").write_text('{"global_step": 7}')
    (run / "config.json").write_text("{}")
    ckptool.reshard(run, out / "two", mesh="2", fsync=False)
    beside = {file for file in files_of(out / "two") if "/" not in file}
    copied = {"trainer_state.json", "config.json"}
    assert beside == {"scheduler.pt", "rng_state_0.pth", "rng_state_1.pth", *copied}
    assert (out / "two" / "trainer_state.json").read_text() == '{"global_step": 7}'
    ckptool.reshard(run, out / "one", mesh="1", rank_state="1", fsync=False)
    assert "rng_state.pth" in files_of(out / "one")
    ckptool.convert(out / "two", out / "dcp", to="dcp", per_rank=True, fsync=False)
    assert "trainer_state.json" not in files_of(out / "dcp")


def test_on_demand_from_a_dcp_folder(out: Path) -> None:
    state = {"model": {"w": torch.ones(4, 3)}, "optimizer": {"state": {"w": {"m": torch.ones(4)}}}}
    dcp.save(state, checkpoint_id=out / "dcp", no_dist=True)
    ckptool.reshard(out / "dcp", out / "r", mesh="2", to="accelerate", fsync=False)
    found = load_dcp(out / "r" / "optimizer_0")
    assert torch.equal(found["optimizer"]["state"]["w"]["m"], torch.ones(4))
    assert load_dcp(out / "r" / "pytorch_model_fsdp_0").keys() == {"model"}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"ema": {"w": torch.ones(2)}}, r"ema\.w: accelerate has no file for it"),
        ({"model": {"w": torch.ones(2)}, "epoch": 3}, "epoch: accelerate has no file for it"),
    ],
    ids=["a-tensor", "a-value"],
)
def test_what_it_would_not_find_is_refused(state: Any, words: str, out: Path) -> None:
    torch.save(state, out / "a.pt")
    with pytest.raises(Unsupported, match=words):
        ckptool.reshard(out / "a.pt", out / "r", mesh="2", to="accelerate", fsync=False)


def test_optimizer_state_by_number_is_reported(out: Path) -> None:
    torch.save({"optimizer": {"state": {0: {"m": torch.ones(2)}}}}, out / "a.pt")
    report = ckptool.reshard(out / "a.pt", out / "r", mesh="2", to="accelerate", fsync=False)
    assert [note for note in report.notes if note.startswith("optimizer state is by number")]


def test_an_export_beside_the_model_of_fsdp_is_not_read(tmp_path: Path) -> None:
    """With FULL_STATE_DICT, ``save_state`` and ``save_pretrained`` into one folder."""
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model_fsdp.bin")
    torch.save({"step": 1}, tmp_path / "random_states_0.pkl")
    torch.save({"state": {0: {"exp_avg": torch.ones(2)}}}, tmp_path / "optimizer.bin")
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    opened = open_checkpoint(tmp_path)
    assert {"model.w", "optimizer.state.0.exp_avg"} <= opened.catalog.tensors.keys()
    assert "not read: model.safetensors: looks like part of a checkpoint" in opened.catalog.notes
    assert "model.safetensors" not in opened.catalog.files
    assert ckptool.open(tmp_path)["model.w"].tolist() == [1.0, 1.0]
