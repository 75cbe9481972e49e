"""The framework, version and degrees that inspect shows, from what the files record."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import case
from msgspec.structs import replace
from safetensors.torch import save_file

import ckptool
from ckptool.commands.open import open_checkpoint
from ckptool.errors import Damaged, NotFound
from ckptool.formats.companions import add_tensor_parallelism

LIGHTNING = {"pytorch-lightning_version": "2.6.6", "global_step": 4}
TITAN = {
    "train_state": {"step": 3},
    "dataloader": {"dp_rank_0": b"", "dp_rank_1": b"", "world_size": 2},
}


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (LIGHTNING, {"framework": "Lightning", "version": "2.6.6"}),
        (TITAN, {"framework": "torchtitan", "parallelism": "DP 2"}),
        ({"train_state": {"step": 3}}, {}),
        ({"pytorch-lightning_version": 2}, {}),
    ],
)
def test_values_that_a_framework_always_saves(
    values: dict[str, Any], wanted: dict[str, str], tmp_path: Path
) -> None:
    dcp.save({"w": torch.ones(2)} | values, checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save({"w": torch.ones(2)} | values, tmp_path / "one.ckpt")
    for path in (tmp_path / "dcp", tmp_path / "one.ckpt"):
        info = open_checkpoint(path).catalog.info
        assert {
            key: info[key] for key in info if key in ("framework", "version", "parallelism")
        } == (wanted)


@pytest.mark.parametrize(
    ("config", "framework", "arguments"),
    [
        (
            {"architectures": ["A"], "transformers_version": "5.1", "num_hidden_layers": 2},
            "transformers",
            "A, layers 2",
        ),
        ({"text_config": {"hidden_size": 8, "num_local_experts": 4}}, None, "hidden 8, experts 4"),
        ({"architectures": "A", "hidden_size": "8"}, None, None),
    ],
)
def test_a_config_beside_the_weights(
    config: Any, framework: str | None, arguments: str | None, tmp_path: Path
) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    info = open_checkpoint(tmp_path).catalog.info
    assert (info.get("framework"), info.get("arguments")) == (framework, arguments)


NO_OBJECTS = [b"[1]", b"{", b"", b"\xff", b"\xef\xbb\xbf{}", b"\xff\xfe{\0}\0", b"\xfe\xff\0{\0}"]


@pytest.mark.parametrize("data", NO_OBJECTS)
def test_a_config_that_cannot_be_read_is_an_error(data: bytes, tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(Damaged, match=r"^config\.json: not a JSON object"):
        open_checkpoint(tmp_path)
    found = ckptool.verify(tmp_path).findings
    assert [each.file for each in found if each.code == "metadata-unreadable"] == ["config.json"]


@pytest.mark.parametrize("kind", ["pipe", "folder", "full folder", "link"])
@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "model.extra.pt"])
def test_what_is_no_file_is_not_absent(kind: str, name: str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    elif kind == "link":
        (tmp_path / name).symlink_to(name)
    else:
        (tmp_path / name).mkdir()
        if kind == "full folder":
            (tmp_path / name / "inside").write_bytes(b"x")
    with pytest.raises(NotFound, match=re.escape(name)):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("deepspeed_zero_3", "TP 1, PP 1, DP 4"),
        ("deepspeed_pipeline", "TP 2, PP 2, DP 1"),
        ("deepspeed_experts", "TP 1, PP 1, DP 2, EP 2"),
        ("deepspeed_experts_zero_2", "TP 1, PP 1, DP 4, EP 2"),
    ],
)
def test_the_degrees_that_deepspeed_records(name: str, degrees: str) -> None:
    assert open_checkpoint(case(name).path).catalog.info["parallelism"] == degrees


@pytest.mark.parametrize(
    ("name", "framework", "told", "wanted"),
    [
        ("dcp_fsdp2_tp", "torchtitan", "DP 2", "TP 2, DP 2"),
        ("dcp_fsdp2_tp", "torchtitan", "DP 1", "DP 1"),
        ("dcp_fsdp2_tp", "another", "DP 2", "DP 2"),
        ("dcp_hsdp", "torchtitan", "DP 2", "DP 2"),
        ("dcp_fsdp2", "torchtitan", "DP 2", "DP 2"),
    ],
)
def test_tensor_parallelism_that_chunks_tell(
    name: str, framework: str, told: str, wanted: str
) -> None:
    catalog = open_checkpoint(case(name).path).catalog
    said = replace(catalog, info={"framework": framework, "parallelism": told})
    assert add_tensor_parallelism(said).info["parallelism"] == wanted


def test_the_version_that_torchsnapshot_records() -> None:
    info = open_checkpoint(case("snapshot").path).catalog.info
    assert info == {"writer": "TorchSnapshot", "version": "0.1.0"}
