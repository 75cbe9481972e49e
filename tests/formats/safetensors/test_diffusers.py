"""Pipelines of diffusers, read and written as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import case, convert_to
from safetensors.torch import load_file

import ckptool
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.rewrite import MapOptions
from ckptool.errors import Damaged, Unsupported

SOURCE = case("diffusers_pipeline").path
MODELS = {"vae": "diffusion_pytorch_model", "text_encoder": "model"}


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_each_component_is_written_as_its_library_opens_it(out: Path) -> None:
    """diffusers 0.42 and transformers 5 find files by these names, and tensors by their own."""
    report = ckptool.convert(SOURCE, out / "p", to="diffusers", fsync=False)
    assert report.notes == ()
    mine, theirs = files_of(SOURCE), files_of(out / "p")
    texts = {name: text for name, text in mine.items() if "model-" not in name}
    texts = {name: text for name, text in texts.items() if not name.endswith("rs.index.json")}
    weights = {f"{folder}/{stem}.safetensors" for folder, stem in MODELS.items()}
    assert theirs.keys() == texts.keys() | weights
    assert {name: theirs[name] for name in texts if name not in weights} == {
        name: text for name, text in texts.items() if name not in weights
    }
    shards = sorted((SOURCE / "vae").glob("*.safetensors"))
    whole = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    found = load_file(out / "p" / "vae" / "diffusion_pytorch_model.safetensors")
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_shards_and_types_of_each_component(out: Path) -> None:
    report = ckptool.convert(
        SOURCE, out / "p", to="diffusers", dtype="fp16", max_shard_size=4000, fsync=False
    )
    assert report.notes == ("text_encoder/config.json: dtype set to float16, as written",)
    index = out / "p" / "vae" / "diffusion_pytorch_model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"]
    assert len(set(files.values())) > 1
    for name, file in files.items():
        assert load_file(index.parent / file)[name].dtype == torch.float16
    config = json.loads((out / "p" / "text_encoder" / "config.json").read_text())
    assert config["dtype"] == "float16"
    assert ckptool.compare(SOURCE, out / "p", dtype="fp16")


@pytest.mark.parametrize("to", ["hf", "safetensors"])
def test_a_folder_of_safetensors_is_a_pipeline_again(to: str, out: Path) -> None:
    """One file of all weights beside model_index.json would be a pipeline without weights."""
    assert convert_to(to, SOURCE, out / "p").target_format == "diffusers"
    assert ckptool.verify(out / "p").ok
    assert ckptool.compare(SOURCE, out / "p")


def test_a_component_by_itself_keeps_the_name_of_its_files(out: Path) -> None:
    convert_to("hf", SOURCE / "vae", out / "vae")
    assert files_of(out / "vae").keys() == {"config.json", "diffusion_pytorch_model.safetensors"}


def test_other_formats_keep_the_folders_of_its_configs(out: Path) -> None:
    convert_to("dcp", SOURCE, out / "d")
    assert {"model_index.json", "vae/config.json", "text_encoder/config.json"} <= files_of(
        out / "d"
    ).keys()


def test_variants_are_read_where_they_are_alone(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("diffusers_pipeline")
    whole = folder / "text_encoder" / "model.safetensors"
    variant = whole.with_name("model.fp16.safetensors")
    variant.write_bytes(whole.read_bytes())
    both = open_checkpoint(folder).catalog
    assert "text_encoder/model.fp16.safetensors: a variant of the model, not read" in both.notes
    whole.unlink()
    assert ckptool.open(folder).tensors.keys() == both.tensors.keys()


def test_files_of_torch_save(copy_of: Callable[[str], Path], out: Path) -> None:
    folder = copy_of("diffusers_pipeline")
    names = ckptool.open(folder).tensors.keys()
    for models in MODELS:
        state: dict[str, Any] = {}
        for file in sorted((folder / models).glob("*.safetensors")):
            state |= load_file(file)
            file.unlink()
        name = "diffusion_pytorch_model.bin" if models == "vae" else "pytorch_model.bin"
        torch.save(state, folder / models / name)
    (folder / "vae" / "diffusion_pytorch_model.safetensors.index.json").unlink()
    assert ckptool.open(folder).tensors.keys() == names
    ckptool.convert(folder, out / "p", to="diffusers", fsync=False)
    assert ckptool.compare(SOURCE, out / "p")


def test_a_component_that_is_not_there(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("diffusers_pipeline")
    (folder / "text_encoder" / "model.safetensors").unlink()
    with pytest.raises(Damaged, match=r"text_encoder: .* this CLIPTextModel, but it has no weigh"):
        ckptool.open(folder)
    for file in (folder / "text_encoder").iterdir():
        file.unlink()
    with pytest.raises(Damaged, match=r"text_encoder: .* this CLIPTextModel, but it has no folde"):
        ckptool.open(folder)


def test_what_would_be_no_pipeline(out: Path) -> None:
    dcp = case("dcp_base").path
    with pytest.raises(Unsupported, match=r"model_index\.json is missing"):
        ckptool.convert(dcp, out / "p", to="diffusers", fsync=False)
    with pytest.raises(Unsupported, match="the pipeline has no component for it"):
        ckptool.convert(SOURCE, out / "p", to="diffusers", rename=("^vae=other",), fsync=False)
    report = ckptool.convert(SOURCE, out / "p", to="diffusers", drop=("vae.*",), fsync=False)
    assert report.notes == ("without the weights that diffusers expects: vae",)
    with pytest.raises(Unsupported, match="each component has its own config"):
        convert_to("diffusers", SOURCE, out / "q", dequantize=True, map=MapOptions())
