"""Links to files that are copied into an export: where they may lead."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import case

import ckptool
from ckptool.commands.model.links import require_own_files
from ckptool.core.layout import FileLayout, Part, Verbatim
from ckptool.errors import Unsupported
from ckptool.storage.local import LocalSource

SECRET = '{"aws_secret_access_key": "hunter2"}'
REVISION = "0" * 40


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "credentials").write_text(SECRET)
    shutil.copytree(case("hf_full").path, tmp_path / "model")
    return tmp_path / "model"


def link(to: str, name: str = "vocab.txt") -> Callable[[Path], None]:
    def make(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(to.format(model.parent))

    return make


def link_to_a_link(model: Path) -> None:
    (model / "inner").symlink_to("../home")
    (model / "vocab.txt").symlink_to("inner/credentials")


OUT = {
    "relative": link("../home/credentials"),
    "absolute": link("{}/home/credentials"),
    "through the folder": link("../model/../home/credentials"),
    "a model's code": link("../home/credentials", "modeling.py"),
    "a config": link("../home/credentials", "config.json"),
    "a link to a link": link_to_a_link,
    "a process's file": link("/proc/self/environ"),
}


@pytest.mark.parametrize("make", OUT.values(), ids=OUT)
def test_a_link_out_of_the_folder_is_named_and_not_copied(
    make: Callable[[Path], None], model: Path, tmp_path: Path
) -> None:
    make(model)
    with pytest.raises(Unsupported, match=r"vocab.txt|modeling.py|config.json") as refused:
        ckptool.convert(model, tmp_path / "out", to="hf")
    assert "lead out of this folder" in refused.value.message
    assert "hunter2" not in f"{refused.value.message}{refused.value.hint}"
    assert not (tmp_path / "out").exists()
    ckptool.convert(model, tmp_path / "weights.safetensors")  # where it would not be copied


def test_a_salvage_copies_nothing_that_a_link_out_leads_to(model: Path, tmp_path: Path) -> None:
    link("../home/credentials")(model)
    with pytest.raises(Unsupported, match="lead out of this folder"):
        ckptool.salvage(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_hint_is_a_command_that_helps(model: Path, tmp_path: Path) -> None:
    link("../home/credentials")(model)
    with pytest.raises(Unsupported) as refused:
        ckptool.convert(model, tmp_path / "out", to="hf")
    assert os.system((refused.value.hint or "").partition(": ")[2]) == 0
    ckptool.convert(model, tmp_path / "out", to="hf")
    assert (tmp_path / "out" / "vocab.txt").read_text() == SECRET


@pytest.mark.parametrize("to", ["texts/words", "{}/model/texts/words", "../latest/texts/words"])
def test_a_link_within_the_folder_is_followed(to: str, model: Path, tmp_path: Path) -> None:
    (model / "texts").mkdir()
    (model / "texts" / "words").write_text("words")
    (tmp_path / "latest").symlink_to("model")
    link(to)(model)
    ckptool.convert(tmp_path / "latest", tmp_path / "out", to="hf")
    assert (tmp_path / "out" / "vocab.txt").read_text() == "words"


def into_cache(model: Path, repository: str) -> Path:
    """A model's files as huggingface_hub keeps them."""
    home = model.parent / "cache" / repository
    snapshot = home / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir()
    for file in model.iterdir():
        file.rename(home / "blobs" / f"sha-of-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/sha-of-{file.name}")
    return snapshot


def test_the_hubs_cache_is_followed_to_its_own_blobs_alone(model: Path, tmp_path: Path) -> None:
    (model / "vocab.txt").write_text("words")
    private = into_cache(shutil.copytree(model, tmp_path / "copy"), "models--me--private")
    snapshot = into_cache(model, "models--x--y")
    ckptool.convert(snapshot, tmp_path / "out", to="hf")
    assert (tmp_path / "out" / "vocab.txt").read_text() == "words"
    for to in (private / "vocab.txt", "../../../models--me--private/blobs/sha-of-vocab.txt"):
        link(str(to))(snapshot)
        with pytest.raises(Unsupported, match="lead out"):
            ckptool.convert(snapshot, tmp_path / "again", to="hf")
    blobs = snapshot.parents[1] / "blobs"
    (blobs / "sha").symlink_to(tmp_path / "home" / "credentials")
    link("../../blobs/sha")(snapshot)
    with pytest.raises(Unsupported, match="home/credentials"):
        ckptool.convert(snapshot, tmp_path / "again", to="hf")


def test_a_cache_whose_blobs_are_a_link_is_not_one(model: Path, tmp_path: Path) -> None:
    (model / "vocab.txt").write_text("words")
    snapshot = into_cache(model, "models--x--y")
    (snapshot.parents[1] / "blobs").rename(tmp_path / "elsewhere")
    (snapshot.parents[1] / "blobs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Unsupported, match="lead out"):
        ckptool.convert(snapshot, tmp_path / "out", to="hf")


def test_files_of_assets_and_of_components(model: Path, tmp_path: Path) -> None:
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "vocab.txt").symlink_to("../home/credentials")
    with pytest.raises(Unsupported, match=r"assets: .*vocab.txt"):
        ckptool.convert(model, tmp_path / "out", to="hf", hf_assets=assets)
    pipeline = tmp_path / "pipeline"
    shutil.copytree(case("diffusers_pipeline").path, pipeline)
    config = next(pipeline.glob("*/config.json"))
    shutil.move(config.parent, tmp_path / "home" / "component")
    config.parent.symlink_to("../home/component")
    with pytest.raises(Unsupported, match=f"{config.parent.name}/config.json"):
        ckptool.convert(pipeline, tmp_path / "out", to="hf")


def test_what_assets_replace_may_lead_anywhere(model: Path, tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "vocab.txt").write_text("words")
    link("../home/credentials")(model)
    ckptool.convert(model, tmp_path / "out", to="hf", hf_assets=tmp_path / "assets")
    assert (tmp_path / "out" / "vocab.txt").read_text() == "words"


def test_files_beside_a_checkpoint_that_lead_away_are_noted(tmp_path: Path) -> None:
    run, home = tmp_path / "run", tmp_path / "home"
    shutil.copytree(case("dcp_base").path, run / "actor")
    home.mkdir()
    (home / "config.json").write_text('{"model_type": "private"}')
    (run / "huggingface").symlink_to("../home")
    report = ckptool.convert(run / "actor", tmp_path / "out", to="hf", model_only=True)
    assert any("not carried from" in note and "lead out" in note for note in report.notes)
    assert not (tmp_path / "out" / "config.json").exists()


def test_weights_may_lie_elsewhere(model: Path, tmp_path: Path) -> None:
    for file in model.glob("*.safetensors"):
        shutil.move(file, tmp_path / "home" / file.name)
        file.symlink_to(f"../home/{file.name}")
    before = ckptool.open(case("hf_full").path).tensors.keys()
    ckptool.convert(model, tmp_path / "out", to="hf")
    assert ckptool.open(tmp_path / "out").tensors.keys() == before


def test_the_parts_of_a_file_of_tensors_are_not_made(tmp_path: Path) -> None:
    class Shards(FileLayout):
        @property
        def parts(self) -> tuple[Part, ...]:
            raise AssertionError("made")

        @property
        def decisive(self) -> tuple[Part, ...]:
            return ()

    shards = Shards("shards", (), nbytes=1 << 40)
    (tmp_path / "note").symlink_to("/etc/hostname")
    copy = FileLayout("note", (Verbatim("note", 8),))
    with pytest.raises(Unsupported, match="links lead out of this folder: note"):
        require_own_files(LocalSource(tmp_path, {}), [shards, copy])
