"""Shards with DCP's sharding info: how they are written, and what reveals a lost last one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import case
from safetensors import safe_open
from safetensors.torch import save_file

import ckptool
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.run import RunOptions
from ckptool.commands.options.target import ReshardOptions, TransferOptions
from ckptool.commands.reshard.reshard import prepare_reshard
from ckptool.core.sharding.placement import parse_mesh
from ckptool.errors import Damaged

torch = pytest.importorskip("torch")


@pytest.fixture
def shards(out: Path) -> Path:
    """Four ranks' shards of an embedding of 16 words and a norm of 8."""
    state = {"model.embed_tokens.weight": torch.ones(16, 8), "model.norm.weight": torch.ones(8)}
    torch.save(state, out / "m.pt")
    options = ReshardOptions(
        mesh=parse_mesh("4"),
        policy="fsdp",
        to="dcp-safetensors",
        transfer=TransferOptions(run=RunOptions(1, fsync=False)),
    )
    prepare_reshard(out / "m.pt", out / "m", options).run()
    return out / "m"


@pytest.mark.parametrize(
    ("config", "tensor"),
    [
        ({"vocab_size": 16, "hidden_size": 8}, "model.embed_tokens.weight"),
        ({"text_config": {"vocab_size": 12, "hidden_size": 8}}, "model.norm.weight"),
    ],
)
def test_the_config_knows_more_rows(config: dict[str, Any], tensor: str, shards: Path) -> None:
    (shards / "config.json").write_text(json.dumps(config))
    open_checkpoint(shards)
    (shards / "shard-00004-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(Damaged, match=tensor):
        open_checkpoint(shards)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"vocab_size": "many", "hidden_size": 8}',
        '{"vocab_size": 1e999, "hidden_size": 8}',
        '{"vocab_size": 99, "hidden_size": 8, "text_config": {"hidden_size": 8}}',
        '{"vocab_size": 99, "hidden_size": 8, "text_config": {}}',
        '{"vocab_size": 99, "hidden_size": 8, "text_config": null}',
    ],
)
def test_a_config_that_says_nothing_stops_nothing(text: str, shards: Path) -> None:
    (shards / "config.json").write_text(text)
    assert len(open_checkpoint(shards).catalog.tensors) == 2


@pytest.mark.parametrize("text", ["[]", "no json", '{"vocab_size": 9', "\ufeff{}", ""])
def test_a_config_that_cannot_be_read_is_not_one_that_says_nothing(text: str, shards: Path) -> None:
    (shards / "config.json").write_text(text)
    with pytest.raises(Damaged, match=r"config\.json: not a JSON object"):
        open_checkpoint(shards)


def test_a_shard_alone_is_no_whole_model(shards: Path, out: Path) -> None:
    for number, begin in ((1, 0), (2, 2)):
        alone = out / f"alone-{number}.safetensors"
        shutil.copy(shards / f"shard-0000{number}-model-00001-of-00001.safetensors", alone)
        catalog = open_checkpoint(alone).catalog
        assert catalog.info["writer"] == "torch HuggingFaceStorageWriter"
        told = [note for note in catalog.notes if "DCP_SHARDING_INFO" in note]
        assert len(told) == (begin > 0)
        assert all(f"{begin} tensors of it begin within larger ones" in note for note in told)


def test_shards_that_were_never_consolidated_are_read(shards: Path, out: Path) -> None:
    """torch's HuggingFaceStorageWriter (2.13) writes them into a folder, and joins them then."""
    wanted = open_checkpoint(shards).catalog.tensors.keys()
    shards.rename(out / "shards")
    shards.mkdir()
    (out / "shards").rename(shards / "sharded")
    found = open_checkpoint(shards)
    assert (found.format.name, found.catalog.tensors.keys()) == ("dcp-safetensors", wanted)


def test_files_are_named_and_counted_as_torch_does(out: Path) -> None:
    """Two shards of one tensor in one rank take two files: a safetensors file has a name once."""
    ckptool.convert(case("dcp_sharded_tensor").path, out / "m", to="dcp-safetensors")
    assert sorted(path.name for path in (out / "m").glob("shard-*")) == [
        "shard-00001-model-00001-of-00002.safetensors",
        "shard-00002-model-00001-of-00002.safetensors",
        "shard-00002-model-00002-of-00002.safetensors",
        "shard-00003-model-00001-of-00002.safetensors",
        "shard-00004-model-00001-of-00002.safetensors",
    ]


def test_a_rank_without_elements_of_a_tensor_does_not_list_it(out: Path) -> None:
    from safetensors import safe_open

    state = {"three": torch.ones(3, 2), "four": torch.ones(4), "none": torch.ones(0)}
    torch.save(state, out / "m.pt")
    ckptool.reshard(out / "m.pt", out / "ranks", to="rank-local", mesh="4", policy="fsdp")
    ckptool.convert(out / "ranks", out / "m", to="dcp-safetensors")
    names = []
    for path in sorted((out / "m").glob("shard-*")):
        with safe_open(path, "pt") as file:
            names.append(sorted(file.keys()))
    assert names == [["four", "none", "three"], *[["four", "three"]] * 2, ["four"]]


def test_a_tensor_that_headers_list_and_no_file_has(shards: Path) -> None:
    for file in shards.glob("shard-*"):
        with safe_open(file, "pt") as opened:
            texts, kept = opened.metadata(), opened.get_tensor("model.embed_tokens.weight")
        save_file({"model.embed_tokens.weight": kept}, file, texts)
    with pytest.raises(Damaged, match=r"model\.norm\.weight: listed in DCP_SHARDING_INFO, but not"):
        open_checkpoint(shards)
