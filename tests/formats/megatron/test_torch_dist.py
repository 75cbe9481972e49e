"""The output for Megatron-core: the files, keys and shapes that its loader requests."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import bits, case, convert_to, flat, load_dcp, read_back

from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.rewrite import MapOptions
from ckptool.errors import Damaged, Unsupported

STACKED = {
    "embedding.word_embeddings.weight": torch.arange(24.0).reshape(6, 4),
    "decoder.final_layernorm.weight": torch.arange(4.0),
    "decoder.layers.self_attention.linear_proj.weight": torch.arange(32.0).reshape(2, 4, 4),
    "decoder.layers.mlp.experts.experts.linear_fc2.weight": torch.arange(48.0).view(2, 3, 4, 2),
    "decoder.layers.mlp.router.weight": torch.arange(24.0).reshape(2, 3, 4),
}


@pytest.fixture
def written(tmp_path: Path, out: Path) -> Path:
    torch.save(STACKED, tmp_path / "a.pt")
    convert_to("megatron-torch_dist", tmp_path / "a.pt", out / "run")
    return out / "run"


def test_a_run_whose_tracker_names_a_release(written: Path) -> None:
    assert (written / "latest_checkpointed_iteration.txt").read_text() == "release"
    backends = json.loads((written / "release" / "metadata.json").read_text())
    assert (backends["sharded_backend"], backends["common_backend"]) == ("torch_dist", "torch")
    with torch.serialization.safe_globals([Namespace]):
        common = torch.load(written / "release" / "common.pt")
    assert (common["iteration"], common["checkpoint_version"]) == (0, 3.0)
    assert common["args"].tensor_model_parallel_size == 1


def test_every_module_has_an_extra_state_of_none(written: Path) -> None:
    """As megatron-core 0.16.1 asks for them: ``module._extra_state/shard_{offset}_{shape}``."""
    stored = flat(load_dcp(written / "release"))
    states = {name: value for name, value in load_dcp(written / "release").items() if "/" in name}
    assert {name for name in stored if "/" not in name} == STACKED.keys()
    assert all(value == [None] for value in states.values())
    expected = {
        "decoder.final_layernorm._extra_state/shard_0_1",
        "decoder.layers.self_attention.core_attention._extra_state/shard_1_2",
        "decoder.layers.self_attention.linear_proj._extra_state/shard_0_2",
        "decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_1.2_2.3",
    }
    assert expected <= states.keys()


def test_it_is_read_back_as_megatrons(written: Path) -> None:
    found = read_back("dcp", written / "release")
    assert {name: found[name] for name in STACKED} == {n: bits(t) for n, t in STACKED.items()}


def test_a_megatron_run_is_written_again(out: Path) -> None:
    one = case("megatron_torch_dist")
    convert_to("megatron-torch_dist", one.path, out / "run", model_only=True)
    convert_to("safetensors", out / "run", out / "m.safetensors", model_only=True)
    found = read_back("safetensors", out / "m.safetensors")
    assert found == {name: one.truth[name] for name in found}
    assert any("decoder.layers" in name for name in found)


def test_names_of_another_framework_are_refused(out: Path) -> None:
    with pytest.raises(Unsupported, match="no tensor has a name of Megatron-core"):
        convert_to("megatron-torch_dist", case("safetensors_file").path, out / "run")


def test_the_state_of_an_optimizer_is_refused(out: Path) -> None:
    with pytest.raises(Unsupported, match="only the model") as caught:
        convert_to("megatron-torch_dist", case("megatron_torch_dist").path, out / "run")
    assert "--model-only" in (caught.value.hint or "")


def test_the_report_is_what_is_written(tmp_path: Path, out: Path) -> None:
    torch.save(STACKED, tmp_path / "a.pt")
    report = convert_to("megatron-torch_dist", tmp_path / "a.pt", out / "run")
    files = {str(p.relative_to(out / "run")): p for p in out.rglob("*") if p.is_file()}
    assert {n: p.stat().st_size for n, p in files.items()} == {
        f.path: f.nbytes for f in report.files
    }


def test_a_map_gives_the_names(tmp_path: Path, out: Path) -> None:
    torch.save({"model.norm.weight": torch.ones(4)}, tmp_path / "a.pt")
    options = MapOptions("megatron-gpt", inverse=True)
    with pytest.raises(Unsupported, match="no tensor has a name"):
        convert_to("megatron-torch_dist", tmp_path / "a.pt", out / "a")
    convert_to("megatron-torch_dist", tmp_path / "a.pt", out / "b", map=options)
    assert "decoder.final_layernorm.weight" in flat(load_dcp(out / "b" / "release"))


@pytest.mark.parametrize(
    ("state", "common", "words"),
    [
        ({"k/shard_0_1": [1], "k/shard_0.0_1.1": [2]}, {}, "^k: two ShardedObjects"),
        (
            {"k/shard_0_1": [1], "k": torch.ones(2)},
            {},
            "^k: two ShardedObjects, or one and a tensor",
        ),
        ({"k": torch.ones(2)}, {"k": torch.zeros(2)}, "common.pt: 'k' is also in the files"),
        ({"k/shard_0_" + "9" * 5000: [1]}, {}, None),
    ],
)
def test_no_value_hides_another_of_its_name(
    state: dict[str, object], common: dict[str, object], words: str | None, tmp_path: Path
) -> None:
    dcp.save(state | {"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({"args": None, **common}, tmp_path / "common.pt")
    if words is None:
        assert "w" in open_checkpoint(tmp_path).catalog.tensors
        return
    with pytest.raises(Damaged, match=words):
        open_checkpoint(tmp_path)
