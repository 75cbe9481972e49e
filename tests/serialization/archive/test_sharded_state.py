"""torchao's 8-bit and 4-bit optimizer state under FSDP2: in rank files, and in DCP folders.

The class imitates torchao 0.18's by its name and attributes; its shards are those of real ones:
codes and scales of the rank's own rows, and the same map on all ranks.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import convert_to, read_back
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckptool
from ckptool.core.box import Box
from ckptool.errors import CkptoolError
from ckptool.serialization.archive.sharded_state import place_part

AO = "torchao.optim.subclass_8bit"
ROWS, WIDTH, RANKS, BLOCK = 8, 4, 2, 8
NAMES = ("codes", "scale", "qmap")


class OptimState8bit(torch.Tensor):
    """A tensor of three others."""

    __module__ = AO

    @staticmethod
    def __new__(cls, codes: Any, scale: Any, qmap: Any) -> Any:
        shape = (codes.numel() * 2 // WIDTH, WIDTH) if codes.ndim == 1 else codes.shape
        made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)
        made.codes, made.scale, made.qmap, made.signed = codes, scale, qmap, True
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return args[0]

    def __tensor_flatten__(self: Any) -> Any:
        return [*NAMES], [self.signed]


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchao", "torchao.optim", AO):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[AO], "OptimState8bit", OptimState8bit, raising=False)


def parts(low: int, high: int, *, bits: int) -> list[torch.Tensor]:
    """What holds rows ``low`` to ``high`` of the state."""
    codes = torch.arange(ROWS * WIDTH, dtype=torch.uint8).reshape(ROWS, WIDTH)[low:high]
    codes = codes if bits == 8 else codes.flatten()[::2]
    scale = torch.arange(ROWS * WIDTH / BLOCK)[low * WIDTH // BLOCK : high * WIDTH // BLOCK]
    return [codes.contiguous().clone(), scale.clone(), torch.linspace(0, 1, 16)]


def save(folder: Path, rank: int, local: torch.Tensor) -> None:
    """Save what a rank has; no process but this one is needed."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    try:
        meta = TensorMeta(torch.Size([ROWS, WIDTH]), (WIDTH, 1), torch.float32)
        spec = DTensorSpec(init_device_mesh("cpu", (RANKS,)), (Shard(0),), meta)
        state = {"state": {"w": {"exp_avg": DTensor(local, spec, requires_grad=False)}}}
        torch.save(state, folder / f"checkpoint_{rank}.pt")
    finally:
        dist.destroy_process_group()


def rank_files(folder: Path, *, bits: int) -> Path:
    folder.mkdir()
    for rank in range(RANKS):
        local = OptimState8bit(*parts(4 * rank, 4 * rank + 4, bits=bits))
        save(folder, rank, local)
    return folder


def dcp_folder(folder: Path, *, bits: int, cuts: tuple[int, ...] = (0, 4, 8)) -> Path:
    """Write the items as torch's writer does: the planner needs processes, the format does not."""
    from torch.distributed.checkpoint import metadata as of

    folder.mkdir()
    chunks, items = [], {}
    for rank in range(RANKS):
        low, high = cuts[rank], cuts[rank + 1]
        file = folder / f"__{rank}_0.distcp"
        torch.save(OptimState8bit(*parts(low, high, bits=bits)), file)
        sizes = torch.Size([high - low, WIDTH])
        chunks.append(of.ChunkStorageMetadata(torch.Size([low, 0]), sizes))
        index = of.MetadataIndex("exp_avg", torch.Size([low, 0]))
        items[index] = dcp.filesystem._StorageInfo(file.name, 0, file.stat().st_size)
    kind = of.TensorProperties(torch.float32)
    tensor = of.TensorStorageMetadata(kind, torch.Size([ROWS, WIDTH]), chunks)
    metadata = of.Metadata({"exp_avg": tensor}, {"exp_avg": ("exp_avg",)}, items)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


FOLDERS = {"rank files": rank_files, "dcp": dcp_folder}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", FOLDERS)
def test_codes_and_scales_are_joined_by_rows(kind: str, bits: int, tmp_path: Path) -> None:
    folder = FOLDERS[kind](tmp_path / "ck", bits=bits)
    assert ckptool.verify(folder).ok
    convert_to("safetensors", folder, tmp_path / "out")
    found = read_back("safetensors", tmp_path / "out")
    for name, wanted in zip(NAMES, parts(0, ROWS, bits=bits), strict=True):
        (written,) = (item for full, item in found.items() if full.endswith(f"exp_avg.{name}"))
        assert written[1] == tuple(wanted.shape)
        assert written[2] == bytes(wanted.flatten().view(torch.uint8).tolist())


def test_a_dcp_folder_may_cut_rows_unevenly(tmp_path: Path) -> None:
    folder = dcp_folder(tmp_path / "ck", bits=8, cuts=(0, 2, 8))
    convert_to("safetensors", folder, tmp_path / "out")
    scale = read_back("safetensors", tmp_path / "out")["exp_avg.scale"]
    assert scale[2] == torch.arange(4.0).numpy().tobytes()


def test_maps_that_differ_between_ranks_are_a_fault(tmp_path: Path) -> None:
    folder = dcp_folder(tmp_path / "ck", bits=8)
    codes, scale, qmap = parts(4, 8, bits=8)
    file = folder / "__1_0.distcp"
    size = file.stat().st_size
    torch.save(OptimState8bit(codes, scale, qmap + 1), file)
    assert file.stat().st_size == size
    assert {"replicas-differ"} == {f.code for f in ckptool.verify(folder).findings if f.tensor}


def test_shards_that_are_not_rows_are_refused(tmp_path: Path) -> None:
    """Of three rows and five, no part of which is a whole number of blocks."""
    folder = dcp_folder(tmp_path / "ck", bits=4, cuts=(0, 3, 8))
    with pytest.raises(CkptoolError):
        convert_to("safetensors", folder, tmp_path / "out")


WHOLE = (8, 4)


@pytest.mark.parametrize(
    ("inner", "rows", "placed"),
    [
        ((4, 4), Box((4, 0), (8, 4)), ((8, 4), Box((4, 0), (8, 4)))),
        ((1,), Box((4, 0), (8, 4)), ((2,), Box((1,), (2,)))),
        ((8,), Box((0, 0), (4, 4)), ((16,), Box((0,), (8,)))),
        ((3,), Box((0, 0), (6, 4)), ((4,), Box((0,), (3,)))),
        ((1,), Box((0, 0), (3, 4)), None),
        ((1,), Box((0, 0), (4, 2)), None),
        ((2, 2), Box((0, 0), (4, 4)), None),
        ((1,), Box((4, 0), (4, 4)), None),
    ],
)
def test_where_a_part_belongs(inner: Any, rows: Box, placed: Any) -> None:
    assert place_part("scale", inner, rows, WHOLE) == placed


def test_state_in_parts_is_not_missing(tmp_path: Path) -> None:
    """torchao keeps the state of small parameters plain."""
    quantized = {kind: OptimState8bit(*parts(0, 8, bits=8)) for kind in ("exp_avg", "exp_avg_sq")}
    plain = {kind: torch.ones(3) for kind in quantized}
    state = {0: quantized, 1: plain, 2: plain}
    file = tmp_path / "a.pt"
    torch.save({"optimizer": {"state": state, "param_groups": [{"params": [0, 1, 2]}]}}, file)
    assert "optimizer-incomplete" not in {f.code for f in ckptool.verify(file).findings}
    del state[0]["exp_avg"]
    torch.save({"optimizer": {"state": state, "param_groups": [{"params": [0, 1, 2]}]}}, file)
    assert "optimizer-incomplete" in {f.code for f in ckptool.verify(file).findings}
