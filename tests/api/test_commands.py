"""The commands as functions: the same options by keyword, the commands' own reports."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import case, read_back

import ckptool
from ckptool.errors import UsageError

SOURCE = case("dcp_fsdp2_tp").path


def test_inspect() -> None:
    report = ckptool.inspect(SOURCE)
    assert report.totals.tensors == len(case("dcp_fsdp2_tp").truth)


def test_convert(out: Path) -> None:
    moved = 0

    def progress(nbytes: int) -> None:
        nonlocal moved
        moved += nbytes

    options = {"model_only": True, "dtype": "bf16", "fsync": False}
    report = ckptool.convert(SOURCE, out / "m", to="safetensors", progress=progress, **options)
    assert report.target_format == "hf"
    assert 0 < moved <= report.write_bytes
    found = read_back("safetensors", out / "m")
    assert found["embed.weight"][0] == "bfloat16"


def test_a_dry_run_writes_nothing(out: Path) -> None:
    report = ckptool.convert(str(SOURCE), str(out / "m"), to="dcp", dry_run=True)
    assert report.write_bytes > 0
    assert not list(out.iterdir())


def test_reshard_and_verify_and_compare(out: Path) -> None:
    report = ckptool.reshard(SOURCE, out / "m", mesh="4x2", policy="hsdp", fsync=False)
    assert report.mesh.shape == (4, 2)
    assert ckptool.verify(out / "m", strict=True).sound
    assert ckptool.compare(out / "m", SOURCE).verify.sound
    assert not ckptool.compare(out / "m", case("dcp_base").path).verify.sound


def test_keywords_are_the_functions_own() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'mesh'"):
        ckptool.verify(SOURCE, mesh="2")  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="no mesh"):
        ckptool.reshard(SOURCE, mesh="two")
