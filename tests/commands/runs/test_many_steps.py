"""A run of very many steps: what is looked at for each does not grow with those before it."""

from __future__ import annotations

from pathlib import Path, PurePath

import pytest
import torch
from safetensors.torch import save_file

import ckptool
from ckptool.commands import detect
from ckptool.formats.base import Format
from ckptool.storage.files import Files


def test_a_step_is_not_compared_with_all_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 120
    for number in range(1, count + 1):
        (tmp_path / f"checkpoint-{number}").mkdir()
        save_file({"w": torch.ones(4)}, tmp_path / f"checkpoint-{number}" / "model.safetensors")
    compared, equal = [0], PurePath.__eq__

    def counted(one: PurePath, other: object) -> bool:
        compared[0] += 1
        return equal(one, other)

    monkeypatch.setattr(PurePath, "__eq__", counted)
    assert len(ckptool.list_steps(tmp_path).steps) == count
    assert compared[0] < count * count


def test_a_folder_of_many_files_is_detected_as_long_as_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 31):
        torch.save({"w": torch.ones(4)}, tmp_path / f"ckpt_{number}.pt")
    detections, detect_folder = [0], detect.detect_folder

    def counted(source: Files) -> Format | None:
        detections[0] += 1
        return detect_folder(source)

    monkeypatch.setattr(detect, "detect_folder", counted)
    assert len(ckptool.list_steps(tmp_path).steps) == 30
    assert detections[0] < 10
    torch.save({"w": torch.ones(8)}, tmp_path / "ckpt_31.pt")
    before = detections[0]
    assert ckptool.open(tmp_path / "ckpt_31.pt").catalog.tensors["w"].shape == (8,)
    assert detections[0] > before
