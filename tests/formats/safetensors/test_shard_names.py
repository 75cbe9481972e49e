"""Shards without an index, by names that count from 1, as transformers does, or from 0."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import case
from rich.console import Console
from safetensors.torch import save_file

from ckptool.commands.inspect.steps import list_steps
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.verify import VerifyOptions
from ckptool.commands.verify.verify import verify
from ckptool.errors import CkptoolError, Several
from ckptool.render.inspect.steps import steps_lines

NAME = "model-{:05d}-of-{:05d}.safetensors"


def sharded(folder: Path, numbers: tuple[int, ...], count: int, name: str = NAME) -> Path:
    folder.mkdir(exist_ok=True)
    for number in numbers:
        file = folder / name.format(number, count)
        save_file({f"layers.{number}.w": torch.full((2, 2), float(number))}, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("has_index", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 11])
def test_all_that_names_state_are_a_whole_model(
    first: int, has_index: bool, count: int, tmp_path: Path
) -> None:
    numbers = tuple(range(first, first + count))
    folder = sharded(tmp_path / "m", numbers, count)
    if has_index:
        weight_map = {f"layers.{n}.w": NAME.format(n, count) for n in numbers}
        index = {"metadata": {"total_size": 16 * count}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert len(open_checkpoint(folder).catalog.tensors) == count
    report = verify(folder, VerifyOptions())
    assert report.ok
    assert not [finding for finding in report.findings if "is missing" in finding.message]
    opened = open_checkpoint(folder / NAME.format(numbers[0], count))
    assert len(opened.catalog.tensors) == count
    assert any("read together" in note for note in opened.catalog.notes) is (count > 1)


@pytest.mark.parametrize(
    ("numbers", "lost"),
    [
        ((0, 2), "00001"),
        ((0, 1), "00002"),
        ((1, 2), "00003"),
        ((1, 2), "00000"),
        ((2, 3), "00001"),
    ],
)
def test_a_lost_shard_is_named(numbers: tuple[int, ...], lost: str, tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", numbers, 3)
    for asked in (folder, folder / NAME.format(numbers[0], 3)):
        with pytest.raises(CkptoolError, match=re.escape(f"model-{lost}-of-00003")) as error:
            open_checkpoint(asked)
        for there in numbers:
            assert f"{there:05d}-of" not in str(error.value)
    alone = open_checkpoint(folder / NAME.format(numbers[0], 3), ReadOptions("safetensors"))
    assert len(alone.catalog.tensors) == 1
    assert any("by its name it is one of 3 parts" in note for note in alone.catalog.notes)


def test_more_shards_than_names_state(tmp_path: Path) -> None:
    with pytest.raises(CkptoolError, match="names state 2 shards, and 3 are there"):
        open_checkpoint(sharded(tmp_path / "m", (0, 1, 2), 2))


def test_shards_of_torch_save_are_named_by_their_parts(tmp_path: Path) -> None:
    """transformers (4) needs an index of them; without one each is read alone."""
    for number in (1, 2):
        file = tmp_path / f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({f"layers.{number}.w": torch.ones(2)}, file)
    with pytest.raises(Several, match="2 checkpoints"):
        open_checkpoint(tmp_path)
    catalog = open_checkpoint(tmp_path / "pytorch_model-00002-of-00002.bin").catalog
    assert list(catalog.tensors) == ["layers.2.w"]
    assert any("by its name it is one of 2 parts" in note for note in catalog.notes)


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_ranks_of_nanotron_are_no_shards_of_a_model(ranks: tuple[int, ...], tmp_path: Path) -> None:
    """Each has its rows of one tensor, as its header says (nanotron 0.4)."""
    name = "model_weight_pp-rank-0-of-1_tp-rank-{}-of-{}.safetensors"
    for rank in ranks:
        rows = f"0,3,None|{3 * rank},{3 * rank + 3},None#0,3,None|0,3,None"
        header = {"unsharded_shape": "(6, 3)", "local_global_slices_pairs": rows}
        save_file({"data": torch.ones(3, 3)}, tmp_path / name.format(rank, 2), header)
    catalog = open_checkpoint(tmp_path / name.format(1, 2)).catalog
    assert catalog.tensors["data"].shape == (3, 3)
    assert any("by its name it is one of 2 parts" in note for note in catalog.notes)
    if len(ranks) == 2:
        with pytest.raises(Several, match="2 checkpoints"):
            open_checkpoint(tmp_path)


def save_nanotron(step: Path) -> Path:
    name = "model/model/decoder/0/attn/model_weight_pp-rank-0-of-1_tp-rank-{}-of-2.safetensors"
    for rank in range(2):
        file = step / name.format(rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({"data": torch.ones(3, 3)}, file)
    (step / "checkpoint_metadata.json").write_text("{}")
    (step / "optimizer").mkdir()
    torch.save({"state": {}}, step / "optimizer/optimizer_pp-0-of-1_dp-0-of-1_tp-0-of-2.pt")
    return step


def test_a_step_of_nanotron_is_recognized_but_not_read(tmp_path: Path) -> None:
    with pytest.raises(CkptoolError, match="nanotron: ranks' parts of each tensor") as caught:
        open_checkpoint(save_nanotron(tmp_path))
    assert "convert_nanotron_to_hf.py" in str(caught.value.hint)


def test_the_steps_of_nanotron_are_not_called_incomplete(tmp_path: Path) -> None:
    steps = [save_nanotron(tmp_path / name) for name in ("100", "200")]
    (tmp_path / "latest.txt").write_text("200")
    run = list_steps(tmp_path)
    sizes = [sum(f.stat().st_size for f in step.rglob("*") if f.is_file()) for step in steps]
    assert [(s.formats, s.unread, s.nbytes) for s in run.steps] == [
        (("nanotron",), True, sizes[1]), (("nanotron",), True, sizes[0])
    ]  # fmt: skip
    rows = [line.plain for line in steps_lines(run, Console(width=100))]
    assert sum("not read" in row for row in rows) == 2
    assert not any("INCOMPLETE" in row for row in rows)


def test_a_shard_of_the_consolidated_model_beside_dcps_shards() -> None:
    """The folder as a whole is DCP's; the other shard of the named one is there as well."""
    folder = case("hf_consolidated").path
    for file in sorted(folder.glob("model-*.safetensors")):
        opened = open_checkpoint(file)
        assert opened.format.name == "hf"
        assert file.name in opened.catalog.files
        assert opened.catalog.tensors.keys() == open_checkpoint(folder).catalog.tensors.keys()
