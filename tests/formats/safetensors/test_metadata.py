"""``__metadata__`` of safetensors goes with the tensors, is shown, compared, set and dropped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

import ckptool
from ckptool.cli.app import app
from ckptool.errors import Unsupported, UsageError

LORA = {"lora_adapter_metadata": json.dumps({"r": 4, "lora_alpha": 16}), "ss_network_alpha": "16"}
DIGEST = {"sshs_model_hash": "0" * 64}
STATE = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
TORCHAO = {
    "m.weight": json.dumps({
        "_type": "Int8Tensor", "_data": {"block_size": [1, 4]},
        "_tensor_data_names": ["qdata", "scale"],
    }),
    "n.bias": json.dumps({"_type": "Tensor"}),
    "tensor_names": json.dumps(["m.weight", "n.bias"]),
}  # fmt: skip
"""As ``flatten_tensor_state_dict`` makes them (torchao 0.18)."""
QUANTIZED = {
    "m._weight_qdata": torch.ones(4, 4, dtype=torch.int8),
    "m._weight_scale": torch.full((4, 1), 0.5),
    "n.bias": torch.ones(4),
}


def texts(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return dict(opened.metadata() or {})


def all_texts(folder: Path) -> list[dict[str, str]]:
    return [texts(file) for file in sorted(folder.glob("*.safetensors"))]


def saved(file: Path, metadata: Mapping[str, str], state: Any = STATE) -> Path:
    file.parent.mkdir(exist_ok=True)
    save_file(state, file, metadata={"format": "pt", **metadata})
    return file


def shards(folder: Path, *metadata: Mapping[str, str]) -> Path:
    """A model's folder of one tensor per shard."""
    count, weights = len(metadata), {}
    for number, texts in enumerate(metadata):
        name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        saved(folder / name, texts, {f"w{number}": torch.full((2,), float(number))})
        weights[f"w{number}"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    return folder


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}, {"select": ["a"]}, {"drop": ["a"]}])
def test_a_file_keeps_it(options: dict[str, Any], tmp_path: Path) -> None:
    source = saved(tmp_path / "m.safetensors", LORA)
    ckptool.convert(source, tmp_path / "o.safetensors", **options)
    assert texts(tmp_path / "o.safetensors") == {"format": "pt", **LORA}
    ckptool.convert(source, tmp_path / "folder", to="hf", max_shard_size=20, **options)
    assert all(each == {"format": "pt", **LORA} for each in all_texts(tmp_path / "folder"))
    ckptool.convert(tmp_path / "folder", tmp_path / "back.safetensors")
    assert texts(tmp_path / "back.safetensors") == {"format": "pt", **LORA}
    assert ckptool.compare(source, tmp_path / "back.safetensors", **options).ok


def test_a_framework_that_is_not_torch_stays(tmp_path: Path) -> None:
    source = saved(tmp_path / "m.safetensors", {"format": "mlx"})
    ckptool.convert(source, tmp_path / "o.safetensors")
    assert texts(tmp_path / "o.safetensors") == {"format": "mlx"}


def test_shards_keep_their_own_and_are_not_joined_where_they_differ(tmp_path: Path) -> None:
    own = [{"all": "x", "part": "1"}, {"all": "x", "part": "2", "two": ""}, {"all": "x"}]
    source = shards(tmp_path / "source", *own)
    ckptool.convert(source, tmp_path / "o", to="hf")
    first = {"format": "pt", "all": "x", "part": "1"}
    assert all_texts(tmp_path / "o") == [first, {"format": "pt", **own[1]}]
    assert ckptool.compare(source, tmp_path / "o").ok
    with pytest.raises(Unsupported, match=r"metadata part differs between .*-00001-.* and "):
        ckptool.convert(source, tmp_path / "o.safetensors")
    ckptool.convert(source, tmp_path / "o.safetensors", metadata={"part": "", "k": "a=b"})
    expected = {"format": "pt", "all": "x", "two": "", "part": "", "k": "a=b"}
    assert texts(tmp_path / "o.safetensors") == expected
    ckptool.convert(source, tmp_path / "d", to="dcp-safetensors", drop_metadata=["p*"])
    (found,) = all_texts(tmp_path / "d")
    assert json.loads(found.pop("DCP_SHARDING_INFO")).keys() == {"w0", "w1", "w2"}
    assert found == {"format": "pt", "DCP_VERSION": "1.0", "all": "x", "two": ""}
    ckptool.reshard(tmp_path / "d", tmp_path / "r", mesh="2")
    assert [each["two"] for each in all_texts(tmp_path / "r")] == ["", ""]


def test_a_component_of_a_pipeline_keeps_its_own(tmp_path: Path) -> None:
    index = {name: ["diffusers", "Model"] for name in ("unet", "vae")}
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "model_index.json").write_text(json.dumps(index))
    for name in index:
        file = tmp_path / "p" / name / "diffusion_pytorch_model.safetensors"
        saved(file, {"of": name})
        (file.parent / "config.json").write_text("{}")
    ckptool.convert(tmp_path / "p", tmp_path / "o", to="hf")
    for name in index:
        assert all_texts(tmp_path / "o" / name) == [{"format": "pt", "of": name}]


def test_what_is_extracted_keeps_it(tmp_path: Path) -> None:
    source = saved(tmp_path / "m.safetensors", LORA | DIGEST)
    ckptool.extract(source, ["a[0:1]"], tmp_path / "a.safetensors")
    assert texts(tmp_path / "a.safetensors") == {"format": "pt", **LORA}


def test_formats_without_a_place_for_it_say_so(tmp_path: Path) -> None:
    source = saved(tmp_path / "m.safetensors", LORA)
    for target in ("o.pt", "dcp"):
        to = "dcp" if target == "dcp" else None
        report = ckptool.convert(source, tmp_path / target, to=to)
        noted = "not carried: metadata of m.safetensors: lora_adapter_metadata, ss_network_alpha"
        assert [*report.notes] == [noted]
        compared = ckptool.compare(source, tmp_path / target)
        found = {f.code for f in compared.verify.findings}
        assert (compared.ok, found) == (False, {"metadata-differs"})
        assert ckptool.compare(tmp_path / target, source).ok
        salvaged = ckptool.salvage(source, tmp_path / f"s-{target}")
        assert (salvaged.complete, [*salvaged.notes]) == (False, [noted])
        with pytest.raises(UsageError, match="only safetensors"):
            ckptool.convert(source, tmp_path / f"x-{target}", to=to, metadata={"a": "b"})


def test_a_salvage_keeps_it_or_says_so(tmp_path: Path) -> None:
    source = saved(tmp_path / "m.safetensors", LORA)
    report = ckptool.salvage(source, tmp_path / "o.safetensors")
    assert texts(tmp_path / "o.safetensors") == {"format": "pt", **LORA}
    assert report.complete
    report = ckptool.salvage(source, tmp_path / "o.pt")
    assert [note for note in report.notes if "not carried: metadata of m.safetensors" in note]
    assert not report.complete


def test_differences_are_named(tmp_path: Path) -> None:
    one = saved(tmp_path / "m.safetensors", LORA | {"a": "1"})
    other = saved(tmp_path / "o.safetensors", LORA | {"a": "2", "b": "3"})
    report = ckptool.compare(one, other)
    assert [f.message for f in report.verify.findings] == [
        "metadata a: A '1', B '2'", "metadata b: A nothing, B '3'"
    ]  # fmt: skip
    assert ckptool.compare(one, other, drop_metadata=["a", "b"]).ok
    assert ckptool.compare(one, other, metadata={"a": "2", "b": "3"}).ok
    assert ckptool.diff(one, other).ok
    assert not ckptool.diff(one, other, values=True).ok


def test_inspect_shows_it(tmp_path: Path) -> None:
    source = shards(tmp_path / "s", {"k": "1"} | {f"z{n}": "" for n in range(9)}, {"k": "2"})
    shown = run("inspect", source).stdout
    assert "10 texts in __metadata__; use --values to list them" in shown
    assert "k   '1'  model-00001-of-00002.safetensors" in shown
    assert "z8" not in shown
    assert "z8" in run("inspect", source, "--values").stdout
    found = json.loads(run("inspect", source, "--json").stdout)["metadata"]
    assert found["model-00002-of-00002.safetensors"] == {"k": "2"}


def test_options_that_make_no_sense(tmp_path: Path) -> None:
    source = saved(tmp_path / "m.safetensors", LORA)
    for options, words in (
        (("--metadata", "x"), "expected KEY=TEXT"),
        (("--metadata", "=x"), "expected KEY=TEXT"),
        (("--metadata", "DCP_SHARDING_INFO={}"), "written anew"),
        (("--metadata", "ckptool.side=x"), "written anew"),
        (("--drop-metadata", "ss_*", "--drop-metadata", "tt_*"), "'tt_*' matches no metadata"),
    ):
        done = run("convert", source, tmp_path / "o.safetensors", *options)
        assert isinstance(done.exception, UsageError)
        assert words in str(done.exception)


@pytest.mark.parametrize(
    ("options", "stays"), [({}, True), ({"dtype": "bf16"}, False), ({"drop": ["a"]}, False)]
)
def test_a_digest_of_other_tensors_is_left_out(
    options: dict[str, Any], stays: bool, tmp_path: Path
) -> None:
    source = saved(tmp_path / "m.safetensors", LORA | DIGEST)
    report = ckptool.convert(source, tmp_path / "o.safetensors", **options)
    assert ("sshs_model_hash" in texts(tmp_path / "o.safetensors")) == stays
    assert any("no longer true" in note for note in report.notes) != stays
    assert ckptool.compare(source, tmp_path / "o.safetensors", **options).ok


def test_torchaos_records_are_true_or_gone(tmp_path: Path) -> None:
    source = saved(tmp_path / "m.safetensors", TORCHAO | LORA, QUANTIZED)
    choices: list[dict[str, Any]] = [{}, {"select": ["m.*"]}, {"drop": ["n.*"]}]
    for options in choices:
        ckptool.convert(source, tmp_path / "o.safetensors", overwrite=True, **options)
        assert texts(tmp_path / "o.safetensors") == {"format": "pt", **LORA, **TORCHAO}
    for rule in ("^m=l", "^n=l"):
        with pytest.raises(Unsupported, match="would have another name, but metadata"):
            ckptool.convert(source, tmp_path / "r.safetensors", rename=[rule])
    dropped = ["m.weight", "n.bias", "tensor_names"]
    ckptool.convert(source, tmp_path / "r.safetensors", rename=["^m=l"], drop_metadata=dropped)
    assert texts(tmp_path / "r.safetensors") == {"format": "pt", **LORA}
    report = ckptool.convert(source, tmp_path / "d.safetensors", dequantize=True, dtype="fp32")
    assert texts(tmp_path / "d.safetensors") == {"format": "pt", **LORA}
    assert [note for note in report.notes if "metadata left out" in note]
