"""A state dict from memory, in every target format, as torch and safetensors load it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import bits, flat, load_dcp, load_torch, read_back
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend)

import ckptool
from ckptool.engine.write.disk_target import DiskTarget
from ckptool.errors import NotVerified, TransferError, Unsupported, UsageError
from ckptool.storage.virtual.memory import MemoryFiles


@pytest.fixture
def state() -> dict[str, Any]:
    """Strides, ties, all kinds of shapes and types, a list with tensors, values."""
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(40, 30, generator=generator)
    return {
        "model": {
            "w": base,
            "tied": base,
            "turned": base.T,
            "part": base[3:9, ::2],
            "half": torch.randn(5, 7, generator=generator).to(torch.bfloat16),
            "conj": torch.randn(4, generator=generator, dtype=torch.complex64).conj(),
            "scalar": torch.tensor(5),
            "none": torch.empty(0, 4),
            "parameter": torch.nn.Parameter(torch.ones(3)),
        },
        "optimizer": {"state": [{"step": torch.tensor(2.0)}, {"step": torch.tensor(3.0)}]},
        "step": 7,
        "betas": (0.9, 0.95),
    }


def tensors_of(state: Any) -> dict[str, Any]:
    return {name: bits(each) for name, each in flat(state).items()}


@pytest.mark.parametrize(
    ("target", "to"),
    [("m.pt", None), ("m.safetensors", None), ("m", "dcp"), ("m", "hf"), ("m", "dcp-safetensors")],
)
def test_it_loads_as_it_was(target: str, to: str | None, state: Any, out: Path) -> None:
    report = ckptool.save(state, out / target, to=to, fsync=False)
    names = {"hf": "safetensors"}
    found = read_back(names.get(report.target_format, report.target_format), out / target)
    assert found == tensors_of(state)
    assert (report.written, report.tensors) == (True, len(found))


def test_torch_loads_it_nested_with_values_and_ties(state: Any, out: Path) -> None:
    ckptool.save(state, out / "m.pt", fsync=False)
    loaded = load_torch(out / "m.pt")
    assert (loaded["step"], loaded["betas"]) == (7, (0.9, 0.95))
    assert isinstance(loaded["optimizer"]["state"], list)
    one, other = loaded["model"]["w"], loaded["model"]["tied"]
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    ckptool.save(state, out / "d", to="dcp", fsync=False)
    assert load_dcp(out / "d")["step"] == 7


def test_safetensors_of_a_plain_model(out: Path) -> None:
    model = torch.nn.Linear(3, 4)
    told: list[tuple[int, int]] = []
    ckptool.save(
        model.state_dict(), out / "m.safetensors", progress=lambda *of: told.append(of), fsync=False
    )
    loaded = load_file(out / "m.safetensors")
    assert all(torch.equal(loaded[n], t) for n, t in model.state_dict().items())
    assert told[-1][0] == told[-1][1] > 0


def test_the_state_dict_of_an_open_checkpoint_is_saved(out: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "step": 3}, out / "m.pt")
    ckptool.save(ckptool.open(out / "m.pt").state_dict(), out / "n.pt")
    saved = torch.load(out / "n.pt")
    assert torch.equal(saved.pop("model.w"), torch.ones(2))
    assert saved == {"step": 3}


class Custom:
    pass


LOOP: dict[str, Any] = {"a": torch.ones(1)}
LOOP["loop"] = [LOOP]
NESTED = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])


@pytest.mark.parametrize(
    ("tree", "error", "says"),
    [
        ({}, UsageError, "no tensors or values"),
        (LOOP, UsageError, "contains itself"),
        ({"a": NESTED}, Unsupported, "a nested tensor"),
        ({"a": torch.nn.UninitializedParameter()}, Unsupported, "an uninitialized parameter"),
        ({"m": torch.nn.Linear(1, 1)}, TypeError, "state_dict"),
        ([torch.ones(1)], TypeError, "a state dict is a dict, not a list"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, UsageError, "named 'a.b'"),
        ({"a": torch.ones(1, device="meta")}, Unsupported, "a: a Tensor .* on meta"),
        ({"a": torch.ones(2, 2).to_sparse()}, Unsupported, "not a plain tensor"),
        ({"a": torch.ones(1), "b": [Custom()]}, Unsupported, "b: a Custom, which is not plain"),
    ],
    ids=["empty", "loop", "nested", "lazy", "module", "list", "names", "meta", "sparse", "object"],
)
def test_what_cannot_be_saved_is_refused(
    tree: Any, error: type[Exception], says: str, out: Path
) -> None:
    with pytest.raises(error, match=says):
        ckptool.save(tree, out / "m.pt")
    assert not list(out.iterdir())


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A device mesh of this process, as one of two."""
    store = dist.HashStore()
    dist.init_process_group("fake", rank=0, world_size=2, store=store)
    yield lambda size: DeviceMesh("cpu", list(range(size)))
    dist.destroy_process_group()


def test_a_dtensor_that_is_whole_here_is_written(mesh: Any, out: Path) -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    state = {
        "cut": DTensor.from_local(whole, mesh(1), [Shard(0)], run_check=False),
        "copied": DTensor.from_local(whole, mesh(2), [Replicate()], run_check=False),
        "empty": DTensor.from_local(whole[:0], mesh(1), [Shard(0)], run_check=False),
    }
    ckptool.save(state, out / "m.safetensors", fsync=False)
    loaded = load_file(out / "m.safetensors")
    assert torch.equal(loaded["cut"], whole)
    assert torch.equal(loaded["copied"], whole)
    assert loaded["empty"].shape == (0, 4)
    ckptool.save(state, out / "m.pt", fsync=False)
    assert ckptool.open(out / "m.pt").tensors["empty"].shape == (0, 4)


def test_a_part_without_the_other_ranks_is_refused(mesh: Any, out: Path) -> None:
    half = DTensor.from_local(torch.ones(3, 4), mesh(2), [Shard(0)], run_check=False)
    dist.destroy_process_group()
    with pytest.raises(Unsupported, match="w: this process holds only a part of its 24") as caught:
        ckptool.save({"w": half}, out / "m.pt")
    assert "to='dcp' writes the shards of all ranks" in str(caught.value.hint)
    assert not list(out.iterdir())
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())


def test_ranks_that_do_not_come_are_named(
    mesh: Any, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptool.engine.ranks.MEETING", 0.01)
    half = DTensor.from_local(torch.ones(3, 4), mesh(2), [Shard(0)], run_check=False)
    for part in (half, torch.ones(3)):
        with pytest.raises(Unsupported, match="reached no other ranks: within 0"):
            ckptool.save({"w": part}, out / "m", to="dcp")


def test_the_target_is_as_for_convert(state: Any, out: Path) -> None:
    with pytest.raises(UsageError, match="does not determine the format"):
        ckptool.save(state, out / "m")
    ckptool.save(state, out / "m.pt", fsync=False)
    with pytest.raises(Unsupported, match="already exists"):
        ckptool.save(state, out / "m.pt")
    ckptool.save({"model": state["model"]}, out / "m.pt", overwrite=True, fsync=False)
    assert set(load_torch(out / "m.pt")) == {"model"}


def test_memory_that_is_changed_meanwhile_is_found(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is compared with memory before it is put in place."""
    weight = torch.zeros(1000)
    make = MemoryFiles.reader

    def reader(files: MemoryFiles) -> Any:
        weight.add_(1)
        return make(files)

    monkeypatch.setattr(MemoryFiles, "reader", reader)
    with pytest.raises(NotVerified):
        ckptool.save({"w": weight}, out / "m.pt", fsync=False)
    assert not (out / "m.pt").exists()


def test_a_save_that_failed_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save from memory cannot be resumed: the hint names no nonexistent option."""

    def fill(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    state = {"w": torch.ones(4)}
    with monkeypatch.context() as patched:
        patched.setattr(DiskTarget, "write", fill)
        with pytest.raises(TransferError, match="No space left") as caught:
            ckptool.save(state, tmp_path / "m", to="dcp")
    assert "--resume" not in f"{caught.value.hint}"
    assert "the next save to the same place" in f"{caught.value.hint}"
    assert ckptool.save(state, tmp_path / "m", to="dcp").written
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_tensor_that_is_trained_on_while_it_is_saved_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing tells of changes of memory but to look at it again."""
    weight, reads = torch.zeros(1 << 20), 0
    real = MemoryFiles.read_into

    def read_into(self: MemoryFiles, file: str, offset: int, buffer: memoryview) -> None:
        nonlocal reads
        real(self, file, offset, buffer)
        reads += 1
        if reads == 2:
            weight.add_(1)

    monkeypatch.setattr(MemoryFiles, "read_into", read_into)
    with pytest.raises(NotVerified, match="differ between source"):
        ckptool.save({"w": weight}, tmp_path / "w.safetensors")
    assert not list(tmp_path.iterdir())
