"""The framework, version and degrees that inspect shows, from what the files record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import case
from msgspec.structs import replace
from safetensors.torch import save_file

from ckptool.commands.open import open_checkpoint
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
        ([1], None, None),
        ("{", None, None),
    ],
)
def test_a_config_beside_the_weights(
    config: Any, framework: str | None, arguments: str | None, tmp_path: Path
) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    text = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / "config.json").write_text(text)
    info = open_checkpoint(tmp_path).catalog.info
    assert (info.get("framework"), info.get("arguments")) == (framework, arguments)


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
