"""A user's program for a type checker: ``mypy --strict`` reads it, with the package.

Lines with ``type: ignore`` are mistakes; mypy reports those that it no longer finds wrong.
"""

from __future__ import annotations

from pathlib import Path

import torch

import ckptool


def as_it_should_be(path: Path, model: torch.nn.Module) -> list[str]:
    checkpoint: ckptool.Checkpoint = ckptool.open(path, model_only=True, dtype=torch.bfloat16)
    shapes: dict[str, tuple[int, ...]] = {n: e.shape for n, e in checkpoint.tensors.items()}
    rows: torch.Tensor = checkpoint.read("embed.weight", (slice(0, 4),))
    bits = checkpoint.read("embed.weight", as_="numpy")
    row: torch.Tensor = checkpoint.read("embed.weight", (0, ..., slice(0, 8, 2)), device="cpu")
    row = checkpoint.read("embed.weight", 0, dtype=torch.float32, out=row)
    known: int = len(checkpoint) + (checkpoint.step or 0) + checkpoint.tensors["embed.weight"].numel
    saved: int = ckptool.save(model.state_dict(), "m.safetensors", fsync=False).write_bytes
    model.load_state_dict(checkpoint.state_dict(device="cuda"), assign=True)
    report = ckptool.load(checkpoint, model.state_dict(), strict=False, workers=2)
    missing: tuple[str, ...] = report.missing
    written: int = ckptool.convert(path, "model/", to="safetensors", budget="1GiB").write_bytes
    ok: bool = ckptool.verify(checkpoint, quick=True, ignore=["no-checksum"]).ok
    report_of: dict[str, object] = ckptool.verify(path).to_dict()
    ckptool.convert(checkpoint, "all.pt", to="torch-save", progress=lambda done, total: None)
    same: bool = ckptool.compare(path, "s3://bucket/step", rtol=1e-3).verify.ok
    good = ckptool.verify_run(path.parent).latest_good
    lost = dict(ckptool.salvage(path, "left/").lost) if good is None else {}
    mesh = ckptool.reshard(path, mesh="2x4", shard="*=Shard(0)", dry_run=True).mesh
    try:
        ckptool.load(path, model.state_dict(), rename=["^=module."])
    except ckptool.KeysDiffer as error:
        missing += error.unexpected
    except ckptool.CkptoolError as error:
        print(error.message, error.hint)
    told = (
        report_of,
        shapes,
        rows.shape,
        row.shape,
        known,
        saved,
        bits.shape,
        written,
        ok,
        same,
        lost,
        mesh.shape,
    )
    return [*missing, *map(str, told), *(one.name for one in ckptool.list_formats())]


def with_mistakes(path: Path, model: torch.nn.Module) -> None:
    ckptool.open(path, modelonly=True)  # type: ignore[call-arg]
    ckptool.open(path, select=1)  # type: ignore[arg-type]
    ckptool.load(path, model)  # type: ignore[arg-type]
    ckptool.verify(path, mesh="2")  # type: ignore[call-arg]
    ckptool.convert(path, "out", to=1)  # type: ignore[arg-type]
    ckptool.open(path).read("w", as_="jax")  # type: ignore[call-overload]
    ckptool.open(path).read("w", as_="numpy", device="cpu")  # type: ignore[call-overload]
    ckptool.laod(path, {})  # type: ignore[attr-defined]
