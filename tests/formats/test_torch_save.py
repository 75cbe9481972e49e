"""Files that torch.save wrote with special options, or of kinds that no fixture has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import inspect_one
from unfilled import record_offset, save_unfilled

import ckptool
from ckptool.errors import CkptoolError, Unsupported
from ckptool.serialization.archive.recover import recover_records
from ckptool.serialization.archive.tensors import read_tensor
from ckptool.serialization.pickle.records import Call, Global
from ckptool.storage.local import LocalSource


def test_a_record_that_begins_right_before_4_gib_is_recovered(tmp_path: Path) -> None:
    """Where its header begins decides how wide the sizes behind it are."""
    path, descriptor, behind = tmp_path / "model.pt", 16, 40
    size = 1
    for _ in range(2):
        with torch.serialization.skip_data():
            torch.save({"a": torch.empty(size, dtype=torch.uint8), "b": torch.arange(5)}, path)
        size = (1 << 32) - record_offset(path, "data/0") - descriptor - behind
    assert record_offset(path, "data/1") > 1 << 32
    assert not recover_records(LocalSource.file(path), "model.pt").lost


def test_a_storage_that_was_filled_later_has_no_checksum(tmp_path: Path) -> None:
    save_unfilled(tmp_path / "model.pt", 2.0)
    assert ckptool.verify(tmp_path / "model.pt").ok
    assert torch.equal(ckptool.open(tmp_path / "model.pt").read("w"), torch.full((3,), 2.0))


def test_a_legacy_stream_of_a_big_endian_machine_has_little_endian_bytes(tmp_path: Path) -> None:
    """torch swaps them when it writes, and loads them as they are."""
    path = tmp_path / "model.pt"
    torch.save({"w": torch.arange(300.0)}, path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    said = data.index(b"\x88", data.index(b"little_endian"))
    path.write_bytes(data[:said] + b"\x89" + data[said + 1 :])
    assert torch.equal(ckptool.open(path).read("w"), torch.load(path)["w"])


def test_replicas_that_were_filled_later_are_compared(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for rank in range(2):
        save_unfilled(source / f"model_rank{rank}.pt", float(rank))
    with pytest.raises(CkptoolError, match="rank 0 and rank 1 hold different values"):
        ckptool.convert(source, tmp_path / "whole.pt", to="torch-save")


class Reduced:
    """What is pickled as a call, its arguments, and the state that is set then."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


@pytest.mark.parametrize("state", [(), ((True, False, {}),)], ids=["torch 0.4", "torch 0.3"])
def test_a_parameter_as_old_versions_call_it(state: Any, tmp_path: Path) -> None:
    arguments = (torch.ones(3), True) if not state else (torch.ones(3),)
    made = Reduced(torch.nn.Parameter, arguments, *state)
    torch.save({"w": made}, tmp_path / "m.pt")
    assert torch.equal(torch.load(tmp_path / "m.pt")["w"], torch.ones(3))
    assert torch.equal(ckptool.open(tmp_path / "m.pt").read("w"), torch.ones(3))


@pytest.mark.parametrize("is_parameter", [False, True])
def test_a_tensor_that_is_set_anew_is_refused(is_parameter: bool, tmp_path: Path) -> None:
    """torch loads the second storage, so the first is not what the file holds."""
    zeros, ones = (make(2).storage() for make in (torch.zeros, torch.ones))
    place: Any = 0, (2,), (1,)
    made = Reduced(torch._utils._rebuild_tensor, (zeros, *place), (ones, *place))
    if is_parameter:
        made = Reduced(torch._utils._rebuild_parameter, (made, False, {}))
    torch.save({"w": made}, tmp_path / "m.pt")
    assert torch.equal(torch.load(tmp_path / "m.pt", weights_only=False)["w"], torch.ones(2))
    with pytest.raises(
        CkptoolError, match=r"^w: m\.pt: a tensor whose content is set after it was made"
    ):
        ckptool.convert(tmp_path / "m.pt", tmp_path / "m.safetensors")


@pytest.mark.parametrize("name", ["qint8", "quint4x2", "uint3", "int7", "float8_e8m0fnu", "half"])
def test_every_element_type_can_be_a_value(name: str, tmp_path: Path) -> None:
    """The modules that torch quantized keep theirs in their state."""
    source, target = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"dtype": getattr(torch, name), "w": torch.ones(1)}, source)
    ckptool.convert(source, target, to="torch-save")
    assert torch.load(target, weights_only=True)["dtype"] is getattr(torch, name)


def test_a_storage_by_itself_is_called_what_it_is(tmp_path: Path) -> None:
    torch.save({"s": torch.ones(3).untyped_storage()}, tmp_path / "s.pt")
    (note,) = inspect_one(tmp_path / "s.pt").notes
    assert note == "s: holds tensors that cannot be read (torch storage)"


class OnXla:
    """A tensor of a device whose tensors have no storage, as torch 2.13 reduces it."""

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        self.arguments = (tensor, dtype, "cpu", False)

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, self.arguments


def test_a_tensor_of_an_accelerator_without_storages_is_its_copy(tmp_path: Path) -> None:
    path, tensor = tmp_path / "xla.pt", torch.arange(6.0).reshape(2, 3)
    torch.save({"w": OnXla(tensor, torch.float32), "cast": OnXla(tensor, torch.half)}, path)
    assert torch.equal(torch.load(path)["w"], tensor)
    checkpoint = ckptool.open(path)
    assert torch.equal(checkpoint.read("w"), tensor)
    assert list(checkpoint.tensors) == ["w"]
    with pytest.raises(Unsupported, match="cast: not a plain tensor"):
        checkpoint.read("cast")


def test_calls_that_wrap_one_another_without_end_are_not_tensor() -> None:
    """Wherever a tensor is expected, also where an item of a DCP folder is opened."""
    rebuild = Global("torch._tensor", "_rebuild_from_type_v2")
    args: tuple[Any, ...] = (Global("torch._utils", "_rebuild_tensor_v2"), None, (), None)
    for _ in range(30_000):
        args = (rebuild, Global("torch", "Tensor"), args, None)
    assert read_tensor(Call(rebuild, args)) is None


def test_a_lora_of_litgpt_is_found_in_its_folder(tmp_path: Path) -> None:
    (step := tmp_path / "step-00000002").mkdir()
    torch.save({"model": {"h.0.lora_A": torch.ones(2)}}, step / "lit_model.pth.lora")
    assert ckptool.open(step).tensors.keys() == {"model.h.0.lora_A"}


def test_a_file_that_is_one_tensor_has_no_finding(tmp_path: Path) -> None:
    torch.save(torch.get_rng_state(), tmp_path / "rng.pt")
    assert ckptool.verify(tmp_path / "rng.pt").findings == ()


@pytest.mark.parametrize("other", [3, 4])
def test_shards_do_not_hide_one_anothers_values(other: int, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    weight_map = {f"w{n}": f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for (name, file), version in zip(weight_map.items(), (3, other), strict=True):
        torch.save({name: torch.ones(2), "version": version}, source / file)
    if other == 3:
        assert ckptool.open(source).objects["version"] == 3
        return
    with pytest.raises(CkptoolError, match=r"^version: another value in pytorch_model-00002-of"):
        ckptool.open(source)
