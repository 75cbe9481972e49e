"""The sizes that a map needs, from the files that trainers leave around a checkpoint."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import trainer_configs
from conftest import convert_to, flat, load_dcp
from safetensors.torch import save_file
from torchtitan_states import JOBS, recorded

import ckptool
from ckptool.commands.keymap import maps
from ckptool.commands.model.records import records_around
from ckptool.commands.open import open_checkpoint
from ckptool.commands.options.rewrite import MapOptions
from ckptool.errors import Unsupported, UsageError

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MAP = MapOptions("torchtitan-llama3")
RUN_CONFIG = """\
_target_: megatron.bridge.training.config.ConfigContainer
dist: {backend: nccl}
model:
  _target_: megatron.bridge.models.llama.llama_provider.LlamaModelProvider
  activation_func: !!python/name:torch.nn.functional.silu ''
  num_layers: 2
  hidden_size: 16
  num_attention_heads: 4
  num_key_value_heads: 2
  params_dtype: !!python/object/apply:os.mkdir [RAN]
"""
MODEL_YAML = """\
_target_: nemo.collections.llm.gpt.model.llama.LlamaModel
config: {_target_: x.LlamaConfig, num_layers: 2, hidden_size: 16, num_attention_heads: 4,
  num_key_value_heads: 2}
optim: {_target_: y.Optimizer, hidden_size: 3}
"""


def save(folder: Path, family: str = "llama3") -> Path:
    tensors = {n: torch.from_numpy(a).float() for n, a in recorded(family)["trainer"].items()}
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    return folder


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("folder", "file", "text"),
    [
        ("checkpoint-5/pytorch_model_fsdp_0", "checkpoint-5/config.json", json.dumps(SIZES)),
        ("run/global_step5", "run/config.json", json.dumps(SIZES)),  # as DeepSpeed lies in it
        ("step/actor", "step/actor/huggingface/config.json", json.dumps(SIZES)),
        ("actor/dist_ckpt", "actor/huggingface/config.json", json.dumps(SIZES)),
        ("actor/model/dist_ckpt", "actor/transformer_config.json", json.dumps(SIZES)),
        ("iter_0000005", "iter_0000005/run_config.yaml", RUN_CONFIG),
        ("model/weights", "model/context/model.yaml", MODEL_YAML),
    ],
)
def test_sizes_are_found(folder: str, file: str, text: str, tmp_path: Path) -> None:
    source = save(tmp_path / folder)
    write(tmp_path / file, text.replace("RAN", str(tmp_path / "ran")))
    report = convert_to("dcp", source, tmp_path / "out", map=MAP)
    assert any(f"with sizes from {tmp_path / file}" in note for note in report.notes)
    expected = recorded("llama3")["hf"]
    written = flat(load_dcp(tmp_path / "out"))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[n], torch.from_numpy(a).float()) for n, a in expected.items())
    assert not (tmp_path / "ran").exists()


def of_llama() -> dict[str, torch.Tensor]:
    """The tensors of a Llama of the recorded sizes, as Hugging Face has them."""
    torch.manual_seed(3)
    rows = {"q": (24, 16), "k": (12, 16), "v": (12, 16), "o": (16, 24)}
    wide = {"gate": (24, 16), "up": (24, 16), "down": (16, 24)}
    state: dict[str, tuple[int, ...]] = {"model.norm.weight": (16,)}
    state |= {f"{name}.weight": (37, 16) for name in ("model.embed_tokens", "lm_head")}
    for layer in ("model.layers.0", "model.layers.1"):
        state |= {f"{layer}.self_attn.{n}_proj.weight": shape for n, shape in rows.items()}
        state |= {f"{layer}.mlp.{n}_proj.weight": shape for n, shape in wide.items()}
        state |= {f"{layer}.{n}_layernorm.weight": (16,) for n in ("input", "post_attention")}
    return {name: torch.randn(shape) for name, shape in state.items()}


WRITTEN = trainer_configs.recorded()
OF_HUGGING_FACE = json.dumps(
    SIZES | {"model_type": "llama", "head_dim": 6, "intermediate_size": 24, "vocab_size": 37}
)
FOLDERS = [
    ("iter_0000005", {"iter_0000005/run_config.yaml": WRITTEN["run_config.yaml"]}),
    ("iter_0000005", {"iter_0000005/run_config.yaml": WRITTEN["run_config.yaml before"]}),
    ("model/weights", {"model/context/model.yaml": WRITTEN["model.yaml"]}),
    ("run/iter_0000005", {"run/config.json": OF_HUGGING_FACE}),
    ("actor/dist_ckpt", {"actor/huggingface/config.json": OF_HUGGING_FACE}),
    (
        "actor/dist_ckpt",
        {
            "actor/transformer_config.json": WRITTEN["transformer_config.json"],
            "actor/huggingface/config.json": OF_HUGGING_FACE,
        },
    ),
    (
        "actor/model/dist_ckpt",
        {
            "actor/transformer_config.json": WRITTEN["transformer_config.json"],
            "actor/model/huggingface/config.json": OF_HUGGING_FACE,
        },
    ),
]
"""Megatron-Bridge with Megatron-core 0.20 and before, NeMo 2, a model's own, verl 0.9 and after."""


@pytest.mark.parametrize(("folder", "files"), FOLDERS)
def test_megatrons_names_are_mapped_by_the_trainers_own_files(
    folder: str, files: dict[str, str], tmp_path: Path
) -> None:
    """Heads, groups, their size, and the vocabulary, which is padded: none is given by hand."""
    state = of_llama()
    save_file(state, tmp_path / "hf.safetensors")
    sizes = {"head": 4, "kv": 2, "dim": 6}
    there = MapOptions("megatron-gpt", sizes)
    convert_to("torch-save", tmp_path / "hf.safetensors", tmp_path / "there.pt", map=there)
    stored = flat(torch.load(tmp_path / "there.pt"))
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        stored[name] = torch.cat([stored[name], stored[name][-1:].expand(91, 16)])
    dcp.save(stored, checkpoint_id=tmp_path / folder, no_dist=True)
    with pytest.raises(UsageError, match="not found in config"):
        convert_to("dcp", tmp_path / folder, tmp_path / "out", map=MapOptions("megatron-gpt"))
    for name, text in files.items():
        write(tmp_path / name, text)
    convert_to("dcp", tmp_path / folder, tmp_path / "out", map=MapOptions("megatron-gpt"))
    found = flat(load_dcp(tmp_path / "out"))
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(
    "change",
    [("gamma: false", "gamma: true"), ("normalization: RMSNorm", "normalization: layernorm1p")],
)
def test_norms_that_store_one_less_are_refused_where_a_trainers_file_says_so(
    change: tuple[str, str], tmp_path: Path
) -> None:
    tensors = {
        "decoder.final_layernorm.weight": torch.ones(16),
        "output_layer.weight": torch.ones(37, 16),
    }
    dcp.save(tensors, checkpoint_id=tmp_path / "iter_5", no_dist=True)
    write(tmp_path / "run_config.yaml", WRITTEN["run_config.yaml"].replace(*change))
    with pytest.raises(Unsupported, match="does not support models with apply_layernorm_1p"):
        convert_to("dcp", tmp_path / "iter_5", tmp_path / "out", map=MapOptions("megatron-gpt"))


@pytest.mark.parametrize("family", ["llama3", "llama3_tied", "deepseek_v3"])
def test_torchtitans_job_config_is_found_under_any_name(family: str, tmp_path: Path) -> None:
    source = save(tmp_path / "dump" / "checkpoint" / "step-5", family)
    job = json.loads(JOBS.read_text())[family]
    write(tmp_path / "dump" / "other.json", json.dumps({"hidden_size": 16, "num_layers": 2}))
    write(tmp_path / "dump" / "run-7.json", json.dumps({"training": {"steps": 5}, **job}))
    name = "torchtitan-" + family.removesuffix("_tied").replace("_", "-")
    report = convert_to("dcp", source, tmp_path / "out", map=MapOptions(name))
    assert any(f"with sizes from {tmp_path / 'dump' / 'run-7.json'}" in n for n in report.notes)
    expected = recorded(family)["hf"]
    written = flat(load_dcp(tmp_path / "out"))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[n], torch.from_numpy(a).float()) for n, a in expected.items())


def test_what_differs_among_torchtitans_layers_is_not_taken(tmp_path: Path) -> None:
    source = save(tmp_path / "step-5")
    job = json.loads(JOBS.read_text())["llama3"]
    job["model_spec"]["model"]["layers"][1]["attention"]["n_kv_heads"] = None
    write(tmp_path / "job.json", json.dumps(job))
    (record,) = records_around(source, open_checkpoint(source).catalog).values()
    assert record["num_attention_heads"] == 4
    assert record["num_key_value_heads"] is None


def test_the_configuration_in_a_nemo_archive_is_found(tmp_path: Path) -> None:
    tensors = {n: torch.from_numpy(a).float() for n, a in recorded("llama3")["trainer"].items()}
    config = "hidden_size: 16\nnum_layers: 2\nnum_attention_heads: 4\nnum_query_groups: 2\n"
    torch.save(tensors, tmp_path / "model_weights.ckpt")
    write(tmp_path / "model_config.yaml", config)
    with tarfile.open(tmp_path / "model.nemo", "w:") as archive:
        for name in ("model_config.yaml", "model_weights.ckpt"):
            archive.add(tmp_path / name, arcname=f"./{name}")
    unpacked = open_checkpoint(tmp_path / "model_weights.ckpt")
    found = records_around(unpacked.path, unpacked.catalog)
    assert [*found] == [str(tmp_path / "model_config.yaml")]
    (tmp_path / "model_config.yaml").unlink()
    packed = open_checkpoint(tmp_path / "model.nemo")
    inside = records_around(packed.path, packed.catalog)
    assert [*inside.values()] == [*found.values()]
    assert [*inside] == [str(tmp_path / "model.nemo" / "model_config.yaml")]


def test_the_config_of_another_model_is_none(tmp_path: Path) -> None:
    source = save(tmp_path / "run" / "step-1")
    write(tmp_path / "run" / "config.json", json.dumps(SIZES | {"hidden_size": 32}))
    with pytest.raises(UsageError, match="size of head, kv not found"):
        convert_to("dcp", source, tmp_path / "out", map=MAP)


def test_what_the_checkpoint_itself_says_is_stronger(tmp_path: Path) -> None:
    source = save(tmp_path / "run" / "step-1")
    write(source / "config.json", json.dumps(SIZES))
    write(tmp_path / "run" / "config.json", json.dumps(SIZES | {"num_key_value_heads": 4}))
    report = convert_to("dcp", source, tmp_path / "out", map=MAP)
    assert not any("with sizes from" in note for note in report.notes)


def test_where_it_says_all_nothing_is_looked_for_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path / "run" / "step-1")
    write(source / "config.json", json.dumps(SIZES))
    monkeypatch.setattr(maps, "records_around", lambda path, catalog: pytest.fail("looked around"))
    convert_to("dcp", source, tmp_path / "out", map=MAP)


MERGES = "a0: &a0 {k: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 12)
)
"""Ten to the eleventh pairs where each merge is carried out."""
ALIASES = "\n".join(
    f"b{n}: &b{n} {{" + ", ".join(f"k{i}: {value}" for i in range(2_000)) + "}"
    for n, value in enumerate(["{}", "*b0", "*b1"])
)
"""Eight thousand million parts where each place is looked at."""
NO_YAML = ['!!int ""', '!!bool "x"', '!!timestamp "x"', MERGES, ALIASES]


@pytest.mark.parametrize(
    "text", ["", "[1, 2]", "a: [", "a: " + "[" * 9_000, "x" * (2 << 20), *NO_YAML]
)
def test_a_file_that_is_not_a_configuration_is_none(text: str, tmp_path: Path) -> None:
    source = save(tmp_path / "iter_1")
    for name in ("run_config.yaml", "transformer_config.json"):
        write(source / name, text)
    assert records_around(source, open_checkpoint(source).catalog) == {}


def test_a_model_folder_without_config_is_told_where_one_is(tmp_path: Path) -> None:
    source = save(tmp_path / "actor")
    write(source / "huggingface" / "config.json", json.dumps(SIZES))
    options: dict[str, Any] = {"to": "safetensors", "map": "torchtitan-llama3"}
    report = ckptool.convert(source, tmp_path / "out", **options)
    lines = [note for note in report.notes if "config.json not written" in note]
    assert len(lines) == 1
    assert f"({source / 'huggingface'} has one); use --hf-assets" in lines[0]


def test_folders_above_are_found_from_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path / "actor" / "model" / "dist_ckpt")
    write(tmp_path / "actor" / "transformer_config.json", json.dumps(SIZES))
    write(source / "config.json", json.dumps(SIZES))
    catalog = open_checkpoint(source).catalog
    expected = [str(tmp_path / "actor" / "transformer_config.json")]
    for folder, name in ((source.parent, "dist_ckpt"), (source, ".")):
        monkeypatch.chdir(folder)
        assert list(records_around(Path(name), catalog)) == expected
