"""Whatever is excluded from a conversion cannot stop the rest."""

from __future__ import annotations

import argparse
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import case
from refused_values import MODEL, REFUSED, Trap

import ckptool
from ckptool.errors import Damaged, Hostile


def one_file(folder: Path, state: dict[str, Any]) -> Path:
    torch.save(state, folder / "a.pt")
    return folder / "a.pt"


def legacy(folder: Path, state: dict[str, Any]) -> Path:
    torch.save(state, folder / "a.pt", _use_new_zipfile_serialization=False)
    return folder / "a.pt"


def rank_files(folder: Path, state: dict[str, Any]) -> Path:
    (folder / "ranks").mkdir()
    for rank in range(2):
        torch.save(state, folder / "ranks" / f"model_rank{rank}.pt")
    return folder / "ranks"


WRITERS: list[Callable[[Path, dict[str, Any]], Path]] = [one_file, legacy, rank_files]


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("write", WRITERS)
def test_one_value_stops_only_who_wants_it(
    write: Callable[[Path, dict[str, Any]], Path], kind: str, tmp_path: Path
) -> None:
    value, error, code = REFUSED[kind]
    source = write(tmp_path, {"model": MODEL, "optimizer": value, "step": 3})
    choices: list[dict[str, Any]] = [
        {"model_only": True}, {"select": ["model.*", "step"]}, {"drop": ["optimizer*"]}
    ]  # fmt: skip
    for number, choice in enumerate(choices):
        target = tmp_path / f"out{number}.pt"
        ckptool.convert(source, target, to="torch-save", **choice)
        found = torch.load(target, weights_only=True)
        found = found if number == 0 else found["model"]
        assert torch.equal(found["layer.weight"], MODEL["layer.weight"])
        assert len(ckptool.open(source, **choice).tensors) == 1
    choices = [{}, {"select": ["*"]}, {"drop": ["step"]}]
    for everything in choices:
        with pytest.raises(error):
            ckptool.convert(source, tmp_path / "whole.pt", to="torch-save", **everything)
        with pytest.raises(error):
            ckptool.open(source, **everything)
    with pytest.raises(error):
        ckptool.inspect(source)
    report = ckptool.verify(source)
    assert code in {finding.code for finding in report.findings}
    assert not report.ok
    assert not Path("EXECUTED").exists()


def test_one_item_of_a_dcp_folder_stops_only_who_wants_it(tmp_path: Path) -> None:
    source = tmp_path / "dcp"
    dcp.save({"model": MODEL, "hook": Trap(), "step": 3}, checkpoint_id=source, no_dist=True)
    ckptool.convert(source, tmp_path / "a.pt", to="torch-save", drop=["hook"])
    assert torch.load(tmp_path / "a.pt", weights_only=True)["step"] == 3
    with pytest.raises(Hostile, match="hook"):
        ckptool.convert(source, tmp_path / "b.pt", to="torch-save")
    ckptool.convert(source, tmp_path / "c.pt", to="torch-save", model_only=True)
    assert set(torch.load(tmp_path / "c.pt", weights_only=True)) == set(MODEL)
    codes = {finding.code for finding in ckptool.verify(source).findings}
    assert "hostile-global" in codes


def test_what_is_part_of_no_value_stops_all(tmp_path: Path) -> None:
    """An attribute that is set on the state dict itself is none that could be left out."""

    state = OrderedDict(model=MODEL)
    state.hook = Trap()  # type: ignore[attr-defined]
    source = one_file(tmp_path, state)
    with pytest.raises(Hostile):
        ckptool.convert(source, tmp_path / "b.pt", to="torch-save", model_only=True)


def test_state_of_ranks_that_a_reshard_drops_does_not_stop_it(tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    for rank in range(2):
        state = {"layer.weight": torch.ones(4), "rng_state": [rank, Trap()]}
        torch.save(state, folder / f"model_rank{rank}.pt")
    for what in ("stop", "keep", "0"):
        with pytest.raises(Hostile):
            ckptool.reshard(folder, tmp_path / "out", mesh="1", rank_state=what)
    ckptool.reshard(folder, tmp_path / "out", mesh="1", rank_state="drop")
    assert set(ckptool.open(tmp_path / "out").tensors) == {"layer.weight"}
    assert "hostile-global" in {finding.code for finding in ckptool.verify(folder).findings}


@pytest.mark.parametrize(
    "value", [Trap(), [Trap()], argparse.Namespace(a=Trap())], ids=["call", "list", "object"]
)
@pytest.mark.parametrize("key", ["hook", "hook.weight"])
def test_what_is_surely_no_tensor_is_not_part_of_a_model(
    key: str, value: Any, tmp_path: Path
) -> None:
    source = one_file(tmp_path, {**MODEL, key: value})
    ckptool.convert(source, tmp_path / "b.pt", to="torch-save", model_only=True)
    assert set(torch.load(tmp_path / "b.pt", weights_only=True)) == set(MODEL)


def test_what_may_be_a_tensor_is_part_of_a_model(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.hook = Trap()  # type: ignore[attr-defined]
    source = one_file(tmp_path, {**MODEL, "other.weight": weight})
    with pytest.raises(Hostile):
        ckptool.convert(source, tmp_path / "b.pt", to="torch-save", model_only=True)


FILES = {
    "bin_shards": "pytorch_model-00001*.bin",
    "deepspeed_pipeline": "mp_rank_00_model_states.pt",
    "deepspeed_universal": "mp_rank_00_model_states.pt",
    "deepspeed_zero_2": "*mp_rank_00_model_states.pt",
    "deepspeed_zero_3": "zero_pp_rank_0_mp_rank_00_model_states.pt",
    "megatron_torch": "model_optim_rng.pt",
    "megatron_torch_distributed": "model_optim_rng.pt",
    "megatron_torch_dist": "common.pt",
    "bytecheckpoint_ddp": "extra_state*.pt",
    "dcp_lightning": "meta.pt",
    "llama_consolidated": "consolidated.00.pth",
}
"""Fixtures, and the file that gets a value more."""


def with_values(file: Path, values: dict[str, Any]) -> None:
    """Add values to the dict that a torch.save file holds."""
    state = torch.load(file, weights_only=False)
    torch.save(state | values, file)


@pytest.mark.parametrize("kind", ["hostile", "damaged"])
@pytest.mark.parametrize("name", FILES)
def test_one_value_of_a_format_stops_only_who_wants_it(
    name: str, kind: str, tmp_path: Path, copy_of: Callable[[str], Path]
) -> None:
    source = copy_of(name)
    value, error, code = REFUSED[kind]
    file = min(source.rglob(FILES[name]))
    key = "hook_of_mine" if kind == "hostile" else "lr_scheduler_of_mine"
    with_values(file, {key: value})
    with pytest.raises(error):
        ckptool.convert(source, tmp_path / "b.pt", to="torch-save")
    ckptool.convert(source, tmp_path / "a.pt", to="torch-save", drop=["*_of_mine*"])
    if kind == "hostile" or name not in ("bin_shards", "llama_consolidated"):  # the model alone
        expected = ckptool.open(case(name).path, model_only=True).tensors.keys()
        assert ckptool.open(source, model_only=True).tensors.keys() == expected
    report = ckptool.verify(source)
    assert code in {finding.code for finding in report.findings}
    assert not report.ok


@pytest.mark.parametrize("kind", ["hostile", "cut short"])
def test_one_value_of_a_snapshot_stops_only_who_wants_it(
    kind: str, tmp_path: Path, copy_of: Callable[[str], Path]
) -> None:
    source = copy_of("snapshot")
    manifest = (source / ".snapshot_metadata").read_text()
    places = re.findall(r'"location": "([^"]+)",\s+"serializer": "torch_save",\s+"obj_', manifest)
    file = source / places[0]
    if kind == "hostile":
        torch.save(Trap(), file)
    else:
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(Hostile if kind == "hostile" else Damaged) as raised:
        ckptool.convert(source, tmp_path / "b.pt", to="torch-save")
    name = raised.value.problems[0].tensor
    assert name is not None
    ckptool.convert(source, tmp_path / "a.pt", to="torch-save", drop=[name])
    assert not ckptool.verify(source).ok


TENSOR_FILES = {
    "hostile archive": ("snapshot_quantized", "replicated/state/one", "state.one"),
    "archive of several chunks": ("snapshot_quantized", "replicated/state/chunks_0_0", "state.chu"),
    "cut archive": ("snapshot_quantized", "replicated/state/channels", "state.channels"),
    "cut shard": ("snapshot", "sharded/state/rows_*", "state.rows"),
    "lost file": ("snapshot", "replicated/state/model/half", "state.model.half"),
}


@pytest.mark.parametrize("kind", TENSOR_FILES)
def test_one_tensor_of_a_snapshot_stops_only_who_wants_it(
    kind: str, tmp_path: Path, copy_of: Callable[[str], Path]
) -> None:
    fixture, pattern, start = TENSOR_FILES[kind]
    source = copy_of(fixture)
    file = min(source.glob(pattern))
    if kind.startswith("cut"):
        file.write_bytes(file.read_bytes()[:-1])
    elif kind.startswith("lost"):
        file.unlink()
    else:
        torch.save(Trap(), file)
    with pytest.raises(Damaged if kind[:4] in ("cut ", "lost") else Hostile) as raised:
        ckptool.convert(source, tmp_path / "b.pt", to="torch-save")
    name = raised.value.problems[0].tensor
    assert name is not None
    assert name.startswith(start)
    ckptool.convert(source, tmp_path / "a.pt", to="torch-save", drop=[f"{name}*"])
    expected = [n for n in ckptool.open(case(fixture).path).tensors if not n.startswith(name)]
    assert sorted(ckptool.open(source, drop=[f"{name}*"]).tensors) == sorted(expected)
    report = ckptool.verify(source)
    assert raised.value.problems[0].code in {finding.code for finding in report.findings}
    assert not report.ok


def test_one_item_of_megatron_fsdp_stops_only_who_wants_it(tmp_path: Path) -> None:
    model = {f"model.module.{name}": tensor for name, tensor in MODEL.items()}
    groups = {"optimizer.param_to_group_meta.layer.weight": {"lr": 0.1}}
    source = tmp_path / "dcp"
    dcp.save(model | groups | {"hook": Trap()}, checkpoint_id=source, no_dist=True)
    with pytest.raises(Hostile, match="hook"):
        ckptool.convert(source, tmp_path / "b.pt", to="torch-save")
    ckptool.convert(source, tmp_path / "a.pt", to="torch-save", drop=["hook"])
    assert len(ckptool.open(source, model_only=True).tensors) == 1
    report = ckptool.verify(source)
    assert report.format == "megatron-fsdp_dtensor"
    assert "hostile-global" in {finding.code for finding in report.findings}


@pytest.mark.parametrize("kind", ["hostile", "damaged"])
def test_a_value_in_a_distributed_optimizer_stops_only_who_wants_it(
    kind: str, tmp_path: Path, copy_of: Callable[[str], Path]
) -> None:
    source = copy_of("megatron_torch_distributed")
    value, error, code = REFUSED[kind]
    with_values(min(source.rglob("distrib_optim.pt")), {"of_mine": value})
    choices: list[dict[str, Any]] = [{}, {"drop": ["*of_mine*"]}]
    for everything in choices:
        with pytest.raises(error if not everything else Damaged):
            ckptool.convert(source, tmp_path / "b.pt", to="torch-save", **everything)
    ckptool.convert(source, tmp_path / "a.pt", to="torch-save", drop=["optimizer*"])
    expected = ckptool.open(case("megatron_torch_distributed").path, model_only=True).tensors
    assert ckptool.open(source, model_only=True).tensors.keys() == expected.keys()
    assert code in {finding.code for finding in ckptool.verify(source).findings}


PARTS_OF_MEGATRON = {
    "a value": ("decoder.layers.0.mlp.linear_fc1._extra_state", "hostile", False),
    "a value of mine": ("hook_of_mine", "hostile", False),
    "a weight of one rank": ("decoder.layers.0.mlp.linear_fc2.weight", "hostile", True),
    "a damaged weight": ("decoder.layers.0.mlp.linear_fc1.weight", "damaged", True),
    "the embedding": ("embedding.word_embeddings.weight", "damaged", True),
}


@pytest.mark.parametrize("what", PARTS_OF_MEGATRON)
def test_a_part_of_megatrons_model_stops_only_who_wants_it(
    what: str, tmp_path: Path, copy_of: Callable[[str], Path]
) -> None:
    key, kind, is_weight = PARTS_OF_MEGATRON[what]
    source = copy_of("megatron_torch")
    value, error, code = REFUSED[kind]
    file = min(source.rglob("model_optim_rng.pt"))
    state = torch.load(file, weights_only=False)
    state["model"][key] = Trap() if kind == "hostile" else value["exp_avg"]
    torch.save(state, file)
    with pytest.raises(error, match=re.escape(f"model.{key}")):
        ckptool.convert(source, tmp_path / "b.pt", to="torch-save")
    known = ckptool.open(case("megatron_torch").path, model_only=True).tensors
    ckptool.convert(source, tmp_path / "a.pt", to="torch-save", select=["iteration"])
    found = ckptool.open(source, drop=[f"model.{key}*", "optimizer*"]).tensors
    assert {name.removeprefix("model.") for name in found} == known.keys() - {key}
    if is_weight:
        with pytest.raises(error):
            ckptool.open(source, model_only=True)
    else:
        assert ckptool.open(source, model_only=True).tensors.keys() == known.keys()
    report = ckptool.verify(source)
    assert code in {finding.code for finding in report.findings}
    assert not report.ok


def test_what_may_be_all_of_a_layer_stops_all(
    tmp_path: Path, copy_of: Callable[[str], Path]
) -> None:
    """The layers of the stages that follow are numbered from there."""
    source = copy_of("megatron_torch_distributed")
    file = min(source.rglob("mp_rank_00_000/model_optim_rng.pt"))
    state = torch.load(file, weights_only=False)
    state["model"]["decoder.layers.1.hook"] = Trap()
    torch.save(state, file)
    with pytest.raises(Hostile, match=r"layers\.1\.hook"):
        ckptool.convert(source, tmp_path / "b.pt", to="torch-save", select=["iteration"])


MODULES = {
    "deepspeed_zero_2": "mp_rank_00_model_states.pt",
    "deepspeed_zero_3": "zero_pp_rank_0_mp_rank_00_model_states.pt",
    "deepspeed_pipeline": "layer_00-model_00-model_states.pt",
}


@pytest.mark.parametrize("name", MODULES)
def test_a_hostile_value_in_a_module_stops_only_who_wants_it(
    name: str, tmp_path: Path, copy_of: Callable[[str], Path]
) -> None:
    source = copy_of(name)
    file = min(source.rglob(MODULES[name]))
    state = torch.load(file, weights_only=False)
    state.get("module", state)["hook_of_mine"] = Trap()
    torch.save(state, file)
    with pytest.raises(Hostile):
        ckptool.convert(source, tmp_path / "b.pt", to="torch-save")
    ckptool.convert(source, tmp_path / "a.pt", to="torch-save", drop=["*_of_mine*"])
    expected = ckptool.open(case(name).path, model_only=True).tensors.keys()
    assert ckptool.open(source, model_only=True).tensors.keys() == expected
    assert "hostile-global" in {finding.code for finding in ckptool.verify(source).findings}
