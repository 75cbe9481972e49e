"""Commands that write in parts, and what they made."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem

from ckptool.commands.convert import prepare
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ConvertOptions, ReshardOptions, TransferOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.core.sharding.placement import parse_mesh, parse_rule
from ckptool.engine.share import parse_part
from ckptool.errors import (
    CkptoolError,
    Unsupported,
)
from ckptool.storage.url import RemotePath, location

MANY = {"max_shard_size": 1_500}


Place = Path | RemotePath


def save(path: Path, seed: int) -> Path:
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Any] = {
        f"layers.{n}.w": torch.randn(16, 24, generator=generator) for n in range(6)
    }
    state |= {"norm": torch.ones(7), "none": torch.empty(0, 3), "step": 3}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def asked(part: str | None = None, **more: Any) -> TransferOptions:
    share = None if part is None else parse_part(part, "--part")
    return TransferOptions(part=share, run=RunOptions(workers=1, fsync=False), **more)


def convert(to: str, **more: Any) -> Callable[..., Any]:
    def planned(source: Path, target: Place, transfer: TransferOptions) -> Any:
        return prepare(source, target, ConvertOptions(to, transfer=transfer, **more))

    return planned


def reshard(mesh: str, to: str | None = None) -> Callable[..., Any]:
    def planned(source: Path, target: Place, transfer: TransferOptions) -> Any:
        rules = (parse_rule("layers.0.w=Shard(1)"), parse_rule("layers.1.w=Replicate()"))
        options = ReshardOptions(parse_mesh(mesh), rules=rules, to=to, transfer=transfer)
        return prepare_reshard(source, target, options)

    return planned


KINDS: dict[str, tuple[str, Callable[..., Any]]] = {
    "folder of models": ("m", convert("hf", **MANY)),
    "dcp": ("m", convert("dcp")),
    "safetensors": ("m.safetensors", convert("safetensors")),
    "torch-save": ("m.pt", convert("torch-save")),
    "reshard": ("m", reshard("4")),
    "rank files": ("m", reshard("3", "rank-local")),
}


def content(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def alone(kind: str, source: Path, folder: Path) -> dict[str, bytes]:
    """What one process writes."""
    name, planned = KINDS[kind]
    folder.mkdir()
    planned(source, folder / name, asked()).run()
    return content(folder)


def write(planned: Callable[..., Any], source: Path, target: Place, *parts: str) -> None:
    for part in parts:
        report = planned(source, target, asked(part)).run()
        assert not report.written
        assert report.part.done


def finish(planned: Callable[..., Any], source: Path, target: Place, **more: Any) -> Any:
    return planned(source, target, asked(finish=True, **more)).run()


def refused(work: Callable[[], object], match: str, kind: type[CkptoolError] = Unsupported) -> str:
    with pytest.raises(kind, match=match) as error:
        work()
    return f"{error.value.message} {error.value.hint}"


def once(real: Callable[..., None], first: Callable[..., None]) -> Callable[..., None]:
    called: list[int] = []

    def call(*words: Any) -> None:
        called.append(1)
        (first if len(called) == 1 else real)(*words)

    return call


def in_memory() -> RemotePath:
    found = location(f"memory://{uuid.uuid4().hex}/run/m")
    assert isinstance(found, RemotePath)
    return found


def stored(place: RemotePath) -> dict[str, bytes]:
    folder = MemoryFileSystem().store
    head = f"{place.parent.key}/"
    return {key.removeprefix(head): file.getvalue() for key, file in folder.items() if head in key}
