"""A quantized tensor comes with all of its parts, into a model that says it is quantized."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_merge import run
from typer.testing import CliRunner

from ckptool.cli.app import app
from ckptool.errors import UsageError

FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
MODULES = ("model.l", "model.mtp")


def plain(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        f"{name}.weight": torch.randn(128, 256, generator=random).bfloat16() for name in MODULES
    }


def quantized(seed: int) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, tensor in plain(seed).items():
        tensors[name] = tensor.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.tensor([[0.5, 2.0]]) * (seed + 1)
    return tensors | {"model.norm.weight": torch.full((3,), float(seed))}


def numbers(seed: int, name: str) -> torch.Tensor:
    """What the codes stand for, in bf16."""
    stored = quantized(seed)
    scale = stored[f"{name}_scale_inv"].repeat_interleave(128, 1)
    return (stored[name].float() * scale).bfloat16()


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    models = {"p1": plain(1), "p2": plain(2), "p8": quantized(3), "p8b": quantized(4)}
    for label, tensors in models.items():
        (tmp_path / label).mkdir()
        save_file(tensors, tmp_path / label / "model.safetensors")
        said = FP8 if label.startswith("p8") else {}
        (tmp_path / label / "config.json").write_text(json.dumps({"model_type": "x", **said}))
    return {label: str(tmp_path / label) for label in models}


@pytest.mark.parametrize(
    ("base", "take", "wanted"),
    [
        ("p8", "model.l.weight=p8b", "model.l.weight without model.l.weight_scale_inv of"),
        ("p8", "*_scale_inv=p8b", "model.l.weight_scale_inv without model.l.weight of"),
        ("p8", "model.l.weight=p1", "model.l.weight_scale_inv without model.l.weight of"),
        ("p1", "mtp=p8", "model.mtp.weight_scale_inv of {p8} is quantized, and the config of {p1}"),
        ("p8", "mtp=p1", "model.mtp.weight of {p1} is not quantized, and the config of {p8} says"),
    ],
)
def test_a_torn_or_undeclared_quantized_tensor_is_refused(
    places: dict[str, str], tmp_path: Path, base: str, take: str, wanted: str
) -> None:
    name, _, source = take.partition("=")
    code, said = run(str(tmp_path / "out"), places[base], "--take", name, "FROM", places[source])
    assert code == 4
    assert wanted.format(**places) in said
    assert not (tmp_path / "out").exists()


def test_what_a_name_does_not_mean_is_said_of_its_own_checkpoint(places: dict[str, str]) -> None:
    words = ["merge", "out", places["p1"], "--take", "nowhere", "FROM", places["p2"]]
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, UsageError)
    assert str(error) == f"--take 'nowhere' matches none of 2 tensors of {places['p2']}"
    assert error.hint == f"`ckptool inspect {places['p2']} --tensors '*'` lists all"


def test_a_checkpoint_is_one_whatever_place_leads_to_it(
    places: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(places["p8b"])
    file = f"{places['p8b']}/model.safetensors"
    for one, other in (
        (places["p8b"], file),
        (file, f"{tmp_path}/link"),
        (file, f"{tmp_path}/p1/../p8b"),
    ):
        takes = ["--take", "model.l.weight", "FROM", one]
        takes += ["--take", "*l.weight_scale_inv", "FROM", other]
        code, said = run(str(tmp_path / "out"), places["p8"], *takes, "--overwrite")
        assert code == 0, said
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(made["model.l.weight_scale_inv"], quantized(4)["model.l.weight_scale_inv"])
    code, said = run(
        str(tmp_path / "same"), "--average", places["p1"], f"{places['p1']}/model.safetensors"
    )
    assert (code, "(p1 + p1) / 2" in said) == (0, True)


@pytest.mark.parametrize(
    ("left_out", "is_refused"),
    [
        ({}, True),
        ({"modules_to_not_convert": ["lm_head"]}, True),
        ({"modules_to_not_convert": ["mtp"]}, False),
        ({"modules_to_not_convert": ["model.mtp.0"]}, False),
        ({"ignore": ["re:.*mtp.*"]}, False),
        ({"llm_int8_skip_modules": ["mtp"]}, False),
        ({"config_groups": {"g": {"targets": ["re:.*layers.*"], "weights": {}}}}, False),
    ],
)
def test_plain_layers_are_left_out_by_the_config(
    tmp_path: Path, left_out: dict[str, object], is_refused: bool
) -> None:
    tensors = {
        "model.layers.0.q_proj.weight": torch.ones(128, 128).to(torch.float8_e4m3fn),
        "model.layers.0.q_proj.weight_scale_inv": torch.ones(1, 1),
    }
    names = ("q_proj.weight", "norm.weight", "embed.weight")
    more = {f"model.mtp.0.{name}": torch.ones(4, 4).bfloat16() for name in names}
    for label, content in (("base", tensors), ("other", tensors | more)):
        (tmp_path / label).mkdir()
        save_file(content, tmp_path / label / "model.safetensors")
    said = {"quantization_config": FP8["quantization_config"] | left_out}
    (tmp_path / "base" / "config.json").write_text(json.dumps({"model_type": "x", **said}))
    words = (str(tmp_path / "base"), "--take", "mtp", "FROM", str(tmp_path / "other"))
    code, answer = run(str(tmp_path / "out"), *words)
    assert code == (4 if is_refused else 0), answer
    refusal = "is not quantized, and the config of"
    assert (refusal in answer) == is_refused
    code, answer = run(str(tmp_path / "out2"), *words[:2], "norm", *words[3:])
    assert code == 0, answer


def test_all_parts_of_a_quantized_tensor_come_together(
    places: dict[str, str], tmp_path: Path
) -> None:
    b = places["p8b"]
    whole = ("--take", "model.l", "FROM", b)
    names = ("model.l.weight", "model.l.weight_scale_inv")
    apart = [word for name in names for word in ("--take", name, "FROM", b)]
    for label, words in (("one", whole), ("two", apart)):
        code, said = run(str(tmp_path / label), places["p8"], *words)
        assert code == 0, said
        found = load_file(tmp_path / label / "model.safetensors")
        wanted = quantized(3) | {n: t for n, t in quantized(4).items() if n.startswith("model.l.")}
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[n].float(), t.float()) for n, t in wanted.items())


@pytest.mark.parametrize(("base", "source"), [("p1", "p8"), ("p8", "p1")])
def test_only_sources_that_are_quantized_are_dequantized(
    places: dict[str, str], tmp_path: Path, base: str, source: str
) -> None:
    words = (places[base], "--take", "mtp", "FROM", places[source], "--dequantize")
    code, said = run(str(tmp_path / "out"), *words)
    assert code == 0, said
    found = load_file(tmp_path / "out" / "model.safetensors")
    stood = {"p1": plain(1), "p8": {name: numbers(3, name) for name in plain(3)}}
    assert torch.equal(found["model.mtp.weight"], stood[source]["model.mtp.weight"])
    assert torch.equal(found["model.l.weight"], stood[base]["model.l.weight"])
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


def test_nothing_to_dequantize_names_all_sources(places: dict[str, str], tmp_path: Path) -> None:
    words = ("--average", places["p1"], places["p2"], "--dequantize")
    code, said = run(str(tmp_path / "out"), *words)
    assert code == 4
    assert f"in {places['p1']} and {places['p2']}" in said


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes_of_an_unknown_kind_have_no_sum(tmp_path: Path, dtype: torch.dtype) -> None:
    for at, label in enumerate("ab", 1):
        codes = torch.full((4, 4), at).to(dtype)
        tensors = {"m.weight": codes, "m.kernel_absmax": torch.full((4,), float(at))}
        save_file(tensors, tmp_path / f"{label}.safetensors")
    a, b = (str(tmp_path / f"{label}.safetensors") for label in "ab")
    code, said = run(str(tmp_path / "out.safetensors"), "--average", a, b)
    assert code == 4
    assert "m.kernel_absmax may be the scale of m.weight" in said
    code, said = run(str(tmp_path / "out.safetensors"), a, "--take", "m.weight", "FROM", b)
    assert code == 4
    assert "m.weight without m.kernel_absmax" in said


@pytest.mark.parametrize("average", [True, False])
def test_a_tie_that_ends_is_noted(tmp_path: Path, average: bool) -> None:
    for at, label in enumerate("abc", 1):
        shared = torch.full((3, 4), float(at))
        torch.save({"embed": shared, "head": shared}, tmp_path / f"{label}.pt")
    a, b, c = (str(tmp_path / f"{label}.pt") for label in "abc")
    base = ("--average", a, b) if average else (a,)
    note = f"embed, head: one tensor in {a}, several in the result"
    head, embed = ("--take", "head", "FROM", c), ("--take", "embed", "FROM", c)
    code, said = run(str(tmp_path / "one.pt"), *base, *head)
    assert code == 0
    assert note in said
    code, said = run(str(tmp_path / "two.pt"), *base, *head, *embed)
    assert code == 0
    assert note not in said
    found = torch.load(tmp_path / "two.pt")
    assert found["embed"].data_ptr() == found["head"].data_ptr()


@pytest.mark.parametrize(
    ("said", "name", "note"),
    [
        ({"tie_word_embeddings": True}, "lm_head", "a model that is loaded so does not use it"),
        ({"architectures": ["XForCausalLM"]}, "embed_tokens", "is the head, too: the config of"),
        ({"tie_word_embeddings": False}, "lm_head", None),
        ({"tie_word_embeddings": True}, "model.norm", None),
    ],
)
def test_a_head_that_the_config_ties_is_noted(
    tmp_path: Path, said: dict[str, object], name: str, note: str | None
) -> None:
    names = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    for label, count in (("base", 2), ("other", 3)):
        (tmp_path / label).mkdir()
        tensors = {each: torch.ones(3, 4) * count for each in names[:count]}
        save_file(tensors, tmp_path / label / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text(json.dumps({"model_type": "x", **said}))
    words = ("--take", name, "FROM", str(tmp_path / "other"))
    code, answer = run(str(tmp_path / "out"), str(tmp_path / "base"), *words)
    assert code == 0, answer
    assert note is None or note in answer
    assert ("ties the head" in answer) == (note is not None)
