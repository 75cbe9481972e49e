"""``verify --like``: broken models in every naming are named, their sound twins are not."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import FIXTURES
from safetensors.torch import load_file, save_file
from torchtitan_states import recorded, write_config
from typer.testing import CliRunner

import ckptool
from ckptool.cli.app import app
from ckptool.commands.verify.findings import Finding, VerifyReport
from ckptool.errors import UsageError

States = dict[str, torch.Tensor]
SIZES = {
    "hidden_size": 8, "intermediate_size": 16, "vocab_size": 10, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model as transformers saves it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import MixtralConfig, MixtralForCausalLM

    folder = tmp_path_factory.mktemp("mixtral")
    MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=3)).save_pretrained(folder)
    return folder


def state_of(folder: Path) -> States:
    return load_file(folder / "model.safetensors")


def found(report: VerifyReport) -> list[Finding]:
    return [finding for finding in report.findings if finding.code.startswith("like-")]


def codes(report: VerifyReport) -> list[str]:
    return [finding.code for finding in found(report)]


def without(state: States, part: str) -> States:
    return {name: tensor for name, tensor in state.items() if part not in name}


SAVES: dict[str, Callable[[States, Path], object]] = {
    "safetensors": lambda state, path: save_file(state, path),
    "wrapped": lambda state, path: torch.save(
        {"model": {f"module.{n}": t for n, t in state.items()}, "step": 3}, path
    ),
    "dcp": lambda state, path: dcp.save({"model": state}, checkpoint_id=path, no_dist=True),
    "with an optimizer": lambda state, path: torch.save(
        {
            "model": state,
            "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": []},
        },
        path,
    ),
}


@pytest.mark.parametrize("other", ["", "config.json"])
@pytest.mark.parametrize("how", SAVES)
def test_a_sound_model_in_any_format_is_like_its_base(
    how: str, other: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    state = {name: tensor.bfloat16() for name, tensor in state_of(llama).items()}
    source = tmp_path / ("m.safetensors" if how == "safetensors" else "m.pt")
    SAVES[how](state, source)
    report = ckptool.verify(source, like=llama / other)
    assert report.ok
    assert not found(report)
    layers = "module.model.layers" if how == "wrapped" else "model.layers"
    assert f"30 of 30 tensors of {llama / other} (3 in {layers}) found" in report.summary


@pytest.mark.parametrize("how", SAVES)
def test_a_missing_layer_is_one_finding(how: str, llama: Path, tmp_path: Path) -> None:
    source = tmp_path / ("m.safetensors" if how == "safetensors" else "m.pt")
    SAVES[how](without(state_of(llama), ".layers.1."), source)
    for other in (llama, llama / "config.json"):
        report = ckptool.verify(source, like=other, quick=True)
        (finding,) = found(report)
        assert not report.ok
        assert finding.code == "like-missing"
        assert f"missing, {other} has it, as is all of " in finding.message
        assert finding.message.endswith("model.layers.1 (2 of 3 found)")
        assert len(finding.affected) == 9


def test_missing_experts_of_every_layer_are_one_finding(mixtral: Path, tmp_path: Path) -> None:
    assert not found(ckptool.verify(mixtral, like=mixtral / "config.json"))
    state = without(without(state_of(mixtral), ".experts.0."), ".experts.2.")
    save_file(state, tmp_path / "m.safetensors")
    (finding,) = found(ckptool.verify(tmp_path / "m.safetensors", like=mixtral / "config.json"))
    text = "all of model.layers.*.block_sparse_moe.experts.{0, 2} (1 of 3 found)"
    assert text in finding.message
    assert len(finding.affected) == 3 * 2 * 3


def test_each_difference_is_named_by_its_cause(llama: Path, tmp_path: Path) -> None:
    state = without(state_of(llama), "self_attn.k_proj")
    state["model.embed_tokens.weight"] = torch.ones(11, 8)
    state["lm_head.weight"] = torch.ones(11, 8)
    state["model.layers.0.self_attn.q_norm.weight"] = torch.ones(4)
    state["model.layers.3.mlp.up_proj.weight"] = torch.ones(16, 8)
    save_file(state, tmp_path / "m.safetensors")
    report = ckptool.verify(tmp_path / "m.safetensors", like=llama)
    names = "model.layers.{}.self_attn.k_proj.weight"
    assert [(f.code, f.message) for f in found(report)] == [
        (
            "like-missing",
            f"{', '.join(names.format(i) for i in range(3))}: missing, {llama} has it: [4, 8]",
        ),
        (
            "like-shape",
            f"lm_head.weight, model.embed_tokens.weight: [11, 8], but [10, 8] in {llama}",
        ),
        (
            "like-extra",
            f"model.layers.0.self_attn.q_norm.weight: not in {llama}: [4]",
        ),
        (
            "like-extra",
            f"model.layers.3.mlp.up_proj.weight: not in {llama}, as is all of model.layers.3"
            " (3 of 4 found)",
        ),
    ]


def test_a_tied_head_may_be_stored_or_not(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    network = LlamaForCausalLM(LlamaConfig(**SIZES | {"tie_word_embeddings": True}))
    network.save_pretrained(tmp_path / "hf")
    torch.save(network.state_dict(), tmp_path / "tied.pt")
    copied = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    save_file(copied, tmp_path / "copied.safetensors")
    places = [tmp_path / name for name in ("hf", "tied.pt", "copied.safetensors")]
    for one in places:
        for other in (*places[:2], tmp_path / "hf" / "config.json"):
            assert not found(ckptool.verify(one, like=other)), (one, other)
    lost = without(without(copied, "lm_head"), "embed_tokens")
    save_file(lost, tmp_path / "lost.safetensors")
    report = ckptool.verify(tmp_path / "lost.safetensors", like=tmp_path / "hf" / "config.json")
    assert codes(report) == ["like-missing"]


def test_what_damage_explains_is_not_reported_twice(llama: Path, tmp_path: Path) -> None:
    ckptool.convert(llama, tmp_path / "hf", to="hf", max_shard_size="1kB")
    shard = sorted(tmp_path.glob("hf/*.safetensors"))[0]
    shard.unlink()
    report = ckptool.verify(tmp_path / "hf", like=llama)
    assert not report.ok
    assert not found(report)


# Other trainers' names


def trainer_and_hf(out: Path) -> tuple[Path, Path]:
    tensors = {side: tensors_of(recorded("llama3")[side]) for side in ("trainer", "hf")}
    hf = write_config("llama3", out / "hf")
    save_file(tensors["hf"], hf / "model.safetensors")
    dcp.save(tensors["trainer"], checkpoint_id=out / "step-1", no_dist=True)
    return out / "step-1", hf


def tensors_of(arrays: dict[str, Any]) -> States:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def test_a_trainers_names_are_mapped_by_themselves(tmp_path: Path) -> None:
    trainer, hf = trainer_and_hf(tmp_path)
    for one, other in ((trainer, hf), (hf, trainer)):
        report = ckptool.verify(one, like=other)
        assert not found(report), (one, other)
        assert "torchtitan-llama3" in report.summary


def test_a_missing_layer_and_tensor_in_a_trainers_names(tmp_path: Path) -> None:
    _, hf = trainer_and_hf(tmp_path)
    whole = tensors_of(recorded("llama3")["trainer"])
    layers = {name.split(".")[1] for name in whole if name.startswith("layers.")}
    last = str(max(map(int, layers)))
    broken = without(without(whole, f"layers.{last}."), "layers.0.attention.qkv_linear.wk")
    assert len(broken) < len(whole)
    dcp.save(broken, checkpoint_id=tmp_path / "broken", no_dist=True)
    (layer, one) = found(ckptool.verify(tmp_path / "broken", like=hf))
    assert one.code == layer.code == "like-missing"
    assert one.message.startswith("layers.0.attention.qkv_linear.wk.weight: missing")
    assert f"all of layers.{last} ({len(layers) - 1} of {len(layers)} found)" in layer.message


def test_a_model_whose_tensors_another_trainer_fuses(llama: Path, tmp_path: Path) -> None:
    fused = tmp_path / "fused.pt"
    ckptool.convert(llama, fused, map="megatron-gpt")
    whole = torch.load(fused, weights_only=True)
    name = "model.layers.1.self_attn.k_proj.weight"
    shutil.copytree(llama, tmp_path / "lost")
    save_file(without(state_of(llama), name), tmp_path / "lost" / "model.safetensors")
    for one, other in ((fused, llama), (fused, llama / "config.json"), (llama, fused)):
        report = ckptool.verify(one, like=other)
        assert not found(report), (one, other)
        assert "megatron-gpt" in report.summary
    (finding,) = found(ckptool.verify(tmp_path / "lost", like=fused))
    assert finding.tensor == name
    part = "decoder.layers.self_attention.linear_qkv.weight"  # of all layers
    torch.save(without(whole, part), tmp_path / "lost.pt")
    torch.save({n: t[:2] if t.shape[0] == 3 else t for n, t in whole.items()}, tmp_path / "few.pt")
    for other in (llama, llama / "config.json"):
        (finding,) = found(ckptool.verify(tmp_path / "lost.pt", like=other))
        assert (finding.code, finding.tensor) == ("like-missing", part)
        few = found(ckptool.verify(tmp_path / "few.pt", like=other))
        assert {finding.code for finding in few} == {"like-shape"}
        assert f"{part}: [2, 16, 8], but [3, 16, 8]" in {
            finding.message.partition(" in ")[0] for finding in few
        }


def test_packed_experts_are_those_of_the_base(mixtral: Path, tmp_path: Path) -> None:
    """As FSDP saves them with transformers 5: all but the experts and gates has its name."""
    packed = tmp_path / "packed.pt"
    ckptool.convert(mixtral, packed, map="transformers-mixtral")
    whole = torch.load(packed, weights_only=True)
    for one, other in ((packed, mixtral), (packed, mixtral / "config.json"), (mixtral, packed)):
        report = ckptool.verify(one, like=other)
        assert not found(report), (one, other)
        assert "transformers-mixtral" in report.summary
    torch.save(without(whole, "layers.1.mlp.experts"), tmp_path / "lost.pt")
    lost = found(ckptool.verify(tmp_path / "lost.pt", like=mixtral))
    assert {(finding.code, finding.tensor) for finding in lost} == {
        ("like-missing", f"model.layers.1.mlp.experts.{part}")
        for part in ("gate_up_proj", "down_proj")
    }


def test_another_model_is_one_finding(llama: Path, tmp_path: Path) -> None:
    save_file({f"fc{i}.weight": torch.ones(2) for i in range(9)}, tmp_path / "m.safetensors")
    report = ckptool.verify(tmp_path / "m.safetensors", like=llama)
    assert codes(report) == ["like-unnamed"]
    assert "0 of 9 tensors of the model have a name of" in found(report)[0].message


# What training changed


def test_what_should_have_changed_and_what_should_not(llama: Path, tmp_path: Path) -> None:
    state = state_of(llama)
    trained = {n: t + 0.5 if ".mlp." in n else t for n, t in state.items()}
    save_file(trained, tmp_path / "m.safetensors")
    torch.save({"model": {n: t.double() for n, t in trained.items()}}, tmp_path / "m.pt")
    for source in (tmp_path / "m.safetensors", tmp_path / "m.pt"):
        right = ckptool.verify(
            source, like=llama, expect_changed="*.mlp.*", expect_equal=["*self_attn*", "*norm*"]
        )
        assert right.ok
        wrong = ckptool.verify(
            source, like=llama, expect_changed="*.layers.*_proj*", expect_equal="lm_head.weight"
        )
        (finding,) = found(wrong)
        assert finding.code == "like-unchanged"
        assert len(finding.affected) == 3 * 4
        assert f"equal to {llama}" in finding.message
        report = ckptool.verify(source, like=llama, expect_equal="model.layers.*")
        (finding,) = found(report)
        assert finding.code == "like-changed"
        assert {each.tensor for each in finding.affected} == {n for n in state if ".mlp." in n}


def test_what_damage_of_the_other_changed_is_no_change(tmp_path: Path) -> None:
    state = {"w": torch.arange(4096.0), "v": torch.ones(8)}
    for name in ("a.pt", "b.pt"):
        torch.save(state, tmp_path / name)
    data = bytearray((tmp_path / "b.pt").read_bytes())
    data[data.index(state["w"].numpy().tobytes()) + 100] ^= 1
    (tmp_path / "b.pt").write_bytes(data)
    report = ckptool.verify(tmp_path / "a.pt", like=tmp_path / "b.pt", expect_changed="w")
    (finding,) = report.findings
    assert finding.code == "crc-mismatch"
    assert finding.message.startswith(f"{tmp_path / 'b.pt'}: b.pt: bytes")
    assert ckptool.verify(tmp_path / "a.pt", like=tmp_path / "b.pt", expect_equal="v").ok
    sampled = ckptool.verify(
        tmp_path / "b.pt", like=tmp_path / "a.pt", expect_changed="w", sample=0.001
    )
    assert [finding.code for finding in sampled.findings] == ["crc-mismatch"]


def test_what_changed_in_a_trainers_names(llama: Path, tmp_path: Path) -> None:
    fused = tmp_path / "fused.pt"
    ckptool.convert(llama, fused, map="megatron-gpt")
    assert ckptool.verify(fused, like=llama, expect_equal="*").ok
    state = torch.load(fused, weights_only=True)
    state["decoder.layers.self_attention.linear_qkv.weight"][1, 15, 7] += 1
    torch.save(state, tmp_path / "changed.pt")
    (finding,) = found(ckptool.verify(tmp_path / "changed.pt", like=llama, expect_equal="*"))
    assert (finding.code, finding.tensor) == (
        "like-changed",
        "decoder.layers.self_attention.linear_qkv.weight",
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [("megatron_torch_dist", "megatron_local"), ("megatron_local", "megatron_torch_dist")],
)
def test_two_layouts_of_megatron_core_are_alike(one: str, other: str) -> None:
    report = ckptool.verify(FIXTURES / one / "ckpt", like=FIXTURES / other / "ckpt")
    assert not found(report)
    assert report.summary.endswith("found, layer by layer")


def test_halves_of_a_gated_layer_are_one_tensor(tmp_path: Path) -> None:
    sizes = {"embedding.word_embeddings.weight": (8, 4), "decoder.final_layernorm.weight": (4,)}
    fc1 = "decoder.layers.{}.mlp.linear_fc1.weight_{}"
    halves = {fc1.format(n, end): (6, 4) for n in (0, 1) for end in "wv"}
    dcp.save({n: torch.ones(s) for n, s in (sizes | halves).items()}, checkpoint_id=tmp_path / "a")
    sizes["decoder.layers.mlp.linear_fc1.weight"] = (2, 12, 4)
    dcp.save({n: torch.ones(s) for n, s in sizes.items()}, checkpoint_id=tmp_path / "b")
    assert not found(ckptool.verify(tmp_path / "a", like=tmp_path / "b"))
    assert not found(ckptool.verify(tmp_path / "b", like=tmp_path / "a", expect_equal="*"))


def test_a_quantized_model_is_like_that_in_full(tmp_path: Path) -> None:
    quantized = FIXTURES / "merged" / "quantized" / "ckpt"
    assert not found(ckptool.verify(quantized, like=quantized / "config.json"))
    ckptool.convert(quantized, tmp_path / "full", to="hf", dequantize=True)
    assert not found(ckptool.verify(tmp_path / "full", like=quantized))
    assert not found(ckptool.verify(quantized, like=tmp_path / "full", expect_equal="*"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"expect_changed": "nothing.*"}, "matches none of"),
        ({"expect_changed": "*", "expect_equal": "lm_head.weight"}, "changed, and to be equal"),
        ({"expect_changed": "*", "quick": True}, "not with --quick"),
        ({"expect_changed": "*", "like": None}, "needs --like"),
        ({"manifest": "m.json"}, "one at a time"),
        ({"part": "1/2"}, "part"),
    ],
)
def test_what_cannot_be_asked(options: dict[str, Any], words: str, llama: Path) -> None:
    with pytest.raises(UsageError, match=words):
        ckptool.verify(llama, **{"like": llama, **options})


def test_a_config_has_no_values(llama: Path) -> None:
    with pytest.raises(UsageError, match="without values"):
        ckptool.verify(llama, like=llama / "config.json", expect_equal="*")


# The command


def test_the_command(llama: Path, tmp_path: Path) -> None:
    def run(*words: object) -> Any:
        return CliRunner().invoke(app, ["verify", *map(str, words)])

    save_file(without(state_of(llama), ".layers.2."), tmp_path / "m.safetensors")
    done = run(tmp_path / "m.safetensors", "--like", llama / "config.json", "--json")
    assert done.exit_code == 1
    assert [f["code"] for f in json.loads(done.stdout)["findings"] if "like" in f["code"]] == [
        "like-missing"
    ]
    assert run(llama, "--like", llama, "--expect-equal", "*").exit_code == 0
    assert run(llama, "--like", llama, "--expect-changed", "*lm_head*").exit_code == 1
    assert run(llama, "--like", llama, "--other-format", "hf").exit_code == 0
    for words in (
        ["--expect-equal", "*"],
        ["--like", llama, "--against", llama],
        ["--like", llama, "--latest-good"],
        ["--like", llama, "--rtol", "1"],
        ["--like", llama, "--part", "1/2"],
    ):
        assert run(llama, *words).exception.exit_code == 2, words
