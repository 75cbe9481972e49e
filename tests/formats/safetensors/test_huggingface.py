"""Which of a folder's safetensors files are the model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckptool
from ckptool.errors import CkptoolError


def with_index(folder: Path, stem: str, *names: str) -> None:
    """One shard for each tensor, and their index."""
    files = {name: f"{stem}-{name}.safetensors" for name in names}
    for name, file in files.items():
        save_file({name: np.zeros(2, np.uint8)}, folder / file)
    index = json.dumps({"weight_map": files})
    (folder / f"{stem}.safetensors.index.json").write_text(index)


def test_the_index_of_transformers_is_read_and_not_that_beside_it(tmp_path: Path) -> None:
    """As in the folders of Mistral's models, which hold their own format too."""
    with_index(tmp_path, "consolidated", "a", "b")
    with_index(tmp_path, "model", "c", "d")
    checkpoint = ckptool.open(tmp_path)
    assert list(checkpoint.tensors) == ["c", "d"]
    assert len([note for note in checkpoint.catalog.notes if "consolidated-" in note]) == 2


def test_of_two_other_indexes_none_is_taken(tmp_path: Path) -> None:
    with_index(tmp_path, "one", "a")
    with_index(tmp_path, "two", "b")
    with pytest.raises(CkptoolError, match=r"several indexes: one.* two"):
        ckptool.open(tmp_path)


def test_shards_of_two_saves_without_an_index_are_distinguished_by_none(tmp_path: Path) -> None:
    for count in (1, 2):
        name = f"model-00001-of-0000{count}.safetensors"
        save_file({"a": np.zeros(2, np.uint8)}, tmp_path / name)
    with pytest.raises(CkptoolError, match="file names state 00001, 00002 shards"):
        ckptool.open(tmp_path)


@pytest.mark.parametrize("indexed", [True, False])
def test_shards_beside_a_whole_model_are_refused_for_transformers_opens_that(
    tmp_path: Path, indexed: bool
) -> None:
    shard = "model-00001-of-00001.safetensors"
    save_file({"a": np.zeros(2, np.uint8)}, tmp_path / shard)
    save_file({"a": np.ones(2, np.uint8)}, tmp_path / "model.safetensors")
    if indexed:
        index = {"weight_map": {"a": shard}, "metadata": {"total_size": 2}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CkptoolError, match=r"model\.safetensors, which transformers opens, and"):
        ckptool.open(tmp_path)
    (finding,) = ckptool.verify(tmp_path).findings
    assert "1 shard of another save" in finding.message
    assert f"read {tmp_path}/model.safetensors by its own path" in str(finding.hint)
    assert ckptool.open(tmp_path / "model.safetensors").read("a").tolist() == [1, 1]
    (tmp_path / "model.safetensors").unlink()
    assert ckptool.open(tmp_path).read("a").tolist() == [0, 0]


def test_the_index_is_written_as_python_writes_json(tmp_path: Path) -> None:
    names = ["b", 'a"\\\n', "é\x7f"]
    save_file({name: np.zeros(2, np.uint8) for name in names}, tmp_path / "a.safetensors")
    ckptool.convert(tmp_path / "a.safetensors", tmp_path / "hf", to="hf", max_shard_size="4B")
    text = (tmp_path / "hf" / "model.safetensors.index.json").read_text("utf-8")
    index = json.loads(text)
    assert sorted(index["weight_map"]) == sorted(names)
    assert text == json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
