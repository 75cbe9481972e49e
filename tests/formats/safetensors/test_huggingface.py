"""Which of a folder's safetensors files are the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import case, convert_to, inspect_one, read_back
from safetensors.numpy import save_file

import ckptool
from ckptool.errors import CkptoolError, Damaged


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


@pytest.mark.parametrize(
    ("whole", "config"),
    [("model.safetensors", "config.json"), ("adapter_model.safetensors", "adapter_config.json")],
)
def test_what_lies_beside_a_whole_model_is_not_read_with_it(
    whole: str, config: str, tmp_path: Path
) -> None:
    """As LLaMA-Factory saves the head of a reward model beside an adapter."""
    save_file({"a": np.zeros(2, np.uint8)}, tmp_path / whole)
    save_file({"b": np.zeros(2, np.uint8)}, tmp_path / "value_head.safetensors")
    (tmp_path / config).write_text("{}")
    assert list(ckptool.open(tmp_path).tensors) == ["a"]
    assert list(ckptool.open(tmp_path / "value_head.safetensors").tensors) == ["b"]
    unused = [f for f in ckptool.verify(tmp_path).findings if f.code == "file-unused"]
    assert ["value_head.safetensors" in str(finding) for finding in unused] == [True]


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


def shards(
    folder: Path,
    stem: str = "model",
    index: str = "model.safetensors.index.json",
    *,
    value: int = 1,
    count: int = 2,
    **listed: str,
) -> list[Path]:
    """Shards ``w1``, ``w2``..., and an index of them, or of what is ``listed`` instead."""
    folder.mkdir(exist_ok=True)
    files = {f"w{n}": f"{stem}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)}
    for name, file in files.items():
        save_file({name: np.full(2, value, np.uint8)}, folder / file)
    (folder / index).write_text(json.dumps({"weight_map": listed or files}))
    return [folder / file for file in files.values()]


def values_of(place: Path) -> dict[str, int]:
    opened = ckptool.open(place)
    return {name: int(opened.read(name)[0]) for name in sorted(opened.tensors)}


@pytest.mark.parametrize("head", ["./", "././", ".//"])
def test_an_index_may_write_paths_as_a_shell_takes_them(head: str, tmp_path: Path) -> None:
    files = shards(tmp_path)
    index = {"weight_map": {f"w{n + 1}": f"{head}{file.name}" for n, file in enumerate(files)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert ckptool.verify(tmp_path, strict=True).ok
    assert values_of(tmp_path) == {"w1": 1, "w2": 1}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("count", [2, 3])
def test_a_variant_beside_the_model_is_no_fault_and_read_by_its_path(
    whole: bool, count: int, tmp_path: Path
) -> None:
    """As ``save_pretrained(variant="fp16")`` of transformers and diffusers names its files."""
    folder = tmp_path / "m"
    files = shards(folder, "model.fp16", "model.safetensors.index.fp16.json", value=16, count=count)
    assert values_of(folder) == {f"w{n + 1}": 16 for n in range(count)}
    if whole:
        save_file({"w1": np.full(2, 1, np.uint8)}, folder / "model.safetensors")
    else:
        shards(folder, value=1)
    save_file({"w1": np.full(2, 8, np.uint8)}, folder / "model.fp8.safetensors")
    (folder / "config.json").write_text("{}")
    report = ckptool.verify(folder, strict=True)
    assert (report.ok, report.tensors) == (True, 1 if whole else 2)
    assert {f.code for f in report.findings} == {"checkpoint-nested", "no-checksum"}
    for place in (*files, folder / "model.safetensors.index.fp16.json"):
        assert values_of(place) == {f"w{n + 1}": 16 for n in range(count)}
        assert ckptool.verify(place, strict=True).ok
        ckptool.convert(place, tmp_path / f"{place.name}.pt")
    assert values_of(folder / "model.fp8.safetensors") == {"w1": 8}
    files[1].unlink()
    with pytest.raises(CkptoolError, match=r"model.fp16-00002-of-.* is missing"):
        ckptool.open(files[0])


def test_shards_of_another_save_than_the_index_are_read_by_the_path_of_one(tmp_path: Path) -> None:
    files = shards(
        tmp_path / "m",
        w1="model-00001-of-00004.safetensors",
        w2="model-00003-of-00004.safetensors",
        w3="model-00004-of-00004.safetensors",
    )
    with pytest.raises(CkptoolError, match="is missing") as caught:
        ckptool.open(tmp_path / "m")
    assert f"give the path of a shard that is there, {files[0]}" in str(caught.value.hint)
    for file in files:
        assert values_of(file) == {"w1": 1, "w2": 1}
    assert not ckptool.verify(tmp_path / "m").ok
    report = ckptool.salvage(tmp_path / "m", tmp_path / "found.safetensors")
    assert not report.complete
    assert values_of(tmp_path / "found.safetensors") == {"w1": 1, "w2": 1}


def test_shards_of_two_saves_are_read_by_the_path_of_one(tmp_path: Path) -> None:
    first, second = shards(tmp_path, value=2), shards(tmp_path, value=3, count=3)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CkptoolError, match="file names state 00002, 00003 shards"):
        ckptool.open(tmp_path)
    assert values_of(first[0]) == {"w1": 2, "w2": 2}
    assert values_of(second[2]) == {"w1": 3, "w2": 3, "w3": 3}


def test_a_tensor_in_no_shard_stops_nothing_that_leaves_it_out(tmp_path: Path) -> None:
    file = "model-00001-of-00002.safetensors"
    shards(tmp_path / "m", w1=file, w2=file.replace("1", "2", 1), lost=file)
    out = tmp_path / "o.safetensors"
    for select in ((), ("w1", "lost")):
        with pytest.raises(CkptoolError, match=r"lost: .* lists it in .*, but it is missing"):
            ckptool.convert(tmp_path / "m", out, select=select)
    with pytest.raises(CkptoolError, match="lost"):
        ckptool.open(tmp_path / "m")
    ckptool.convert(tmp_path / "m", out, drop=["lost"])
    assert values_of(out) == {"w1": 1, "w2": 1}
    ckptool.convert(tmp_path / "m", tmp_path / "one.safetensors", select=["w1"])
    (error,) = [f for f in ckptool.verify(tmp_path / "m").findings if f.severity.value == "error"]
    assert error.code == "index-mismatch"
    report = ckptool.salvage(tmp_path / "m", tmp_path / "found.safetensors")
    assert ([*report.lost], report.tensors) == (["lost"], 2)


def test_a_tensor_in_another_shard_than_listed_is_found_by_salvage(tmp_path: Path) -> None:
    first, second = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    shards(tmp_path / "m", w1=second, w2=first)
    save_file({"w3": np.full(2, 7, np.uint8)}, tmp_path / "m" / "model-00003-of-00002.safetensors")
    index = {"weight_map": {"w1": second, "w2": second, "w3": first}}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    index["weight_map"]["w1"] = second
    with pytest.raises(CkptoolError, match="but it is in model-00001"):
        ckptool.convert(tmp_path / "m", tmp_path / "o.safetensors")
    report = ckptool.salvage(tmp_path / "m", tmp_path / "found.safetensors")
    assert (dict(report.lost), report.complete) == ({}, False)
    assert values_of(tmp_path / "found.safetensors") == {"w1": 1, "w2": 1, "w3": 7}


def test_a_tensor_in_two_other_shards_is_neither(tmp_path: Path) -> None:
    first, second = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    shards(tmp_path / "m", w1=first, w2=second, w3=first)
    for name, value in (("x", 1), ("y", 2)):
        save_file({"w3": np.full(2, value, np.uint8)}, tmp_path / "m" / f"{name}.safetensors")
    report = ckptool.salvage(tmp_path / "m", tmp_path / "found.safetensors")
    assert ([*report.lost], report.tensors) == (["w3"], 2)


def test_tensors_of_a_missing_shard_stop_nothing_that_leaves_them_out(out: Path) -> None:
    folder = out / "m"
    shutil.copytree(case("hf_shards").path, folder)
    lost = sorted(folder.glob("*.safetensors"))[-1]
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    names = [name for name, file in weight_map.items() if file == lost.name]
    lost.unlink()
    with pytest.raises(Damaged, match=f"{lost.name}.* is missing"):
        convert_to("torch-save", folder, out / "all.pt")
    convert_to("torch-save", folder, out / "rest.pt", drop=tuple(names))
    assert read_back("torch-save", out / "rest.pt").keys() == weight_map.keys() - {*names}


def test_a_writer_is_named_only_if_a_file_says_so(tmp_path: Path) -> None:
    save_file({"w": np.ones(3)}, tmp_path / "model.safetensors")
    report = inspect_one(tmp_path)
    assert report.catalog.format == "hf"
    assert report.catalog.info == {}


@pytest.mark.parametrize(("size", "is_right"), [(48, True), (48 / 2**20, True), (47, False)])
def test_the_total_size_of_an_index_is_in_bytes_or_in_mebibytes(
    size: float, is_right: bool, tmp_path: Path
) -> None:
    save_file({"a": np.zeros(12, np.float32)}, tmp_path / "model-00001.safetensors")
    index = {"metadata": {"total_size": size}, "weight_map": {"a": "model-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))  # ColossalAI's
    codes = {finding.code for finding in ckptool.verify(tmp_path).findings}
    assert ("index-total-size" not in codes) == is_right
