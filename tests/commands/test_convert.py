"""The output of convert, its names and types; and refusals before a byte is written."""

from __future__ import annotations

import json
import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import bits, case, convert_to, flat, load_torch, read_back
from safetensors.torch import load_file

import ckptool
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


# Names


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


# Types


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


# Shards


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


# Reports


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


# Targets


@pytest.mark.parametrize(
    ("target", "to", "says"),
    [
        ("m", "nothing", "unknown format"),
        ("m.safetensors", "dcp", "the name of a .safetensors file, but --to dcp writes a folder"),
        ("m.safetensors", "torch-save", "but --to torch-save writes files"),
        ("m.safetensors", "hf", "but --to hf writes a folder"),
        ("m.pt", "dcp", "the name of a .pt file, but --to dcp writes a folder"),
        ("m.pt", "safetensors", "the name of a .pt file"),
        ("m", None, "does not determine the format"),
        ("step-1.0", None, "does not determine the format"),
        ("m", "torch-save", "writes a file, whose name ends in one of .pt, .pth"),
        ("step-1.0", "torch-save", "writes a file, whose name"),
    ],
)
def test_targets_that_make_no_sense(target: str, to: str | None, says: str, out: Path) -> None:
    with pytest.raises(UsageError, match=says):
        ckptool.convert(case("dcp_base").path, out / target, to=to)
    assert not list(out.iterdir())


@pytest.mark.parametrize(
    ("target", "to", "expected"),
    [
        ("m.safetensors", None, "safetensors"),
        ("m.pt", None, "torch-save"),
        ("m.pth", None, "torch-save"),
        ("m", "hf", "hf"),
        ("m", "safetensors", "hf"),
    ],
)
def test_the_name_of_a_target_says_its_format(
    target: str, to: str | None, expected: str, out: Path
) -> None:
    report = ckptool.convert(case("hf_full").path, out / target, to=to, fsync=False)
    assert report.target_format == expected
    assert (out / target).is_dir() == (expected == "hf")


def test_what_a_model_server_would_not_find_is_reported(out: Path) -> None:
    source = case("dcp_fsdp2_tp").path
    notes = ckptool.convert(source, out / "m", to="hf", dry_run=True).notes
    assert "config.json and a tokenizer are missing: copy with --hf-assets FOLDER" in notes
    (optimizer,) = [note for note in notes if note.startswith("optimizer state is included")]
    assert "--model-only leaves it out" in optimizer
    assets = out / "assets"
    assets.mkdir()
    for name in ("tokenizer.json", "config.json"):
        (assets / name).write_text("{}")
    done = ckptool.convert(
        source, out / "m", to="hf", dry_run=True, model_only=True, hf_assets=assets
    )
    assert not [note for note in done.notes if "without" in note or "optimizer" in note]
    (assets / "adapter_config.json").write_text("{}")
    done = ckptool.convert(
        source, out / "m", to="hf", dry_run=True, model_only=True, hf_assets=assets
    )
    assert any("an adapter: loading it needs its base model" in note for note in done.notes)


@pytest.mark.parametrize(("folder", "step"), [(".", "step-1"), ("huggingface", "actor/step-1")])
def test_the_folder_above_that_has_a_config_is_named(folder: str, step: str, out: Path) -> None:
    run = out / "a run"
    shutil.copytree(case("dcp_fsdp2_tp").path, run / step)
    (run / folder).mkdir(exist_ok=True)
    (run / folder / "config.json").write_text('{"model_type": "llama"}')
    notes = ckptool.convert(run / step, out / "m", to="hf", dry_run=True).notes
    assert any(note.endswith(f"copy with --hf-assets '{run / folder}'") for note in notes)


@pytest.mark.parametrize(
    ("names", "wrapper"),
    [
        (("_orig_mod.a.w", "_orig_mod.b.w"), "_orig_mod"),
        (("a._checkpoint_wrapped_module.w", "b.w"), "_checkpoint_wrapped_module"),
        (("module.a.w", "module.b.w"), "module"),
        (("module.a.w", "b.w"), None),
        (("_orig_mod.a.w", "a.w"), None),
    ],
    ids=["compiled", "checkpointed", "ddp", "a-model-with-a-module", "two-of-one-name"],
)
def test_names_that_no_model_loads_are_reported(
    names: tuple[str, ...], wrapper: str | None, out: Path
) -> None:
    torch.save({"model": {name: torch.ones(2) for name in names}}, out / "run.pt")
    convert = partial(ckptool.convert, out / "run.pt", out / "m", to="hf", model_only=True)
    said = [note for note in convert(dry_run=True).notes if note.startswith("wrapped names")]
    assert len(said) == (wrapper is not None)
    if wrapper is not None:
        (rule,) = re.findall(f"\\({wrapper}\\).*--rename '(.*)'", said[0])
        convert(rename=[rule], fsync=False)
        written = load_file(out / "m" / "model.safetensors")
        assert len(written) == 2
        assert not [name for name in written if wrapper in name.split(".")[:-1]]


ADAPTER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("names", "config", "file"),
    [
        ((f"{ADAPTER}.lora_A.weight", f"{ADAPTER}.lora_B.weight"), None, "adapter_model"),
        ((f"{ADAPTER}.lora_A.default.weight",), None, "adapter_model"),
        ((f"{ADAPTER}.lora_A.weight", "lm_head.weight"), None, "model"),
        ((f"{ADAPTER}.ia3_l",), "adapter_config.json", "adapter_model"),
        ((f"{ADAPTER}.lora_A.weight",), "config.json", "model"),
    ],
    ids=["lora", "lora-of-a-run", "with-a-weight", "by-its-config", "a-model-by-its-config"],
)
def test_an_adapter_has_the_name_that_peft_opens(
    names: tuple[str, ...], config: str | None, file: str, out: Path
) -> None:
    torch.save({name: torch.ones(4, 2) for name in names}, out / "run.pt")
    (out / "assets").mkdir()
    if config is not None:
        (out / "assets" / config).write_text("{}")
    assets = None if config is None else out / "assets"
    ckptool.convert(
        out / "run.pt", out / "m", to="hf", hf_assets=assets, max_shard_size=16, fsync=False
    )
    written = sorted(path.name for path in (out / "m").glob("*.safetensors"))
    assert (written == ["adapter_model.safetensors"]) == (file == "adapter_model")


@pytest.mark.parametrize("target", [".", ".."])
def test_a_folder_without_a_name_is_replaced_by_its_own(
    target: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, inner = out / "run", out / "run" / "inner"
    inner.mkdir(parents=True)
    monkeypatch.chdir(run if target == "." else inner)
    with pytest.raises(CkptoolError, match=f"{run} already exists"):
        convert_to("dcp", case("dcp_base").path, Path(target))
    inner.rmdir()
    if target == ".":
        convert_to("dcp", case("dcp_base").path, Path(target), overwrite=True)
        assert read_back("dcp", run) == case("dcp_base").truth
    assert [path.name for path in out.iterdir()] == ["run"]


def test_names_that_no_file_can_have_are_refused_before_anything_is_written(out: Path) -> None:
    with pytest.raises(CkptoolError, match="file names have at most 255 bytes") as caught:
        convert_to("dcp", case("dcp_base").path, out / ("m" * 228))
    assert caught.value.exit_code == 4
    convert_to("dcp", case("dcp_base").path, out / ("m" * 227))
    source, rename = case("deepspeed_zero_2").path, [f"embed={'m' * 300}"]
    with pytest.raises(CkptoolError, match="has 307"):
        convert_to("deepspeed-universal", source, out / "m", rename=rename)
    assert [path.name for path in out.iterdir()] == ["m" * 227]


@pytest.mark.parametrize("said", [0, -1])
def test_a_file_system_that_does_not_say_how_long_names_are_takes_all(
    said: int, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pathconf", lambda path, name: said)
    convert_to("dcp", case("dcp_base").path, out / "m")


def test_the_root_of_the_disk_is_not_a_target() -> None:
    with pytest.raises(UsageError, match="is the root folder"):
        convert_to("dcp", case("dcp_base").path, Path("/"), overwrite=True)


def test_the_target_lies_apart_from_the_source(copy_of: Any) -> None:
    source = copy_of("dcp_base")
    before = sorted(path.name for path in source.iterdir())
    for target in (source, source / "inside", source.parent):
        with pytest.raises(CkptoolError) as caught:
            convert_to("dcp", source, target, overwrite=True)
        assert caught.value.exit_code == 2
    assert sorted(path.name for path in source.iterdir()) == before


def test_conflicting_ranks_are_refused_or_kept_apart(out: Path) -> None:
    source = case("rank_differing").path
    with pytest.raises(CkptoolError, match="local") as caught:
        convert_to("safetensors", source, out / "m")
    assert "--per-rank" in (caught.value.hint or "")
    convert_to("safetensors", source, out / "kept", per_rank=True)
    assert set(read_back("safetensors", out / "kept")) == {"shared", "local@rank0", "local@rank1"}
    convert_to("safetensors", source, out / "dropped", drop=("local",))
    assert set(read_back("safetensors", out / "dropped")) == {"shared"}


# Where the source is


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


def test_a_tensor_of_a_kind_that_is_not_read_is_refused(tmp_path: Path) -> None:
    torch.save(torch.eye(2).to_sparse(), tmp_path / "model.pt")
    with pytest.raises(Unsupported, match="value: not a plain tensor, but sparse tensor"):
        prepare(tmp_path / "model.pt", tmp_path / "out.safetensors", ConvertOptions("safetensors"))


@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_arrays_of_numpy_alone_are_no_model_of_safetensors(to: str, out: Path) -> None:
    torch.save({"model": {"w": np.ones(4)}, "step": 3}, out / "m.pt")
    torch.save({"model": {"w": np.ones(4)}}, out / "n.pt")
    with pytest.raises(Unsupported, match=r"can hold nothing of it.*1 value such as model\.w"):
        convert_to(to, out / "n.pt", out / "n")
    assert not (out / "n").exists()
    convert_to("torch-save", out / "n.pt", out / "back.pt")
