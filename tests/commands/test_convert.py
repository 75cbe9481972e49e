"""The output of convert: its names, types, shards and reports, and where the source is."""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import bits, case, convert_to, flat, load_torch, read_back

from ckptool.commands.convert import prepare
from ckptool.commands.options.target import ConvertOptions
from ckptool.core.casts import Casts
from ckptool.core.dtype import BY_NAME
from ckptool.errors import CkptoolError, Unsupported, UsageError
from ckptool.formats import targets

MODEL_AND_OPTIMIZER = "dcp_fsdp2_tp"


def names(out: Path, source: str = MODEL_AND_OPTIMIZER, **options: Any) -> set[str]:
    convert_to("safetensors", case(source).path, out / "m", **options)
    return set(read_back("safetensors", out / "m"))


def test_select(out: Path) -> None:
    assert names(out, select=("model.blocks.*", "model.one")) == {
        "model.one",
        *(f"model.blocks.0.{n}" for n in ("up.weight", "up.bias", "down.weight")),
    }


def test_drop(out: Path) -> None:
    whole = set(case(MODEL_AND_OPTIMIZER).truth)
    assert names(out, drop=("optim.*",)) == {n for n in whole if not n.startswith("optim.")}


def test_a_list_loses_an_element_and_still_loads_as_dcp(out: Path) -> None:
    whole = case("zip_zoo").truth
    inner = next(n for n in whole if n.split(".")[-1] == "0")
    convert_to("dcp", case("zip_zoo").path, out / "m", drop=(inner,))
    assert read_back("dcp", out / "m").keys() == whole.keys() - {inner}


def test_model_only_strips_its_prefix(out: Path) -> None:
    whole = set(case(MODEL_AND_OPTIMIZER).truth)
    expected = {n.removeprefix("model.") for n in whole if n.startswith("model.")}
    assert names(out, model_only=True) == expected
    assert [path.name for path in (out / "m").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("name", ["dcp_lightning", "rank_verl", "accelerate_folders", "rank_fsdp1"])
def test_model_only_finds_the_model(name: str, out: Path) -> None:
    truth = case(name).truth
    prefix = {"dcp_lightning": "state_dict."}.get(name, "model.")
    convert_to("torch-save", case(name).path, out / "m.pt", model_only=True)
    assert read_back("torch-save", out / "m.pt") == {
        n.removeprefix(prefix): value for n, value in truth.items() if n.startswith(prefix)
    }


def test_model_only_without_a_model(out: Path) -> None:
    with pytest.raises(Unsupported, match="--model-only"):
        names(out, model_only=True, select=("optim.*",))


def test_strip_prefix_and_rename(out: Path) -> None:
    found = names(
        out,
        select=("model.*",),
        strip_prefix="model",
        rename=(r"blocks\.(\d+)=layers.\1.mlp", "^one$=scale"),
    )
    assert {"layers.0.mlp.up.weight", "scale", "embed.weight"} <= found


def test_renamed_tensors_keep_their_values_and_nesting(out: Path) -> None:
    truth = case(MODEL_AND_OPTIMIZER).truth
    convert_to("torch-save", case(MODEL_AND_OPTIMIZER).path, out / "m.pt", rename=("^model=net",))
    state = load_torch(out / "m.pt")
    assert set(state) == {"net", "optim", "step"}
    assert {n: bits(t) for n, t in flat(state).items()} == {
        re.sub("^model", "net", name): value for name, value in truth.items()
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"select": ("nothing*",)}, "matches none"),
        ({"drop": ("nothing*",)}, "matches none"),
        ({"strip_prefix": "nothing"}, "no name begins"),
        ({"rename": ("a",)}, "REGEX=REPLACEMENT"),
        ({"rename": (r".*=x",)}, "same name"),
        ({"drop": ("*",)}, "no tensors or values left"),
        ({"from_format": "nothing"}, "unknown format"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str, out: Path) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        names(out, **options)
    assert caught.value.exit_code == 2
    assert not list(out.iterdir())


@pytest.mark.parametrize("wanted", ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn"])
@pytest.mark.parametrize("target", ["torch-save", "dcp", "safetensors"])
def test_dtype_casts_as_torch_does(wanted: str, target: str, out: Path) -> None:
    source = case("dcp_fsdp2_tp")
    path = out / ("m.pt" if target == "torch-save" else "m")
    report = convert_to(target, source.path, path, casts=Casts(BY_NAME[wanted]))
    expected = {}
    for name, (dtype, shape, data) in source.truth.items():
        values = torch.frombuffer(bytearray(data or b"\0" * 8), dtype=getattr(torch, dtype))
        values = values[: torch.Size(shape).numel()].reshape(shape)
        is_cast = dtype.startswith(("float", "bfloat")) and name.startswith("model.")
        expected[name] = bits(values.to(getattr(torch, wanted)) if is_cast else values)
    assert read_back(target, path) == expected
    model = [dtype for n, (dtype, _, _) in source.truth.items() if n.startswith("model.")]
    count = model.count("float32")
    assert report.cast == ({"float32": count} if wanted != "float32" else {})


def test_other_types_are_left_alone(out: Path) -> None:
    convert_to("torch-save", case("zip_zoo").path, out / "m.pt", casts=Casts(BY_NAME["float32"]))
    before = case("zip_zoo").truth
    after = read_back("torch-save", out / "m.pt")
    for name, (dtype, shape, _) in before.items():
        floating = BY_NAME[dtype].kind == "float" and shape
        assert after[name][0] == ("float32" if floating else dtype)
        if not floating:
            assert after[name] == before[name]


def test_shards_are_as_large_as_allowed(out: Path) -> None:
    truth = case("dcp_fsdp2_tp").truth
    convert_to("safetensors", case("dcp_fsdp2_tp").path, out / "m", max_shard_size=500)
    index = json.loads((out / "m" / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in (out / "m").glob("model-*.safetensors"))
    assert shards == [
        f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)
    ]
    assert set(index["weight_map"]) == set(truth)
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in truth.values())
    held: dict[str, int] = {}
    for name, file in index["weight_map"].items():
        held[file] = held.get(file, 0) + len(truth[name][2])
    assert max(held.values()) <= 500
    assert read_back("safetensors", out / "m") == truth


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(out: Path) -> None:
    convert_to("safetensors", case("dcp_base").path, out / "m", max_shard_size=100)
    assert read_back("safetensors", out / "m") == case("dcp_base").truth


@pytest.mark.parametrize("target", sorted({*targets()} - {"megatron-torch_dist"}))
def test_the_report_is_what_is_written(target: str, out: Path) -> None:
    path = out / ("m.pt" if target == "torch-save" else "m")
    own = {"deepspeed-universal": "deepspeed_zero_2", "diffusers": "diffusers_pipeline"}
    one = case(own.get(target, "dcp_fsdp2_tp"))
    report = convert_to(target, one.path, path)
    files = {
        p.relative_to(path if path.is_dir() else out): p for p in out.rglob("*") if p.is_file()
    }
    assert {str(name): p.stat().st_size for name, p in files.items()} == {
        file.path: file.nbytes for file in report.files
    }
    assert report.write_bytes == sum(p.stat().st_size for p in files.values())
    assert report.tensors == len(one.truth)


def test_a_dry_run_writes_nothing(out: Path) -> None:
    report = prepare(case("dcp_fsdp2_tp").path, out / "m", ConvertOptions("dcp")).report
    assert report.write_bytes > 0
    assert report.files
    assert not list(out.iterdir())


def test_what_was_excluded_is_reported(out: Path) -> None:
    report = convert_to("dcp", case("dcp_fsdp2_tp").path, out / "m", select=("model.*",))
    assert any("tensors" in line for line in report.excluded)
    assert any("values" in line for line in report.excluded)


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("dcp_base", ".metadata"),
        ("dcp_base", "__1_0.distcp"),
        ("hf_shards", "model-00002-of-00004.safetensors"),
        ("hf_shards", "model.safetensors.index.json"),
        ("hf_sharded", "shard-00002-model-00001-of-00001.safetensors"),
        ("rank_base", "checkpoint_2.pt"),
        ("bin_shards", "pytorch_model-00001-of-00004.bin"),
    ],
)
def test_a_file_inside_stands_for_the_checkpoint(name: str, inside: str, out: Path) -> None:
    convert_to("safetensors", case(name).path / inside, out / "m")
    assert read_back("safetensors", out / "m") == case(name).truth


@pytest.mark.parametrize("name", ["dcp_base", "zip_zoo", "hf_shards", "rank_verl"])
def test_a_folder_above_stands_for_the_only_checkpoint_in_it(
    name: str, copy_of: Any, out: Path
) -> None:
    source = copy_of(name).parent.parent
    convert_to("safetensors", source, out / "m")
    assert set(case(name).truth) <= set(read_back("safetensors", out / "m"))


def test_several_checkpoints_are_listed(copy_of: Any, out: Path) -> None:
    first, second = copy_of("dcp_base"), copy_of("rank_base")
    with pytest.raises(CkptoolError, match="2 checkpoints") as caught:
        convert_to("safetensors", first.parent, out / "m")
    assert caught.value.exit_code == 3
    assert str(first) in caught.value.message
    assert str(second) in caught.value.message


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "nowhere", "no such file"),
        (lambda folder: folder, "empty"),
        (lambda folder: _written(folder / "x.bin", b""), "empty"),
        (lambda folder: _written(folder / "x.bin", b"hello there"), "no"),
        (lambda folder: _written(folder / "notes.txt", b"hello").parent, "no checkpoint"),
    ],
)
def test_what_is_not_a_checkpoint(make: Any, words: str, tmp_path: Path, out: Path) -> None:
    folder = tmp_path / "some"
    folder.mkdir()
    with pytest.raises(CkptoolError, match=words) as caught:
        convert_to("safetensors", make(folder), out / "m")
    assert caught.value.exit_code == 3


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_the_format_can_be_told(out: Path) -> None:
    convert_to("dcp", case("zip_zoo").path, out / "m", from_format="torch-save")
    assert read_back("dcp", out / "m") == case("zip_zoo").truth


def test_dcp_loads_though_a_list_lost_a_member(tmp_path: Path, out: Path) -> None:
    torch.save({"list": [torch.ones(1), torch.zeros(2)], "w": torch.ones(3)}, tmp_path / "m.pt")
    convert_to("dcp", tmp_path / "m.pt", out / "m", drop=("list.0",))
    assert set(read_back("dcp", out / "m")) == {"list.1", "w"}


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.eye(2).to_sparse(), "sparse tensor"),
        (torch.eye(2, device="meta"), "meta tensor, without data"),
    ],
    ids=["sparse", "meta"],
)
def test_a_tensor_of_a_kind_that_is_not_read_is_refused(
    tensor: torch.Tensor, kind: str, tmp_path: Path
) -> None:
    torch.save(tensor, tmp_path / "model.pt")
    with pytest.raises(Unsupported, match=f"value: not a plain tensor, but {kind}"):
        prepare(tmp_path / "model.pt", tmp_path / "out.safetensors", ConvertOptions("safetensors"))


def test_a_value_that_torch_save_cannot_hold_can_go_into_dcp(out: Path) -> None:
    torch.save({"since": date(2026, 1, 1)}, out / "m.pt")
    with pytest.raises(Unsupported, match="can hold nothing of it") as refused:
        convert_to("torch-save", out / "m.pt", out / "n.pt")
    assert refused.value.hint == "--to dcp keeps any value"
    convert_to("dcp", out / "m.pt", out / "n")
    torch.save({"since": {}}, out / "m.pt")
    with pytest.raises(Unsupported, match="can hold nothing of it") as refused:
        convert_to("dcp", out / "m.pt", out / "other")
    assert refused.value.hint == "--to torch-save keeps empty dicts"


@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_arrays_of_numpy_alone_are_no_model_of_safetensors(to: str, out: Path) -> None:
    torch.save({"model": {"w": np.ones(4)}, "step": 3}, out / "m.pt")
    torch.save({"model": {"w": np.ones(4)}}, out / "n.pt")
    with pytest.raises(Unsupported, match=r"can hold nothing of it.*1 value such as model\.w"):
        convert_to(to, out / "n.pt", out / "n")
    assert not (out / "n").exists()
    convert_to("torch-save", out / "n.pt", out / "back.pt")
